"""Publications that can't break the source, slots, and the commands that make and remove them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures.wait import wait_for

from millrace.config.dsn import Dsn
from millrace.errors import PreflightError, ServerError
from millrace.lsn import parse_lsn
from millrace.postgres.connect import connect
from millrace.stream.begin import require_silence
from millrace.stream.publication import (
    create_publications,
    publication_names,
    read_published_tables,
)
from millrace.stream.slot import cleanup, create_stream, read_leftovers, read_slot
from millrace.stream.spool_reader import SpoolReader

SCHEMA = """
CREATE TABLE keyed (id int PRIMARY KEY, v text);
CREATE TABLE bare (v text);
CREATE TABLE is_full (v text);
ALTER TABLE is_full REPLICA IDENTITY FULL;
CREATE TABLE by_index (a int NOT NULL UNIQUE, v text);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_a_key;
CREATE TABLE nothing (id int PRIMARY KEY, v text);
ALTER TABLE nothing REPLICA IDENTITY NOTHING;
CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE, v text);
CREATE TABLE parent (id int PRIMARY KEY, v text);
CREATE TABLE child () INHERITS (parent);
CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
CREATE TABLE parted_bare (id int, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_bare_1 PARTITION OF parted_bare FOR VALUES FROM (0) TO (10);
CREATE TABLE parted_full (id int, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_full_1 PARTITION OF parted_full FOR VALUES FROM (0) TO (10);
ALTER TABLE parted_full REPLICA IDENTITY FULL;
ALTER TABLE parted_full_1 REPLICA IDENTITY FULL;
CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
CREATE SCHEMA "Odd, name";
CREATE TABLE "Odd, name".t (id int PRIMARY KEY);
"""
WITHOUT_IDENTITY = {"bare", "nothing", "deferred", "child", "parted_bare"}
WITH_IDENTITY = {"keyed", "is_full", "by_index", "parent", "parted", "parted_full", "t"}


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


def test_tables_without_identity_are_told_apart(database: str) -> None:
    with connect(Dsn.parse(database), "test") as connection:
        tables = read_published_tables(connection)
    assert {table.name for table in tables if table.has_identity} == WITH_IDENTITY
    assert {table.name for table in tables if not table.has_identity} == WITHOUT_IDENTITY


def test_every_statement_of_the_source_goes_on_working(database: str) -> None:
    """The oracle: each of them on every table, before and after."""
    slot = _slot(database)
    created = create_stream(Dsn.parse(database), slot, "pgoutput")
    with psycopg.connect(database, autocommit=True) as connection:
        for name in sorted(WITH_IDENTITY | WITHOUT_IDENTITY | {"parted_bare_1", "unlogged"}):
            table = f'"Odd, name".{name}' if name == "t" else name
            value = "''" if name not in ("t", "unlogged") else None
            first = "DEFAULT" if name in ("bare", "is_full") else "1"
            row = value if first == "DEFAULT" else ", ".join(filter(None, (first, value)))
            for statement in (
                f"INSERT INTO {table} VALUES ({row})",
                f"UPDATE {table} SET v = 'x'" if value else f"UPDATE {table} SET id = 2",
                f"DELETE FROM {table}",
                f"TRUNCATE {table} CASCADE",
            ):
                connection.execute(statement.encode())
        published: dict[str, set[str]] = {}
        for publication, table in connection.execute(
            "SELECT pubname, relname FROM pg_publication_rel r JOIN pg_class c ON c.oid = prrelid"
            " JOIN pg_publication p ON p.oid = prpubid"
        ):
            published.setdefault(publication, set()).add(table)
    with_identity, insert_only = publication_names(slot)
    assert published == {with_identity: WITH_IDENTITY, insert_only: WITHOUT_IDENTITY}
    warnings = "\n".join(created.warnings)
    assert 'ALTER TABLE "public"."bare" REPLICA IDENTITY FULL' in warnings
    assert '"public"."parted_full" has no primary key: a partition that is added' in warnings
    assert len(created.warnings) == len(WITHOUT_IDENTITY) + 1


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


def test_setting_up_twice_changes_nothing(database: str) -> None:
    dsn = Dsn.parse(database)
    first = create_stream(dsn, _slot(database), "pgoutput")
    assert create_stream(dsn, _slot(database), "pgoutput") == first


def test_a_slot_that_is_read_is_not_dropped(database: str, tmp_path: Path) -> None:
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
        out, error = process.communicate(timeout=30)
    assert process.returncode == 143, error
    assert not _active(database, slot)
    out = _millrace("stream", "cleanup", "--json", env=environment)
    assert len(json.loads(out)["removed"]) == 4  # slot, two publications, spool


def _none() -> Any:
    raise AssertionError("the slot is gone")


def _active(uri: str, slot: str) -> bool:
    with connect(Dsn.parse(uri), "test") as connection:
        state = read_slot(connection, slot)
    return state is not None and state.active_pid is not None


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
        process.communicate(timeout=30)
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
        _, error = process.communicate(timeout=30)
        assert process.returncode == 4, error
    assert not (tmp_path / "none").exists()


def _start(*arguments: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "millrace", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )


def _millrace(*arguments: str, env: dict[str, str]) -> str:
    process = _start(*arguments, env=env)
    out, error = process.communicate(timeout=60)
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
