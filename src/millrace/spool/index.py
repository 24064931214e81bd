"""The index beside a segment: which transactions end in it, which relations it describes.

Invariant: everything in an index follows from its segment; a record is written after the bytes it
describes are on disk, so a transaction that has a record is whole and durable. Nothing is written
of a transaction before its end, so an index is only ever added to.

Records have one size and a checksum each, in the order of the stream; a bad one ends the index.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.postgres.pgoutput.messages import FRAME_HEADER_BYTES, Bytes, Messages, scan
from millrace.spool.segment import (
    HEADER_BYTES,
    Block,
    OpenTransaction,
    SegmentFile,
    SegmentReader,
)

COMMIT: Final = 1
# `xid` is the relation's OID; `begin` and `end` are those of its frame.
RELATION: Final = 2
# No commits up to `end_lsn`.
IDLE: Final = 3

RECORD: Final = np.dtype(
    [
        ("kind", "<u4"),
        ("xid", "<u4"),
        # Positions: of the block where it begins, of its first and after its last byte.
        ("begin_block", "<u8"),
        ("begin", "<u8"),
        ("end", "<u8"),
        ("commit_lsn", "<u8"),
        ("end_lsn", "<u8"),
        # Microseconds since 2000.
        ("committed_at", "<i8"),
        ("changes", "<u8"),
        ("checksum", "<u8"),
    ]
)
Records = NDArray[Any]

_WORDS = RECORD.itemsize // 8
_PRIME = np.uint64(0x100000001B3)
_BASIS = np.uint64(0xCBF29CE484222325)

_BEGIN, _COMMIT, _RELATION = ord("B"), ord("C"), ord("R")
_CHANGES = np.zeros(256, bool)
_CHANGES[list(b"IUDT")] = True
_BEGIN_BYTES = 21
_COMMIT_BYTES = 26


def empty_records(count: int = 0) -> Records:
    return np.zeros(count, RECORD)


def idle_record(lsn: int, begin: int, end: int) -> Records:
    """The record of an IDLE block."""
    record = empty_records(1)
    record["kind"], record["end_lsn"] = IDLE, lsn
    record["begin_block"], record["begin"], record["end"] = begin, begin, end
    record["checksum"] = _checksums(record)
    return record


def index_block(
    buffer: Bytes,
    messages: Messages,
    start: int,
    block: int,
    opened: OpenTransaction | None,
) -> tuple[Records, OpenTransaction | None]:
    """The records of a block's messages, and the transaction that is open after it.

    The payload begins at `start` in the buffer; `block` is the position of the block.
    """
    if not len(messages):
        return empty_records(), opened
    _check_order(messages, opened)
    shift = block + HEADER_BYTES - start
    begins = np.flatnonzero(messages.kind == _BEGIN)
    commits = np.flatnonzero(messages.kind == _COMMIT)
    changes = np.concatenate(([0], np.cumsum(_CHANGES[messages.kind])))
    xids = _numbers(buffer, messages, begins, 17, ">u4", _BEGIN_BYTES)
    begin_at = messages.offset[begins] - FRAME_HEADER_BYTES + shift
    # Each begin's (block, position, xid, changes before it), the open one first.
    starts = np.zeros((len(begins) + (opened is not None), 4), np.int64)
    if opened is not None:
        starts[0] = opened.begin_block, opened.begin, opened.xid, -opened.changes
    fresh = starts[1:] if opened is not None else starts
    fresh[:, 0] = block
    fresh[:, 1] = begin_at
    fresh[:, 2] = xids
    fresh[:, 3] = changes[begins]
    ended = starts[: len(commits)]
    records = empty_records(len(commits))
    records["kind"] = COMMIT
    records["begin_block"], records["begin"], records["xid"] = ended[:, 0], ended[:, 1], ended[:, 2]
    records["changes"] = changes[commits] - ended[:, 3]
    records["end"] = messages.offset[commits] + messages.length[commits] + shift
    for name, at in (("commit_lsn", 2), ("end_lsn", 10), ("committed_at", 18)):
        records[name] = _numbers(buffer, messages, commits, at, ">u8", _COMMIT_BYTES)
    relations = _relation_records(messages, shift, block)
    if len(relations):
        records = np.concatenate((records, relations))
        records = records[np.argsort(records["end"], kind="stable")]
    records["checksum"] = _checksums(records)
    if len(starts) == len(commits):
        return records, None
    last_block, last_begin, last_xid, before = (int(value) for value in starts[-1])
    return records, OpenTransaction(last_block, last_begin, last_xid, int(changes[-1]) - before)


def _check_order(messages: Messages, opened: OpenTransaction | None) -> None:
    """Begin and Commit take turns, and nothing is outside of them."""
    kind = messages.kind
    marks = np.flatnonzero((kind == _BEGIN) | (kind == _COMMIT))
    is_commit = kind[marks] == _COMMIT
    expected = (np.arange(len(marks)) % 2 == 0) == (opened is not None)
    after = np.flatnonzero(kind[:-1] == _COMMIT) + 1
    wrong = np.concatenate(
        (
            marks[is_commit != expected],
            after[kind[after] != _BEGIN],
            np.zeros(int(opened is None and kind[0] != _BEGIN), np.int64),
        )
    )
    if len(wrong):
        first = int(wrong.min())
        raise FormatError(
            f"replication stream: message {chr(kind[first])} is out of place at offset "
            f"{messages.offset[first]}",
            offset=int(messages.offset[first]),
        )


def _numbers(
    buffer: Bytes, messages: Messages, which: NDArray[np.int64], at: int, kind: str, size: int
) -> NDArray[Any]:
    """A number at the same place of several messages of a fixed size."""
    wrong = which[messages.length[which] != size]
    if len(wrong):
        first = int(wrong[0])
        raise FormatError(
            f"replication stream: expected {size} bytes of message {chr(messages.kind[first])} at "
            f"offset {messages.offset[first]}, found {messages.length[first]}",
            offset=int(messages.offset[first]),
        )
    width = np.dtype(kind).itemsize
    places = messages.offset[which][:, None] + np.arange(at, at + width)
    numbers: NDArray[Any] = buffer[places].reshape(-1).view(kind)
    return numbers


def _relation_records(messages: Messages, shift: int, block: int) -> Records:
    which = np.flatnonzero(messages.kind == _RELATION)
    records = empty_records(len(which))
    records["kind"], records["xid"] = RELATION, messages.relation[which]
    records["begin_block"] = block
    records["begin"] = messages.offset[which] - FRAME_HEADER_BYTES + shift
    records["end"] = messages.offset[which] + messages.length[which] + shift
    records["end_lsn"] = messages.lsn[which]
    return records


def _checksums(records: Records) -> NDArray[np.uint64]:
    """FNV-1a over the words of each record."""
    words = np.ascontiguousarray(records).view(np.uint64).reshape(-1, _WORDS)
    checksums = np.full(len(records), _BASIS)
    for column in range(_WORDS - 1):
        checksums = (checksums ^ words[:, column]) * _PRIME
    return checksums


def decode_records(data: bytes) -> Records:
    """The good records at the beginning of the data."""
    whole = len(data) // RECORD.itemsize
    records = np.frombuffer(data, RECORD, whole)
    bad = np.flatnonzero(records["checksum"] != _checksums(records))
    return records[: bad[0]] if len(bad) else records


class IndexFile:
    """The records of one segment, read as they are added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = empty_records()
        self._commits = empty_records()

    def read(self) -> Records:
        """All records there are by now; none if the file is missing."""
        offset = self._records.nbytes
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                added = decode_records(file.read())
        except FileNotFoundError:
            return self._records
        if len(added):
            self._records = np.concatenate((self._records, added))
            self._commits = self._records[self._records["kind"] == COMMIT]
        return self._records

    @property
    def commits(self) -> Records:
        """The commits among the records read."""
        return self._commits


def relations_before(file: SegmentFile, index: IndexFile, position: int | None) -> dict[int, bytes]:
    """The newest frame of each relation before a position of the segment, or at its end."""
    with SegmentReader(file) as reader:
        frames = dict(_iter_relation_frames(reader.read_start().relations))
        records = index.read()
        records = records[records["kind"] == RELATION]
        if position is not None:
            records = records[records["begin"] < position]
        block: Block | None = None
        for record in records:
            if block is None or block.position != int(record["begin_block"]):
                block = reader.read_block(int(record["begin_block"]))
            first = int(record["begin"]) - block.payload_position
            end = int(record["end"]) - block.payload_position
            frames[int(record["xid"])] = bytes(block.payload[first:end])
    return frames


def _iter_relation_frames(data: bytes) -> Iterable[tuple[int, bytes]]:
    buffer = np.frombuffer(data, np.uint8)
    messages = scan(buffer, len(buffer))
    for oid, offset, length in zip(
        messages.relation, messages.offset, messages.length, strict=True
    ):
        yield int(oid), data[int(offset) - FRAME_HEADER_BYTES : int(offset + length)]
