"""Tablespaces of the target that are full, and the parts that are not tried because of it.

Invariant: one full tablespace costs the tables in it, and no other. A part that is not tried fails
with the error of the one that found the tablespace full.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any, Final

import psycopg

from millrace.clone.copy_task import Outcome, PartStatements
from millrace.errors import MillraceError
from millrace.relation import Table

Connection = psycopg.Connection[tuple[Any, ...]]

DISK_FULL: Final = "53100"

_TABLESPACES = """
SELECT n.nspname, c.relname, c.reltablespace::int8
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.reltablespace <> 0
"""


class FullTablespaces:
    """What was found full in one run; asked by the threads that copy."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = {table.oid: table for table in tables}
        self._lock = threading.Lock()
        # By table; the database's own is 0, and so is what is not known.
        self._places: dict[int, int] = {}
        self._full: dict[int, MillraceError] = {}

    def note(self, target: Connection, table_oid: int, error: MillraceError) -> None:
        """A part of this table found no room."""
        if table_oid not in self._tables:
            return  # large objects are in the database's own
        found = {(schema, name): oid for schema, name, oid in target.execute(_TABLESPACES)}
        with self._lock:
            self._places = {
                oid: found.get((table.target.schema, table.target.name), 0)
                for oid, table in self._tables.items()
            }
            self._full[self._places[table_oid]] = error

    def have_all(self, table_oids: Collection[int]) -> bool:
        """Whether none of these tables could be copied."""
        with self._lock:
            return all(self._places.get(oid, 0) in self._full for oid in table_oids)

    def refuse(self, part: PartStatements) -> Outcome | None:
        """The failure of a part that has no room; None if it can be tried."""
        with self._lock:
            error = self._full.get(self._places.get(part.table_oid, 0))
        return (
            None if error is None else Outcome(part.table_oid, part.part, part.label, error=error)
        )
