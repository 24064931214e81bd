"""Applying a stretch of the spool: what one Spark task does.

Invariant: a batch is whole source transactions and one target transaction, which also advances the
position; a second attempt begins at the position, so nothing is applied twice and
nothing is left out, whatever became of the first.

A transaction larger than memory streams through: its chunks are folded one after the other, in
the same target transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn

from millrace import failpoint
from millrace.apply.applier import Applier
from millrace.apply.conflict import ApplyCounts, OnConflict
from millrace.apply.position import open_position
from millrace.apply.prefetch import ahead
from millrace.apply.prepare import Preparer, Share, Work
from millrace.apply.sections import iter_sections
from millrace.apply.structure import Place, Structure, StructureScan, WatchedRow
from millrace.apply.structure_batch import StructureBatch
from millrace.apply.sync_position import SyncPosition
from millrace.apply.table_state import (
    TableStates,
    cuts,
    lock_states,
    read_table_states,
    skipped_tables,
    views,
)
from millrace.config.dsn import Dsn
from millrace.errors import ApplyError, Blocked, ConnectionLost, MillraceError, as_bug
from millrace.filter.exclusions import Exclusions
from millrace.lsn import parse_lsn, render_lsn
from millrace.name import Naming
from millrace.postgres.pgoutput.messages import MICROSECONDS_1970_TO_2000, LogicalMessage
from millrace.postgres.wire.connect import connect, session_owner
from millrace.postgres.wire.libpq import execute, open_session
from millrace.retry import with_retries
from millrace.spool.interface import Range, Reader
from millrace.workdir.sentinel import FILE as SENTINEL_FILE
from millrace.workdir.sentinel import Sentinel

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

# Bytes of changes that one target transaction takes, at least; it ends with the transaction
# of the source that reaches it.
BATCH_BYTES = 32 << 20
# Bytes of changes folded at once: enough to make sets large, little enough to bound memory. More
# than half of a batch: a third, tiny piece would leave no time to make the next batch's first.
CHUNK_BYTES = 18 << 20
# Pieces of work made while the target is busy with another.
AHEAD = 2
# After catching up: how long to gather changes before the next batch, and how long to stay
# without any, where nobody says otherwise.
GATHER_SECONDS = 0.1
STAY_SECONDS = 2.0

# No triggers, no foreign keys: the source has done all that; stream.silence does the rest, and must
# see what others commit meanwhile. Enough memory to keep a stage, and to hash it. Rows are looked
# up by key unless most of the table changes: at its default cost for a page out of order, the
# planner would hash a table of a million rows to update twenty thousand. Statements are simple and
# last a second: compiling them takes longer than it saves.
SESSION = (
    "SET session_replication_role = replica; SET default_transaction_isolation = 'read committed'; "
    "SET temp_buffers = '64MB'; SET work_mem = '128MB'; "
    "SET random_page_cost = 1.1; SET jit = off"
)

# What is read of the target's tables waits for no lock that apply itself may hold (see
# target_table). Should it wait nevertheless, the wait must end: apply would never continue.
CATALOG_LOCK_TIMEOUT = "60s"

# What is called at a logical message's place in the stream: everything before it is applied, in
# this session's transaction or earlier, and nothing after it. What it does there commits with the
# rows and the position, so it happens once. It survives pickle, and does not end the transaction.
MessageHook = Callable[[PGconn, LogicalMessage], None]

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class ApplyTask:
    """One task: which stream, from which spool, to which target, how far."""

    target: Dsn
    stream: str
    # "origin" or "table"; see millrace.apply.position.
    position_kind: str
    # Opens the spool where the task runs.
    open_spool: Callable[[], Reader]
    # PostgreSQL's and Python's name of the stream's encoding.
    encoding: str
    python_encoding: str
    # Transactions that end after this stay; None for all there are. With `directory`, the end
    # position of the sentinel counts instead, which may change meanwhile.
    until_lsn: int | None = None
    # The task ends with the first batch after this time.
    seconds: float = 10.0
    # The work directory, if the task can reach it: it is steered from there, and stays a while
    # when it has caught up, because starting another costs more than waiting.
    directory: Path | None = None
    # How long it stays without any change.
    stay_seconds: float = STAY_SECONDS
    batch_bytes: int = BATCH_BYTES
    # A batch ends before it would hold more of the source's time than this; None for any.
    batch_seconds: float | None = None
    chunk_bytes: int = CHUNK_BYTES
    on_conflict: OnConflict = OnConflict.STOP
    # A table that has another shape than its rows stops the stream, whether or not they fit.
    is_strict: bool = False
    left: Exclusions = field(default_factory=Exclusions)
    naming: Naming = field(default_factory=Naming)
    share: Share = field(default_factory=Share)
    # The stream of which this is a worker, by which the states of its tables are found.
    family: str = ""
    # Of a task that brings one table forward, by itself: which copy of it.
    sync_id: str | None = None
    # By the prefix of logical messages; all others are passed over.
    message_hooks: Mapping[str, MessageHook] = field(default_factory=dict)
    # Who changes the target's structure where the source's did; None if nobody does.
    structure: Structure | None = None


@dataclass(frozen=True)
class ApplyOutcome:
    """Where the task left the stream."""

    position: int
    # Microseconds since 2000 of the last transaction applied; None if there was none.
    committed_at: int | None
    transactions: int
    batches: int
    applied: ApplyCounts
    error: MillraceError | None = None
    # It made way for who changes the state of a table.
    made_way: bool = False


class _TablesChanged(Exception):
    """A table's state is another than when the batch was prepared."""


class _MadeWay(Exception):
    """Somebody is about to change the state of a table."""


@dataclass(frozen=True)
class _Batch:
    """Marks the begin or the end of a batch among its work."""

    range: Range
    is_end: bool


def apply_spool(task: ApplyTask, attempt: int = 0) -> ApplyOutcome:
    """Apply what the spool holds; lost connections are opened again, other errors are returned."""
    run = _Run(task)
    try:
        with as_bug(f"applying stream {task.stream}"):
            return run.outcome(None, made_way=not _go(run))
    except MillraceError as error:
        return run.outcome(error)
    finally:
        run.close()


def _go(run: _Run) -> bool:
    """False if it made way before it had applied everything."""
    while True:
        try:
            with_retries(run.go, on_retry=log_retry)
            return True
        except _TablesChanged:
            log.debug("a table's state has changed: its changes are prepared again")
        except _MadeWay:
            return False


def apply_role(stream: str) -> str:
    """What a worker's sessions are called."""
    return f"apply {session_owner(stream)}"


def render_committed_at(microseconds: int) -> str:
    """A time of the source, as a timestamptz reads it."""
    return (_EPOCH + timedelta(microseconds=microseconds)).isoformat(sep=" ")


def since_1970(microseconds: int) -> float:
    """A time of the source, in seconds since 1970."""
    return (microseconds + MICROSECONDS_1970_TO_2000) / 1e6


def log_retry(error: BaseException, pause: float) -> None:
    """For `with_retries`."""
    log.warning("%s; trying again in %.1f s", error, pause)


def _structure_scan(task: ApplyTask, spool: Reader) -> StructureScan | None:
    if task.structure is None or task.sync_id is not None:
        return None
    return StructureScan(spool, task.structure, task.python_encoding)


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
        self._position = (
            open_position(task.position_kind, task.stream)
            if task.sync_id is None
            else SyncPosition(task.family, task.sync_id)
        )
        self._tables: TableStates = {}
        self._lsn = 0
        self._committed_at: int | None = None
        self._transactions = 0
        self._batches = 0
        self._applied = ApplyCounts()
        self._deadline = time.monotonic() + task.seconds
        self._sentinel = _find_sentinel(task.directory)
        # A task for one table is ahead of or behind the others, so a message has no place in it.
        self._hooks = task.message_hooks if task.sync_id is None else {}
        self._scan = _structure_scan(task, self._spool)
        # The next transaction, if it changes the structure.
        self._alone: Range | None = None

    def outcome(self, error: MillraceError | None, *, made_way: bool = False) -> ApplyOutcome:
        return ApplyOutcome(
            self._lsn,
            self._committed_at,
            self._transactions,
            self._batches,
            self._applied,
            error,
            made_way,
        )

    def close(self) -> None:
        self._spool.close()
        if self._sentinel is not None:
            self._sentinel.close()

    def go(self) -> None:
        """Until the spool is applied or the time is up."""
        task = self._task
        name = apply_role(task.stream)
        session = open_session(task.target, name, task.encoding)
        try:
            # The session for those who read catalogs within its transaction; closed with it.
            itself: Connection = psycopg.Connection(session)
            execute(session, SESSION)
            self._lsn = self._position.take(session)
            limit = CATALOG_LOCK_TIMEOUT
            with connect(task.target, f"{name} catalog", lock_timeout=limit) as catalog:
                self._go_on(session, catalog)
                while self._alone is not None and time.monotonic() < self._deadline:
                    self._apply_alone(session, itself, self._alone)
                    execute(session, "DISCARD TEMP")
                    self._go_on(session, catalog)
        finally:
            session.finish()

    def _go_on(self, session: PGconn, catalog: Connection) -> None:
        """Up to a change of structure: what is read of the target's tables is right until then."""
        self._alone = None
        preparer = self._new_preparer(catalog)
        if self._has_states:
            self._tables = read_table_states(catalog, self._task.family)
        with ahead(self._iter_work(preparer, self._lsn), AHEAD) as work:
            self._apply(session, work)

    def _new_preparer(self, catalog: Connection) -> Preparer:
        task = self._task
        return Preparer(
            catalog,
            task.left,
            task.share,
            task.naming,
            staged_inserts=task.on_conflict is not OnConflict.STOP,
            # What DDL leaves behind is compared where it runs.
            is_strict=task.is_strict and task.structure is None,
            finds_roots=task.structure is not None,
            leaves_out=None if task.structure is None else task.structure.leaves_out,
        )

    def _apply_alone(self, session: PGconn, itself: Connection, found: Range) -> None:
        """A source transaction that changes the structure: in its order, nothing ahead."""
        task = self._task
        assert task.structure is not None
        applier = Applier(session, task.on_conflict)
        self._begin(session, applier)
        try:
            applier.drop_stages()
            batch = StructureBatch(
                session,
                itself,
                task.structure,
                applier,
                self._new_preparer,
                task.family,
                found.end_lsn,
            )
            at = render_committed_at(found.committed_at)
            relations = self._spool.relations(found)
            for chunk in self._spool.chunks(found, task.chunk_bytes):
                for section in iter_sections(
                    chunk,
                    relations,
                    task.python_encoding,
                    {*self._hooks, task.structure.prefix},
                    task.structure.tables,
                ):
                    if isinstance(section, LogicalMessage):
                        if section.prefix != task.structure.prefix:
                            self._hooks[section.prefix](session, section)
                            continue
                        (table,) = task.structure.tables
                        section = WatchedRow.lost(table, section)
                    if isinstance(section, WatchedRow):
                        place = Place(section.lsn, found.end_lsn, at, task.python_encoding)
                        batch.change(section, place)
                    else:
                        batch.apply(section)
            batch.end()
        except (ApplyError, Blocked) as error:
            if session.transaction_status != TransactionStatus.UNKNOWN:
                execute(session, "ROLLBACK")
                task.structure.note_failure(session, error)
            raise
        self._commit(session, found, applier)

    def _iter_work(self, preparer: Preparer, after_lsn: int) -> Iterator[Work | _Batch]:
        task, lsn = self._task, after_lsn
        while True:
            found = self._next_range(lsn)
            if found is None:
                return
            if self._is_alone(found):
                self._alone = found
                return
            preparer.skipped = skipped_tables(self._tables, found.end_lsn)
            yield _Batch(found, False)
            relations = self._spool.relations(found)
            for chunk in self._spool.chunks(found, task.chunk_bytes):
                for section in iter_sections(
                    chunk, relations, task.python_encoding, self._hooks.keys()
                ):
                    label = section.label
                    with as_bug(f"{label}: changes after {render_lsn(lsn)}", table=label):
                        work = preparer.prepare(section)
                    if work is not None:
                        yield work
            yield _Batch(found, True)
            lsn = found.end_lsn
            if time.monotonic() > self._deadline:
                return

    def _next_range(self, lsn: int) -> Range | None:
        """What is to be applied next; None if this task has nothing more to do."""
        until = self._task.until_lsn
        give_up_at = time.monotonic() + self._task.stay_seconds
        while True:
            state = self._sentinel.read() if self._sentinel else None
            if state is not None:
                if not state.apply:
                    return None
                until = state.endpos
            found = self._plan(lsn, until)
            if state is None:
                return found
            is_whole = until is not None and (state.flushed_lsn or 0) >= until
            is_last_look = is_whole or time.monotonic() > min(give_up_at, self._deadline)
            if found is None and is_last_look:
                # What was spooled before that was read is seen now.
                found = self._plan(lsn, until)
                if found is None:
                    return None
            if found is None:
                time.sleep(GATHER_SECONDS)
            elif self._may_apply(found):
                return found

    def _may_apply(self, found: Range) -> bool:
        """False if an end position before its end was set since that was looked at."""
        return self._sentinel is None or self._sentinel.claim(found.end_lsn)

    def _plan(self, lsn: int, until: int | None) -> Range | None:
        """The next range; it does not reach across a position from which on a table's changes
        count."""
        found = self._within_seconds(lsn, self._spool.plan(lsn, self._task.batch_bytes, until))
        if self._scan is not None and found is not None:
            found = self._scan.cut(lsn, found)
        for cut in cuts(self._tables, lsn):
            if found is not None and found.end_lsn > cut:
                before = self._spool.plan(lsn, self._task.batch_bytes, cut)
                if before is not None:
                    return before
        return found

    def _within_seconds(self, lsn: int, found: Range | None) -> Range | None:
        """The range, or as much of it as was committed within the seconds that a batch may hold;
        one transaction at least."""
        limit = self._task.batch_seconds
        if limit is None or found is None or found.transactions == 1:
            return found
        first = self._spool.plan(lsn, 1, found.end_lsn)
        assert first is not None
        size = found.bytes
        while found.committed_at - first.committed_at > limit * 1e6 and found.transactions > 1:
            size //= 2
            found = self._spool.plan(lsn, size, found.end_lsn) or first
        return found

    def _is_alone(self, found: Range) -> bool:
        return self._scan is not None and self._scan.is_alone(found)

    @property
    def _has_states(self) -> bool:
        """Whether tables may be left to others for a while."""
        return bool(self._task.family) and self._task.sync_id is None

    def _apply(self, session: PGconn, work: Iterator[Work | _Batch]) -> None:
        applier = Applier(session, self._task.on_conflict)
        for item in work:
            if isinstance(item, LogicalMessage):
                self._hooks[item.prefix](session, item)
            elif not isinstance(item, _Batch):
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
        if self._has_states:
            self._check_tables(session)
        applier.begin()
        failpoint.hit("apply.after_begin")

    def _check_tables(self, session: PGconn) -> None:
        """Hold the states of tables as they are until the batch is committed."""
        found = lock_states(session, self._task.family, self._task.stream)
        if found is None:
            raise _MadeWay
        if views(found) != views(self._tables):
            raise _TablesChanged

    def _commit(self, session: PGconn, batch: Range, applier: Applier) -> None:
        applier.end()
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

    def _tell(self, sentinel: Sentinel, batch: Range, done: ApplyCounts) -> None:
        """For people who watch; of several workers' positions the driver knows the least."""
        share = self._task.share
        sentinel.count_applied(batch.transactions if share.number == 0 else 0, done.changes)
        if share.total == 1:
            sentinel.write_applied(batch.end_lsn, since_1970(batch.committed_at))
