"""The values in row messages of pgoutput: where each one is, for all rows of a table at once.

Invariant: every position lies inside its message; a value is never copied or looked at here.

    I  relation:4  'N' tuple
    U  relation:4  ('K' old key | 'O' old row)?  'N' tuple
    D  relation:4  ('K' old key | 'O' old row)
    tuple = columns:2  ('n' null | 'u' unchanged TOAST | 't' length:4 text | 'b' length:4 binary)*

Facts: PostgreSQL documentation, "Logical Replication Message Formats", TupleData.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.postgres.kernel import be16, be32, kernel
from millrace.postgres.pgoutput.messages import Bytes

# In place of a size.
NULL: Final = -1
# The update left an out-of-line value alone, so it was not sent; or there is no such tuple.
UNCHANGED: Final = -2

# Bits of `formats`.
TEXT: Final = 1
BINARY: Final = 2

INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")


@dataclass(frozen=True)
class Values:
    """Positions and sizes of values in the buffer: a line for each row, a column for each column.

    A chunk is smaller than 2 GB, so 32 bits do.
    """

    at: NDArray[np.int32]
    size: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.at)

    def take(self, rows: NDArray[np.int64]) -> Values:
        return Values(self.at[rows], self.size[rows])

    def columns(self, numbers: NDArray[np.int64]) -> Values:
        return Values(self.at[:, numbers], self.size[:, numbers])

    def reorder(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """In these rows, bring the columns into this order."""
        self.at[rows] = self.at[rows[:, None], columns]
        self.size[rows] = self.size[rows[:, None], columns]


def beside(left: Values, right: Values) -> Values:
    """The columns of both, for the same rows."""
    return Values(np.hstack((left.at, right.at)), np.hstack((left.size, right.size)))


@dataclass(frozen=True)
class Rows:
    """Row messages of one version of a table, in their order."""

    buffer: Bytes
    # INSERT, UPDATE or DELETE.
    kind: NDArray[np.uint8]
    lsn: NDArray[np.uint64]
    new: Values
    # UNCHANGED everywhere where there is no old tuple.
    old: Values
    # 0, or 'K' for the key only, or 'O' for the whole old row.
    old_kind: NDArray[np.uint8]
    # TEXT, BINARY, both, or 0 for a row without a single value.
    formats: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.kind)

    def reorder(self, is_meant: NDArray[np.bool_], columns: NDArray[np.int64]) -> None:
        """In some rows, bring the columns into this order."""
        rows = np.flatnonzero(is_meant)
        self.new.reorder(rows, columns)
        if len(self.old):
            self.old.reorder(rows, columns)

    def between(self, first: int, end: int) -> Rows:
        part = slice(first, end)
        return Rows(
            self.buffer,
            self.kind[part],
            self.lsn[part],
            Values(self.new.at[part], self.new.size[part]),
            Values(self.old.at[part], self.old.size[part]),
            self.old_kind[part],
            self.formats[part],
        )


def locate(
    buffer: Bytes,
    kind: NDArray[np.uint8],
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
    lsn: NDArray[np.uint64],
    columns: int,
) -> Rows:
    """Find the values of these row messages, all of one table with that number of columns."""
    count = len(kind)
    has_old = bool(np.any(kind != INSERT))
    new = _empty(count, columns)
    old = _empty(count if has_old else 0, columns)
    old_kind = np.zeros(count, np.uint8)
    formats = np.zeros(count, np.uint8)
    bad = _locate(
        buffer, kind, offset, length, columns, new.at, new.size, old.at, old.size, old_kind, formats
    )
    if bad >= 0:
        raise FormatError(
            f"row message of pgoutput: expected {columns} columns inside "
            f"{length[bad]} bytes at offset {offset[bad]}",
            offset=int(offset[bad]),
        )
    return Rows(buffer, kind, lsn, new, old, old_kind, formats)


def _empty(rows: int, columns: int) -> Values:
    return Values(np.zeros((rows, columns), np.int32), np.full((rows, columns), -2, np.int32))


@kernel
def _locate(
    buffer: Any,
    kind: Any,
    offset: Any,
    length: Any,
    columns: int,
    new_at: Any,
    new_size: Any,
    old_at: Any,
    old_size: Any,
    old_kind: Any,
    formats: Any,
) -> int:
    """The number of the first bad message, or -1."""
    for row in range(len(kind)):
        at = offset[row] + 5
        end = offset[row] + length[row]
        if at >= end:
            return row
        if kind[row] != 73:
            mark = buffer[at]
            if mark == 75 or mark == 79:
                old_kind[row] = mark
                at = _tuple(buffer, at + 1, end, columns, row, old_at, old_size, formats)
                if at < 0:
                    return row
            elif kind[row] == 68:
                return row
        if kind[row] != 68:
            if at >= end or buffer[at] != 78:
                return row
            at = _tuple(buffer, at + 1, end, columns, row, new_at, new_size, formats)
        if at != end:
            return row
    return -1


@kernel
def _tuple(
    buffer: Any,
    at: Any,
    end: Any,
    columns: int,
    row: int,
    value_at: Any,
    value_size: Any,
    formats: Any,
) -> Any:
    """Where the tuple ends, or -1."""
    if at + 2 > end or be16(buffer, at) != columns:
        return -1
    at += 2
    for column in range(columns):
        if at >= end:
            return -1
        mark = buffer[at]
        at += 1
        if mark == 110:
            value_size[row, column] = -1
        elif mark == 117:
            value_size[row, column] = -2
        elif mark == 116 or mark == 98:
            if at + 4 > end:
                return -1
            size = be32(buffer, at)
            at += 4
            if size < 0 or at + size > end:
                return -1
            value_at[row, column] = at
            value_size[row, column] = size
            at += size
            formats[row] |= 1 if mark == 116 else 2
        else:
            return -1
    return at
