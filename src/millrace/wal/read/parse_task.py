"""One stretch of WAL into a file of records: what a task does, and how WAL is cut for tasks.

Invariant: the records of all stretches, one after the other, are those of the whole, each once; a
record belongs to the stretch it starts in. A file depends on its stretch alone, so an attempt that
is repeated writes the same one.

What is kept of a stretch is what decoding looks at: changes of rows, ends of transactions, catalog
and snapshot matters, and of each transaction its first record, whatever it is. Most records of
indexes go.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal.read.files import WalFiles
from millrace.wal.read.reader import iter_records
from millrace.wal.read.record import Records, concat, empty_records
from millrace.wal.read.record_file import write_record_file

# Resource managers whose records are all kept: Transaction, Storage, Database, MultiXact, RelMap,
# Standby, LogicalMessage.
_KEPT_RMGRS = (1, 2, 4, 6, 7, 8, 21)
_XLOG, _HEAP2, _HEAP = 0, 9, 10
_FPI_FOR_HINT = 0xA0
_HEAP_LOCK = 0x60
# REWRITE, MULTI_INSERT, NEW_CID; the others are about vacuum and locks.
_HEAP2_KEPT = (0x00, 0x50, 0x70)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one task reads: records that start in it. Without an end, up to the end of WAL."""

    files: WalFiles
    start_lsn: int
    end_lsn: int | None
    path: Path
    check_crc: bool = True


@dataclass(frozen=True, slots=True)
class Parsed:
    """The file of a stretch, and how it is linked to those beside it."""

    path: Path
    count: int
    first_lsn: int  # 0 for both if there is no record
    last_lsn: int
    prev_lsn: int  # what the first record names as the one before
    next_lsn: int


def plan_stretches(
    files: WalFiles, start_lsn: int, end_lsn: int | None, folder: Path, *, check_crc: bool = True
) -> list[Stretch]:
    """One for each segment. Only the last may end before its end."""
    size = files.segment_bytes
    end = files.end_lsn if end_lsn is None else min(end_lsn, files.end_lsn)
    starts = [start_lsn, *range((start_lsn // size + 1) * size, end, size)]
    ends: list[int | None] = [*starts[1:], end_lsn]
    return [
        Stretch(files, begin, stop, folder / f"{begin:016X}.records", check_crc)
        for begin, stop in zip(starts, ends, strict=True)
    ]


def parse_stretch(stretch: Stretch, attempt: int = 0) -> Parsed:
    """The body of a task."""
    first = last = prev = 0
    next_lsn = stretch.start_lsn
    parts: list[Records] = []
    for records in iter_records(
        stretch.files, stretch.start_lsn, stretch.end_lsn, check_crc=stretch.check_crc
    ):
        next_lsn = records.next_lsn
        if not len(records):
            continue
        if not first:
            first, prev = int(records.lsn[0]), int(records.prev_lsn[0])
        last = int(records.lsn[-1])
        parts.append(records.take(is_needed(records)))
    kept = concat(parts) if parts else empty_records(stretch.files.version, next_lsn)
    write_record_file(stretch.path, kept, attempt)
    return Parsed(stretch.path, len(kept), first, last, prev, next_lsn)


def is_needed(records: Records) -> NDArray[np.bool_]:
    """Which records decoding looks at."""
    rmid, operation = records.rmid, records.info & 0xF0
    needed: NDArray[np.bool_] = np.isin(rmid, _KEPT_RMGRS)
    needed |= (rmid == _XLOG) & (operation != _FPI_FOR_HINT)
    needed |= (rmid == _HEAP) & (operation & 0x70 != _HEAP_LOCK)
    needed |= (rmid == _HEAP2) & np.isin(operation & 0x70, _HEAP2_KEPT)
    needed |= records.top_xid != 0
    _, first = np.unique(records.xid, return_index=True)
    needed[first] = True
    return needed


def check_joins(parsed: list[Parsed]) -> None:
    """Every stretch goes on where the one before has ended."""
    last = 0
    for part in parsed:
        if not part.count and not part.first_lsn:
            continue
        if last and part.prev_lsn != last:
            raise FormatError(
                f"the record at {render_lsn(part.first_lsn)} follows {render_lsn(part.prev_lsn)},"
                f" but the one before it is at {render_lsn(last)}",
                hint="the segments are not of one history: fetch them again from the archive",
                lsn=render_lsn(part.first_lsn),
            )
        last = part.last_lsn
