"""A start that fails takes its slot and its publications along; what was there before stays."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.engine import Engine
from millrace.errors import PreflightError, WorkDirError
from millrace.follow.clone_follow import clone_and_follow
from millrace.follow.progress import FollowReporter
from millrace.follow.settings import FollowSettings, SlotSettings
from millrace.follow.setup import open_slot_snapshot
from millrace.follow.slot import create_stream
from millrace.follow.slot_making import FILE
from millrace.route import Route
from millrace.workdir.sentinel import Sentinel


@pytest.fixture
def database(source_db: str) -> Iterator[str]:
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
    yield source_db
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database()"
        )


def _made(uri: str) -> tuple[list[str], int]:
    """What is on the source: slots by name, publications by number."""
    with psycopg.connect(uri) as connection:
        slots = connection.execute(
            "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
            " ORDER BY 1"
        ).fetchall()
        row = connection.execute("SELECT count(*) FROM pg_publication").fetchone()
    assert row is not None
    return [slot[0] for slot in slots], row[0]


def _run(*arguments: str, uri: str, directory: Path, failpoints: str = "") -> tuple[int, str, str]:
    process = subprocess.run(
        [*MILLRACE, *arguments],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "MILLRACE_SOURCE": uri,
            "MILLRACE_DIR": str(directory),
            "MILLRACE_FAILPOINTS": failpoints,
        },
        timeout=DEADLINE_SECONDS,
    )
    return process.returncode, process.stdout, process.stderr


def test_a_setup_that_is_refused_makes_nothing(database: str, tmp_path: Path) -> None:
    first = _run("stream", "setup", "--slot-name", "making_1", uri=database, directory=tmp_path)
    assert first[0] == 0, first
    before = _made(database)
    assert before[0] == ["making_1"]
    code, _, told = _run(
        "stream", "setup", "--slot-name", "making_2", uri=database, directory=tmp_path
    )
    assert code == 4
    assert "was set up for --slot-name making_1, now it is making_2" in told
    assert _made(database) == before
    # Nor does a clone, and it says what can be done.
    source = Dsn.parse(database)
    with (
        pytest.raises(WorkDirError, match="holds the stream of slot making_1") as caught,
        open_slot_snapshot(Route(source, source, tmp_path), SlotSettings("making_1")),
    ):
        pass
    assert "--restart" in caught.value.hint
    assert _made(database) == before


def test_a_failure_after_the_slot_takes_everything_back(database: str, tmp_path: Path) -> None:
    for command in (
        ("stream", "setup", "--slot-name", "making_3"),
        ("snapshot", "--follow", "--slot-name", "making_3"),
    ):
        code, _, told = _run(
            *command, uri=database, directory=tmp_path, failpoints="slot.made=error"
        )
        assert code == 5, told
        assert "dropped replication slot making_3 again" in told
        assert _made(database) == ([], 0)
        assert not (tmp_path / FILE).exists()


def test_what_a_killed_process_left_is_found_by_the_next_one(database: str, tmp_path: Path) -> None:
    for command in (
        ("stream", "setup", "--slot-name", "making_4"),
        ("snapshot", "--follow", "--slot-name", "making_4"),
    ):
        code, _, told = _run(
            *command, uri=database, directory=tmp_path, failpoints="slot.made=kill"
        )
        assert code == -9, told
        assert _made(database)[0] == ["making_4"]
    # The second had to remove what the first left. So can people, without knowing the name.
    assert "dropped replication slot making_4: process" in told
    code, out, told = _run("stream", "cleanup", "--json", uri=database, directory=tmp_path)
    assert code == 0, told
    assert len(json.loads(out)["removed"]) == 3
    assert _made(database) == ([], 0)
    assert not (tmp_path / FILE).exists()


def test_a_slot_that_exists_is_described_and_left_alone(database: str, tmp_path: Path) -> None:
    source = Dsn.parse(database)
    create_stream(source, "making_5", "pgoutput")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("INSERT INTO t SELECT generate_series(1, 10000)")
        connection.execute("SELECT pg_create_logical_replication_slot('making_6', 'pgoutput')")
    before = _made(database)

    def refusal(slot: str) -> PreflightError:
        with (
            pytest.raises(PreflightError, match=f"has a replication slot {slot} already") as caught,
            open_slot_snapshot(Route(source, source, tmp_path), SlotSettings(slot)),
        ):
            pass
        assert _made(database) == before
        return caught.value

    ours = refusal("making_5")
    assert "for plugin pgoutput, made by millrace" in ours.message
    assert re.search(r"not read since about 20\d\d-", ours.message)
    assert re.search(r"keeps [\d.]+ [kMG]?i?B of WAL for it", ours.message), ours.message
    assert "millrace stream setup --slot-name making_5" in ours.hint
    other = refusal("making_6")
    assert "not known to be millrace's" in other.message
    assert "SELECT pg_drop_replication_slot('making_6')" in other.hint
    # The commands do what they say.
    match = re.search(r"millrace (stream cleanup --slot-name \w+)", ours.hint)
    assert match is not None
    code, _, told = _run(*match[1].split(), uri=database, directory=tmp_path / "other")
    assert code == 0, told
    assert _made(database) == (["making_6"], 0)


def test_a_slot_that_is_read_says_by_whom(database: str, tmp_path: Path) -> None:
    env = os.environ | {"MILLRACE_SOURCE": database, "MILLRACE_DIR": str(tmp_path / "one")}
    code, _, told = _run(
        "stream", "setup", "--slot-name", "making_7", uri=database, directory=tmp_path / "one"
    )
    assert code == 0, told
    reader = subprocess.Popen([*MILLRACE, "stream", "receive"], env=env)
    try:
        wait_for(lambda: _reader(database) is not None)
        source = Dsn.parse(database)
        with (
            pytest.raises(PreflightError) as caught,
            open_slot_snapshot(Route(source, source, tmp_path / "two"), SlotSettings("making_7")),
        ):
            pass
    finally:
        reader.terminate()
        reader.wait(DEADLINE_SECONDS)
    assert "application 'millrace receive'" in caught.value.message
    assert "stop its reader" in caught.value.hint


def _reader(uri: str) -> int | None:
    with psycopg.connect(uri) as connection:
        row = connection.execute(
            "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'making_7'"
        ).fetchone()
    return row[0] if row else None


def test_a_clone_that_preflight_refuses_makes_no_slot(
    database: str, target_db: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(target_db, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
    nobody: Any = None

    def start(**more: Any) -> None:
        source, target = Dsn.parse(database), Dsn.parse(target_db)
        clone_and_follow(
            CloneSettings(Route(source, target, tmp_path), **more),
            FollowSettings(Route(source, target, tmp_path)),
            SlotSettings("making_8"),
            cast(Engine, nobody),
            cast(FollowReporter, nobody),
            on_cloned=lambda result: None,
        )

    with pytest.raises(PreflightError, match="are not empty"):
        start()
    assert _made(database) == ([], 0)
    # A stream that is there is not forgotten before it is sure that a new one can begin.
    code, _, told = _run(
        "stream", "setup", "--slot-name", "making_8", uri=database, directory=tmp_path
    )
    assert code == 0, told
    with pytest.raises(PreflightError, match="are not empty"):
        start(restart=True)
    assert _made(database)[0] == ["making_8"]
    with Sentinel(tmp_path) as sentinel:
        assert sentinel.read_setup() is not None
    assert "dropping" not in caplog.text
