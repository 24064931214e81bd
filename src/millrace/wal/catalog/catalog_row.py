"""Rows of catalogs as Python values.

Invariant: numbers, names and flags come out as such, anything of variable length as its bytes, and
NULL as None; so do columns that were added after the row was written.
"""

from __future__ import annotations

import struct
from typing import Any

from millrace.wal.catalog.catalog_layout import CatalogColumns
from millrace.wal.row.heap_tuple import HeapTuple, deform

Row = dict[str, Any]

_BOOL, _CHAR, _NAME, _INT8, _INT2, _INT4, _FLOAT4 = 16, 18, 19, 20, 21, 23, 700
_SIGNED = frozenset({_INT8, _INT2, _INT4})


def decode_row(catalog: CatalogColumns, stored: HeapTuple) -> Row:
    """The row's columns by name."""
    values = deform(stored, catalog.columns)
    return {
        column.name: _value(type_oid, column.length, value)
        for column, type_oid, value in zip(catalog.columns, catalog.types, values, strict=True)
    }


def _value(type_oid: int, length: int, value: Any) -> Any:
    if value is None or length <= 0:
        return value
    if type_oid == _NAME:
        return value.split(b"\0", 1)[0]
    if type_oid == _CHAR:
        return value.decode("latin-1")
    if type_oid == _BOOL:
        return value != b"\0"
    if type_oid == _FLOAT4:
        return struct.unpack("<f", value)[0]
    return int.from_bytes(value, "little", signed=type_oid in _SIGNED)


def decode_vector(value: bytes) -> tuple[int, ...]:
    """An int2vector or oidvector: an array of one dimension without NULLs."""
    dimensions, _, element = struct.unpack_from("<iiI", value)
    if not dimensions:
        return ()
    (count,) = struct.unpack_from("<i", value, 12)
    return struct.unpack_from(f"<{count}{'h' if element == _INT2 else 'I'}", value, 20)
