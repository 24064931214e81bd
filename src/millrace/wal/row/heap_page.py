"""Heap pages: the tuples in them, with the transactions that made and ended them.

Invariant: what is not a heap page, or points outside of itself, is a FormatError.

    page    lsn:8 checksum:2 flags:2 lower:2 upper:2 special:2 version:2 prune:4 (line pointer:4)*
    pointer offset:15 state:2 length:15, the lowest bits first
    tuple   xmin:4 xmax:4 cid:4 block:4 offset:2 infomask2:2 infomask:2 hoff:1 ...

Facts: bufpage.h, itemid.h, htup_details.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from millrace.errors import FormatError
from millrace.wal.row.heap_tuple import HEADER_BYTES, HeapTuple

PAGE_BYTES = 8192
_HEADER_BYTES = 24
_NORMAL = 1

XMAX_LOCK_ONLY = 0x0080
XMIN_COMMITTED = 0x0100
XMIN_INVALID = 0x0200
XMIN_FROZEN = XMIN_COMMITTED | XMIN_INVALID
XMAX_COMMITTED = 0x0400
XMAX_INVALID = 0x0800
XMAX_IS_MULTI = 0x1000


@dataclass(frozen=True, slots=True)
class PageTuple:
    """A tuple in a page."""

    offset: int
    xmin: int
    xmax: int
    stored: HeapTuple


def page_lsn(page: bytes) -> int:
    high, low = struct.unpack_from("<II", page)
    return int(high) << 32 | int(low)


def iter_tuples(page: bytes) -> Iterator[PageTuple]:
    """All tuples with storage; a page that was never written has none."""
    lower, upper = struct.unpack_from("<HH", page, 12)
    if not upper:
        return
    if lower < _HEADER_BYTES or lower > upper or upper > len(page):
        raise FormatError(f"expected a heap page, found lower {lower} and upper {upper}")
    for offset in range(1, (lower - _HEADER_BYTES) // 4 + 1):
        found = read_tuple(page, offset)
        if found is not None:
            yield found


def read_tuple(page: bytes, offset: int) -> PageTuple | None:
    """The tuple of a line pointer, or None if it has no storage."""
    at = _HEADER_BYTES + 4 * (offset - 1)
    if offset < 1 or at + 4 > len(page):
        raise FormatError(f"expected line pointer {offset} within the page")
    (pointer,) = struct.unpack_from("<I", page, at)
    if pointer >> 15 & 3 != _NORMAL:
        return None
    start, length = pointer & 0x7FFF, pointer >> 17
    if length < HEADER_BYTES or start + length > len(page):
        raise FormatError(f"expected a tuple of {length} bytes at {start} of the page")
    xmin, xmax = struct.unpack_from("<II", page, start)
    return PageTuple(offset, xmin, xmax, HeapTuple.from_page(page[start : start + length]))
