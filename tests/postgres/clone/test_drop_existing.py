"""What a clone that replaces an older one drops from the target, and what it must not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fixtures.sql import execute, rows

from millrace.clone.schema.database import drop_existing
from millrace.config.dsn import Dsn
from millrace.filter.apply import read_decision
from millrace.filter.rules import parse_filters
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import connect
from millrace.route import Route

SCHEMA = """
CREATE SCHEMA app;
CREATE SCHEMA log;
CREATE TABLE app.kept (id int PRIMARY KEY);
CREATE TABLE app.emptied (id int PRIMARY KEY);
CREATE TABLE app.spared (id int PRIMARY KEY, kept_id int REFERENCES app.kept);
CREATE VIEW app.spared_ids AS SELECT id FROM app.spared;
CREATE TABLE log.event (id int PRIMARY KEY);
CREATE MATERIALIZED VIEW log.events AS SELECT count(*) FROM log.event;
CREATE FUNCTION app.seen() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN NULL; END';
CREATE FUNCTION log.seen() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN NULL; END';
CREATE EVENT TRIGGER app_seen ON ddl_command_start EXECUTE FUNCTION app.seen();
CREATE EVENT TRIGGER log_seen ON ddl_command_start EXECUTE FUNCTION log.seen();
CREATE PUBLICATION news FOR TABLE app.kept;
CREATE TABLE app.parent (id int);
CREATE TABLE app.heir (extra text) INHERITS (app.parent);
CREATE TABLE app.days (day int, n int, PRIMARY KEY (day, n)) PARTITION BY RANGE (day);
CREATE TABLE app.days_1 PARTITION OF app.days FOR VALUES FROM (1) TO (2);
CREATE TABLE app.days_2 PARTITION OF app.days FOR VALUES FROM (2) TO (9) PARTITION BY LIST (n);
CREATE TABLE app.days_2_a PARTITION OF app.days_2 FOR VALUES IN (1);
CREATE TABLE app.days_2_b PARTITION OF app.days_2 DEFAULT;
INSERT INTO app.spared VALUES (7, NULL);
INSERT INTO log.event VALUES (7);
INSERT INTO app.heir VALUES (7, 'x');
INSERT INTO app.days VALUES (1, 7), (2, 1), (3, 7);
"""
LEFT = """
SELECT array_agg(n.nspname || '.' || c.relname ORDER BY 1) FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname IN ('app', 'log') AND c.relkind IN ('r', 'p', 'v', 'm')"""


@pytest.fixture
def databases(source_db: str, target_db: str) -> tuple[str, str]:
    """The target is an older clone of the source, and has a table of its own."""
    execute(source_db, SCHEMA)
    execute(target_db, SCHEMA, "CREATE TABLE app.own (id int)")
    return source_db, target_db


def drop(source: str, target: str, filters: str = "") -> set[str]:
    """Drop under these filters; the relations that are left."""
    with connect(Dsn.parse(source), "test") as connection:
        decision = read_decision(connection, parse_filters(filters, name="f.ini"))
    with connect(Dsn.parse(target), "test") as connection:
        drop_existing(connection, Route(Dsn.parse(source), Dsn.parse(target)), decision.excluded)
    ((left,),) = rows(target, LEFT)
    return set(left)


def test_all_that_the_source_has_goes_without_filters(databases: tuple[str, str]) -> None:
    source, target = databases
    assert drop(source, target) == {"app.own"}
    assert rows(target, "SELECT evtname FROM pg_event_trigger") == []
    assert rows(target, "SELECT pubname FROM pg_publication") == []


def test_what_filters_leave_out_stays(databases: tuple[str, str]) -> None:
    source, target = databases
    left = drop(
        source,
        target,
        "[exclude-table]\napp.spared\n[exclude-schema]\nlog\n[exclude-table-data]\napp.emptied\n",
    )
    assert left == {"app.own", "app.spared", "app.spared_ids", "log.event", "log.events"}
    assert rows(target, "SELECT id FROM app.spared") == [(7,)]
    assert rows(target, "SELECT id FROM log.event") == [(7,)]
    assert rows(target, "SELECT evtname FROM pg_event_trigger") == [("log_seen",)]


def test_only_what_filters_include_goes(databases: tuple[str, str]) -> None:
    source, target = databases
    left = drop(source, target, "[include-only-table]\napp.kept\n")
    assert {"app.spared", "app.heir", "app.days_2_b", "log.event", "app.own"} <= left
    assert "app.kept" not in left
    left = drop(source, target, "[include-only-schema]\nlog\n")
    assert {"app.spared", "app.emptied"} <= left
    assert "log.event" not in left


def test_partitions_and_heirs_that_are_left_out_outlive_their_parents(
    databases: tuple[str, str],
) -> None:
    source, target = databases
    left = drop(source, target, "[exclude-table]\napp.heir\napp.days_1\napp.days_2_a\n")
    assert left == {"app.own", "app.heir", "app.days_1", "app.days_2_a"}
    assert rows(target, "SELECT id, extra FROM app.heir") == [(7, "x")]
    assert rows(target, "SELECT * FROM app.days_1") == [(1, 7)]
    assert rows(target, "SELECT * FROM app.days_2_a") == [(2, 1)]


def test_partitioned_table_that_is_left_out_keeps_its_partitions(
    databases: tuple[str, str],
) -> None:
    source, target = databases
    drop(source, target, "[exclude-table]\napp.days\n")
    assert rows(target, "SELECT * FROM app.days ORDER BY 1") == [(1, 7), (2, 1), (3, 7)]


SUBSCRIPTIONS = """
SELECT s.subname::text FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid
 WHERE d.datname = current_database() ORDER BY s.subname::text COLLATE "C" """


@pytest.fixture
def subscribed(source_db: str, target_db: str) -> Iterator[tuple[str, str]]:
    """Two subscriptions on both sides, one on the target alone. Their publisher is the source's
    server; a slot is there for one."""
    execute(
        source_db,
        "CREATE ROLE subscription_reader LOGIN",
        "CREATE PUBLICATION news",
        "SELECT pg_create_logical_replication_slot('of_the_source', 'pgoutput')",
    )
    publisher = source_db.replace("'", "''")
    options = "WITH (connect = false, slot_name = 'of_the_source')"
    for uri in (source_db, target_db):
        execute(
            uri,
            f"CREATE SUBSCRIPTION news CONNECTION '{publisher}' PUBLICATION news {options}",
            "CREATE SUBSCRIPTION \"On it\" CONNECTION 'dbname=nowhere' PUBLICATION news"
            " WITH (connect = false, slot_name = 'none_such')",
        )
    execute(
        target_db,
        'ALTER SUBSCRIPTION "On it" ENABLE',
        f"CREATE SUBSCRIPTION own CONNECTION '{publisher}' PUBLICATION news {options}",
    )
    yield source_db, target_db
    for uri in (source_db, target_db):
        for (name,) in rows(uri, SUBSCRIPTIONS):
            execute(
                uri,
                f"ALTER SUBSCRIPTION {ident(name)} DISABLE",
                f"ALTER SUBSCRIPTION {ident(name)} SET (slot_name = NONE)",
                f"DROP SUBSCRIPTION {ident(name)}",
            )
    execute(
        source_db,
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        " WHERE slot_name = 'of_the_source'",
        "DROP ROLE subscription_reader",
    )


def test_subscription_goes_and_the_slot_stays_the_sources(subscribed: tuple[str, str]) -> None:
    source, target = subscribed
    with connect(Dsn.parse(target), "test") as connection:
        drop_existing(connection, Route(Dsn.parse(source), Dsn.parse(target)))
    assert rows(target, SUBSCRIPTIONS) == [("own",)]
    slots = "SELECT slot_name::text FROM pg_replication_slots WHERE slot_name = 'of_the_source'"
    assert rows(source, slots) == [("of_the_source",)]


def test_subscription_that_pg_dump_can_not_see_is_not_dropped(subscribed: tuple[str, str]) -> None:
    source, target = subscribed
    with connect(Dsn.parse(target), "test") as connection:
        reader = Dsn.parse(source).with_(user="subscription_reader")
        drop_existing(connection, Route(reader, Dsn.parse(target)))
    assert rows(target, SUBSCRIPTIONS) == [("On it",), ("news",), ("own",)]
