"""What pgcopydb's users type works as it is typed, or is refused with what to use instead."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import fresh_database
from tests.fixtures.cloning import DEPOT
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.sql import execute, rows

from millrace.cli.habits import VARIABLES, take_variables
from millrace.postgres.program.embedded import Cluster

SCRIPT = Path(__file__).parents[2] / "fixtures" / "pgcopydb_script.sh"


@pytest.fixture
def other_target(target_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    yield from fresh_database(target_cluster, "target", request)


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    )


def test_script_for_pgcopydb_runs_with_another_name_only(
    source_db: str, target_db: str, other_target: str, tmp_path: Path
) -> None:
    execute(source_db, DEPOT, "CREATE TABLE left_out (id int PRIMARY KEY)")
    ended = run(
        "bash",
        str(SCRIPT),
        PROGRAM=shlex.join(MILLRACE),
        DIR=str(tmp_path),
        PGCOPYDB_SOURCE_PGURI=source_db,
        PGCOPYDB_TARGET_PGURI=target_db,
        OTHER_TARGET=other_target,
        PGCOPYDB_INDEX_JOBS="1",
    )
    assert ended.returncode == 0, ended.stderr
    assert "PGCOPYDB_SOURCE_PGURI is used, as MILLRACE_SOURCE is not set" in ended.stderr
    assert "table public.left_out" in ended.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] > 5_000
    for target in (target_db, other_target):
        assert rows(target, "SELECT to_regclass('left_out')::text") == [(None,)]
        assert rows(target, "SELECT count(*) FROM depot.things") == [(5000,)]


def test_all_databases_are_compared(source_db: str, target_db: str) -> None:
    """Each with its namesake; here the target's server has none of that name."""
    ended = run(*MILLRACE, "compare", "data", "--all-databases", "--snapshot", "x",
                "--source", source_db, "--target", target_db)  # fmt: skip
    assert ended.returncode == 2
    assert "--all-databases and --snapshot cannot be used together" in ended.stderr


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (["clone", "--origin", "mine"], "--slot-name"),
        (["follow", "--publication", "mine"], "--slot-name"),
        (["follow", "--restart"], "millrace stream cleanup"),
        (["stream", "receive", "--port", "5442"], "millrace stream sentinel"),
    ],
)
def test_option_that_would_be_missed_is_refused_with_what_to_use(
    command: list[str], hint: str
) -> None:
    ended = run(*MILLRACE, *command)
    assert ended.returncode == 2
    assert hint in ended.stderr


def test_own_variables_come_before_those_of_pgcopydb() -> None:
    given = {
        "PGCOPYDB_SOURCE_PGURI": "theirs",
        "MILLRACE_SOURCE": "ours",
        "PGCOPYDB_FAIL_FAST": "1",
    }
    assert take_variables(given) == ["PGCOPYDB_FAIL_FAST"]
    assert given["MILLRACE_SOURCE"] == "ours"
    assert given["MILLRACE_FAIL_FAST"] == "1"


def test_every_variable_of_theirs_is_one_of_ours() -> None:
    reference = (Path(__file__).parents[3] / "docs" / "reference").glob("*.md")
    known = "".join(page.read_text() for page in reference)
    assert [ours for ours in VARIABLES.values() if f"`{ours}`" not in known] == []
