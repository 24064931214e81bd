"""Stored rows, taken apart into their values.

Invariant: a column's value depends on the row's bytes and the descriptor alone; a row that does not
have the bytes its descriptor asks for is a FormatError.

    header = infomask2:2 infomask:2 hoff:1, as in a WAL record, or the last 5 of the 23 bytes
             at the beginning of a row in a page
    body   = what is behind the 23 bytes: the bitmap of values that are not NULL, padding up to
             `hoff`, the values

Values are aligned relative to where the row begins. A row can have fewer columns than its table:
those that were added later have the value the catalog has kept for them.

Facts: htup_details.h; heaptuple.c, heap_deform_tuple(), getmissingattr(); tupmacs.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from millrace.errors import FormatError
from millrace.wal.row import varlena
from millrace.wal.row.descriptor import ALIGNMENT_BYTES, CSTRING, VARLENA, ColumnDescriptor
from millrace.wal.row.varlena import ToastPointer

# Of a row in a page, before the bitmap.
HEADER_BYTES: Final = 23
# xl_heap_header: the part of the header that is in a WAL record.
RECORD_HEADER_BYTES: Final = 5
_COLUMNS_MASK: Final = 0x07FF
_HAS_NULL: Final = 0x0001

# None is NULL.
StoredValue = bytes | ToastPointer | None


@dataclass(frozen=True, slots=True)
class HeapTuple:
    """A stored row."""

    infomask2: int
    infomask: int
    hoff: int
    # From byte 23 of the row on.
    body: bytes

    @property
    def column_count(self) -> int:
        return self.infomask2 & _COLUMNS_MASK

    @classmethod
    def from_record(cls, data: bytes) -> HeapTuple:
        """As in INSERT, UPDATE and DELETE records: xl_heap_header and the body."""
        if len(data) < RECORD_HEADER_BYTES:
            raise FormatError(f"expected the header of a row in {len(data)} bytes")
        infomask2, infomask, hoff = struct.unpack_from("<HHB", data)
        return cls(infomask2, infomask, hoff, data[RECORD_HEADER_BYTES:])

    @classmethod
    def from_page(cls, data: bytes) -> HeapTuple:
        """As in a page, with all of its header."""
        if len(data) < HEADER_BYTES:
            raise FormatError(f"expected the header of a row in {len(data)} bytes")
        infomask2, infomask, hoff = struct.unpack_from("<HHB", data, 18)
        return cls(infomask2, infomask, hoff, data[HEADER_BYTES:])


def deform(row: HeapTuple, columns: Sequence[ColumnDescriptor]) -> list[StoredValue]:
    """The value of each column, dropped ones included.

    A value of variable length is without its header and not compressed, a name or any other value
    of fixed length is as it is.
    """
    stored = min(row.column_count, len(columns))
    bitmap = _bitmap(row)
    data = row.body
    # Offsets in the body that are aligned are those which are one less than a multiple of 8.
    at = row.hoff - HEADER_BYTES
    if at < 0 or at > len(data):
        raise FormatError(f"expected a row's values behind its header, found hoff {row.hoff}")
    values: list[StoredValue] = []
    for number, column in enumerate(columns[:stored]):
        if bitmap is not None and not bitmap[number >> 3] >> (number & 7) & 1:
            values.append(None)
            continue
        at, value = read_value(data, at, HEADER_BYTES, column.length, column.alignment)
        values.append(value)
    values += [column.missing for column in columns[stored:]]
    return values


def read_value(
    data: bytes, at: int, shift: int, length: int, alignment: str
) -> tuple[int, bytes | ToastPointer]:
    """(where the value ends, the value); at + shift is what is aligned."""
    if length == VARLENA and at < len(data) and data[at] != 0:
        pass  # a short header, which is not aligned; padding is zeros
    else:
        step = ALIGNMENT_BYTES[alignment]
        at += -(at + shift) % step
    if length > 0:
        end = at + length
        if end > len(data):
            raise FormatError(f"expected {length} bytes at offset {at} of {len(data)}")
        return end, data[at:end]
    if length == VARLENA:
        size = varlena.measure(data, at)
        return at + size, varlena.decode(data, at, size)
    if length != CSTRING:
        raise FormatError(f"expected a column with the length -1 or -2, found {length}")
    end = data.find(b"\0", at)
    if end < 0:
        raise FormatError(f"expected the zero byte that ends a string at offset {at}")
    return end + 1, data[at:end]


def _bitmap(row: HeapTuple) -> bytes | None:
    if not row.infomask & _HAS_NULL:
        return None
    size = (row.column_count + 7) // 8
    if size > len(row.body):
        raise FormatError(f"expected a bitmap of {row.column_count} columns in a row")
    return row.body[:size]
