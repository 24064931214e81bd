"""Where a stream's tables are on the target, and a schema of the user's that has such a name."""

from __future__ import annotations

import threading

import pytest
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import wait_for

from millrace.apply import position, table_state
from millrace.apply.position import read_position
from millrace.config.dsn import Dsn
from millrace.errors import PreflightError
from millrace.filter.rules import parse_filters
from millrace.follow.setup import require_place
from millrace.follow.slot import cleanup
from millrace.postgres.own_schema import STREAM_POSITION, STREAM_TABLES, install_table
from millrace.postgres.run_record import RunRecord, drop_records, open_run, read_runs
from millrace.postgres.stream_record import (
    Follower,
    read_followers,
    remove_follower,
    write_follower,
)
from millrace.postgres.wire.connect import connect
from millrace.route import Route
from millrace.spool import table as table_spool
from millrace.spool.kind import SpoolKind

SCHEMAS = ("millrace", "replication")
FOLLOWER = Follower("source", "mine", "", "host", "directory")


def tables(uri: str) -> list[str]:
    """In the schemas of ours."""
    found = rows(
        uri,
        "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relnamespace IN"
        " (to_regnamespace('millrace'), to_regnamespace('replication')) ORDER BY 1",
    )
    return [name for (name,) in found]


def place(source: str, target: str, filters: str = "") -> None:
    rules = parse_filters(filters, name="test")
    require_place(Route(Dsn.parse(source), Dsn.parse(target), filters=rules), SpoolKind.TABLE)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_tables_of_the_users_with_our_names_are_refused_and_left_alone(
    source_db: str, target_db: str, schema: str
) -> None:
    execute(target_db, f"CREATE SCHEMA {schema}")
    for table in STREAM_TABLES:
        execute(
            target_db,
            f"CREATE TABLE {schema}.{table.name} (stream text)",
            f"INSERT INTO {schema}.{table.name} VALUES ('mine_spool'), ('mine')",
        )
    with pytest.raises(PreflightError, match=f"target has a schema {schema}") as refused:
        place(source_db, target_db)
    assert "RENAME" in refused.value.hint
    with connect(Dsn.parse(target_db), "test") as there, connect(Dsn.parse(source_db), "t") as here:
        with pytest.raises(PreflightError, match="millrace did not make"):
            table_spool.install(there, "mine")
        if schema == "millrace":
            for install in (
                lambda: table_state.install(there),
                lambda: write_follower(there, FOLLOWER),
            ):
                with pytest.raises(PreflightError, match="millrace did not make"):
                    install()
        assert (read_followers(there), read_position(there, "mine")) == ([], None)
        assert table_state.read_table_states(there, "mine") == {}
        # An origin that was left behind.
        there.execute("SELECT pg_replication_origin_create('mine_00000000_1_spool')")
        table_spool.uninstall(there, "mine_00000000_1")
        assert cleanup(here, there, "mine", "") == []
    for table in STREAM_TABLES:
        assert rows(target_db, f"SELECT count(*) FROM {schema}.{table.name}") == [(2,)]


def test_a_schema_replication_of_the_users_is_no_matter_unless_the_spool_is_a_table(
    source_db: str, target_db: str
) -> None:
    for uri in (source_db, target_db):
        execute(uri, "CREATE SCHEMA replication", "CREATE TABLE replication.node (id int)")
    require_place(Route(Dsn.parse(source_db), Dsn.parse(target_db)), SpoolKind.FILES)
    with connect(Dsn.parse(target_db), "test") as there:
        write_follower(there, FOLLOWER)
        table_state.install(there)
        assert tables(target_db) == [
            "millrace.stream_copy",
            "millrace.stream_table",
            "replication.node",
        ]
        assert remove_follower(there, "source", "mine")
        there.execute("DROP TABLE millrace.stream_table")
    assert tables(target_db) == ["replication.node"]


def test_our_own_schemas_go_with_the_last_stream_unless_something_is_in_them(
    target_db: str,
) -> None:
    with connect(Dsn.parse(target_db), "test") as there:
        for guest in (True, False):
            write_follower(there, FOLLOWER)
            table_spool.install(there, "mine")
            if guest:
                execute(target_db, *(f"CREATE TABLE {one}.guest (id int)" for one in SCHEMAS))
            table_spool.uninstall(there, "mine")
            assert remove_follower(there, "source", "mine")
            assert tables(target_db) == [f"{one}.guest" for one in SCHEMAS if guest]
            if guest:
                execute(target_db, *(f"DROP TABLE {one}.guest" for one in SCHEMAS))
    for schema in SCHEMAS:
        assert rows(target_db, f"SELECT to_regnamespace('{schema}')::text") == [(None,)]


def test_cleanup_of_the_last_stream_leaves_nothing_on_the_target(
    source_db: str, target_db: str
) -> None:
    with connect(Dsn.parse(target_db), "test") as there, connect(Dsn.parse(source_db), "t") as here:
        for slot in ("mine", "other"):
            write_follower(there, Follower("source", slot, "", "host", "directory"))
        table_state.install(there)
        install_table(there, STREAM_POSITION, position.DEFINITION)
        cleanup(here, there, "mine", "source")
        assert len(tables(target_db)) == 3  # the other stream may be about to write to them
        cleanup(here, there, "other", "source")
    assert rows(target_db, "SELECT to_regnamespace('millrace')::text") == [(None,)]


def test_a_run_and_a_stream_share_the_schema_and_each_takes_away_its_own(target_db: str) -> None:
    run = RunRecord("run1", "source", frozenset({"public"}))
    with connect(Dsn.parse(target_db), "test") as there:
        for _ in range(2):
            write_follower(there, FOLLOWER)
            assert open_run(there, run) == 1
            drop_records(there, "run1")
            assert tables(target_db) == ["millrace.stream_copy"]
            open_run(there, run)
            assert remove_follower(there, "source", "mine")
            assert [one.run_id for one in read_runs(there)] == ["run1"]
            drop_records(there, "run1")
    assert rows(target_db, "SELECT to_regnamespace('millrace')::text") == [(None,)]


def test_a_schema_of_the_sources_that_would_come_among_our_tables_is_refused(
    source_db: str, target_db: str
) -> None:
    place(source_db, target_db)
    for schema in SCHEMAS:
        execute(source_db, f"CREATE SCHEMA {schema}", f"CREATE TABLE {schema}.node (id int)")
        with pytest.raises(PreflightError, match=f"source has a schema {schema} of its own"):
            place(source_db, target_db)
        place(source_db, target_db, f"[exclude-schema]\n{schema}\n")
        execute(source_db, f"DROP SCHEMA {schema} CASCADE")


def test_two_streams_that_begin_at_once_share_the_schema(target_db: str) -> None:
    dsn, failures = Dsn.parse(target_db), list[BaseException]()

    def install() -> None:
        try:
            with connect(dsn, "second") as second:
                table_state.install(second)
        except BaseException as error:
            failures.append(error)

    waiting = "SELECT FROM pg_stat_activity WHERE application_name = 'millrace second' AND "
    with connect(dsn, "first") as first:
        thread = threading.Thread(target=install)
        with first.transaction():
            table_state.install(first)
            thread.start()
            wait_for(lambda: rows(target_db, waiting + "wait_event_type = 'Lock'"))
        thread.join()
    assert not failures
    assert tables(target_db) == ["millrace.stream_table"]
