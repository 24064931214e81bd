"""A tube as its deliverers see it: partitions, tables, keys.

Invariant: a `Tube` is of one moment. Whoever reads pods by it says so, and is refused once the tube
has another number of partitions; then it is read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import TubeLost
from millrace.postgres.quote import ident, qualified
from millrace.postgres.wire.connect import connect, translated
from millrace.tube.install import find_schema

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class TubeTable:
    """A table that is attached to a tube."""

    # Pods name their table by this.
    id: int
    schema: str
    name: str
    # Its key's columns, and their types as SQL writes them.
    key: tuple[str, ...]
    key_types: tuple[str, ...]
    # Whether rows choose their shard themselves.
    is_routed: bool
    # Otherwise, all of them are in this one.
    shard: int

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def has_ids(self) -> bool:
        """Whether its keys are those that pg-tube's functions take."""
        return self.key_types in (("smallint",), ("integer",), ("bigint",))


@dataclass(frozen=True)
class Tube:
    """A tube with the tables that are attached to it."""

    # Where its functions are.
    schema: str
    name: str
    partitions: int
    tables: tuple[TubeTable, ...]

    @property
    def label(self) -> str:
        return qualified(self.schema, self.name)

    def tables_of(self, id_: int | None) -> tuple[TubeTable, ...]:
        """The table of a pod, none if it was detached. What pg-tube's functions wrote names no
        table, and may be about any that has such ids."""
        if id_ is None:
            return tuple(table for table in self.tables if table.has_ids)
        return self._by_id.get(id_, ())

    def is_at_home(self, table: TubeTable, partition: int) -> bool:
        """Whether a table is delivered by whoever serves this partition. One with a shard of its
        own has one; pods of it in others are of another time, or were put there by hand."""
        return table.is_routed or table.shard % self.partitions == partition

    @cached_property
    def fetch_sql(self) -> dict[int, str]:
        """What reads the pods of a partition, as far as somebody has asked for it."""
        return {}

    @cached_property
    def _by_id(self) -> dict[int, tuple[TubeTable, ...]]:
        return {table.id: (table,) for table in self.tables}


@contextmanager
def open_reader(source: Dsn, tube: str) -> Iterator[Connection]:
    """A session for pods and enrichments, with the search path that its user would have."""
    with connect(source, f"tube {tube}") as session:
        with translated("opening a session"):
            session.execute("SET search_path TO DEFAULT")
        yield session


def find_tube(connection: Connection, name: str, schema: str | None = None) -> Tube:
    """The tube of this name, wherever it was installed."""
    with translated("looking for the tube"):
        return read_tube(connection, find_schema(connection, schema, name), name)


def read_tube(connection: Connection, schema: str, name: str) -> Tube:
    """As it is now; an error if it was dropped."""
    here = ident(schema)
    try:
        row = connection.execute(
            f"SELECT id, partitions FROM {here}._tube_tubes u WHERE name = %s"
            " AND EXISTS (SELECT FROM pg_class c WHERE c.oid = u.rel)".encode(),
            (name,),
        ).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        row = None  # uninstalled
    if row is None:
        raise TubeLost(
            f"tube {name} was dropped, with what was in it",
            hint=f"`millrace tube create {name}` makes a new one; attach its tables, and backfill"
            " them",
        )
    tables = connection.execute(
        "SELECT t.id, n.nspname, c.relname, t.key, t.key_types, t.routing IS NOT NULL, t.shard"
        f" FROM {here}._tube_tables t JOIN pg_class c ON c.oid = t.tbl"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE t.tube = %s ORDER BY t.id".encode(),
        (row[0],),
    ).fetchall()
    return Tube(
        schema,
        name,
        row[1],
        tuple(
            TubeTable(id_, in_schema, table, tuple(key), tuple(types), is_routed, shard)
            for id_, in_schema, table, key, types, is_routed, shard in tables
        ),
    )
