"""Compressed values, as the server stores them.

Invariant: exactly the announced number of bytes comes out, or a FormatError; damaged input neither
reads nor writes outside of its buffers.

    pglz = (control byte, 8 items)*, the lowest bit of the control byte first;
           item of a 0 bit = a byte; of a 1 bit = a copy of what came out before:
           offset's high 4 bits and length - 3 in one byte, offset's low byte,
           and, if that length is 18, a third byte to be added to it

lz4 is the raw block format, without a frame.

Facts: src/common/pg_lzcompress.c, pglz_decompress(); toast_compression.c.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from millrace.errors import FormatError
from millrace.postgres.kernel import kernel

PGLZ: Final = 0
LZ4: Final = 1
_NAMES = {PGLZ: "pglz", LZ4: "lz4"}
# The largest value a server can hold: 1 GB.
_MAX_BYTES: Final = 0x3FFFFFFF


def decompress(method: int, data: bytes, raw_bytes: int) -> bytes:
    """The `raw_bytes` bytes that were compressed by the method of a value's header."""
    if method not in _NAMES:
        raise FormatError(f"expected a value compressed by pglz or lz4, found method {method}")
    if raw_bytes > _MAX_BYTES:
        raise FormatError(f"expected a value of less than 1 GB, found {raw_bytes} bytes")
    out = _decompress_pglz(data, raw_bytes) if method == PGLZ else _decompress_lz4(data, raw_bytes)
    if out is None or len(out) != raw_bytes:
        raise FormatError(
            f"expected {raw_bytes} bytes in a value that {_NAMES[method]} compressed into "
            f"{len(data)}"
        )
    return out


def _decompress_pglz(data: bytes, raw_bytes: int) -> bytes | None:
    out = np.empty(raw_bytes, np.uint8)
    if not expand_pglz(np.frombuffer(data, np.uint8), 0, len(data), out, 0, raw_bytes):
        return None
    return out.tobytes()


def _decompress_lz4(data: bytes, raw_bytes: int) -> bytes | None:
    try:
        return pa.Codec("lz4_raw").decompress(data, raw_bytes, asbytes=True)  # type: ignore[no-any-return]
    except (pa.ArrowException, OSError):
        return None


@kernel
def expand_pglz(source: Any, at: Any, end: Any, out: Any, first: Any, size: Any) -> Any:
    """Decompress source[at:end] into out[first:first + size]; whether that fits exactly."""
    to = first
    last = first + size
    while at < end and to < last:
        control = source[at]
        at += 1
        for _ in range(8):
            if at >= end or to >= last:
                break
            if control & 1:
                if at + 1 >= end:
                    return False
                length = np.int64(source[at] & 0x0F) + 3
                offset = np.int64(source[at] & 0xF0) << 4 | np.int64(source[at + 1])
                at += 2
                if length == 18:
                    if at >= end:
                        return False
                    length += np.int64(source[at])
                    at += 1
                if offset == 0 or offset > to - first:
                    return False
                # The server also stops at the end of what was announced.
                length = min(length, last - to)
                for i in range(to, to + length):
                    out[i] = out[i - offset]
                to += length
            else:
                out[to] = source[at]
                to += 1
                at += 1
            control >>= 1
    return at == end and to == last
