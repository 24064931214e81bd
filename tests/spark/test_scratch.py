"""What Spark leaves in the temporary directory: nothing, whoever was killed.

Each Spark is in a process of its own: there can be only one in a process, and the other tests have
theirs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.spark.scratch import PREFIX, Scratch, scratch_root

# Says what is there while a task runs, and waits to be told how to end.
RUN = """
import os, sys, tempfile
from millrace.cli.signals import stop_on_signals
from millrace.spark.session import Engine, default_master
stop_on_signals()
with Engine(default_master(1)) as engine:
    where = engine.call(lambda _, attempt: tempfile.gettempdir(), 0, "look")
    print(where, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Of a length that sockets can do with, as few temporary directories of tests are."""
    path = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def start(temporary: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], number: int | None) -> None:
    """By a signal, or as it should; waits until its JVM and workers are gone, too."""
    assert process.stdout is not None
    where = process.stdout.readline().strip()
    family = psutil.Process(process.pid).children(recursive=True)
    assert where, process.communicate()[1]
    names = [path.name for path in Path(where).iterdir()]
    assert any(name.startswith("blockmgr-") for name in names), names
    assert any(name.startswith("spark-") for name in names), names
    assert any(name.endswith(".sock") for name in names), names
    if number is not None:
        process.send_signal(number)
    process.communicate("\n")
    psutil.wait_procs(family, timeout=DEADLINE_SECONDS)


def test_nothing_is_left_in_the_temporary_directory(temporary: Path) -> None:
    end(start(temporary), signal.SIGKILL)
    # The JVM, killed together with its owner.
    orphan = temporary / f"{PREFIX}orphaned"
    (orphan / "blockmgr-1" / "0a").mkdir(parents=True)
    (orphan / ".1.sock").touch()
    end(start(temporary), signal.SIGTERM)
    assert list(temporary.iterdir()) == []
    end(start(temporary), None)
    assert list(temporary.iterdir()) == []


def test_the_jvm_of_an_owner_that_was_killed_while_it_started_ends(temporary: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(psutil.Process(process.pid).children, "the JVM is started")
        family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.communicate()
    assert family
    Scratch(temporary).close()  # the next owner
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_SECONDS)
    for one in alive:
        one.kill()
    assert not alive
    Scratch(temporary).close()
    assert list(temporary.iterdir()) == []


def test_what_a_living_owner_holds_stays(tmp_path: Path) -> None:
    first = Scratch(tmp_path)
    (first.path / "file").touch()
    second = Scratch(tmp_path)
    assert (first.path / "file").exists()
    first.close()
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_a_directory_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / f"{PREFIX}link").symlink_to(precious)
    Scratch(tmp_path / "root").close()
    assert (precious / "file").exists()


@pytest.mark.parametrize("root", ["/tmp/" + "x" * 60, "/tmp/with space"])
def test_a_temporary_directory_that_sockets_can_not_have_is_not_used(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", root)
    assert scratch_root() == Path("/tmp")


def test_a_directory_swept_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(**given: object) -> str:
        path = Path(given["dir"]) / f"{PREFIX}{len(made)}"  # type: ignore[arg-type]
        path.mkdir()
        made.append(path)
        if len(made) == 1:
            path.rmdir()
        return str(path)

    monkeypatch.setattr("millrace.spark.scratch.tempfile.mkdtemp", make)
    scratch = Scratch(tmp_path)
    assert scratch.path == made[1]
    scratch.close()
