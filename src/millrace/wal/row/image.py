"""Page images in records, as whole pages again.

Invariant: a page of the right size comes out, or a FormatError.

Facts: xlogreader.c, RestoreBlockImage().
"""

from __future__ import annotations

import pyarrow as pa

from millrace.errors import FormatError
from millrace.wal.read.record import Records
from millrace.wal.row.compression import LZ4, PGLZ, decompress
from millrace.wal.row.heap_page import PAGE_BYTES

_PGLZ, _LZ4, _ZSTD = 0x04, 0x08, 0x10


def restore_image(records: Records, block: int) -> bytes:
    """The page as it was after the record's change."""
    begin, length = int(records.image_start[block]), int(records.image_length[block])
    hole, size = int(records.hole_offset[block]), int(records.hole_length[block])
    if not length:
        raise FormatError("no page image in the record")
    image = records.data[begin : begin + length].tobytes()
    whole = _inflate(image, int(records.image_info[block]), PAGE_BYTES - size)
    page = whole[:hole] + bytes(size) + whole[hole:]
    if len(page) != PAGE_BYTES:
        raise FormatError(f"expected an image of {PAGE_BYTES} bytes, found {len(page)}")
    return page


def _inflate(image: bytes, info: int, raw_bytes: int) -> bytes:
    if info & _PGLZ:
        return decompress(PGLZ, image, raw_bytes)
    if info & _LZ4:
        return decompress(LZ4, image, raw_bytes)
    if info & _ZSTD:
        try:
            return bytes(pa.Codec("zstd").decompress(image, raw_bytes, asbytes=True))
        except (pa.ArrowException, OSError) as error:
            raise FormatError("a page image cannot be decompressed by zstd") from error
    return image
