"""The archive of Spark's classes: made, used, and made anew when Spark was installed anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.spark import java
from millrace.spark.java import class_archive, class_archive_options, make_class_archive
from millrace.spark.session import Engine, default_master


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "millrace"


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

    archive = make_class_archive()

    assert set(cache.iterdir()) == {archive, elsewhere}
    loaded = tmp_path / "classes.log"
    conf = {"spark.driver.extraJavaOptions": f"-Xlog:class+load:file={loaded}"}
    with Engine(default_master(1), conf) as engine:
        engine.wait()
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


def test_an_archive_that_java_did_not_write_is_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java, "DUMP_SECONDS", 0.0)  # the JVM is killed before it can
    with pytest.raises(OSError, match="has not written"):
        make_class_archive()
    assert class_archive_options() == []
