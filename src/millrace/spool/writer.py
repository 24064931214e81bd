"""Writes a spool in files.

Invariant: bytes before the synced position never change; a torn tail is legal only after it, and
is cut on open. After an error of its disk a writer does nothing more: what an fsync has failed for
may be gone although it can still be read, and a second fsync would call it stored. So it is cut
off at once, down to what an fsync has succeeded for, and the source sends it again.

One process writes, others read at the same time: a reader follows the indexes, and an index is
written after the bytes it describes. Blocks end where transactions end (or where a buffer did, in
a long one), so that cutting back an unfinished transaction never rewrites a block.

Facts: fsync(2); PostgreSQL wiki, "Fsync Errors".
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from millrace import failpoint
from millrace.errors import InvariantError, WorkDirError
from millrace.lsn import render_lsn
from millrace.postgres.pgoutput.messages import (
    FRAME_HEADER_BYTES,
    Bytes,
    Messages,
)
from millrace.room import AGAIN, writing
from millrace.spool.index import (
    COMMIT,
    RELATION,
    IndexFile,
    Records,
    empty_records,
    idle_record,
    index_block,
    relations_before,
)
from millrace.spool.interface import FOLDER
from millrace.spool.recover import check_index, has_start, recover_last
from millrace.spool.segment import (
    BlockKind,
    OpenTransaction,
    SegmentFile,
    SegmentStart,
    encode_header,
    encode_start,
    has_known_version,
    list_segments,
    remove_segment,
    segment_path,
    sync_folder,
)
from millrace.workdir.place import make_private

log = logging.getLogger(__name__)

# Small enough that pruning keeps up, large enough that files stay few.
SEGMENT_BYTES: Final = 64 * 1024 * 1024
# How long the receiver of a run that was killed may take to notice that and end: whoever starts
# the command again at once waits for it.
LOCK_SECONDS = 15.0
LOCK_POLL_SECONDS = 0.05

_COMMIT, _RELATION = ord("C"), ord("R")


class SpoolWriter:
    """The one process that adds to a spool; opening it cuts what a crash left unfinished."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = directory / FOLDER
        self._segment_bytes = segment_bytes
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
        # What an fsync has succeeded for: a position, and the size of the index.
        self._synced = (0, 0)
        self._failure: WorkDirError | None = None
        # Disks are waited for here, so that receiving continues meanwhile.
        self._syncer = ThreadPoolExecutor(1, "spool sync")
        self._syncing: Future[None] | None = None
        # What is durable when that has ended: (complete_lsn, last_end_lsn).
        self._then_durable = (0, 0)
        try:
            with _told(self._folder):
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
        self._check()
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
        self._check()
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
        self._check()
        with self._noticed():
            self._begin_sync()()
        self._durable_lsn, self._durable_end_lsn = self._then_durable
        return self._durable_end_lsn

    def sync_soon(self) -> None:
        """Begin to put everything on disk, unless that is under way; `durable_lsn` shows it."""
        self._note_synced()
        self._check()
        if self._syncing is None:
            self._syncing = self._syncer.submit(self._begin_sync())

    def _note_synced(self) -> None:
        if self._syncing is not None and self._syncing.done():
            done, self._syncing = self._syncing, None
            with self._noticed():
                done.result()
            self._durable_lsn, self._durable_end_lsn = self._then_durable

    def _begin_sync(self) -> Callable[[], None]:
        """What has to be done for all that was appended up to now."""
        records = self._take_records()
        size, self._unsynced_bytes = self._unsynced_bytes, 0
        self._then_durable = (self._durable_lsn, self._durable_end_lsn)
        if len(records):
            self._then_durable = (self.complete_lsn, self.last_end_lsn)
        return partial(self._flush, self._position, size, records)

    def _flush(self, position: int, size: int, records: Records) -> None:
        """The segment up to a position, then its index."""
        try:
            if size:
                _sync(self._segment, self._file)
            # Readers may see the records before their own fsync: these bytes have to stay.
            self._synced = (position, self._synced[1])
            if len(records):
                with _told(_path(self._file)):
                    failpoint.hit("spool.before_index")
                _write_all(self._index, self._file, records.tobytes(), memoryview(b""))
                _sync(self._index, self._file)
        except WorkDirError:
            # At once: nobody who is killed from here on leaves it to the next one.
            self._discard()
            raise
        self._synced = (position, self._synced[1] + records.nbytes)

    def _check(self) -> None:
        """Raise what the disk has failed with."""
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _noticed(self) -> Iterator[None]:
        """After an error of the disk nothing more is written, and nothing is left that it may not
        have stored."""
        try:
            yield
        except WorkDirError as error:
            self._failure = error
            if self._syncing is not None:
                self._syncing.exception()  # it may still succeed, and then its bytes stay
            self._discard()
            raise

    def _discard(self) -> None:
        """Cut off what no fsync has succeeded for; a disk that refuses that too has said enough."""
        if self._file is None:
            return
        position, index_bytes = self._synced
        with suppress(OSError):
            os.ftruncate(self._segment, max(0, position - self._file.position))
            os.ftruncate(self._index, index_bytes)

    def cut_unfinished(self) -> None:
        """Remove the beginning of a transaction whose end will not come on this connection."""
        self.sync()
        if self._opened is None:
            return
        log.debug("cutting an unfinished transaction, xid %d", self._opened.xid)
        with self._noticed(), _told(self._folder):
            self._cut(self._opened.begin_block)

    def _append_block(
        self, frames: memoryview, buffer: Bytes, messages: Messages, start: int, end: int
    ) -> None:
        self._make_room(end - start)
        records, opened = index_block(buffer, messages, start, self._position, self._opened)
        self._check_order(records)
        self._write_block(BlockKind.FRAMES, int(messages.lsn[0]), frames[start:end])
        self._opened = opened
        if len(records):
            self._pending.append(records)
            self._learn(frames, messages, records)

    def _check_order(self, records: Records) -> None:
        """Readers search by position: what does not rise would be applied twice, or never."""
        ends = records["end_lsn"][records["kind"] == COMMIT]
        if not len(ends):
            return
        if ends[0] <= self.last_end_lsn or (ends[1:] <= ends[:-1]).any():
            raise InvariantError(
                f"the source sent a transaction again, or out of order, after "
                f"{render_lsn(self.last_end_lsn)}"
            )

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
        file = SegmentFile(path, self._position, self.last_end_lsn)
        start = SegmentStart(
            self.last_end_lsn, self.complete_lsn, self._opened, b"".join(self._relations.values())
        )
        try:
            with _told(path):
                self._open_segment(file)
                self._write_block(
                    BlockKind.START, self.last_end_lsn, memoryview(encode_start(start))
                )
                # Older segments may be pruned as soon as this one is there.
                _sync(self._segment, file)
                sync_folder(self._folder)
        except WorkDirError as error:
            self._failure = error
            with suppress(OSError):
                remove_segment(file)  # it holds nothing yet
            raise
        self._synced = (self._position, 0)

    def _write_block(self, kind: BlockKind, lsn: int, payload: memoryview) -> None:
        header = encode_header(kind, lsn, self._position, payload)
        size = len(header) + len(payload)
        with self._noticed():
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
            self._synced = (position, os.fstat(self._index).st_size)
            self._relations = relations_before(files[-1], IndexFile(files[-1].index_path), None)
        sync_folder(self._folder)

    def _recover(self) -> None:
        """Find the end of the last transaction; repair indexes; cut what comes after."""
        files = list_segments(self._folder)
        for file in files:
            has_known_version(file)
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


@contextmanager
def open_spool_lock(directory: Path) -> Iterator[None]:
    """Be the one receiver of a work directory whose spool is elsewhere."""
    folder = directory / FOLDER
    descriptor = _lock(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    with _told(folder):
        make_private(folder)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise WorkDirError(
                    f"another process writes the spool in {folder}",
                    hint="a slot has one receiver: stop the other one, or choose another --dir",
                ) from None
            time.sleep(LOCK_POLL_SECONDS)


def _sync(descriptor: int, file: SegmentFile | None) -> None:
    with _told(_path(file)):
        os.fdatasync(descriptor)


def _write_all(descriptor: int, file: SegmentFile | None, head: bytes, payload: memoryview) -> None:
    with _told(_path(file)):
        written = os.writev(descriptor, (head, payload))
        rest = memoryview(head)[written:] if written < len(head) else memoryview(b"")
        payload = payload[max(0, written - len(head)) :]
        for part in (rest, payload):
            while len(part):
                part = part[os.write(descriptor, part) :]


def _path(file: SegmentFile | None) -> Path:
    assert file is not None
    return file.path


def _told(path: Path) -> AbstractContextManager[None]:
    """What a disk says, in our words."""
    then = f"{AGAIN}; --max-spool sets a limit to the spool"
    return writing(path, needed_bytes=SEGMENT_BYTES, then=then)
