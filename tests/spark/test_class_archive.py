"""The archive of Spark's classes: made, used, and made anew when Spark was installed anew.

Each Spark is in a process of its own: there can be only one in a process, and the other tests have
theirs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import SparkContext
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace.spark import java, session
from millrace.spark.java import class_archive, class_archive_options, make_class_archive

START = """
import sys
from millrace.spark.session import Engine, default_master
with Engine(default_master(1), {"spark.driver.extraJavaOptions": sys.argv[1]}) as engine:
    engine.wait()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "millrace"


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)


@pytest.mark.slow
def test_spark_loads_its_classes_from_the_archive_that_was_made(
    cache: Path, tmp_path: Path
) -> None:
    assert class_archive_options() == []
    cache.mkdir()
    place, _ = class_archive().name.removesuffix(".jsa").rsplit("-java-", 1)
    stale = cache / f"{place.rsplit('-', 1)[0]}-00000000-java-17.jsa"
    stale.touch()
    elsewhere = cache / "spark-11111111-00000000-java-17.jsa"
    elsewhere.touch()

    made = run_python("-m", "millrace.spark.java")

    archive = class_archive()
    assert made.stdout.strip() == str(archive), made.stderr
    assert set(cache.iterdir()) == {archive, elsewhere}
    loaded = tmp_path / "classes.log"
    started = run_python("-c", START, f"-Xlog:class+load:file={loaded}")
    assert started.returncode == 0, started.stderr
    lines = loaded.read_text().splitlines()
    archived = [line for line in lines if line.endswith("shared objects file (top)")]
    from_jars = [line for line in lines if "source: jar:" in line or "source: file:" in line]
    assert any("org.apache.spark.SparkContext " in line for line in archived)
    assert len(archived) > 20 * len(from_jars)


def test_spark_installed_anew_needs_another_archive(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar = tmp_path / "pyspark" / "jars" / "spark-core.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"classes")
    monkeypatch.setattr(java, "_spark_directory", lambda: tmp_path / "pyspark")
    cache.mkdir()
    class_archive().touch()
    assert class_archive_options()

    os.utime(jar, (0, 0))
    assert not class_archive_options()


class JvmThatWritesNothing:
    """In the place of Spark's engine."""

    def __init__(self, master: str, conf: dict[str, str], *, end_seconds: float) -> None:
        assert "-XX:ArchiveClassesAtExit=" in conf["spark.driver.extraJavaOptions"]
        assert end_seconds == java.DUMP_SECONDS

    def __enter__(self) -> JvmThatWritesNothing:
        return self

    def __exit__(self, *_: object) -> None:
        """Killed before it could write."""

    def wait(self) -> float:
        return 0.0


def test_an_archive_that_java_did_not_write_is_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "Engine", JvmThatWritesNothing)
    with pytest.raises(OSError, match="has not written"):
        make_class_archive()
    assert class_archive_options() == []


def test_a_jvm_that_does_not_end_in_its_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_gateway", "_jvm", "_active_spark_context"):  # of the other tests
        monkeypatch.setattr(SparkContext, name, getattr(SparkContext, name))

    class Gateway:
        proc = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE)

        def shutdown(self) -> None:
            """Nobody listens."""

    gateway = Gateway()
    session._stop_jvm(gateway, 0.0)
    assert gateway.proc.returncode == -signal.SIGKILL
