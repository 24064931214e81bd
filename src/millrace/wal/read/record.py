"""A stretch of WAL as columns: one row for each record, one for each block reference.

Invariant: every offset in the columns lies in `data`, and the bytes of a record lie there in one
piece, however many pages it took in the file.

    data    ... | header 24 | fragment headers | image, data of block 0 | ... | main data | ...
                  ^ start                        ^ image_start ^ data_start      ^ main_start

Block references of record i are the rows first_block[i] to first_block[i + 1] of the block columns.

Facts: xlogrecord.h; wal.md has the layout in docs/design.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.postgres.kernel import kernel
from millrace.wal.read.version import WalVersion

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

# The types of the columns, in the order of the fields.
RECORD_COLUMNS = {
    "lsn": np.uint64,
    "end_lsn": np.uint64,
    "prev_lsn": np.uint64,
    "xid": np.uint32,
    "top_xid": np.uint32,
    "rmid": np.uint8,
    "info": np.uint8,
    "origin": np.uint16,
    "start": np.int64,
    "total_length": np.uint32,
    "main_start": np.int64,
    "main_length": np.uint32,
}
BLOCK_COLUMNS = {
    "block_id": np.uint8,
    "fork": np.uint8,
    "flags": np.uint8,
    "spc": np.uint32,
    "db": np.uint32,
    "rel": np.uint32,
    "blkno": np.uint32,
    "image_start": np.int64,
    "image_length": np.uint16,
    "hole_offset": np.uint16,
    "hole_length": np.uint16,
    "image_info": np.uint8,
    "data_start": np.int64,
    "data_length": np.uint16,
}

# Flags of a block reference.
HAS_IMAGE = 0x10
HAS_DATA = 0x20
WILL_INIT = 0x40


@dataclass(frozen=True, eq=False, slots=True)
class Records:
    """Consecutive records, or a selection of them, and their bytes."""

    version: WalVersion

    lsn: U64  # where it starts
    end_lsn: U64  # the aligned end; of a SWITCH, the end of its segment
    prev_lsn: U64
    xid: U32  # of the subtransaction, if there is one; 0 for none
    top_xid: U32  # 0 unless the record names it: the first of each subtransaction does
    rmid: U8
    info: U8
    origin: U16  # replication origin, 0 for none
    start: I64
    total_length: U32
    main_start: I64
    main_length: U32

    first_block: I64  # one more than there are records

    block_id: U8
    fork: U8
    flags: U8
    spc: U32
    db: U32
    rel: U32
    blkno: U32
    image_start: I64
    image_length: U16  # 0 without an image
    hole_offset: U16
    hole_length: U16
    image_info: U8
    data_start: I64
    data_length: U16

    data: U8

    next_lsn: int  # where the search for the following record begins

    def __len__(self) -> int:
        return len(self.lsn)

    def main_data(self, record: int) -> bytes:
        begin = int(self.main_start[record])
        return self.data[begin : begin + int(self.main_length[record])].tobytes()

    def block_data(self, block: int) -> bytes:
        begin = int(self.data_start[block])
        return self.data[begin : begin + int(self.data_length[block])].tobytes()

    def find_block(self, record: int, block_id: int) -> int:
        """The row of the record's block reference with that id, or -1: blocks are looked up by
        id and never by place, because minor releases add references."""
        for block in range(int(self.first_block[record]), int(self.first_block[record + 1])):
            if self.block_id[block] == block_id:
                return block
        return -1

    def take(self, chosen: NDArray[np.bool_] | I64) -> Records:
        """A selection of the records, with no more bytes than they have."""
        rows = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        first, blocks = _block_rows(self.first_block, rows)
        length = self.total_length[rows].astype(np.int64)
        start = np.zeros(len(rows), np.int64)
        np.cumsum(length[:-1], out=start[1:])
        data = np.empty(int(length.sum()), np.uint8)
        gather(self.data, self.start[rows], length, data)
        columns = {name: getattr(self, name)[rows] for name in RECORD_COLUMNS}
        columns |= {name: getattr(self, name)[blocks] for name in BLOCK_COLUMNS}
        moved = start - self.start[rows]
        by_block = np.repeat(moved, np.diff(first))
        columns["start"] = start
        columns["main_start"] = columns["main_start"] + moved
        columns["image_start"] = columns["image_start"] + by_block
        columns["data_start"] = columns["data_start"] + by_block
        return replace(self, first_block=first, data=data, **columns)


def concat(parts: Sequence[Records]) -> Records:
    """One after the other; there must be at least one."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {}
    moved = _starts([part.data.size for part in parts])
    for name in [*RECORD_COLUMNS, *BLOCK_COLUMNS]:
        shift = moved if name.endswith("start") else np.zeros(len(parts), np.int64)
        pieces = [
            getattr(p, name) + s if s else getattr(p, name)
            for p, s in zip(parts, shift, strict=True)
        ]
        columns[name] = np.concatenate(pieces)
    blocks = _starts([len(part.block_id) for part in parts])
    first = [p.first_block[:-1] + b for p, b in zip(parts, blocks, strict=True)]
    end = np.array([len(columns["block_id"])], np.int64)
    return replace(
        parts[-1],
        first_block=np.concatenate([*first, end]),
        data=np.concatenate([part.data for part in parts]),
        **columns,
    )


def empty_records(version: WalVersion, next_lsn: int) -> Records:
    columns = {name: np.empty(0, kind) for name, kind in (RECORD_COLUMNS | BLOCK_COLUMNS).items()}
    return Records(
        version=version,
        first_block=np.zeros(1, np.int64),
        data=np.empty(0, np.uint8),
        next_lsn=next_lsn,
        **columns,
    )


def column_names() -> list[str]:
    """Every array of `Records`, in the order of the fields."""
    return [f.name for f in fields(Records) if f.name not in ("version", "next_lsn")]


def _starts(sizes: Sequence[int]) -> I64:
    starts = np.zeros(len(sizes), np.int64)
    np.cumsum(np.array(sizes[:-1], np.int64), out=starts[1:])
    return starts


def _block_rows(first_block: I64, rows: I64) -> tuple[I64, I64]:
    """(first_block of the chosen records, the rows of their blocks)"""
    counts = (first_block[1:] - first_block[:-1])[rows]
    first = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    blocks = np.arange(int(first[-1]), dtype=np.int64)
    blocks += np.repeat(first_block[:-1][rows] - first[:-1], counts)
    return first, blocks


@kernel
def gather(pool: Any, at: Any, size: Any, out: Any) -> Any:
    """The pieces of a pool, one after the other."""
    end = 0
    for i in range(len(at)):
        begin = at[i]
        for k in range(size[i]):
            out[end + k] = pool[begin + k]
        end += size[i]
