"""The headers of WAL pages.

Invariant: a page is used only if its header names the magic, the address, the timeline and, on the
first page of a segment, the system and the segment's size that are expected at its place.

    0 magic u16 | 2 flags u16 | 4 timeline u32 | 8 address u64 | 16 remaining u32 | 20 padding
    24 system identifier u64 | 32 segment bytes u32 | 36 page bytes u32   (first page of a segment)

Facts: XLogPageHeaderData in xlog_internal.h.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.wal.read.record import U8

PAGE_BYTES = 8192  # XLOG_BLCKSZ as everybody builds it; another size is refused
SHORT_HEADER_BYTES = 24
LONG_HEADER_BYTES = 40

IS_CONTINUED = 0x0001  # FIRST_IS_CONTRECORD
IS_LONG = 0x0002
IS_OVERWRITE = 0x0008  # FIRST_IS_OVERWRITE_CONTRECORD, in 15 to 18
ALL_FLAGS = 0x000F

_LONG = struct.Struct("<HHIQI4xQII")
_HEADER = np.dtype(
    {
        "names": ["magic", "flags", "timeline", "address", "remaining"],
        "formats": ["<u2", "<u2", "<u4", "<u8", "<u4"],
        "offsets": [0, 2, 4, 8, 16],
        "itemsize": PAGE_BYTES,
    }
)

MIN_SEGMENT_BYTES = 1 << 20
MAX_SEGMENT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class LongHeader:
    """The header of a segment's first page."""

    magic: int
    flags: int
    timeline: int
    address: int
    remaining: int
    system_identifier: int
    segment_bytes: int
    page_bytes: int


def decode_long_header(page: bytes) -> LongHeader | None:
    """None if there are too few bytes."""
    if len(page) < _LONG.size:
        return None
    return LongHeader(*_LONG.unpack_from(page))


def decode_headers(pages: U8) -> NDArray[np.void]:
    """The headers of whole pages, as columns by name."""
    return np.frombuffer(pages, _HEADER)


def is_segment_size(size: int) -> bool:
    return MIN_SEGMENT_BYTES <= size <= MAX_SEGMENT_BYTES and size & (size - 1) == 0
