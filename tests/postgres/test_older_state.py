"""What the release before left, here and on the target, is continued; what is lost is told."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.changes import Transaction, append
from tests.fixtures.sql import execute, rows
from tests.postgres.test_two_clones import killed_at, run

from millrace.clone.directory import catalog_path
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
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


def test_tables_of_a_stream_of_another_release(target_db: str) -> None:
    """Those without a format are continued with, those of a newer one are left alone."""
    dsn, tables = Dsn.parse(target_db), ("stream_copy", "raw_messages")
    follower = Follower("somewhere", "slot", "run", "host", "/directory")
    with connect(dsn, "test") as target:
        write_follower(target, follower)
        with TableSpoolWriter(dsn, "older") as writer:
            append(writer, Transaction(1).frames())
            writer.sync()
        for table in tables:
            target.execute(f"COMMENT ON TABLE replication.{table} IS NULL".encode())
        assert read_followers(target) == [follower]
        write_follower(target, follower)
        with TableSpoolWriter(dsn, "older") as writer:
            assert writer.last_end_lsn == Transaction(1).end_lsn
        for table in tables:
            name = f"replication.{table}"
            described = f"SELECT obj_description('{name}'::regclass)"
            assert rows(target_db, described) == [("millrace format 1",)]
            target.execute(f"COMMENT ON TABLE {name} IS 'millrace format 99'".encode())
            with pytest.raises(WorkDirError, match=f"{name} on the target has format 99"):
                read_followers(target)
            with pytest.raises(WorkDirError, match="has format 99"), TableSpoolWriter(dsn, "older"):
                pass
            target.execute(f"COMMENT ON TABLE {name} IS NULL".encode())
        uninstall(target, "older")
