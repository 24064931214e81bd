"""Tables with every kind of key, and what applications do to them while a tube is delivered.

Invariant: `n` tells a row for life; its key is computed from it, and changes with it. A document is
a row that is shown. What a statement fails with is the application's own (a key that exists, a lock
that is taken): it is rolled back, and counts as nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]
# Rows have numbers below this; a changed key is that of a row so much further on.
ROWS = 60
FURTHER = 500
# Ranges of a partitioned table that are made later: the first begins here, each is so wide.
LATE = 400


class TubeIngredient(StrEnum):
    """The name is that in the report."""

    ROWS = "rows inserted, or updated ON CONFLICT"
    UPDATES = "rows updated or deleted"
    PREDICATE = "rows that entered or left the predicate"
    ROUTING = "rows that changed their shard"
    KEYS = "keys changed"
    MERGES = "rows of MERGE"
    TRUNCATES = "TRUNCATE"
    PARTITIONS = "partitions created meanwhile"
    LEAVES = "rows written into a partition by its name"
    TOUCHES = "touches by hand"
    ASYNCHRONOUS = "transactions with synchronous_commit off"
    LATE_COMMITS = "transactions that committed late"
    PREPARED = "prepared transactions"
    ONE_BACKFILL = "backfills in one transaction"
    PAGES = "backfills in pages"
    SCHEDULED = "backfills scheduled"
    SHARDS = "tables attached again with another shard or routing"
    DETACHED = "tables detached, changed and attached again"
    REPARTITIONS = "repartitions"
    ROTATIONS = "storage rotated"
    SNAPSHOTS = "snapshots held"
    REFUSALS = "documents refused by the sink, and retried"
    SINK_AWAY = "sinks that were away"
    FROZEN = "workers frozen, their partitions taken over, and woken again"


@dataclass(frozen=True)
class Subject:
    """A table, and a tube of the same name."""

    name: str
    key: tuple[str, ...]
    types: tuple[str, ...]
    # The key of row i, in SQL.
    make: tuple[str, ...]
    is_parted: bool = False

    @property
    def tables(self) -> str:
        """On the source."""
        columns = ", ".join(f"{k} {t}" for k, t in zip(self.key, self.types, strict=True))
        rest = f"n int, v text, region int, shown boolean, PRIMARY KEY ({', '.join(self.key)})"
        if not self.is_parted:
            return f"CREATE TABLE {self.name} ({columns}, {rest})"
        ranges = (("low", "MINVALUE", "0"), ("high", "0", str(LATE)))
        return f"CREATE TABLE {self.name} ({columns}, {rest}) PARTITION BY RANGE (id);" + ";".join(
            f"CREATE TABLE {self.name}_{name} PARTITION OF {self.name} FOR VALUES"
            f" FROM ({low}) TO ({high})"
            for name, low, high in ranges
        )

    @property
    def documents(self) -> str:
        """Beside the sink; an enum of the source is a text there."""
        types = ("text" if one == "mood" else one for one in self.types)
        columns = ", ".join(f"{k} {t}" for k, t in zip(self.key, types, strict=True))
        return f"CREATE TABLE docs ({columns}, n int, v text, PRIMARY KEY ({', '.join(self.key)}))"

    @property
    def enrich(self) -> str:
        names = ", ".join(self.key)
        numbers = ", ".join(f"${at}" for at in range(1, len(self.key) + 1))
        return (
            f"SELECT {names}, n, v FROM {self.name} JOIN unnest({numbers}) k ({names})"
            f" USING ({names}) WHERE shown"
        )

    def rows(self, source: str) -> str:
        """Of the numbers that the source calls i."""
        made = ", ".join(self.make)
        return f"SELECT {made}, i, 'new', i % 5 - 2, i % 4 <> 0 FROM {source}"


SUBJECTS = (
    Subject("by_bigint", ("id",), ("bigint",), ("(i - 20)::bigint",)),
    Subject("by_int", ("number",), ("int",), ("i",)),
    Subject("by_uuid", ("at",), ("uuid",), ("md5(i::text)::uuid",)),
    Subject("by_text", ("name",), ("text",), ("E'it''s \"odd\", \\\\' || i",)),
    Subject("by_pair", ("a", "b"), ("bigint", "text"), ("(i % 5 - 2)::bigint", "'b, ' || i")),
    Subject("by_mood", ("m", "k"), ("mood", "int"),
            ("(ARRAY['low', 'it''s, \"high\"'])[1 + i % 2]::mood", "i")),
    Subject("parted", ("id",), ("bigint",), ("(i - 20)::bigint",), is_parted=True),
)  # fmt: skip
MOOD = "CREATE TYPE mood AS ENUM ('low', 'it''s, \"high\"')"

Write = Callable[[Connection, Subject, random.Random], int]


def insert(connection: Connection, subject: Subject, dice: random.Random) -> int:
    first, count = dice.randrange(ROWS), dice.choice((1, 1, 5, 30))
    series = f"generate_series({first}, {first + count - 1}) i"
    again = dice.choice(("NOTHING", f"UPDATE SET v = {subject.name}.v || '+', shown = true"))
    names = ", ".join(subject.key)
    return _do(
        connection,
        f"INSERT INTO {subject.name} {subject.rows(series)} ON CONFLICT ({names}) DO {again}",
    )


def change(connection: Connection, subject: Subject, dice: random.Random) -> int:
    by, at = dice.choice(((60, dice.randrange(60)), (7, dice.randrange(7))))
    where = f"WHERE n % {by} = {at}"
    if dice.random() < 0.3:
        return _do(connection, f"DELETE FROM {subject.name} {where}")
    return _do(connection, f"UPDATE {subject.name} SET v = right(v || '{at}', 40) {where}")


def show(connection: Connection, subject: Subject, dice: random.Random) -> int:
    return _do(
        connection,
        f"UPDATE {subject.name} SET shown = NOT shown WHERE n % 9 = {dice.randrange(9)}",
    )


def move(connection: Connection, subject: Subject, dice: random.Random) -> int:
    step = dice.choice((-3, -1, 1, 2))
    return _do(
        connection,
        f"UPDATE {subject.name} SET region = (region + {step}) % 6, v = v || 'm'"
        f" WHERE n % 8 = {dice.randrange(8)}",
    )


def change_key(connection: Connection, subject: Subject, dice: random.Random) -> int:
    step = dice.choice((FURTHER, -FURTHER))
    sets = ", ".join(
        f"{name} = (SELECT {made} FROM (SELECT n + {step}) x (i))"
        for name, made in zip(subject.key, subject.make, strict=True)
    )
    return _do(
        connection,
        f"UPDATE {subject.name} SET {sets}, n = n + {step} WHERE n % 20 = {dice.randrange(20)}"
        f" AND n {'<' if step > 0 else '>='} {FURTHER}",
    )


def merge(connection: Connection, subject: Subject, dice: random.Random) -> int:
    first = dice.randrange(ROWS)
    names = ", ".join(subject.key)
    rows = subject.rows(f"generate_series({first}, {first + 9}) i")
    columns = f"{names}, n, v, region, shown"
    values = ", ".join(f"s.{one}" for one in columns.split(", "))
    return _do(
        connection,
        f"MERGE INTO {subject.name} t USING ({rows}) s ({columns}) ON t.n = s.n"
        f" WHEN MATCHED AND s.n % 3 = {dice.randrange(3)} THEN DELETE"
        " WHEN MATCHED THEN UPDATE SET v = 'merged'"
        f" WHEN NOT MATCHED THEN INSERT ({columns}) VALUES ({values})",
    )


def truncate(connection: Connection, subject: Subject, dice: random.Random) -> int:
    connection.execute(f"TRUNCATE {subject.name}".encode())
    return 1


def add_partition(connection: Connection, subject: Subject, dice: random.Random) -> int:
    """Half of the time a trigger for each row is left to it."""
    if not subject.is_parted:
        return 0
    found = connection.execute(
        "SELECT count(*) FROM pg_inherits WHERE inhparent = %s::regclass", (subject.name,)
    ).fetchone()
    assert found is not None
    low = LATE + (found[0] - 2) * LATE
    connection.execute(
        f"CREATE TABLE {subject.name}_{low} PARTITION OF {subject.name} FOR VALUES FROM ({low})"
        f" TO ({low + LATE})".encode()
    )
    if dice.random() < 0.5:
        connection.execute("SELECT tube.tube_partitions_refresh()")
    return 1


def write_leaf(connection: Connection, subject: Subject, dice: random.Random) -> int:
    """A row for one of the partitions, by its name; most were made later."""
    if not subject.is_parted:
        return 0
    (leaf,) = dice.choice(
        connection.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass"
            " ORDER BY 1", (subject.name,)
        ).fetchall()
    )  # fmt: skip
    return _do(
        connection,
        dice.choice(
            (
                f"UPDATE {leaf} SET v = right(v || 'leaf', 40) WHERE n % 3 = 1",
                f"DELETE FROM {leaf} WHERE n % 10 = {dice.randrange(10)}",
                f"UPDATE {leaf} SET shown = NOT shown WHERE n % 5 = 2",
            )
        ),
    )


def touch(connection: Connection, subject: Subject, dice: random.Random) -> int:
    """Keys that are there and keys that are not; also into a shard that the table does not have."""
    n = dice.randrange(ROWS)
    if len(subject.key) == 1 and subject.types[0] in ("bigint", "int"):
        statement = dice.choice(
            (
                f"SELECT tube.{subject.name}_touch({dice.randrange(-3, 6)}, ARRAY[{n}, 7], 'T')",
                f"SELECT {subject.name}_touch(ARRAY[{n}, {n}, 7])",
            )
        )
    else:
        statement = (
            f"SELECT tube.tube_touch('{subject.name}', '{subject.name}', array_agg(k)) FROM"
            f" (SELECT {_pod_key(subject)} FROM {subject.name} LIMIT 5) x (k)"
        )
    connection.execute(statement.encode())
    return 1


# How often each is done, among the others.
WRITES: dict[Write, int] = {
    insert: 10, change: 10, show: 5, move: 5, change_key: 4, merge: 4, truncate: 1,
    add_partition: 1, write_leaf: 4, touch: 3,
}  # fmt: skip
OF_WRITE = {
    insert: TubeIngredient.ROWS,
    change: TubeIngredient.UPDATES,
    show: TubeIngredient.PREDICATE,
    move: TubeIngredient.ROUTING,
    change_key: TubeIngredient.KEYS,
    merge: TubeIngredient.MERGES,
    truncate: TubeIngredient.TRUNCATES,
    add_partition: TubeIngredient.PARTITIONS,
    write_leaf: TubeIngredient.LEAVES,
    touch: TubeIngredient.TOUCHES,
}


def choose_write(dice: random.Random) -> Write:
    return dice.choices(list(WRITES), list(WRITES.values()))[0]


def _pod_key(subject: Subject) -> str:
    names = ", ".join(f"{one}::text" for one in subject.key)
    return names if len(subject.key) == 1 else f"json_build_array({names})::text"


def _do(connection: Connection, statement: str) -> int:
    return max(0, connection.execute(statement.encode()).rowcount)
