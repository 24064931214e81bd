"""Values of variable length as they are stored in rows and inside of other values.

Invariant: what leaves here is the value's own bytes without its header and not compressed, or a
pointer to where they are.

    first byte     header
    0x01           2 bytes: 0x01, tag (18: on disk); then rawsize:4 extinfo:4 value:4 relation:4
    odd            1 byte: total length << 1 | 1
    ..00           4 bytes: total length << 2
    ..10           4 bytes: total length << 2 | 2; then extinfo:4 and compressed bytes

`extinfo` holds a size in its low 30 bits and the method of compression above. All of it is
little-endian: the reader of WAL files refuses big-endian ones.

Facts: src/include/varatt.h.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from millrace.errors import FormatError
from millrace.wal.row.compression import decompress

ON_DISK: Final = 18
POINTER_BYTES: Final = 18
HEADER_BYTES: Final = 4
_SIZE_MASK: Final = 0x3FFFFFFF
_EXTERNAL: Final = 0x01


@dataclass(frozen=True)
class ToastPointer:
    """In place of a value that is stored out of line."""

    # With the 4 bytes of a header.
    raw_bytes: int
    # Of the chunks together.
    stored_bytes: int
    method: int
    value_oid: int
    relation_oid: int

    @property
    def is_compressed(self) -> bool:
        return self.stored_bytes < self.raw_bytes - HEADER_BYTES


Stored = bytes | ToastPointer


def measure(data: bytes, at: int) -> int:
    """The number of bytes that the value at this place takes, its header included."""
    _require(data, at, 1)
    first = data[at]
    if first == _EXTERNAL:
        return POINTER_BYTES
    if first & 1:
        return first >> 1
    _require(data, at, HEADER_BYTES)
    (header,) = struct.unpack_from("<I", data, at)
    return int(header >> 2)


def decode(data: bytes, at: int, size: int) -> Stored:
    """The value at this place; `size` as measured."""
    _require(data, at, max(size, 1))
    first = data[at]
    if first == _EXTERNAL:
        return _decode_pointer(data, at)
    if first & 1:
        return data[at + 1 : at + size]
    if size < HEADER_BYTES:
        raise FormatError(f"expected a value of at least 4 bytes at offset {at}, found {size}")
    if first & 3 == 0:
        return data[at + HEADER_BYTES : at + size]
    return inflate(data[at + HEADER_BYTES : at + size])


def inflate(data: bytes) -> bytes:
    """A compressed value: its extinfo, then what the method made of it."""
    _require(data, 0, HEADER_BYTES)
    (info,) = struct.unpack_from("<I", data)
    return decompress(info >> 30, data[HEADER_BYTES:], info & _SIZE_MASK)


def _decode_pointer(data: bytes, at: int) -> ToastPointer:
    _require(data, at, POINTER_BYTES)
    tag, raw_bytes, info, value_oid, relation_oid = struct.unpack_from("<BiIII", data, at + 1)
    if tag != ON_DISK:
        raise FormatError(f"expected a pointer to a value on disk at offset {at}, found tag {tag}")
    return ToastPointer(raw_bytes, info & _SIZE_MASK, info >> 30, value_oid, relation_oid)


def _require(data: bytes, at: int, size: int) -> None:
    if at < 0 or at + size > len(data):
        raise FormatError(
            f"expected a value of {size} bytes at offset {at}, found only {len(data) - at}"
        )
