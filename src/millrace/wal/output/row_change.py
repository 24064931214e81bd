"""A change of one row, ready to be printed.

Invariant: `new` and `old` have a value for each column of the relation, dropped ones included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from millrace.wal.row.descriptor import RowDescriptor
from millrace.wal.row.toast import RowValue

INSERT: Final = "I"
UPDATE: Final = "U"
DELETE: Final = "D"


@dataclass(frozen=True)
class RowChange:
    """An insert, an update or a delete."""

    kind: str
    relation: RowDescriptor
    # Of an insert and an update; None if the record has no row.
    new: Sequence[RowValue] | None
    # The old key or row of an update or a delete; None if the record has none.
    old: Sequence[RowValue] | None
