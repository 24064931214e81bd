"""Publications that can't break the source, slots, and the commands that make and remove them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.config.dsn import Dsn
from millrace.errors import PreflightError, ServerError, SlotLost
from millrace.follow import slot as slot_module
from millrace.follow.publication import create_publications
from millrace.follow.setup import require_silence
from millrace.follow.slot import cleanup, create_stream, read_leftovers
from millrace.lsn import parse_lsn
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.slot import SlotState, read_slot, require_slot
from millrace.spool.reader import SpoolReader

SCHEMA = """
CREATE TABLE keyed (id int PRIMARY KEY, v text);
CREATE TABLE bare (v text);
CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
"""


@pytest.fixture
def database(source_db: str) -> Iterator[str]:
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(SCHEMA.encode())
    yield source_db
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database()"
        )


def _slot(uri: str) -> str:
    return "millrace_" + uri.partition("?")[0].rpartition("/")[2]


def test_only_wanted_tables_are_published(database: str) -> None:
    with connect(Dsn.parse(database), "test") as connection:
        row = connection.execute(
            "SELECT array['public.keyed'::regclass::oid::int8, 'public.parted_1'::regclass::oid]"
        ).fetchone()
        assert row is not None
        create_publications(connection, "some_slot", row[0])
        found = connection.execute("SELECT tablename FROM pg_publication_tables ORDER BY 1")
        assert [name for (name,) in found] == ["keyed", "parted_1"]


def test_a_foreign_publication_is_not_touched(database: str) -> None:
    with connect(Dsn.parse(database), "test") as connection:
        connection.execute("CREATE PUBLICATION some_slot")
        with pytest.raises(PreflightError, match="millrace did not make"):
            create_publications(connection, "some_slot")
        assert cleanup(connection, None, "some_slot") == []


def test_source_that_ends_idle_slots_is_reported_before_and_after(target_db: str) -> None:
    """A server's setting, of version 18."""
    dsn, slot = Dsn.parse(target_db), _slot(target_db)
    with psycopg.connect(target_db, autocommit=True) as connection:

        def is_ended() -> bool:
            connection.execute("CHECKPOINT")  # which is when a server looks
            row = connection.execute(
                "SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = %s", (slot,)
            ).fetchone()
            return row == ("idle_timeout",)

        assert create_stream(dsn, slot, "pgoutput").warnings == ()
        cleanup(connection, None, slot)
        connection.execute("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'")
        try:
            connection.execute("SELECT pg_reload_conf()")
            setting = "SELECT current_setting('idle_replication_slot_timeout')"
            wait_for(lambda: connection.execute(setting).fetchone() == ("1s",))
            (warning,) = create_stream(dsn, slot, "pgoutput").warnings
            wait_for(is_ended)
            with pytest.raises(SlotLost, match="nobody read it for longer"):
                require_slot(connection, slot, "pgoutput")
        finally:
            connection.execute("ALTER SYSTEM RESET idle_replication_slot_timeout")
            connection.execute("SELECT pg_reload_conf()")
            cleanup(connection, None, slot)
    assert "that nobody reads for 1s (idle_replication_slot_timeout)" in warning


def test_setting_up_twice_changes_nothing(database: str) -> None:
    dsn = Dsn.parse(database)
    first = create_stream(dsn, _slot(database), "pgoutput")
    assert create_stream(dsn, _slot(database), "pgoutput") == first


def test_a_slot_that_is_read_is_not_dropped(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_module, "LEAVING_SECONDS", 0.0)
    slot = _slot(database)
    environment = {"MILLRACE_SOURCE": database, "MILLRACE_DIR": str(tmp_path)}
    _millrace("stream", "setup", "--slot-name", slot, env=environment)
    process = _start("stream", "receive", env=environment)
    try:
        with connect(Dsn.parse(database), "test") as connection:
            wait_for(lambda: (read_slot(connection, slot) or _none()).active_pid is not None)
            with pytest.raises(ServerError, match="is being read by process"):
                cleanup(connection, None, slot)
    finally:
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 143, error
    out = _millrace("stream", "cleanup", "--json", env=environment)
    assert len(json.loads(out)["removed"]) == 4  # slot, two publications, spool


def test_a_reader_that_is_leaving_is_waited_for(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = Dsn.parse(database)
    slot = _slot(database)
    create_stream(dsn, slot, "pgoutput")
    looks: list[str] = []

    def look(connection: psycopg.Connection[Any], name: str) -> SlotState | None:
        looks.append(name)
        state = read_slot(connection, name)
        return replace(state, active_pid=1) if state and len(looks) == 1 else state

    monkeypatch.setattr(slot_module, "read_slot", look)
    with connect(dsn, "test") as connection:
        assert slot_module.drop_slot(connection, slot)
        assert read_slot(connection, slot) is None


def _none() -> Any:
    raise AssertionError("the slot is gone")


def test_the_commands_of_a_stream(database: str, target_db: str, tmp_path: Path) -> None:
    slot = _slot(database)
    env = {
        "MILLRACE_SOURCE": database,
        "MILLRACE_TARGET": target_db,
        "MILLRACE_DIR": str(tmp_path),
    }
    told = json.loads(_millrace("stream", "setup", "--slot-name", slot, "--json", env=env))
    assert told["slot_name"] == slot
    assert told["encoding"] == "UTF8"
    assert told["warnings"]
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = on")
        connection.execute("INSERT INTO keyed SELECT i, 'v' FROM generate_series(1, 100) AS i")
    end = _millrace("stream", "sentinel", "set", "endpos", "--current", env=env).strip()
    told = json.loads(_millrace("stream", "receive", "--json", env=env))
    assert told["reached_endpos"]
    assert parse_lsn(told["complete_lsn"]) >= parse_lsn(end)
    found = SpoolReader(tmp_path).plan(0, 1 << 30, None)
    assert found is not None
    assert found.changes == 100
    state = json.loads(_millrace("stream", "sentinel", "get", "--json", env=env))
    assert state["endpos"] == end
    assert parse_lsn(state["flushed_lsn"]) >= parse_lsn(end)
    _millrace("stream", "sentinel", "set", "apply", "off", env=env)
    _millrace("stream", "sentinel", "set", "prefetch", "off", env=env)
    _millrace("stream", "sentinel", "set", "endpos", "--none", env=env)
    state = json.loads(_millrace("stream", "sentinel", "get", "--json", env=env))
    assert (state["apply"], state["prefetch"], state["endpos"]) == (False, False, None)
    assert json.loads(_millrace("stream", "prune", "--json", "--dry-run", env=env))["bytes"] == 0
    left = json.loads(_millrace("stream", "cleanup", "--list", "--json", env=env))
    assert [s["name"] for s in left["slots"]] == [slot]
    assert {p["name"] for p in left["publications"]} == set(publication_names(slot))
    _millrace("stream", "cleanup", env=env)
    left = json.loads(_millrace("stream", "cleanup", "--list", "--json", env=env))
    assert slot not in [s["name"] for s in left["slots"]]
    assert left["publications"] == []
    assert slot not in [o["name"] for o in left["origins"]]


def test_a_snapshot_with_a_slot_has_its_publications(database: str, tmp_path: Path) -> None:
    slot = _slot(database)
    env = {"MILLRACE_SOURCE": database, "MILLRACE_DIR": str(tmp_path)}
    process = _start("snapshot", "--follow", "--slot-name", slot, "--json", env=env)
    try:
        assert process.stdout is not None
        held = json.loads(process.stdout.readline())
        assert held["slot"] == slot
        told = json.loads(_millrace("stream", "setup", "--json", env=env))
        assert told["start_lsn"] == held["start_lsn"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)
    with connect(Dsn.parse(database), "test") as connection:
        left = read_leftovers(connection, None, slot)
    assert {name for name, _ in left.publications} == set(publication_names(slot))
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = on")
        connection.execute("INSERT INTO keyed VALUES (1, 'v')")
    _millrace("stream", "sentinel", "set", "endpos", "--current", env=env)
    _millrace("stream", "receive", env=env)
    assert SpoolReader(tmp_path).last_end_lsn() > 0


def test_a_wrong_directory_makes_no_stream(tmp_path: Path) -> None:
    env = {"MILLRACE_DIR": str(tmp_path / "none")}
    for command in (("sentinel", "get"), ("prune",), ("receive", "--source", "dbname=x")):
        process = _start("stream", *command, env=env)
        _, error = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 4, error
    assert not (tmp_path / "none").exists()


def _start(*arguments: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*MILLRACE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )


def _millrace(*arguments: str, env: dict[str, str]) -> str:
    process = _start(*arguments, env=env)
    out, error = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, error
    return out


def test_a_role_that_can_not_silence_triggers_is_told_before_the_copy(target_db: str) -> None:
    name = f"mover_{time.time_ns()}"
    with psycopg.connect(target_db, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN".encode())
        try:
            mover = Dsn.parse(f"{target_db}&user={name}")
            with pytest.raises(PreflightError, match=f"{name} may not set") as caught:
                require_silence(mover)
            grant, _, _ = caught.value.hint.partition(";")
            connection.execute(grant.removeprefix("since version 15: ").encode())
            require_silence(mover)
        finally:
            connection.execute(f"DROP OWNED BY {name}".encode())
            connection.execute(f"DROP ROLE {name}".encode())
