"""What has broken a stream before: each of these is part of every campaign, and is counted.

Invariant: an ingredient counts only what was committed on the source, or done to the stream. A
campaign in which one of them never came up proves nothing about it, and fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]
Action = Callable[[Connection, random.Random], int]


class Ingredient(StrEnum):
    """The name is that in the report."""

    GENERATED_KEYS = "changes by keys with a generated column"
    LEAF_INDEXES = "values traded under unique indexes of leaf partitions"
    DOMAINS = "changes beside long values of NOT NULL domains"
    ALWAYS_TRIGGERS = "changes of a table whose trigger fires ALWAYS"
    NO_IDENTITY = "rows of tables without replica identity"
    LATE_IDENTITY = "changes of tables that got REPLICA IDENTITY FULL in mid-stream"
    LATE_TABLES = "tables created in mid-stream"
    RESYNCS = "tables copied again in mid-stream"
    ASYNCHRONOUS = "asynchronous commits right before an end position"
    SHORT_TIMEOUTS = "processes under server timeouts of a second"
    SEQUENCES = "sequences compared at an end"


class Incident(StrEnum):
    """What happens to one of many sources; the name is that in the report."""

    PAUSED = "sources paused and resumed"
    POISONED = "sources halted by a change that can't be applied, and mended"
    RESHAPED = "sources halted by DDL that fails on the target, and skipped"
    NEW_TABLE = "sources halted by DDL that fails on the target, and edited"
    ADDED = "sources added while others are followed"
    REMOVED = "sources removed while others are followed"
    RESYNCED = "tables copied again"
    RESYNCED_WHOLE = "sources copied again, all their tables"
    COPY_KILLED = "base copies that the process died in"
    HALT_KILLED = "processes killed while a source was halted"
    OTHERS_WENT_ON = "other sources seen to go on while one was halted"
    DDL_CREATE_TABLE = "DDL: CREATE TABLE"
    DDL_CREATE_TABLE_AS = "DDL: CREATE TABLE AS"
    DDL_ADD_COLUMN = "DDL: ALTER TABLE ADD COLUMN"
    DDL_VOLATILE = "DDL: ALTER TABLE with values that only the source knows"
    DDL_ALTER_TYPE = "DDL: ALTER TABLE ALTER COLUMN TYPE"
    DDL_RENAME = "DDL: ALTER TABLE RENAME"
    DDL_DROP_TABLE = "DDL: DROP TABLE"
    DDL_PARTITION = "DDL: partitions created and detached"
    DDL_INDEX = "DDL: CREATE INDEX"
    DDL_VIEW = "DDL: CREATE VIEW"
    DDL_ENUM = "DDL: ALTER TYPE ADD VALUE"
    DDL_SCHEMA = "DDL: schemas created and renamed"


def write_generated(connection: Connection, dice: random.Random) -> int:
    """Keys of which half is computed; some rows are gone again before the commit."""
    values = {"a": dice.randrange(300), "by": dice.randrange(1, 50)}
    statements = dice.choice(
        (
            ("INSERT INTO generated_key (a, v) SELECT %(a)s + i, 'new' FROM generate_series(1, 9) i"
             " ON CONFLICT DO NOTHING",),
            ("UPDATE generated_key SET v = v || '.' WHERE a %% 11 = %(a)s %% 11",),
            ("UPDATE generated_key SET a = 1000 + a + %(by)s WHERE a = %(a)s",),
            ("DELETE FROM generated_key WHERE a %% 13 = %(a)s %% 13",),
            ("INSERT INTO generated_key (a, v) VALUES (%(a)s + 5000, 'short') ON CONFLICT DO"
             " NOTHING",
             "INSERT INTO generated_key (a, v) VALUES (%(a)s + 6000, 'stays') ON CONFLICT DO"
             " NOTHING",
             "DELETE FROM generated_key WHERE a = %(a)s + 5000"),
        )
    )  # fmt: skip
    return sum(_do(connection, statement, **values) for statement in statements)


def trade_desks(connection: Connection, dice: random.Random) -> int:
    """By way of a free place: the leaves' own indexes are checked at once."""
    wing, first = dice.choice((("east", 1), ("west", 21)))
    one, other = sorted(dice.sample(range(first, first + 20), 2))
    places: dict[int, int] = dict(
        connection.execute(
            "SELECT id, place FROM desk WHERE wing = %s AND id IN (%s, %s) ORDER BY id FOR UPDATE",
            (wing, one, other),
        ).fetchall()
    )
    steps = ((one, -one), (other, places[one]), (one, places[other]))
    query = "UPDATE desk SET place = %(place)s WHERE wing = %(wing)s AND id = %(id)s"
    return sum(_do(connection, query, wing=wing, id=desk, place=place) for desk, place in steps)


def write_domained(connection: Connection, dice: random.Random) -> int:
    """The long values are mostly left alone, and then not sent; the table is not always there."""
    values = {"id": dice.randrange(40), "size": dice.randrange(100, 800)}
    long = (
        "(SELECT string_agg(md5(i::text || %(id)s::text), '') FROM generate_series(1, %(size)s) i)"
    )
    statement = dice.choice(
        (
            f"INSERT INTO domained VALUES (%(id)s, 0, {long}, {long}) ON CONFLICT (id) DO UPDATE"
            " SET turns = domained.turns + 1",
            "UPDATE domained SET turns = turns + 1 WHERE id %% 5 = %(id)s %% 5",
            f"UPDATE domained SET other = {long} || 'x' WHERE id = %(id)s",
            "UPDATE domained SET id = id + 1000 * (1 + %(size)s) WHERE id = %(id)s",
            "DELETE FROM domained WHERE id >= 1000 AND id %% 3 = %(id)s %% 3",
        )
    )
    return _do(connection, statement, **values)


def write_audited(connection: Connection, dice: random.Random) -> int:
    """The source's trigger writes a row of its own for each; the target's must not."""
    values = {"id": dice.randrange(100)}
    statement = dice.choice(
        (
            "INSERT INTO audited VALUES (%(id)s, 'new') ON CONFLICT (id) DO UPDATE SET v = 'again'",
            "UPDATE audited SET v = v || '.' WHERE id %% 9 = %(id)s %% 9",
            "DELETE FROM audited WHERE id %% 11 = %(id)s %% 11",
        )
    )
    return _do(connection, statement, **values)


def write_bare(connection: Connection, dice: random.Random) -> int:
    return _do(
        connection,
        "INSERT INTO bare SELECT i, 'bare', now() FROM generate_series(1, %(rows)s) i",
        rows=dice.randrange(1, 5),
    )


def write_nameless(connection: Connection, dice: random.Random) -> int:
    """Inserts only, as long as its rows can't be told apart."""
    row = connection.execute("SELECT relreplident = 'f' FROM pg_class WHERE oid = 'nameless'"
                             "::regclass").fetchone()  # fmt: skip
    insert = "INSERT INTO nameless SELECT i, 'row' FROM generate_series(1, 5) i"
    statement = dice.choice(
        (
            insert,
            "UPDATE nameless SET b = b || '.' WHERE ctid = ANY (ARRAY(SELECT ctid FROM nameless"
            " WHERE a = %(a)s LIMIT 3))",
            "DELETE FROM nameless WHERE ctid = ANY (ARRAY(SELECT ctid FROM nameless LIMIT 9))",
        )
    )
    is_known = row == (True,)
    changed = _do(connection, statement if is_known else insert, a=dice.randrange(1, 6))
    return changed if is_known else 0


def write_late(connection: Connection, dice: random.Random) -> int:
    """One of the tables that were made while the stream ran, if there is one."""
    found = connection.execute(
        "SELECT relname FROM pg_class WHERE relname LIKE 'late_%' AND relkind = 'r' ORDER BY 1"
    ).fetchall()
    if not found:
        return 0
    (table,) = dice.choice(found)
    statement = dice.choice(
        (
            f"INSERT INTO {table} VALUES (%(id)s, 'new') ON CONFLICT (id) DO UPDATE SET v = 'old'",
            f"UPDATE {table} SET v = v || '.' WHERE id %% 7 = %(id)s %% 7",
            f"DELETE FROM {table} WHERE id %% 9 = %(id)s %% 9",
        )
    )
    return _do(connection, statement, id=dice.randrange(200))


# How often each is done, among the others.
HARD_ACTIONS: dict[Action, int] = {
    write_generated: 8, trade_desks: 6, write_domained: 6, write_audited: 6, write_bare: 4,
    write_nameless: 4, write_late: 6,
}  # fmt: skip
OF_ACTION = {
    write_generated: Ingredient.GENERATED_KEYS,
    trade_desks: Ingredient.LEAF_INDEXES,
    write_domained: Ingredient.DOMAINS,
    write_audited: Ingredient.ALWAYS_TRIGGERS,
    write_bare: Ingredient.NO_IDENTITY,
    write_nameless: Ingredient.LATE_IDENTITY,
}

_SEQUENCES = """
SELECT format('%I.%I', schemaname, sequencename), coalesce(last_value, 0)
  FROM pg_sequences WHERE schemaname <> 'millrace' ORDER BY 1
"""


def sequence_differences(source: str, target: str) -> tuple[int, list[str]]:
    """How many sequences the source has, and those that the target has elsewhere."""
    found = []
    for uri in (source, target):
        with psycopg.connect(uri) as connection:
            rows: dict[str, int] = dict(connection.execute(_SEQUENCES).fetchall())
            found.append(rows)
    here, there = found
    return len(here), [
        f"sequence {name}: {value} on the source, {there.get(name)} on the target"
        for name, value in here.items()
        if there.get(name) != value
    ]


def _do(connection: Connection, statement: str, **values: object) -> int:
    return max(0, connection.execute(statement.encode(), values).rowcount)
