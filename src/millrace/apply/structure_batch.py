"""One source transaction that changes the structure, applied in its order.

Invariant: each piece is prepared for the tables as they are at its place, read in the transaction
that changes them; nothing is prepared ahead. Rows of a table that the target does not have yet wait
for the change that makes it, as those of CREATE TABLE AS come before it; at the end none waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.pq.abc import PGconn

from millrace.apply.applier import Applier
from millrace.apply.prepare import Preparer
from millrace.apply.sections import TableRows, TruncatedTables
from millrace.apply.structure import Place, Structure, WatchedRow
from millrace.apply.table_state import read_table_states, skipped_tables
from millrace.errors import as_bug

Connection = psycopg.Connection[tuple[Any, ...]]
Rows = TableRows | TruncatedTables


class StructureBatch:
    """The changes of one transaction, rows and structure, one after the other."""

    def __init__(
        self,
        session: PGconn,
        catalog: Connection,
        structure: Structure,
        applier: Applier,
        new_preparer: Callable[[Connection], Preparer],
        family: str,
        end_lsn: int,
    ) -> None:
        """`catalog` is the same session, for those who read catalogs."""
        self._catalog = catalog
        self._applier = applier
        self._new_preparer = new_preparer
        self._family = family
        self._end_lsn = end_lsn
        self._changes = structure.open(session)
        self._waiting: list[Rows] = []
        self._preparer = self._prepare_anew()

    def change(self, row: WatchedRow, place: Place) -> None:
        """Change the structure."""
        # A stage may have a column of a type that is about to be dropped.
        self._applier.drop_stages()
        self._changes.apply(row, place)
        self._preparer = self._prepare_anew()
        waiting, self._waiting = self._waiting, []
        for rows in waiting:
            self.apply(rows)

    def apply(self, rows: Rows) -> None:
        """Change rows."""
        if isinstance(rows, TableRows) and not self._preparer.has_table(rows.relation):
            self._waiting.append(rows)
            return
        with as_bug(f"{rows.label}: changes of a transaction with DDL", table=rows.label):
            work = self._preparer.prepare(rows)
        if work is not None:
            self._applier.apply(work)  # type: ignore[arg-type]

    def end(self) -> None:
        """All of it is there, now or never."""
        for rows in self._waiting:
            self._preparer.prepare(rows)
        self._changes.end()

    def _prepare_anew(self) -> Preparer:
        preparer = self._new_preparer(self._catalog)
        states = read_table_states(self._catalog, self._family)
        preparer.skipped = skipped_tables(states, self._end_lsn)
        return preparer
