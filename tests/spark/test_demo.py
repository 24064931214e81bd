"""The demo: whole, it proves both sides equal; interrupted, it ends and takes its servers along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace.postgres.program.embedded import FOLDER_VARIABLE


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where servers have short paths, and whoever runs them can write."""
    with TemporaryDirectory(prefix="mr-", dir=os.environ.get(FOLDER_VARIABLE)) as made:
        Path(made).chmod(0o777)
        yield Path(made)


def test_demo_ends_with_both_sides_equal(folder: Path) -> None:
    assert "equal at " in _run("demo", "--megabytes", "5", folder=folder)


def test_interrupted_demo_ends_and_leaves_no_process(folder: Path) -> None:
    process = subprocess.Popen(
        [*MILLRACE, "demo", "--megabytes", "5", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MILLRACE_CONFIG": os.devnull, FOLDER_VARIABLE: str(folder)},
        start_new_session=True,
    )
    made: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        # When it is cloned, changes are followed, without an end.
        assert any(line.startswith("cloned") for line in process.stdout)
        made = psutil.Process(process.pid).children(recursive=True) + _servers(folder)
        assert len(_servers(folder)) == 2
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 130, errors
        assert errors.endswith("millrace: stopped\n")
        _, alive = psutil.wait_procs(made, timeout=DEADLINE_SECONDS)
        assert alive == []
        assert list(folder.iterdir()) == []
    finally:
        for one in made:
            if one.is_running():
                one.kill()
        process.kill()
        process.communicate()


def _servers(folder: Path) -> list[psutil.Process]:
    """They are nobody's children, and known by their folders."""
    return [
        one
        for one in psutil.process_iter(["name", "cmdline"])
        if one.info["name"] == "postgres" and str(folder) in " ".join(one.info["cmdline"] or ())
    ]


def test_demo_of_consolidate_mends_a_halted_source_and_ends_with_all_equal(folder: Path) -> None:
    told = _run("demo", "consolidate", "--articles", "100", folder=folder)
    assert "the column is on the target" in told
    assert "south is halted: CREATE TABLE public.shelf" in told
    assert "equal: all 3 sources" in told


def _run(*words: str, folder: Path) -> str:
    """What a demo prints; it ends well and leaves nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "millrace", *words, "--quiet"],
        capture_output=True,
        text=True,
        env={**os.environ, "MILLRACE_CONFIG": os.devnull, FOLDER_VARIABLE: str(folder)},
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout
