"""A schema of the user's own that has the name of the one in which a stream keeps its tables."""

from __future__ import annotations

import threading

import pytest
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import wait_for

from millrace.apply import table_state
from millrace.apply.position import read_position
from millrace.config.dsn import Dsn
from millrace.errors import PreflightError, ServerError
from millrace.filter.rules import parse_filters
from millrace.follow.setup import require_place
from millrace.follow.slot import cleanup
from millrace.postgres.stream_record import (
    Follower,
    read_followers,
    remove_follower,
    write_follower,
)
from millrace.postgres.wire.connect import connect
from millrace.route import Route
from millrace.spool import table as table_spool

NAMES = ("stream_copy", "stream_position", "stream_table", "raw_messages", "raw_relations")


def tables(uri: str) -> list[str]:
    found = rows(
        uri,
        "SELECT relname FROM pg_class WHERE relkind = 'r'"
        " AND relnamespace = to_regnamespace('replication') ORDER BY 1",
    )
    return [name for (name,) in found]


def test_tables_of_the_users_with_our_names_are_refused_and_left_alone(
    source_db: str, target_db: str
) -> None:
    source, target = Dsn.parse(source_db), Dsn.parse(target_db)
    execute(target_db, "CREATE SCHEMA replication")
    for name in NAMES:
        execute(
            target_db,
            f"CREATE TABLE replication.{name} (stream text)",
            f"INSERT INTO replication.{name} VALUES ('mine_spool'), ('mine')",
        )
    with pytest.raises(PreflightError, match="target has a schema replication") as refused:
        require_place(Route(source, target))
    assert "RENAME" in refused.value.hint
    with connect(target, "test") as there, connect(source, "test") as here:
        for install in (
            lambda: table_spool.install(there, "mine"),
            lambda: table_state.install(there),
            lambda: write_follower(there, Follower("source", "mine", "", "host", "directory")),
        ):
            with pytest.raises(ServerError, match="millrace did not make"):
                install()
        assert (read_followers(there), read_position(there, "mine")) == ([], None)
        assert table_state.read_table_states(there, "mine") == {}
        # An origin that was left behind.
        there.execute("SELECT pg_replication_origin_create('mine_00000000_1_spool')")
        table_spool.uninstall(there, "mine_00000000_1")
        assert cleanup(here, there, "mine", "") == []
    for name in NAMES:
        assert rows(target_db, f"SELECT count(*) FROM replication.{name}") == [(2,)]


def test_our_own_schema_goes_with_the_last_stream_unless_something_is_in_it(
    target_db: str,
) -> None:
    follower = Follower("source", "mine", "", "host", "directory")
    with connect(Dsn.parse(target_db), "test") as there:
        write_follower(there, follower)
        execute(target_db, "CREATE TABLE replication.guest (id int)")
        assert remove_follower(there, "source", "mine")
        assert tables(target_db) == ["guest"]
        execute(target_db, "DROP TABLE replication.guest")
        write_follower(there, follower)
        assert remove_follower(there, "source", "mine")
    assert rows(target_db, "SELECT to_regnamespace('replication')::text") == [(None,)]


def test_a_stream_that_began_in_a_schema_of_the_users_goes_on(target_db: str) -> None:
    follower = Follower("source", "mine", "", "host", "directory")
    with connect(Dsn.parse(target_db), "test") as there:
        write_follower(there, follower)
        execute(target_db, "COMMENT ON SCHEMA replication IS 'of the user'")
        write_follower(there, follower)
        table_state.install(there)
        assert read_followers(there) == [follower]
        assert remove_follower(there, "source", "mine")
    assert tables(target_db) == ["stream_table"]


def test_a_schema_of_the_sources_that_would_come_among_our_tables_is_refused(
    source_db: str, target_db: str
) -> None:
    source, target = Dsn.parse(source_db), Dsn.parse(target_db)
    require_place(Route(source, target))
    execute(source_db, "CREATE SCHEMA replication", "CREATE TABLE replication.node (id int)")
    with pytest.raises(PreflightError, match="source has a schema replication of its own"):
        require_place(Route(source, target))
    left_out = parse_filters("[exclude-schema]\nreplication\n", name="test")
    require_place(Route(source, target, filters=left_out))


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
    assert tables(target_db) == ["stream_table"]
