"""One file of the spool: blocks of frames, each with a checksum.

Invariant: a block is returned whole with a right checksum, at the position it was written for, or
not at all.

A position is a byte of the whole spool, counted through all segments since its beginning; a
segment's name says at which position it starts. All numbers are big-endian.

    block:    'MRSP'  version:2  kind:2  payload_bytes:4  crc32:4  lsn:8  position:8  payload
    segment:  one START block, then FRAMES and IDLE blocks

The checksum covers the header, with itself as zero, and the payload. A START block makes the
segment readable alone: it holds the position before it, the transaction that is open there, and
the relations as they are known there, as the frames they came in.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from millrace.errors import FormatError, UnknownVersion

MAGIC: Final = b"MRSP"
# Of the blocks, of the frames in them, and of the index beside them.
VERSION: Final = 1
SUFFIX: Final = ".spool"
INDEX_SUFFIX: Final = ".index"

_HEADER = struct.Struct(">4sHHIIQQ")
HEADER_BYTES: Final = _HEADER.size
_CRC_AT = 12
# previous_end_lsn, idle_lsn, is_open, begin_block, begin, xid, changes
_START = struct.Struct(">QQ?QQIQ")
_NAME = re.compile(r"([0-9A-F]{16})-([0-9A-F]{16})\.spool")


class BlockKind(IntEnum):
    """What a block holds."""

    START = 1
    # Frames as the server sent them.
    FRAMES = 2
    # No frames: the server has shown that there are no commits up to the block's LSN.
    IDLE = 3


@dataclass(frozen=True)
class Block:
    """A block as it is on disk; `position` is that of its header."""

    kind: BlockKind
    lsn: int
    position: int
    payload: bytes | memoryview

    @property
    def payload_position(self) -> int:
        return self.position + HEADER_BYTES

    @property
    def end(self) -> int:
        return self.position + HEADER_BYTES + len(self.payload)


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction whose end is still to come."""

    # Of the block with its Begin, and of the Begin's frame.
    begin_block: int
    begin: int
    xid: int
    changes: int


@dataclass(frozen=True)
class SegmentStart:
    """What must be known to read a segment alone."""

    # The end of the last commit before the segment, and how far the source was known to be idle.
    previous_end_lsn: int
    idle_lsn: int
    transaction: OpenTransaction | None
    # The relations' frames.
    relations: bytes


@dataclass(frozen=True)
class SegmentFile:
    """A segment's name on disk."""

    path: Path
    position: int
    # The end of the last commit before the segment.
    lsn: int

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(INDEX_SUFFIX)


def segment_path(folder: Path, position: int, lsn: int) -> Path:
    return folder / f"{position:016X}-{lsn:016X}{SUFFIX}"


def list_segments(folder: Path) -> list[SegmentFile]:
    """The segments of a spool, oldest first."""
    found = []
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append(SegmentFile(path, int(match[1], 16), int(match[2], 16)))
    return sorted(found, key=lambda file: file.position)


def encode_header(kind: BlockKind, lsn: int, position: int, payload: bytes | memoryview) -> bytes:
    """The header of a block; the payload is written after it."""
    fields = (MAGIC, VERSION, kind, len(payload))
    unsigned = _HEADER.pack(*fields, 0, lsn, position)
    crc = zlib.crc32(payload, zlib.crc32(unsigned))
    return _HEADER.pack(*fields, crc, lsn, position)


def encode_start(start: SegmentStart) -> bytes:
    opened = start.transaction or OpenTransaction(0, 0, 0, 0)
    head = _START.pack(
        start.previous_end_lsn,
        start.idle_lsn,
        start.transaction is not None,
        opened.begin_block,
        opened.begin,
        opened.xid,
        opened.changes,
    )
    return head + start.relations


def decode_start(payload: bytes | memoryview) -> SegmentStart:
    if len(payload) < _START.size:
        raise FormatError(f"start of a segment: expected {_START.size} bytes, found {len(payload)}")
    previous, idle, is_open, *opened = _START.unpack_from(payload)
    transaction = OpenTransaction(*opened) if is_open else None
    return SegmentStart(previous, idle, transaction, bytes(payload[_START.size :]))


class SegmentReader:
    """Reads blocks of one segment, at any place."""

    def __init__(self, file: SegmentFile) -> None:
        self.file = file
        self._descriptor = os.open(file.path, os.O_RDONLY)

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    @property
    def end(self) -> int:
        """The position after the last byte there is."""
        return self.file.position + os.fstat(self._descriptor).st_size

    def read_start(self) -> SegmentStart:
        block = self.read_block(self.file.position)
        if block.kind != BlockKind.START:
            raise self.damaged(block.position, "expected the start of a segment")
        return decode_start(block.payload)

    def read_block(self, position: int) -> Block:
        """The block at a position, or FormatError."""
        header = self._read(position, HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise self.damaged(position, "expected the header of a block")
        magic, version, kind, size, crc, lsn, own_position = _HEADER.unpack(header)
        if magic != MAGIC or own_position != position:
            raise self.damaged(position, "expected the header of a block")
        if version != VERSION:
            raise _unknown_version(self.file, version)
        if self.end < position + HEADER_BYTES + size:
            raise self.damaged(position, f"expected a block of {size} bytes")
        payload = self._read(position + HEADER_BYTES, size)
        unsigned = header[:_CRC_AT] + bytes(4) + header[_CRC_AT + 4 :]
        if len(payload) < size or zlib.crc32(payload, zlib.crc32(unsigned)) != crc:
            raise self.damaged(position, "expected a block with a right checksum")
        try:
            known = BlockKind(kind)
        except ValueError:
            raise self.damaged(position, f"expected a known kind of block, found {kind}") from None
        return Block(known, lsn, position, payload)

    def iter_blocks(self, position: int, end: int) -> Iterator[Block]:
        """The blocks from a position to an end, which is the end of a block too."""
        while position < end:
            block = self.read_block(position)
            position = block.end
            yield block

    def find_block(self, position: int) -> Block | None:
        """The first whole block at or after a position, wherever it begins."""
        rest = self._read(position, max(0, self.end - position))
        at = -1
        while (at := rest.find(MAGIC, at + 1)) >= 0:
            try:
                return self.read_block(position + at)
            except UnknownVersion:
                raise
            except FormatError:
                continue
        return None

    def damaged(self, position: int, expected: str) -> FormatError:
        offset = position - self.file.position
        return FormatError(
            f"{self.file.path} is damaged: {expected} at offset {offset}",
            hint="the source no longer has these changes: they were confirmed as stored; make a "
            "new clone, or restore this file from a backup",
            path=str(self.file.path),
            offset=offset,
        )

    def _read(self, position: int, size: int) -> bytes:
        offset = position - self.file.position
        parts = []
        while size > 0:
            # Linux reads at most 2 GB at once.
            part = os.pread(self._descriptor, size, offset)
            if not part:
                break
            parts.append(part)
            size -= len(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def has_known_version(file: SegmentFile) -> bool:
    """False for a segment that is being made, was pruned, or is damaged, which its reader reports;
    UnknownVersion for one of another version."""
    try:
        with file.path.open("rb") as opened:
            header = opened.read(HEADER_BYTES)
    except FileNotFoundError:
        return False
    if len(header) < HEADER_BYTES:
        return False
    magic, version, *_, position = _HEADER.unpack(header)
    if magic != MAGIC or position != file.position:
        return False
    if version != VERSION:
        raise _unknown_version(file, version)
    return True


def _unknown_version(file: SegmentFile, version: int) -> UnknownVersion:
    return UnknownVersion(
        f"{file.path}: expected version {VERSION} of the spool's format, found {version}",
        hint="use the version of millrace that wrote the spool; nothing was changed",
        path=str(file.path),
    )


def remove_segment(file: SegmentFile) -> None:
    """The segment first: an index alone is nothing."""
    file.path.unlink(missing_ok=True)
    file.index_path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
