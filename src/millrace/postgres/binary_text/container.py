"""Arrays, ranges and multiranges as PostgreSQL prints them.

Invariant: elements are quoted where the server quotes them and nowhere else.

    array      = dimensions:4 has_null:4 element type:4 (length:4 lower bound:4)*
                 (size:4 element)*, size -1 is NULL
    range      = flags:1 (size:4 bound)*
    multirange = ranges:4 (size:4 range)*

Facts: arrayfuncs.c, array_send(), array_out(); rangetypes.c, range_send(), range_deparse();
multirangetypes.c.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from itertools import islice

Render = Callable[[bytes, str], str]

_MAX_DIMENSIONS = 6
_EMPTY, _LOWER_INCLUDED, _UPPER_INCLUDED, _NO_LOWER, _NO_UPPER = 1, 2, 4, 8, 16
_SPACE = " \t\n\r\v\f"
_BOUND_IS_QUOTED = re.compile(f'[{_SPACE}"\\\\()\\[\\],]')


def array_renderer(element: Render, element_oid: int, delimiter: str) -> Render:
    """The renderer of arrays of one type."""
    quoted = element_quoter(delimiter)

    def item(data: bytes | None, encoding: str) -> str:
        return "NULL" if data is None else quoted(element(data, encoding))

    def render(data: bytes, encoding: str) -> str:
        dimensions, _, oid = struct.unpack_from(">iiI", data)
        if oid != element_oid or not 0 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{dimensions} dimensions of type {oid}")
        bounds = list(struct.iter_unpack(">ii", data[12 : 12 + 8 * dimensions]))
        items = [item(one, encoding) for one in _iter_sized(data, 12 + 8 * dimensions)]
        return render_array(items, bounds, delimiter)

    return render


def element_quoter(delimiter: str) -> Callable[[str], str]:
    """How elements are quoted in arrays of types with this delimiter."""
    is_quoted = re.compile(f'[{_SPACE}"\\\\{{}}{re.escape(delimiter)}]')

    def quoted(text: str) -> str:
        if text and text.upper() != "NULL" and not is_quoted.search(text):
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return quoted


def render_array(items: list[str], bounds: list[tuple[int, int]], delimiter: str) -> str:
    """Quoted elements in their dimensions, which are given by (length, lower bound)."""
    lengths = [length for length, _ in bounds]
    if (math.prod(lengths) if lengths else 0) != len(items):
        raise ValueError(f"{len(items)} elements")
    body = _nested(iter(items), lengths, delimiter) if items else "{}"
    if all(lower == 1 for _, lower in bounds):
        return body
    ranges = "".join(f"[{lower}:{lower + length - 1}]" for length, lower in bounds)
    return f"{ranges}={body}"


def vector_renderer(element: Render) -> Render:
    """int2vector and oidvector: sent as arrays, printed as numbers with spaces."""

    def render(data: bytes, encoding: str) -> str:
        (dimensions,) = struct.unpack_from(">i", data)
        items = _iter_sized(data, 12 + 8 * dimensions)
        return " ".join(element(item or b"", encoding) for item in items)

    return render


def range_renderer(bound: Render) -> Render:
    """The renderer of ranges of one type."""

    def shown(data: bytes | None, encoding: str) -> str:
        if data is None:
            raise ValueError("a bound is NULL")
        return quote_bound(bound(data, encoding))

    def render(data: bytes, encoding: str) -> str:
        flags = data[0]
        bounds = [shown(one, encoding) for one in _iter_sized(data, 1)]
        return render_range(flags, bounds)

    return render


def quote_bound(text: str) -> str:
    """A bound of a range, or a column of a composite value."""
    if text and not _BOUND_IS_QUOTED.search(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'


def has_bounds(flags: int) -> tuple[bool, bool]:
    """Whether a range with these flags has a lower and an upper bound."""
    is_empty = bool(flags & _EMPTY)
    return not (is_empty or flags & _NO_LOWER), not (is_empty or flags & _NO_UPPER)


def render_range(flags: int, bounds: list[str]) -> str:
    """A range with the quoted bounds that it has."""
    if flags & _EMPTY:
        return "empty"
    has_lower, has_upper = has_bounds(flags)
    if len(bounds) != has_lower + has_upper:
        raise ValueError(f"{len(bounds)} bounds")
    lower = bounds[0] if has_lower else ""
    upper = bounds[-1] if has_upper else ""
    begin = "[" if flags & _LOWER_INCLUDED else "("
    return f"{begin}{lower},{upper}{']' if flags & _UPPER_INCLUDED else ')'}"


def multirange_renderer(one: Render) -> Render:
    """The renderer of multiranges of one range type."""

    def render(data: bytes, encoding: str) -> str:
        ranges = [one(part or b"", encoding) for part in _iter_sized(data, 4)]
        if (len(ranges),) != struct.unpack_from(">i", data):
            raise ValueError(f"{len(ranges)} ranges")
        return "{" + ",".join(ranges) + "}"

    return render


def _iter_sized(data: bytes, at: int) -> Iterator[bytes | None]:
    """Values behind their sizes, to the end."""
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        at += 4
        if size == -1:
            yield None
            continue
        if size < 0 or at + size > len(data):
            raise ValueError(f"a value of {size} bytes")
        yield data[at : at + size]
        at += size


def _nested(items: Iterator[str], lengths: list[int], delimiter: str) -> str:
    if len(lengths) == 1:
        parts = list(islice(items, lengths[0]))
    else:
        parts = [_nested(items, lengths[1:], delimiter) for _ in range(lengths[0])]
    return "{" + delimiter.join(parts) + "}"
