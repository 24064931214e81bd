"""Segment files: their names, and their bytes whatever they are compressed with.

Invariant: a file that was not read to its end, or whose size is not that of a segment, is an error
with its name; only `.partial` files may be short. Never more than a segment is held.

Facts: xlog_internal.h, XLogFileName(); pg_receivewal writes `.gz` and `.lz4`, archive commands also
`.zst`, and `.partial` comes before or after the suffix of the compression.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from millrace.errors import FormatError
from millrace.wal.read.record import U8

_NAME = re.compile(
    r"([0-9A-F]{8})([0-9A-F]{8})([0-9A-F]{8})(\.partial)?(\.gz|\.lz4|\.zst)?(\.partial)?"
)
_HISTORY = re.compile(r"([0-9A-F]{8})\.history(\.gz|\.lz4|\.zst)?")
_CODECS = {".gz": "gzip", ".lz4": "lz4", ".zst": "zstd"}
_CHUNK_BYTES = 1 << 20
_MAX_HISTORY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One file that holds a segment, or its beginning."""

    path: str
    timeline: int
    high: int  # the second and third part of the name; with the size, they are the number
    low: int
    codec: str | None
    is_partial: bool

    @property
    def name(self) -> str:
        return segment_name(self.timeline, self.high, self.low)

    def number(self, segment_bytes: int) -> int:
        return self.high * ((1 << 32) // segment_bytes) + self.low


def segment_name(timeline: int, high: int, low: int) -> str:
    return f"{timeline:08X}{high:08X}{low:08X}"


def name_of_number(timeline: int, number: int, segment_bytes: int) -> str:
    return segment_name(timeline, *divmod(number, (1 << 32) // segment_bytes))


def parse_segment_name(path: Path) -> SegmentFile | None:
    match = _NAME.fullmatch(path.name)
    if not match or (match[4] and match[6]):
        return None
    timeline, high, low = (int(match[i], 16) for i in (1, 2, 3))
    codec = _CODECS[match[5]] if match[5] else None
    return SegmentFile(str(path), timeline, high, low, codec, bool(match[4] or match[6]))


def parse_history_name(path: Path) -> int | None:
    """The timeline of a history file."""
    match = _HISTORY.fullmatch(path.name)
    return int(match[1], 16) if match else None


def read_history_file(path: Path) -> str:
    codec = _CODECS.get(path.suffix)
    data = read_compressed(str(path), codec, _MAX_HISTORY_BYTES) if codec else path.read_bytes()
    return data[:_MAX_HISTORY_BYTES].decode("utf-8", "replace")


def read_head(file: SegmentFile, size: int) -> bytes:
    """The first bytes of a segment, as many as there are up to that size."""
    if file.codec:
        return read_compressed(file.path, file.codec, size)
    with Path(file.path).open("rb") as opened:
        return opened.read(size)


def read_into(file: SegmentFile, offset: int, out: U8, segment_bytes: int) -> int:
    """Fill an array from a segment; how many bytes, fewer only at the end of a partial one."""
    if file.codec:
        part = _decompressed(file, segment_bytes)[offset : offset + out.size]
        out[: part.size] = part
        return part.size
    with Path(file.path).open("rb", buffering=0) as opened:
        _check_size(file, os.fstat(opened.fileno()).st_size, segment_bytes)
        opened.seek(offset)
        at = 0
        while at < out.size and (count := opened.readinto(out[at:].data)):
            at += count
        return at


@lru_cache(maxsize=1)  # windows of a segment are read one after the other
def _decompressed(file: SegmentFile, segment_bytes: int) -> U8:
    data = read_compressed(file.path, file.codec, segment_bytes + 1)
    _check_size(file, len(data), segment_bytes)
    return np.frombuffer(data, np.uint8)


def read_compressed(path: str, codec: str | None, limit: int) -> bytes:
    """Up to `limit` bytes of what a file holds once it is decompressed."""
    parts: list[bytes] = []
    left = limit
    try:
        with pa.OSFile(path) as raw, pa.CompressedInputStream(raw, codec) as stream:
            while left > 0 and (part := stream.read(min(left, _CHUNK_BYTES))):
                parts.append(part)
                left -= len(part)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise FormatError(
            f"{path}: cannot be decompressed as {codec} after {limit - left} bytes",
            hint="fetch the file again from the archive",
            file=path,
            offset=limit - left,
        ) from error
    return b"".join(parts)


def _check_size(file: SegmentFile, size: int, segment_bytes: int) -> None:
    if size == segment_bytes or (file.is_partial and size < segment_bytes):
        return
    raise FormatError(
        f"{file.path}: {size} bytes, expected the {segment_bytes} bytes of a segment",
        hint="the file was cut or is still being copied: fetch it again from the archive",
        file=file.path,
        offset=min(size, segment_bytes),
    )
