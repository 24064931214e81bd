"""Rows that are written together: one table, one kind of change.

Invariant: all rows of a group have the same parts, an old row or none, a new one or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.wal.row.descriptor import RowDescriptor
from millrace.wal.row.heap_columns import Bytes, Numbers
from millrace.wal.types.column import TextColumn
from millrace.wal.types.registry import Renderers


@dataclass(frozen=True)
class Stamps:
    """Where changes are, and whose. Begins have the position of the transaction's first record,
    commits the end of the commit record."""

    lsn: NDArray[np.uint64]
    xid: Numbers
    # Of begins and commits only: where the commit record begins, and its time.
    commit_lsn: NDArray[np.uint64]
    committed_at: Numbers

    def take(self, chosen: slice | Numbers) -> Stamps:
        """Some of them."""
        return Stamps(
            self.lsn[chosen], self.xid[chosen], self.commit_lsn[chosen], self.committed_at[chosen]
        )


@dataclass(frozen=True)
class RowGroup:
    """Rows with their texts; a column that is dropped has none."""

    relation: RowDescriptor
    # I, U or D
    kind: str
    stamps: Stamps
    new: Sequence[TextColumn | None] | None
    old: Sequence[TextColumn | None] | None

    def __len__(self) -> int:
        return len(self.stamps.lsn)

    def slice(self, first: int, end: int) -> RowGroup:
        """Some of the rows."""
        stamps = self.stamps.take(slice(first, end))
        new, old = _slices(self.new, first, end), _slices(self.old, first, end)
        return RowGroup(self.relation, self.kind, stamps, new, old)


def _slices(
    columns: Sequence[TextColumn | None] | None, first: int, end: int
) -> list[TextColumn | None] | None:
    if columns is None:
        return None
    return [c and TextColumn(c.data, c.at[first:end], c.size[first:end]) for c in columns]


class RowFormat(Protocol):
    """Writes rows at given places: first it says how long each will be."""

    @property
    def renderers(self) -> Renderers: ...

    def relation(self, relation: RowDescriptor, lsn: int) -> bytes:
        """What has to stand before the first row of a table, which has this position, and again
        when the table has changed; often nothing."""

    def count_begins(self, stamps: Stamps) -> Numbers: ...

    def put_begins(self, stamps: Stamps, out: Bytes, cursor: Numbers) -> None: ...

    def count_commits(self, stamps: Stamps) -> Numbers: ...

    def put_commits(self, stamps: Stamps, out: Bytes, cursor: Numbers) -> None: ...

    def count_rows(self, group: RowGroup) -> Numbers:
        """0 for a row that is not written at all."""

    def put_rows(self, group: RowGroup, out: Bytes, cursor: Numbers) -> None: ...
