"""Applying a stretch of the spool: what one Spark task does.

Invariant: a batch is whole source transactions and one target transaction, which also advances the
position; a second attempt begins where the position stands, so nothing is applied twice and
nothing is left out, whatever became of the first.

A transaction larger than memory streams through: its chunks are folded one after the other, in
the same target transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from psycopg.pq.abc import PGconn

from millrace import failpoint
from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, MillraceError
from millrace.lsn import parse_lsn
from millrace.postgres.connect import connect
from millrace.postgres.libpq import execute, open_session
from millrace.postgres.pgoutput import MICROSECONDS_1970_TO_2000
from millrace.retry import with_retries
from millrace.stream.ahead import ahead
from millrace.stream.apply import Applier
from millrace.stream.position import open_position
from millrace.stream.progress import Applied
from millrace.stream.sentinel import FILE as SENTINEL_FILE
from millrace.stream.sentinel import Sentinel
from millrace.stream.settings import Left, OnConflict
from millrace.stream.spool import Range, Reader
from millrace.stream.transform import iter_sections
from millrace.stream.work import Preparer, Share, Work

log = logging.getLogger(__name__)

# Bytes of changes that one target transaction takes, at least; it ends with the transaction
# of the source that reaches it.
BATCH_BYTES = 32 << 20
# Bytes of changes folded at once: enough to make sets large, little enough to bound memory. More
# than half of a batch: a third, tiny piece would leave no time to make the next batch's first.
CHUNK_BYTES = 18 << 20
# Pieces of work made while the target is busy with another.
AHEAD = 2
# After catching up: how long to gather changes before the next batch, and how long to stay
# without any.
GATHER_SECONDS = 0.1
STAY_SECONDS = 2.0

# No triggers, no foreign keys: the source has done all that. Enough memory to keep a stage, and to
# hash it. Rows are looked up by key unless most of the table changes: at its default cost for
# a page out of order, the planner would hash a table of a million rows to update twenty thousand.
# Statements are simple and last a second: compiling them takes longer than it saves.
_SESSION = (
    "SET session_replication_role = replica; SET temp_buffers = '64MB'; SET work_mem = '128MB'; "
    "SET random_page_cost = 1.1; SET jit = off"
)

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class ApplyTask:
    """One task: which stream, from which spool, to which target, how far."""

    target: Dsn
    stream: str
    # "origin" or "table"; see millrace.stream.position.
    position_kind: str
    # Opens the spool where the task runs.
    open_spool: Callable[[], Reader]
    # PostgreSQL's and Python's name of the stream's encoding.
    encoding: str
    python_encoding: str
    # Transactions that end after this stay; None for all there are.
    until_lsn: int | None = None
    # The task ends with the first batch after so many seconds.
    seconds: float = 10.0
    # The work directory, if the task can reach it: it is steered from there, and stays a while
    # when it has caught up, because starting another costs more than waiting.
    directory: Path | None = None
    batch_bytes: int = BATCH_BYTES
    chunk_bytes: int = CHUNK_BYTES
    on_conflict: OnConflict = OnConflict.STOP
    left: Left = field(default_factory=Left)
    share: Share = field(default_factory=Share)


@dataclass(frozen=True)
class ApplyOutcome:
    """Where the task left the stream."""

    position: int
    # Microseconds since 2000 of the last transaction applied; None if there was none.
    committed_at: int | None
    transactions: int
    batches: int
    applied: Applied
    error: MillraceError | None = None


@dataclass(frozen=True)
class _Batch:
    """Marks the begin or the end of a batch among its work."""

    range: Range
    is_end: bool


def apply_spool(task: ApplyTask, attempt: int = 0) -> ApplyOutcome:
    """Apply what the spool holds; lost connections are made anew, other errors are returned."""
    run = _Run(task)
    try:
        with_retries(run.go, on_retry=log_retry)
    except MillraceError as error:
        return run.outcome(error)
    finally:
        run.close()
    return run.outcome(None)


def render_committed_at(microseconds: int) -> str:
    """A time of the source, as a timestamptz reads it."""
    return (_EPOCH + timedelta(microseconds=microseconds)).isoformat(sep=" ")


def since_1970(microseconds: int) -> float:
    """A time of the source, in seconds since 1970."""
    return (microseconds + MICROSECONDS_1970_TO_2000) / 1e6


def log_retry(error: BaseException, pause: float) -> None:
    """For `with_retries`."""
    log.warning("%s; trying again in %.1f s", error, pause)


def _find_sentinel(directory: Path | None) -> Sentinel | None:
    """None where the work directory is not: no other one is made there."""
    if directory is None or not (directory / SENTINEL_FILE).exists():
        return None
    return Sentinel(directory)


class _Run:
    """The work of one task, over as many sessions as it takes."""

    def __init__(self, task: ApplyTask) -> None:
        self._task = task
        self._spool = task.open_spool()
        self._position = open_position(task.position_kind, task.stream)
        self._lsn = 0
        self._committed_at: int | None = None
        self._transactions = 0
        self._batches = 0
        self._applied = Applied()
        self._deadline = time.monotonic() + task.seconds
        self._sentinel = _find_sentinel(task.directory)

    def outcome(self, error: MillraceError | None) -> ApplyOutcome:
        return ApplyOutcome(
            self._lsn,
            self._committed_at,
            self._transactions,
            self._batches,
            self._applied,
            error,
        )

    def close(self) -> None:
        self._spool.close()
        if self._sentinel is not None:
            self._sentinel.close()

    def go(self) -> None:
        """Until the spool is applied or the time is up."""
        task = self._task
        session = open_session(task.target, f"apply {task.stream}", task.encoding)
        try:
            execute(session, _SESSION)
            self._lsn = self._position.take(session)
            with connect(task.target, f"apply {task.stream} catalog") as catalog:
                staged = task.on_conflict is not OnConflict.STOP
                preparer = Preparer(catalog, task.left, task.share, staged_inserts=staged)
                with ahead(self._iter_work(preparer, self._lsn), AHEAD) as work:
                    self._apply(session, work)
        finally:
            session.finish()

    def _iter_work(self, preparer: Preparer, after_lsn: int) -> Iterator[Work | _Batch]:
        task, lsn = self._task, after_lsn
        while True:
            found = self._next_range(lsn)
            if found is None:
                return
            yield _Batch(found, False)
            relations = self._spool.relations(found)
            for chunk in self._spool.chunks(found, task.chunk_bytes):
                for section in iter_sections(chunk, relations, task.python_encoding):
                    work = preparer.prepare(section)
                    if work is not None:
                        yield work
            yield _Batch(found, True)
            lsn = found.end_lsn
            if time.monotonic() > self._deadline:
                return

    def _next_range(self, lsn: int) -> Range | None:
        """What is to be applied next; None if this task has nothing more to do."""
        task, until = self._task, self._task.until_lsn
        give_up_at = time.monotonic() + STAY_SECONDS
        while True:
            state = self._sentinel.read() if self._sentinel else None
            if state is not None:
                if not state.apply:
                    return None
                until = state.endpos
            found = self._spool.plan(lsn, task.batch_bytes, until)
            if found is not None or state is None:
                return found
            is_whole = until is not None and (state.flushed_lsn or 0) >= until
            if is_whole or time.monotonic() > min(give_up_at, self._deadline):
                # What was spooled before that was read is seen now.
                return self._spool.plan(lsn, task.batch_bytes, until)
            time.sleep(GATHER_SECONDS)

    def _apply(self, session: PGconn, work: Iterator[Work | _Batch]) -> None:
        applier = Applier(session, self._task.on_conflict)
        for item in work:
            if not isinstance(item, _Batch):
                applier.apply(item)
            elif item.is_end:
                self._commit(session, item.range, applier)
            else:
                self._begin(session, applier)

    def _begin(self, session: PGconn, applier: Applier) -> None:
        results = execute(session, self._position.lock_sql())
        value = results[-1].get_value(0, 0) if results[-1].ntuples else None
        if value is not None and parse_lsn(value.decode()) != self._lsn:
            raise ConnectionLost("another attempt has moved the position", sqlstate=None)
        applier.begin()

    def _commit(self, session: PGconn, batch: Range, applier: Applier) -> None:
        failpoint.hit("apply.before_commit")
        at = render_committed_at(batch.committed_at)
        execute(session, f"{self._position.advance_sql(batch.end_lsn, at)}; COMMIT")
        failpoint.hit("apply.after_commit")
        self._lsn = batch.end_lsn
        self._committed_at = batch.committed_at
        self._transactions += batch.transactions
        self._batches += 1
        done = applier.take()
        self._applied.add(done)
        if self._sentinel is not None:
            self._tell(self._sentinel, batch, done)

    def _tell(self, sentinel: Sentinel, batch: Range, done: Applied) -> None:
        """For people who watch; of several workers' positions the driver knows the least."""
        share = self._task.share
        sentinel.count_applied(batch.transactions if share.number == 0 else 0, done.changes)
        if share.total == 1:
            sentinel.write_applied(batch.end_lsn, since_1970(batch.committed_at))
