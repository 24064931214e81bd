"""What the release before left, here and on the target, is continued, or refused clearly."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.sql import execute, rows
from tests.fixtures.stream.changes import Transaction, append
from tests.postgres.clone.test_two_clones import killed_at, run

from millrace.apply import position, table_state
from millrace.clone.directory import catalog_path
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
from millrace.postgres import own_schema
from millrace.postgres.own_schema import (
    RAW_MESSAGES,
    STREAM_COPY,
    STREAM_FORMAT,
    STREAM_POSITION,
    STREAM_TABLES,
    install_table,
)
from millrace.postgres.stream_record import Follower, read_followers, write_follower
from millrace.postgres.wire.connect import connect
from millrace.route import Route
from millrace.spool.table import TableSpoolWriter, uninstall
from millrace.workdir.format import FORMAT

TABLES = "; ".join(
    f"CREATE TABLE t{n} (id int PRIMARY KEY); INSERT INTO t{n} SELECT generate_series(1, {n}00)"
    for n in range(1, 4)
)
COPIED = "SELECT table_oid, part, xmin::text FROM millrace.copied_part"


@pytest.fixture
def stopped(source_db: str, target_db: str, tmp_path: Path) -> Iterator[CloneSettings]:
    """A run that was killed after a part of its rows was committed."""
    execute(source_db, TABLES)
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))
    with psycopg.connect(source_db) as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        ((snapshot,),) = holder.execute("SELECT pg_export_snapshot()").fetchall()
        killed_at("copy.after-commit", settings, snapshot)
        yield replace(settings, snapshot=snapshot)


def test_a_run_of_the_release_before_is_resumed(stopped: CloneSettings, target_db: str) -> None:
    with closing(sqlite3.connect(catalog_path(stopped.directory))) as database:
        database.execute("PRAGMA user_version = 0")
        database.execute("ALTER TABLE setup DROP COLUMN rename_schema")
        database.commit()
    execute(
        target_db,
        "COMMENT ON TABLE millrace.run IS NULL",
        "ALTER TABLE millrace.run DROP COLUMN schemas, DROP COLUMN host, DROP COLUMN directory",
    )
    ((oid, _, _),) = rows(target_db, COPIED)
    names = {f"t{n}" for n in range(1, 4)}
    ((done,),) = rows(stopped.source.conninfo(), f"SELECT {oid}::regclass::text")
    before = rows(target_db, f"SELECT xmin::text FROM {done} LIMIT 1")
    run(stopped, resume=True)
    # What was committed was not copied again.
    assert rows(target_db, f"SELECT DISTINCT xmin::text FROM {done}") == before
    for name in names:
        count = f"SELECT count(*) FROM {name}"
        assert rows(target_db, count) == rows(stopped.source.conninfo(), count)
    with closing(sqlite3.connect(catalog_path(stopped.directory))) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (FORMAT,)


def test_a_target_that_forgot_a_run_is_not_taken_for_one_that_it_never_saw(
    stopped: CloneSettings, target_db: str
) -> None:
    execute(target_db, "DROP SCHEMA millrace CASCADE")
    with pytest.raises(WorkDirError, match="no records of run") as refused:
        run(stopped, resume=True)
    assert "--restart" in (refused.value.hint or "")
    run(stopped, restart=True, drop_if_exists=True)
    assert rows(target_db, "SELECT count(*) FROM t3") == [(300,)]


# The release before had no DDL.
OLDER_TABLES = [table for table in STREAM_TABLES if not table.name.startswith("ddl_")]


@pytest.fixture
def older_stream(target_db: str) -> Iterator[Follower]:
    """A stream with a row in each table, all as the release before left them; even in a schema of
    the user's."""
    follower, dsn = Follower("somewhere", "slot", "run", "host", "/directory"), Dsn.parse(target_db)
    with connect(dsn, "test") as target:
        write_follower(target, follower)
        install_table(target, STREAM_POSITION, position.DEFINITION)
        target.execute("INSERT INTO millrace.stream_position (stream, lsn) VALUES ('s', '0/5')")
        table_state.install(target)
        table_state.write_copying(target, "s", ("a", "b"), lsn=7, sync_id="x", source_oid=1)
        with TableSpoolWriter(dsn, "older") as writer:
            append(writer, Transaction(1).frames())
            writer.sync()
        target.execute("INSERT INTO millrace.raw_relations VALUES ('older', 1, 1, '')")
        for table in OLDER_TABLES:
            target.execute(f"COMMENT ON TABLE {table.label} IS NULL".encode())
            if table.schema != "replication":
                target.execute(f"ALTER TABLE {table.label} SET SCHEMA replication".encode())
        target.execute("COMMENT ON SCHEMA replication IS 'of the user'")
        target.execute("DROP SCHEMA millrace")
        yield follower
        uninstall(target, "older")


def test_tables_of_a_stream_of_the_release_before_are_moved_with_what_they_hold(
    older_stream: Follower, target_db: str
) -> None:
    with connect(Dsn.parse(target_db), "test") as target:
        assert read_followers(target) == [older_stream]
        assert position.read_positions(target, "s") == {"s": 5}
        assert list(table_state.read_table_states(target, "s")) == [("a", "b")]
        with TableSpoolWriter(Dsn.parse(target_db), "older") as writer:
            assert writer.last_end_lsn == Transaction(1).end_lsn
        assert rows(target_db, "SELECT count(*) FROM millrace.raw_relations") == [(1,)]
        write_follower(target, older_stream)
        for table in OLDER_TABLES:
            assert table.format.read(target) == STREAM_FORMAT
        assert rows(
            target_db,
            "SELECT relname FROM pg_class WHERE relkind = 'r'"
            " AND relnamespace = 'replication'::regnamespace",
        ) == [("raw_messages",)]


def test_a_table_of_the_release_before_that_cannot_be_moved_is_not_taken_for_none(
    older_stream: Follower, target_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_schema, "_MOVE_TIMEOUT", "100ms")
    dsn = Dsn.parse(target_db)
    with connect(dsn, "test") as target, connect(dsn, "older") as other:
        target.execute("SET ROLE pg_read_all_data")
        with pytest.raises(WorkDirError, match=r"replication.stream_table .* can't be moved"):
            table_state.read_table_states(target, "s")
        target.execute("RESET ROLE")
        with other.transaction():
            other.execute("LOCK TABLE replication.stream_position IN ACCESS SHARE MODE")
            with pytest.raises(WorkDirError, match="lock timeout"):
                position.read_position(target, "s")
        assert position.read_position(target, "s") == 5
        # The release before, used once more, makes its own.
        other.execute(f"CREATE TABLE replication.stream_position {position.DEFINITION}".encode())
        with pytest.raises(WorkDirError, match="an older release has been used on it"):
            position.read_position(target, "s")
        other.execute("DROP TABLE replication.stream_position")


def test_tables_of_a_stream_of_a_newer_release_are_left_alone(
    older_stream: Follower, target_db: str
) -> None:
    with connect(Dsn.parse(target_db), "test") as target:
        assert read_followers(target) == [older_stream]
        for table in (STREAM_COPY, RAW_MESSAGES):
            target.execute(f"COMMENT ON TABLE {table.label} IS 'millrace format 99'".encode())
            with pytest.raises(WorkDirError, match=f"{table.label} on the target has format 99"):
                read_followers(target)
            with (
                pytest.raises(WorkDirError, match="has format 99"),
                TableSpoolWriter(Dsn.parse(target_db), "older"),
            ):
                pass
            target.execute(f"COMMENT ON TABLE {table.label} IS NULL".encode())
