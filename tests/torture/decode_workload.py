"""Random sessions for decoding: rows, DDL, savepoints, prepared transactions, concurrently.

Invariant: a seed gives the same statements to each session; how sessions interleave is the
server's affair, and the WAL tells.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import psycopg

TABLES = 6
_TYPES = (
    "int", "text", "numeric", "timestamptz", "jsonb", "int[]", "mood", "pair", "bool", "bytea",
    "interval", "int4range", "float8", "uuid", "date", "bit(8)", "inet", "mood[]",
)  # fmt: skip
_VALUES = {
    "int": "(random() * 1000)::int", "text": "repeat(md5(random()::text), (random() * 120)::int)",
    "numeric": "(random() * 1e6)::numeric", "timestamptz": "now()",
    "jsonb": "jsonb_build_object('a', random(), 'b', NULL)", "int[]": "ARRAY[1, NULL, 3]",
    "mood": "(enum_range(NULL::mood))[1]", "pair": "ROW(1, 'x')::pair", "bool": "random() < 0.5",
    "bytea": "decode(md5(random()::text), 'hex')", "interval": "random() * interval '1 year'",
    "int4range": "int4range(1, 10)", "float8": "random()", "uuid": "gen_random_uuid()",
    "date": "current_date", "bit(8)": "B'10101010'", "inet": "'10.0.0.1'::inet",
    "mood[]": "enum_range(NULL::mood)",
}  # fmt: skip

SETUP = (
    "CREATE TYPE mood AS ENUM ('m0', 'm1')",
    "CREATE TYPE pair AS (x int, y text)",
    *(f"CREATE TABLE w{n} (id serial PRIMARY KEY, v text)" for n in range(TABLES)),
)


class RandomSession:
    """One session with its own random numbers."""

    def __init__(self, uri: str, seed: int, *, may_prepare: bool = True) -> None:
        self._uri = uri
        self._random = random.Random(seed)
        self._name = f"g{seed}"
        self._may_prepare = may_prepare
        self._number = 0
        self.done: dict[str, int] = {}

    def run(self, is_over: Callable[[], bool]) -> None:
        with psycopg.connect(
            self._uri, autocommit=True, options="-c lock_timeout=2s -c deadlock_timeout=50ms"
        ) as connection:
            while not is_over():
                self._transaction(connection)

    def _transaction(self, connection: psycopg.Connection) -> None:
        steps = self._random.choice((1, 1, 2, 5, 20))
        try:
            connection.execute("BEGIN")
            for _ in range(steps):
                self._step(connection)
            self._end(connection)
        except psycopg.Error:
            connection.execute("ROLLBACK")

    def _end(self, connection: psycopg.Connection) -> None:
        self._number += 1
        chance = self._random.random()
        if chance < 0.1:
            connection.execute("ROLLBACK")
        elif chance < 0.2 and self._may_prepare:
            gid = f"{self._name}-{self._number}"
            connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())
            word = self._random.choice(("COMMIT", "COMMIT", "ROLLBACK"))
            connection.execute(f"{word} PREPARED '{gid}'".encode())
        else:
            connection.execute("COMMIT")

    def _step(self, connection: psycopg.Connection) -> None:
        kind = self._random.choices(
            ("insert", "update", "delete", "ddl", "savepoint", "truncate", "message", "catalog"),
            (40, 20, 8, 10, 12, 1, 3, 1),
        )[0]
        self.done[kind] = self.done.get(kind, 0) + 1
        if kind == "savepoint":
            self._savepoint(connection)
        else:
            connection.execute(getattr(self, f"_{kind}")().encode())

    def _savepoint(self, connection: psycopg.Connection) -> None:
        connection.execute("SAVEPOINT s")
        try:
            for _ in range(self._random.randint(1, 3)):
                self._step(connection)
            word = self._random.choice(("RELEASE s", "ROLLBACK TO s"))
        except psycopg.Error:
            word = "ROLLBACK TO s"
        connection.execute(word.encode())

    def _table(self) -> str:
        return f"w{self._random.randrange(TABLES)}"

    def _insert(self) -> str:
        table, count = self._table(), self._random.choice((1, 1, 3, 50))
        value = _VALUES["text"]
        conflict = self._random.choice(("", "", " ON CONFLICT DO NOTHING"))
        return f"INSERT INTO {table} (v) SELECT {value} FROM generate_series(1, {count}){conflict}"

    def _update(self) -> str:
        change = self._random.choice(("v = v || 'x'", f"v = {_VALUES['text']}", "id = -id"))
        low = self._random.randrange(400)
        return f"UPDATE {self._table()} SET {change} WHERE id BETWEEN {low} AND {low + 3}"

    def _delete(self) -> str:
        return f"DELETE FROM {self._table()} WHERE id % 97 = {self._random.randrange(97)}"

    def _truncate(self) -> str:
        return f"TRUNCATE {self._table()}"

    def _message(self) -> str:
        flag = self._random.choice(("true", "false"))
        return f"SELECT pg_logical_emit_message({flag}, '{self._name}', 'text')"

    def _catalog(self) -> str:
        self._number += 1
        label = f"{self._name}_{self._number}"
        return self._random.choice(
            (
                f"ALTER TYPE mood ADD VALUE '{label}'",
                f"CREATE TEMP TABLE tmp_{label} ON COMMIT DROP AS SELECT 1 AS x",
                f"CREATE TABLE {label} AS SELECT i FROM generate_series(1, 5) i",
            )
        )

    def _ddl(self) -> str:
        table, column = self._table(), f"c{self._random.randrange(5)}"
        type_ = self._random.choice(_TYPES)
        return self._random.choice(
            (
                f"ALTER TABLE {table} ADD COLUMN {column} {type_} DEFAULT {_VALUES[type_]}",
                f"ALTER TABLE {table} ADD COLUMN {column} {type_}",
                f"ALTER TABLE {table} DROP COLUMN IF EXISTS {column}",
                f"ALTER TABLE {table} REPLICA IDENTITY {self._random.choice(('FULL', 'DEFAULT'))}",
                f"ALTER TABLE {table} RENAME COLUMN v TO v2",
                f"ALTER TABLE {table} RENAME COLUMN v2 TO v",
                f"ALTER TABLE {table} ALTER COLUMN {column} TYPE text USING {column}::text",
                f"CREATE INDEX ON {table} ({column})",
            )
        )


def run_sessions(uri: str, seed: int, count: int, seconds: float) -> dict[str, int]:
    """Random sessions side by side; how often each kind of statement was tried."""
    over = threading.Event()
    sessions = [RandomSession(uri, seed * 100 + n) for n in range(count)]
    threads = [threading.Thread(target=s.run, args=(over.is_set,)) for s in sessions]
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()
    done: dict[str, int] = {}
    for session in sessions:
        for kind, number in session.done.items():
            done[kind] = done.get(kind, 0) + number
    return done
