"""What a crash left of a spool: its end found, its indexes repaired.

Invariant: nothing that was confirmed to the source is dropped; where that can't be known, the
answer is a FormatError.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import numpy as np

from millrace.errors import FormatError, UnknownVersion
from millrace.postgres.pgoutput.messages import scan
from millrace.spool.index import (
    COMMIT,
    IDLE,
    RELATION,
    IndexFile,
    Records,
    empty_records,
    idle_record,
    index_block,
)
from millrace.spool.segment import (
    Block,
    BlockKind,
    OpenTransaction,
    SegmentFile,
    SegmentReader,
    sync_folder,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveredSpool:
    """What is known at the end of the newest segment."""

    end_lsn: int
    complete_lsn: int
    # After the last whole block.
    position: int
    opened: OpenTransaction | None


def recover_last(file: SegmentFile) -> RecoveredSpool:
    """Read the newest segment to its end, and complete its index."""
    indexed = IndexFile(file.index_path).read()
    is_whole = file.index_path.exists() and file.index_path.stat().st_size == indexed.nbytes
    found = [empty_records()]
    with SegmentReader(file) as reader:
        start = reader.read_start()
        position, opened = reader.read_block(file.position).end, start.transaction
        synced = int(indexed["end"][-1]) if len(indexed) else position
        if synced > reader.end:
            raise reader.damaged(reader.end, f"expected {synced - reader.end} more bytes")
        while position < reader.end:
            try:
                block = reader.read_block(position)
            except UnknownVersion:
                raise
            except FormatError:
                # After the last indexed transaction nothing was confirmed, so a torn block is
                # just the end. Where the index is torn too, nothing may follow that block.
                if position < synced:
                    raise
                if not is_whole and reader.find_block(position + 1) is not None:
                    raise
                break
            added, opened = _index_of(block, opened)
            found.append(added)
            position = block.end
    records = np.concatenate(found)
    records = records[: _after_last_end(records)]
    _replace_index(file, records)
    commits = records[records["kind"] == COMMIT]
    end_lsn = int(commits["end_lsn"][-1]) if len(commits) else start.previous_end_lsn
    idle = records[records["kind"] == IDLE]
    idle_lsn = int(idle["end_lsn"][-1]) if len(idle) else start.idle_lsn
    return RecoveredSpool(end_lsn, max(end_lsn, idle_lsn), position, opened)


def check_index(file: SegmentFile, following: SegmentFile) -> None:
    """Write the index of a full segment again if it does not lead up to the next segment."""
    records = IndexFile(file.index_path).read()
    commits = records[records["kind"] == COMMIT]
    end_lsn = int(commits["end_lsn"][-1]) if len(commits) else file.lsn
    if end_lsn == following.lsn and file.index_path.exists():
        return
    log.warning("writing the index of %s again", file.path)
    with SegmentReader(file) as reader:
        opened = reader.read_start().transaction
        found = [empty_records()]
        for block in reader.iter_blocks(file.position, following.position):
            added, opened = _index_of(block, opened)
            found.append(added)
    records = np.concatenate(found)
    _replace_index(file, records[: _after_last_end(records)])


def _index_of(
    block: Block, opened: OpenTransaction | None
) -> tuple[Records, OpenTransaction | None]:
    if block.kind == BlockKind.IDLE:
        return idle_record(block.lsn, block.position, block.end), opened
    if block.kind == BlockKind.START:
        return empty_records(), opened
    buffer = np.frombuffer(block.payload, np.uint8)
    return index_block(buffer, scan(buffer, len(buffer)), 0, block.position, opened)


def _after_last_end(records: Records) -> int:
    ends = np.flatnonzero(records["kind"] != RELATION)
    return int(ends[-1]) + 1 if len(ends) else 0


def _replace_index(file: SegmentFile, records: Records) -> None:
    data = records.tobytes()
    try:
        if file.index_path.read_bytes() == data:
            return
    except FileNotFoundError:
        pass
    draft = file.index_path.with_suffix(".tmp")
    try:
        with draft.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(file.index_path)
    except OSError:
        draft.unlink(missing_ok=True)  # of a full disk, it takes room
        raise
    sync_folder(file.path.parent)


def has_start(file: SegmentFile) -> bool:
    if file.position == 0 and file.path.stat().st_size:
        return True  # the first segment: a damaged start must be seen
    with SegmentReader(file) as reader:
        try:
            reader.read_start()
        except UnknownVersion:
            raise
        except FormatError:
            if reader.find_block(file.position + 1) is not None:
                raise
            return False
    return True
