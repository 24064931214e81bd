"""Stored arrays, ranges, multiranges and composite values as the server prints them.

Invariant: elements are quoted where the server quotes them and nowhere else. Offsets are counted
from the value's own header of 4 bytes, which is not part of what is given here.

    array      = dimensions:4 data offset or 0:4 element type:4 length:4 * lower bound:4 *
                 bitmap of values that are not NULL, if there is a data offset; elements
    range      = type:4 bounds flags:1
    multirange = type:4 ranges:4 (offset or size):4 for each but the first, flags:1 *, bounds
    composite  = modifier:4 type:4 unused:6, then as a row: infomask2:2 infomask:2 hoff:1 body

Facts: array.h, arrayfuncs.c, array_out(); rangetypes.c, range_deserialize(); multirangetypes.c,
multirange_get_bounds(); rowtypes.c, record_out().
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Final

from millrace.postgres.binary_text.container import (
    element_quoter,
    has_bounds,
    quote_bound,
    render_array,
    render_range,
)
from millrace.wal.row import varlena
from millrace.wal.row.descriptor import ALIGNMENT_BYTES, ColumnDescriptor, TypeDescriptor
from millrace.wal.row.heap_tuple import HeapTuple, deform, read_value

Render = Callable[[bytes], str]

_MAX_DIMENSIONS: Final = 6
# What is aligned is counted from the header.
_SHIFT: Final = varlena.HEADER_BYTES
_COLUMN_IS_QUOTED: Final = re.compile(r'[ \t\n\r\v\f"\\(),]')


def array_elements(data: bytes, element: TypeDescriptor) -> list[bytes | None]:
    """The elements, as a column of their type would be."""
    dimensions, offset, _ = struct.unpack_from("<iiI", data)
    if not 0 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{dimensions} dimensions")
    if dimensions == 0:
        return []
    count = math.prod(struct.unpack_from(f"<{dimensions}i", data, 12))
    head = 12 + 8 * dimensions
    if not 0 <= count <= 8 * len(data):
        raise ValueError(f"{count} elements")
    bitmap = data[head : head + (count + 7) // 8] if offset else None
    at = offset - _SHIFT if offset else head + -(head + _SHIFT) % 8
    elements: list[bytes | None] = []
    for number in range(count):
        if bitmap is not None and not bitmap[number >> 3] >> (number & 7) & 1:
            elements.append(None)
            continue
        at, value = _read(data, at, element)
        elements.append(value)
    return elements


def array_renderer(element: TypeDescriptor, render_element: Render, delimiter: str) -> Render:
    quoted = element_quoter(delimiter)

    def render(data: bytes) -> str:
        items = [
            "NULL" if one is None else quoted(render_element(one))
            for one in array_elements(data, element)
        ]
        (dimensions,) = struct.unpack_from("<i", data)
        numbers = struct.unpack_from(f"<{2 * dimensions}i", data, 12)
        bounds = list(zip(numbers[:dimensions], numbers[dimensions:], strict=True))
        return render_array(items, bounds, delimiter)

    return render


def vector_renderer(layout: str) -> Render:
    """int2vector and oidvector: stored as arrays, printed as numbers with spaces."""

    def render(data: bytes) -> str:
        (count,) = struct.unpack_from("<i", data, 12)
        return " ".join(map(str, struct.unpack_from(f"<{count}{layout}", data, 20)))

    return render


def range_renderer(subtype: TypeDescriptor, render_bound: Render) -> Render:
    def render(data: bytes) -> str:
        flags = data[-1]
        _, bounds = _bounds(data, 4, flags, subtype, render_bound)
        return render_range(flags, bounds)

    return render


def multirange_renderer(subtype: TypeDescriptor, render_bound: Render) -> Render:
    step = ALIGNMENT_BYTES[subtype.alignment]

    def render(data: bytes) -> str:
        (count,) = struct.unpack_from("<I", data, 4)
        if count == 0:
            return "{}"
        head = 8 + 4 * (count - 1)
        all_flags = data[head : head + count]
        if len(all_flags) != count:
            raise ValueError(f"{count} ranges")
        at = head + count
        ranges = []
        for flags in all_flags:
            at += -(at + _SHIFT) % step
            at, bounds = _bounds(data, at, flags, subtype, render_bound)
            ranges.append(render_range(flags, bounds))
        return "{" + ",".join(ranges) + "}"

    return render


def composite_renderer(
    columns: tuple[ColumnDescriptor, ...], renderers: tuple[Render | None, ...]
) -> Render:
    """`renderers` has None for a column that is dropped."""

    def render(data: bytes) -> str:
        infomask2, infomask, hoff = struct.unpack_from("<HHB", data, 14)
        row = HeapTuple(infomask2, infomask, hoff, data[19:])
        texts = [
            _column(value, renderer)
            for value, renderer in zip(deform(row, columns), renderers, strict=True)
            if renderer is not None
        ]
        return "(" + ",".join(texts) + ")"

    return render


def _column(value: bytes | varlena.ToastPointer | None, renderer: Render) -> str:
    if value is None:
        return ""
    if not isinstance(value, bytes):
        raise ValueError("a column that is stored out of line")
    text = renderer(value)
    if text and not _COLUMN_IS_QUOTED.search(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'


def _bounds(
    data: bytes, at: int, flags: int, subtype: TypeDescriptor, render_bound: Render
) -> tuple[int, list[str]]:
    """(where the last one ends, quoted bounds)."""
    bounds = []
    for is_there in has_bounds(flags):
        if is_there:
            at, value = _read(data, at, subtype)
            bounds.append(quote_bound(render_bound(value)))
    return at, bounds


def _read(data: bytes, at: int, type_: TypeDescriptor) -> tuple[int, bytes]:
    end, value = read_value(data, at, _SHIFT, type_.length, type_.alignment)
    if not isinstance(value, bytes):
        raise ValueError("an element that is stored out of line")
    return end, value
