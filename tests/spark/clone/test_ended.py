"""A clone that is ended in mid-copy, or whose workers are: nothing is left running or lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixtures.gate import (
    GATED,
    assert_equal_data,
    gate_closed,
    sessions,
    terminate,
    waiting_at_gate,
)
from tests.fixtures.processes.clone_program import CloneProgram, is_gone
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.errors import SnapshotLost
from millrace.spark.session import Engine

# How the run is ended, the exit code, and words on stderr.
ENDINGS: dict[str, tuple[Callable[[CloneProgram, str], None], int, str]] = {
    # A terminal's Ctrl-C goes to all processes of the foreground.
    "SIGINT": (lambda one, _: os.killpg(one.process.pid, signal.SIGINT), 130, "stopped"),
    "SIGTERM": (lambda one, _: one.process.terminate(), 143, "stopped"),
    "SIGKILL": (lambda one, _: one.process.kill(), -signal.SIGKILL, ""),
    "snapshot lost": (
        lambda _, source: terminate(source, "millrace view"),
        SnapshotLost.exit_code,
        "hint: ",
    ),
}


# These reach the JVM, or leave it without its parent.
WITH_SPARK = ("SIGINT", "SIGKILL")


@pytest.mark.parametrize("ending", ENDINGS)
def test_ended_in_mid_copy_nothing_is_left_running(
    source_db: str, target_db: str, program: Callable[..., CloneProgram], ending: str
) -> None:
    end, exit_code, words = ENDINGS[ending]
    execute(source_db, GATED)
    with gate_closed(target_db):
        one = program(source_db, target_db, has_spark=ending in WITH_SPARK)
        wait_for(lambda: waiting_at_gate(target_db) or one.process.poll())
        family = one.family()
        end(one, source_db)
        assert one.process.wait(DEADLINE_SECONDS) == exit_code
        wait_for(lambda: all(map(is_gone, family)))
        # Its snapshot is held for whoever resumes it.
        wait_for(lambda: sessions(source_db, target_db) == ["millrace snapshot"])
    printed = one.printed()
    assert words in printed
    assert "Traceback" not in printed
    if ending == "snapshot lost":
        assert "--resume" in printed
    assert not (one.directory / "summary.json").exists()
    assert rows(target_db, "SELECT count(*) FROM gated") == [(0,)]


def test_workers_killed_before_and_after_their_commit_change_nothing(
    source_db: str,
    target_db: str,
    program: Callable[..., CloneProgram],
    engine: Engine,
    tmp_path: Path,
) -> None:
    execute(source_db, GATED)
    markers = {point: tmp_path / point for point in ("copy.before-commit", "copy.after-commit")}
    for marker in markers.values():
        marker.touch()
    failpoints = ",".join(f"{point}=kill@{marker}" for point, marker in markers.items())
    one = program(
        source_db,
        target_db,
        "--split-tables-larger-than=4MB",
        "--json",
        MILLRACE_FAILPOINTS=failpoints,
    )
    assert one.process.wait(DEADLINE_SECONDS) == 0, one.printed()
    assert [marker for marker in markers.values() if marker.exists()] == []
    tables = {table["name"]: table for table in json.loads(one.out.read_text())["tables"]}
    assert tables["gated"]["parts"] > 1
    assert tables["gated"]["rows"] == 2500
    assert rows(target_db, "SELECT count(*), count(DISTINCT id) FROM gated") == [(2500, 2500)]
    assert_equal_data(source_db, target_db, engine)
