"""Many stored rows of one table, taken apart together.

Invariant: says what `heap_tuple.deform` says of each row, as places in the buffer. A row that it
would refuse is refused, and no place lies outside of its row.

For each column there are two numbers for each row: where the value begins and its size in bytes,
without a header. In place of a size stand NULL, MISSING (the row is older than the column),
EXTERNAL (the place is that of a pointer) and COMPRESSED (the place is that of a header).

Facts: as heap_tuple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.postgres.kernel import kernel
from millrace.wal.row.descriptor import ALIGNMENT_BYTES, ColumnDescriptor

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

NULL: Final = -1
MISSING: Final = -2
EXTERNAL: Final = -3
COMPRESSED: Final = -4


@dataclass(frozen=True)
class StoredColumns:
    """By column, then by row."""

    at: Numbers
    size: Numbers


def deform_columns(
    buffer: Bytes, at: Numbers, size: Numbers, columns: Sequence[ColumnDescriptor]
) -> StoredColumns:
    """The values of rows whose headers (xl_heap_header) are at these places, each followed by a
    body of that size."""
    lengths = np.array([column.length for column in columns], np.int64)
    steps = np.array([ALIGNMENT_BYTES[column.alignment] for column in columns], np.int64)
    shape = (len(columns), len(at))
    places, sizes = np.empty(shape, np.int64), np.empty(shape, np.int64)
    bad = _deform(buffer, at, size, lengths, steps, places, sizes)
    if bad >= 0:
        raise FormatError(
            f"expected a row of {len(columns)} columns in {int(size[bad])} bytes at offset"
            f" {int(at[bad])}"
        )
    return StoredColumns(places, sizes)


@kernel
def _deform(
    buffer: Any, tuples: Any, body_sizes: Any, lengths: Any, steps: Any, places: Any, sizes: Any
) -> Any:
    """The number of the first bad row, or -1."""
    count = len(lengths)
    for row in range(len(tuples)):
        header = tuples[row]
        if header < 0 or body_sizes[row] < 0 or header + 5 + body_sizes[row] > len(buffer):
            return row
        stored = (np.int64(buffer[header]) | np.int64(buffer[header + 1]) << 8) & 0x07FF
        has_null = buffer[header + 2] & 1
        bitmap = header + 5
        end = bitmap + body_sizes[row]
        # What is aligned is counted from here: 23 bytes before the body.
        base = bitmap - 23
        at = base + np.int64(buffer[header + 4])
        if at < bitmap or at > end or (has_null and bitmap + (stored + 7) // 8 > end):
            return row
        for column in range(count):
            if column >= stored:
                places[column, row] = 0
                sizes[column, row] = -2
                continue
            if has_null and not buffer[bitmap + (column >> 3)] >> (column & 7) & 1:
                places[column, row] = 0
                sizes[column, row] = -1
                continue
            length = lengths[column]
            if length != -1 or at >= end or buffer[at] == 0:
                step = steps[column]
                at = base + ((at - base + step - 1) & -step)
            if at > end:
                return row
            if length > 0:
                if at + length > end:
                    return row
                places[column, row] = at
                sizes[column, row] = length
                at += length
            elif length == -1:
                if at >= end:
                    return row
                first = np.int64(buffer[at])
                if first == 1:
                    if at + 18 > end:
                        return row
                    places[column, row] = at
                    sizes[column, row] = -3
                    at += 18
                elif first & 1:
                    total = first >> 1
                    if at + total > end:
                        return row
                    places[column, row] = at + 1
                    sizes[column, row] = total - 1
                    at += total
                else:
                    if at + 4 > end:
                        return row
                    total = (
                        first
                        | np.int64(buffer[at + 1]) << 8
                        | np.int64(buffer[at + 2]) << 16
                        | np.int64(buffer[at + 3]) << 24
                    ) >> 2
                    if total < 4 or at + total > end:
                        return row
                    if first & 2:
                        places[column, row] = at
                        sizes[column, row] = -4
                    else:
                        places[column, row] = at + 4
                        sizes[column, row] = total - 4
                    at += total
            else:
                begin = at
                while at < end and buffer[at] != 0:
                    at += 1
                if at >= end:
                    return row
                places[column, row] = begin
                sizes[column, row] = at - begin
                at += 1
    return -1
