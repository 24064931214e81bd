"""From touches of one table to documents of another.

Invariant: a parent is enriched if any of its children was touched, in the shard of that touch. The
parent is looked up after the write: that of a row that was deleted, or had another one before, is
not found. Such a table is attached with the parent's key as its key, and needs no fan-out; whoever
does otherwise is told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from millrace.errors import ConfigError
from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.enrich import SqlKeys
from millrace.tube.delivery.tube import Connection, TubeTable

log = logging.getLogger(__name__)

_COLUMNS = 2


class FanOut:
    """A SELECT that returns (key of the child, key of the parent), both as text; $1 has the keys of
    children."""

    def __init__(self, connection: Connection, sql: str, table: TubeTable) -> None:
        self._connection = connection
        self._keys = SqlKeys(sql, table, "fan-out")
        self._table = table

        self.parent_type = self._find_type()
        self._told = False

    def _find_type(self) -> str:
        """Of the parent's key, as SQL writes it."""
        statement = f"SELECT * FROM ({self._keys.statement(())}) AS f (child, parent) LIMIT 0"
        with translated(f"reading the fan-out of {self._table.label}"):
            found = self._connection.execute(statement.encode()).description or []
            if len(found) != _COLUMNS:
                raise ConfigError(
                    f"the fan-out of {self._table.label} returns {len(found)} columns, not the key"
                    " of the child and the key of the parent"
                )
            row = self._connection.execute(
                "SELECT format_type(%s, -1)", (found[1].type_code,)
            ).fetchone()
        assert row is not None
        return str(row[0])

    def parents(self, shards: dict[str, int]) -> dict[str, int]:
        pairs = self.pairs(shards)
        if not self._told and not shards.keys() <= {child for child, _ in pairs}:
            log.warning(
                "%s: rows were touched that lead to no parent; if they were deleted, or moved to"
                " another parent, the document of the old one stays as it was: attach the table"
                " with the parent's key as its --key, without a fan-out",
                self._table.label,
            )
            self._told = True
        return {parent: shards[child] for child, parent in pairs}

    def pairs(self, children: Iterable[str]) -> list[tuple[str, str]]:
        """(key of the child, key of the parent)."""
        with translated(f"fanning out from {self._table.label}"):
            rows = self._connection.execute(
                "SELECT child::text, parent::text FROM"
                f" ({self._keys.statement(list(children))}) AS f (child, parent)".encode()
            ).fetchall()
        return [(child, parent) for child, parent in rows if parent is not None]
