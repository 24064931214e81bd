"""Where received transactions wait until they are applied: files in the work directory.

Invariant: bytes before the synced position never change; a torn tail is legal only after it, and
is cut on open. A reader sees whole transactions that are on disk, in commit order, each once.

One process writes, others read at the same time: a reader follows the indexes, and an index is
written after the bytes it speaks of. Blocks end where transactions end (or where a buffer did, in
a long one), so that cutting back an unfinished transaction never rewrites a block.
"""

from __future__ import annotations

import fcntl
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from millrace import failpoint
from millrace.errors import WorkDirError
from millrace.lsn import render_lsn
from millrace.postgres.encoding import python_encoding
from millrace.postgres.pgoutput import (
    FRAME_HEADER_BYTES,
    Bytes,
    Messages,
    RelationVersion,
    decode_relation,
    whole_frames,
)
from millrace.stream.segment import (
    Block,
    BlockKind,
    OpenTransaction,
    SegmentFile,
    SegmentReader,
    SegmentStart,
    encode_header,
    encode_start,
    list_segments,
    remove_segment,
    segment_path,
    sync_folder,
)
from millrace.stream.spool_index import (
    COMMIT,
    RELATION,
    IndexFile,
    Records,
    empty_records,
    idle_record,
    index_block,
    relations_before,
)
from millrace.stream.spool_recover import check_index, has_start, recover_last

log = logging.getLogger(__name__)

FOLDER: Final = "spool"
# Small enough that pruning keeps up, large enough that files stay few.
SEGMENT_BYTES: Final = 64 * 1024 * 1024

_COMMIT, _RELATION = ord("C"), ord("R")


@dataclass(frozen=True)
class Range:
    """Consecutive whole transactions of a spool: those that end after one position and up to
    another. It means the same in every process, until it is pruned."""

    after_lsn: int
    # Of its last transaction: the end, the commit record, the time in microseconds since 2000.
    end_lsn: int
    commit_lsn: int
    committed_at: int
    transactions: int
    changes: int
    bytes: int
    # Where it is in the files: the block of the first Begin, that Begin, the end.
    begin_block: int = 0
    begin: int = 0
    end: int = 0


class Writer(Protocol):
    """What a receiver needs of a spool."""

    @property
    def last_end_lsn(self) -> int:
        """The end of the last transaction taken, synced or not."""

    @property
    def complete_lsn(self) -> int:
        """Nothing is missing up to here: last_end_lsn, or how far the source is known to be
        idle."""

    @property
    def durable_lsn(self) -> int:
        """The same, on disk: what may be confirmed to the source."""

    @property
    def is_in_transaction(self) -> bool: ...

    @property
    def is_syncing(self) -> bool:
        """Whether `sync_soon` has not ended yet."""

    @property
    def bytes(self) -> int: ...

    @property
    def unsynced_bytes(self) -> int: ...

    def append(self, frames: memoryview, messages: Messages) -> None: ...

    def mark_idle(self, lsn: int) -> None: ...

    def sync(self) -> int: ...

    def sync_soon(self) -> None: ...

    def cut_unfinished(self) -> None: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """What an applier needs of a spool."""

    def last_end_lsn(self) -> int: ...

    def plan(self, after_lsn: int, max_bytes: int, until_lsn: int | None) -> Range | None: ...

    def chunks(self, range_: Range, max_chunk_bytes: int) -> Iterator[Bytes]: ...

    def relations(self, range_: Range) -> dict[int, RelationVersion]: ...

    def bytes_after(self, lsn: int) -> int: ...

    def close(self) -> None: ...


class SpoolWriter:
    """The one process that adds to a spool; opening it cuts what a crash left unfinished."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = directory / FOLDER
        self._segment_bytes = segment_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._folder)
        self.last_end_lsn = 0
        self.complete_lsn = 0
        self._durable_lsn = 0
        self._durable_end_lsn = 0
        self._position = 0
        self._opened: OpenTransaction | None = None
        self._relations: dict[int, bytes] = {}
        self._file: SegmentFile | None = None
        self._segment = -1
        self._index = -1
        # Records that wait for the sync of their bytes, or for the end of their transaction.
        self._pending: list[Records] = []
        self._unsynced_bytes = 0
        # Disks are waited for here, so that receiving goes on meanwhile.
        self._syncer = ThreadPoolExecutor(1, "spool sync")
        self._syncing: Future[None] | None = None
        # What is durable when that has ended: (complete_lsn, last_end_lsn).
        self._then_durable = (0, 0)
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SpoolWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; what was not synced may be lost."""
        self._syncer.shutdown()
        for descriptor in (self._segment, self._index, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._segment = self._index = self._lock = -1

    @property
    def is_in_transaction(self) -> bool:
        """Whether a Begin was appended whose Commit is still to come."""
        return self._opened is not None

    @property
    def bytes(self) -> int:
        """How much disk the spool takes now."""
        files = list_segments(self._folder)
        return self._position - files[0].position if files else 0

    @property
    def unsynced_bytes(self) -> int:
        return self._unsynced_bytes

    def append(self, frames: memoryview, messages: Messages) -> None:
        """Add whole frames; `messages` is what `scan` found in them."""
        if not len(messages):
            return  # keepalives
        buffer = np.frombuffer(frames, np.uint8)
        commits = np.flatnonzero(messages.kind == _COMMIT)
        first = 0
        start = 0
        if len(commits):
            first = int(commits[-1]) + 1
            start = int(messages.offset[first - 1] + messages.length[first - 1])
            self._append_block(frames, buffer, messages.slice(0, first, start), 0, start)
        if first < len(messages):
            end = messages.consumed
            rest = messages.slice(first, len(messages), end)
            self._append_block(frames, buffer, rest, start, end)

    def mark_idle(self, lsn: int) -> None:
        """Remember that no transaction is missing up to `lsn`; sync makes it durable."""
        if self._opened is not None or lsn <= self.complete_lsn:
            return
        self._make_room(0)
        position = self._position
        self._write_block(BlockKind.IDLE, lsn, memoryview(b""))
        self._pending.append(idle_record(lsn, position, self._position))
        self.complete_lsn = lsn

    @property
    def durable_lsn(self) -> int:
        """What may be confirmed to the source."""
        self._note_synced()
        return self._durable_lsn

    @property
    def is_syncing(self) -> bool:
        self._note_synced()
        return self._syncing is not None

    def sync(self) -> int:
        """Put everything on disk; the end of the last transaction that is there."""
        if self._syncing is not None:
            self._syncing.exception()  # wait; it is raised below
        self._note_synced()
        self._begin_sync()()
        self._durable_lsn, self._durable_end_lsn = self._then_durable
        return self._durable_end_lsn

    def sync_soon(self) -> None:
        """Begin to put everything on disk, unless that is going on; `durable_lsn` tells."""
        self._note_synced()
        if self._syncing is None:
            self._syncing = self._syncer.submit(self._begin_sync())

    def _note_synced(self) -> None:
        if self._syncing is not None and self._syncing.done():
            done, self._syncing = self._syncing, None
            done.result()
            self._durable_lsn, self._durable_end_lsn = self._then_durable

    def _begin_sync(self) -> Callable[[], None]:
        """What has to be done for all that was appended up to now."""
        records = self._take_records()
        size, self._unsynced_bytes = self._unsynced_bytes, 0
        self._then_durable = (self._durable_lsn, self._durable_end_lsn)
        if len(records):
            self._then_durable = (self.complete_lsn, self.last_end_lsn)
        return partial(self._flush, self._segment, self._index, size, records)

    def _flush(self, segment: int, index: int, size: int, records: Records) -> None:
        """The segment, then its index."""
        if size:
            _sync(segment, self._file)
        if len(records):
            failpoint.hit("spool.before_index")
            _write_all(index, self._file, records.tobytes(), memoryview(b""))
            _sync(index, self._file)

    def cut_unfinished(self) -> None:
        """Remove the beginning of a transaction whose end will not come on this connection."""
        self.sync()
        if self._opened is None:
            return
        log.debug("cutting an unfinished transaction, xid %d", self._opened.xid)
        self._cut(self._opened.begin_block)

    def _append_block(
        self, frames: memoryview, buffer: Bytes, messages: Messages, start: int, end: int
    ) -> None:
        self._make_room(end - start)
        records, opened = index_block(buffer, messages, start, self._position, self._opened)
        self._write_block(BlockKind.FRAMES, int(messages.lsn[0]), frames[start:end])
        self._opened = opened
        if len(records):
            self._pending.append(records)
            self._learn(frames, messages, records)

    def _learn(self, frames: memoryview, messages: Messages, records: Records) -> None:
        for at in np.flatnonzero(messages.kind == _RELATION):
            begin = int(messages.offset[at]) - FRAME_HEADER_BYTES
            end = int(messages.offset[at] + messages.length[at])
            self._relations[int(messages.relation[at])] = bytes(frames[begin:end])
        commits = records[records["kind"] == COMMIT]
        if len(commits):
            self.last_end_lsn = int(commits["end_lsn"][-1])
            self.complete_lsn = max(self.complete_lsn, self.last_end_lsn)

    def _make_room(self, size: int) -> None:
        """Begin a segment if there is none, or if this one has had enough."""
        if self._file is not None:
            filled = self._position - self._file.position
            if filled + size <= self._segment_bytes or filled <= self._segment_bytes // 64:
                return
            self.sync()
            # Relations of a transaction that is still open: the next START block has them.
            self._pending.clear()
        self._begin_segment()

    def _begin_segment(self) -> None:
        self._close_segment()
        path = segment_path(self._folder, self._position, self.last_end_lsn)
        self._open_segment(SegmentFile(path, self._position, self.last_end_lsn))
        start = SegmentStart(
            self.last_end_lsn, self.complete_lsn, self._opened, b"".join(self._relations.values())
        )
        self._write_block(BlockKind.START, self.last_end_lsn, memoryview(encode_start(start)))
        # Older segments may be pruned as soon as this one is there.
        _sync(self._segment, self._file)
        sync_folder(self._folder)

    def _write_block(self, kind: BlockKind, lsn: int, payload: memoryview) -> None:
        header = encode_header(kind, lsn, self._position, payload)
        size = len(header) + len(payload)
        _write_all(self._segment, self._file, header, payload)
        self._position += size
        self._unsynced_bytes += size

    def _take_records(self) -> Records:
        """The records up to the end of the last whole transaction."""
        records = np.concatenate((empty_records(), *self._pending))
        ends = np.flatnonzero(records["kind"] != RELATION)
        done = int(ends[-1]) + 1 if len(ends) else 0
        self._pending = [records[done:]] if done < len(records) else []
        return records[:done]

    def _open_segment(self, file: SegmentFile) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._segment = os.open(file.path, flags, 0o600)
        self._index = os.open(file.index_path, flags, 0o600)
        self._file = file

    def _close_segment(self) -> None:
        if self._file is not None:
            os.close(self._segment)
            os.close(self._index)
            self._segment = self._index = -1
            self._file = None

    def _cut(self, position: int) -> None:
        """Drop everything from the block at `position` on: newest first, so that a crash in
        between leaves a shorter spool and no gap."""
        self._close_segment()
        files = list_segments(self._folder)
        while files and files[-1].position >= position:
            remove_segment(files.pop())
        self._pending.clear()
        self._opened = None
        self._position = position
        if files:
            self._open_segment(files[-1])
            os.ftruncate(self._segment, max(0, position - files[-1].position))
            _sync(self._segment, self._file)
            self._relations = relations_before(files[-1], IndexFile(files[-1].index_path), None)
        sync_folder(self._folder)

    def _recover(self) -> None:
        """Find the end of the last transaction; repair indexes; cut what comes after."""
        files = list_segments(self._folder)
        while files and not has_start(files[-1]):
            remove_segment(files.pop())  # the process died while it began this one
        for file, following in pairwise(files):
            check_index(file, following)
        if not files:
            return
        last = files[-1]
        recovered = recover_last(last)
        self.last_end_lsn = self._durable_end_lsn = recovered.end_lsn
        self.complete_lsn = self._durable_lsn = recovered.complete_lsn
        self._position = recovered.position
        self._opened = recovered.opened
        if recovered.opened is not None:
            self._cut(recovered.opened.begin_block)
        else:
            self._cut(recovered.position)


class SpoolReader:
    """Reads a spool, also while another process writes it; `encoding` by PostgreSQL's name."""

    def __init__(self, directory: Path, encoding: str = "utf-8") -> None:
        self._folder = directory / FOLDER
        self._encoding = python_encoding(encoding)
        self._indexes: dict[Path, IndexFile] = {}

    def close(self) -> None:
        """Nothing stays open."""

    def last_end_lsn(self) -> int:
        """The end of the last transaction that is on disk; 0 if there is none."""
        files = list_segments(self._folder)
        if not files:
            return 0
        commits = self._commits(files[-1])
        return int(commits["end_lsn"][-1]) if len(commits) else files[-1].lsn

    def plan(self, after_lsn: int, max_bytes: int, until_lsn: int | None = None) -> Range | None:
        """The next whole transactions: at least one, then as many as fit; None if there is none
        yet."""
        first: Any = None
        last: Any = None
        transactions = changes = 0
        for commits in self._iter_commits(after_lsn, until_lsn):
            if first is None:
                first = commits[0]
            limit = int(first["begin"]) + max_bytes
            fitting = int(np.searchsorted(commits["end"], limit, side="right"))
            if not transactions:
                fitting = max(fitting, 1)
            if not fitting:
                break
            last = commits[fitting - 1]
            transactions += fitting
            changes += int(commits["changes"][:fitting].sum())
            if fitting < len(commits):
                break
        if last is None:
            return None
        return Range(
            after_lsn,
            int(last["end_lsn"]),
            int(last["commit_lsn"]),
            int(last["committed_at"]),
            transactions,
            changes,
            int(last["end"]) - int(first["begin"]),
            int(first["begin_block"]),
            int(first["begin"]),
            int(last["end"]),
        )

    def chunks(self, range_: Range, max_chunk_bytes: int) -> Iterator[Bytes]:
        """The frames from the first Begin to the last Commit, in buffers of whole frames."""
        held: list[Bytes] = []
        held_bytes = 0
        for block in self._iter_blocks(range_):
            if block.kind != BlockKind.FRAMES:
                continue
            first = max(0, range_.begin - block.payload_position)
            end = min(len(block.payload), range_.end - block.payload_position)
            rest = np.frombuffer(block.payload, np.uint8)[first:end]
            if held and held_bytes + len(rest) > max_chunk_bytes:
                yield _joined(held)
                held, held_bytes = [], 0
            while len(rest) > max_chunk_bytes:
                size = whole_frames(rest, max_chunk_bytes)
                yield rest[:size]
                rest = rest[size:]
            if len(rest):
                held.append(rest)
                held_bytes += len(rest)
        if held:
            yield _joined(held)

    def relations(self, range_: Range) -> dict[int, RelationVersion]:
        """The relations as they were known where the range begins."""
        file = self._segment_of(list_segments(self._folder), range_.begin_block, range_)
        frames = relations_before(file, self._index(file), range_.begin)
        found = {}
        for oid, frame in frames.items():
            found[oid] = decode_relation(frame[FRAME_HEADER_BYTES:], self._encoding)
        return found

    def bytes_after(self, lsn: int) -> int:
        """How much there is to read after a position."""
        first: int | None = None
        end = 0
        for commits in self._iter_commits(lsn, None):
            if first is None:
                first = int(commits["begin"][0])
            end = int(commits["end"][-1])
        return 0 if first is None else end - first

    def _iter_commits(self, after_lsn: int, until_lsn: int | None) -> Iterator[Records]:
        """The commits after a position, a segment at a time."""
        files = list_segments(self._folder)
        if not files:
            return
        at = bisect_right([file.lsn for file in files], after_lsn) - 1
        if at < 0:
            raise _pruned(self._folder, after_lsn, files[0].lsn)
        for file in files[at:]:
            commits = self._commits(file)
            first = int(np.searchsorted(commits["end_lsn"], after_lsn, side="right"))
            end = len(commits)
            if until_lsn is not None:
                end = int(np.searchsorted(commits["end_lsn"], until_lsn, side="right"))
            if first < end:
                if int(commits["begin"][first]) < files[0].position:
                    raise _pruned(self._folder, after_lsn, int(commits["end_lsn"][first]))
                yield commits[first:end]
            if end < len(commits):
                return

    def _iter_blocks(self, range_: Range) -> Iterator[Block]:
        files = list_segments(self._folder)
        position = range_.begin_block
        while position < range_.end:
            file = self._segment_of(files, position, range_)
            with SegmentReader(file) as reader:
                end = min(range_.end, reader.end)
                if position >= end:
                    raise reader.damaged(position, "expected another block")
                for block in reader.iter_blocks(position, end):
                    yield block
                    position = block.end

    def _segment_of(self, files: list[SegmentFile], position: int, range_: Range) -> SegmentFile:
        at = bisect_right([file.position for file in files], position) - 1
        if at < 0:
            pruned_to = files[0].lsn if files else range_.end_lsn
            raise _pruned(self._folder, range_.after_lsn, pruned_to)
        return files[at]

    def _commits(self, file: SegmentFile) -> Records:
        index = self._index(file)
        index.read()
        return index.commits

    def _index(self, file: SegmentFile) -> IndexFile:
        return self._indexes.setdefault(file.path, IndexFile(file.index_path))


def prune(directory: Path, applied_lsn: int) -> int:
    """Remove the segments whose transactions all end at or before `applied_lsn`; the bytes
    freed. The newest segment stays."""
    folder = directory / FOLDER
    removed = 0
    for file, size in _prunable(folder, applied_lsn):
        remove_segment(file)
        removed += size
    if removed:
        sync_folder(folder)
    return removed


def prunable_bytes(directory: Path, applied_lsn: int) -> int:
    """How much `prune` would free."""
    return sum(size for _, size in _prunable(directory / FOLDER, applied_lsn))


def _prunable(folder: Path, applied_lsn: int) -> Iterator[tuple[SegmentFile, int]]:
    files = list_segments(folder)
    needed = _first_needed(files, applied_lsn)
    for file, following in pairwise(files):
        if following.position > needed:
            return
        yield file, following.position - file.position


def _first_needed(files: list[SegmentFile], applied_lsn: int) -> int:
    """The position of the first block that is still to be applied."""
    needed = 0
    for file in files:
        index = IndexFile(file.index_path)
        index.read()
        commits = index.commits
        at = int(np.searchsorted(commits["end_lsn"], applied_lsn, side="right"))
        if at < len(commits):
            return int(commits["begin_block"][at])
        if len(commits):
            # The next transaction, perhaps an open one, begins here at the earliest.
            needed = int(commits["end"][-1])
    return needed


def _joined(parts: list[Bytes]) -> Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _pruned(folder: Path, after_lsn: int, known_lsn: int) -> WorkDirError:
    return WorkDirError(
        f"{folder} was pruned: changes after {render_lsn(after_lsn)} are asked for, "
        f"it begins after {render_lsn(known_lsn)}",
        hint="the target is behind what was reported as applied: make a new clone, or bring the "
        "target back to where it was",
    )


@contextmanager
def open_spool_lock(directory: Path) -> Iterator[None]:
    """Be the one receiver of a work directory whose spool is elsewhere."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WorkDirError(
            f"another process writes the spool in {folder}",
            hint="a slot has one receiver: stop the other one, or choose another --dir",
        ) from None
    return descriptor


def _sync(descriptor: int, file: SegmentFile | None) -> None:
    with _told(file):
        os.fdatasync(descriptor)


def _write_all(descriptor: int, file: SegmentFile | None, head: bytes, payload: memoryview) -> None:
    with _told(file):
        written = os.writev(descriptor, (head, payload))
        rest = memoryview(head)[written:] if written < len(head) else memoryview(b"")
        payload = payload[max(0, written - len(head)) :]
        for part in (rest, payload):
            while len(part):
                part = part[os.write(descriptor, part) :]


@contextmanager
def _told(file: SegmentFile | None) -> Iterator[None]:
    """What a disk says, in our words."""
    try:
        yield
    except OSError as error:
        raise WorkDirError(
            f"can't write {file.path if file else 'the spool'}: {error.strerror}",
            hint="free disk space, then run the same command again; --max-spool sets a limit",
        ) from error
