"""Tables copied again while the stream continues: the driver's side.

Invariant: a table is followed again only from a position at which its rows were exactly the
source's; the rows, and the position that belongs to them, commit together. A process that ends at
any place leaves a table that the next one takes up there, or copies from the beginning.

    publish ─► state copying ─► temporary slot: snapshot at C ─► copy ─► catch up (C, P] ─► followed

From `copying` on, apply leaves out the table's changes; other tables are applied as before. When
the copy is committed, its changes after C are applied from the spool up to P, where its worker
stands. During the last step no batch of that worker begins, so that P stays where it is. If the
worker is still before C, there is nothing to catch up with: it leaves out the table up to C.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg

from millrace import failpoint
from millrace.apply.driver import BLIND_TASKS, Catchup, out_of_sight
from millrace.apply.position import read_position
from millrace.apply.prepare import Share
from millrace.apply.table_state import (
    SyncState,
    TableName,
    TableState,
    install,
    lock_key_sql,
    read_table_states,
    write_copying,
    write_followed,
)
from millrace.apply.target_table import TargetTable, read_target_table
from millrace.apply.task import ApplyTask, apply_spool
from millrace.engine import Engine
from millrace.errors import ApplyError, ConfigError, ConnectionLost, MillraceError
from millrace.follow.audit.baseline import renewing_baseline
from millrace.follow.membership import take_up
from millrace.follow.settings import FollowSettings
from millrace.follow.table_sync.copy_task import TableCopy, copy_statements, copy_table, end_copy
from millrace.follow.table_sync.publication import publish_table
from millrace.follow.table_sync.source import (
    current_lsn,
    find_table,
    has_table,
    open_sync_snapshot,
)
from millrace.lsn import render_lsn
from millrace.postgres.wire.connect import connect, translated
from millrace.receive.backoff import GIVE_UP_SECONDS, Patience, may_retry
from millrace.workdir import sync_request as requests
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.sync_request import RequestState, SyncRequest

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

# How soon a request is seen.
POLL_SECONDS = 0.5
# The same, where there are many streams.
MANY_POLL_SECONDS = 2.0
# Of a lock on the source, which is asked for again and again.
LOCK_NOT_AVAILABLE = "55P03"
LOCK_PAUSE_SECONDS = 2.0
# A table that is no further behind, in bytes of the spool, catches up while its worker waits.
HAND_OVER_BYTES = 4 << 20
# How often tables are looked for that DDL asks to be copied; and how often a copy looks whether the
# stream has come to its position.
ADOPT_SECONDS = 1.0
STREAM_POLL_SECONDS = 0.1
# Rounds of catching up; a worker that is faster than this waits longer in the end.
ROUNDS = 20


class _Stopped(Exception):
    """The stream ends; what is not done is taken up by the next process."""


class _Superseded(Exception):
    """DDL has changed the table: its copy begins anew, or ends with it."""


class TableSync:
    """Takes up requests, one after the other, on a thread of its own."""

    def __init__(
        self,
        settings: FollowSettings,
        setup: StreamSetup,
        engine: Engine,
        sentinel: Sentinel,
        catchup: Catchup,
    ) -> None:
        self._settings = settings
        self._setup = setup
        self._engine = engine
        self._sentinel = sentinel
        self._catchup = catchup
        self._stop = threading.Event()
        self._finishing = threading.Event()
        # The copy whose task is running.
        self._copying: str | None = None
        self._adopted_at = 0.0
        # Tables may change while they are copied; where, only the stream knows.
        self._has_ddl = settings.ddl is not None

    def prepare(self) -> None:
        """Before apply begins: take tables out of its hands that it may be unable to follow."""
        self._adopt()
        for request in requests.read_requests(self._sentinel, unfinished=True):
            if not self._is_beyond_end(request) and self._state_of(request) is None:
                with self._noted(request):
                    self._take_up(request)

    def _adopt(self) -> None:
        """Take up what the target says is unfinished: DDL asks for copies there, with what it does;
        and the work directory may have been lost."""
        self._adopted_at = time.monotonic()
        with self._open_target() as target:
            states = read_table_states(target, self._catchup.stream)
        waiting = requests.read_requests(self._sentinel, unfinished=True)
        known = {(one.schema, one.name) for one in waiting}
        for name, state in states.items():
            if state.is_unfinished and name not in known:
                found = requests.request_sync(self._sentinel, *name, "its copy is not done")
                requests.note_running(self._sentinel, found.id, state.sync_id, state.lsn)

    def run(self) -> None:
        """Until `stop`, or until `finish` was called and nothing is left to do; raises what stopped
        a copy. A server that is away is waited for as long as the receiver does."""
        patience = Patience(GIVE_UP_SECONDS)
        patience.connected()
        try:
            while not self._stop.is_set():
                try:
                    if not self._step():
                        return
                    patience.connected()
                except MillraceError as error:
                    if self._stop.is_set():
                        return
                    pause = patience.after(error)
                    log.warning("%s; trying again in %.1f s", error, pause)
                    self._stop.wait(pause)
        except _Stopped:
            return

    def _step(self) -> bool:
        """Do what is next, or wait a moment; False when there is nothing left, and nothing to
        come."""
        # In this order: what was queued before `finish` is seen.
        is_finishing = self._finishing.is_set()
        request = self._next()
        if request is not None:
            self._sync(request)
        elif is_finishing:
            return False
        else:
            is_one = self._settings.is_one_of_many
            self._stop.wait(MANY_POLL_SECONDS if is_one else POLL_SECONDS)
        return True

    def finish(self) -> None:
        """Nothing more is to come: do what is queued, then end."""
        self._finishing.set()

    def stop(self) -> None:
        """End soon: a copy under way is rolled back."""
        self._stop.set()
        copying = self._copying
        if copying is not None:
            try:
                end_copy(self._settings.target, copying)
            except MillraceError as error:
                log.warning("%s", error)

    def _next(self) -> SyncRequest | None:
        if not self._sentinel.read().apply:
            return None
        if self._has_ddl and time.monotonic() - self._adopted_at > ADOPT_SECONDS:
            self._adopt()
        waiting = requests.read_requests(self._sentinel, unfinished=True)
        return next((one for one in waiting if not self._is_beyond_end(one)), None)

    def _is_beyond_end(self, request: SyncRequest) -> bool:
        """Whether a copy that begins now would be newer than the stream's end."""
        endpos = self._sentinel.read().endpos
        if endpos is None or request.state is RequestState.RUNNING:
            return False
        return current_lsn(self._settings.source) >= endpos

    def _sync(self, request: SyncRequest) -> None:
        with self._noted(request):
            try:
                self._bring_forward(request)
            except _Superseded:
                requests.note_ended(self._sentinel, request.id, RequestState.CANCELLED)
                log.info("%s was changed while it was copied", request.label)
                self._adopt()
                return
        requests.note_ended(self._sentinel, request.id, RequestState.DONE)
        log.info("%s is copied, and followed again", request.label)

    def _bring_forward(self, request: SyncRequest) -> None:
        state = self._state_of(request) or self._take_up(request)
        try:
            if state.state is SyncState.COPYING:
                self._copy_unlocked(request, state)
            if state.state is not SyncState.FOLLOWED:
                self._hand_over(request, state)
        except MillraceError as error:
            if self._has_ddl and not self._stop.is_set() and self._is_superseded(state):
                raise _Superseded from error
            raise

    def _is_superseded(self, state: TableState) -> bool:
        """Whether DDL has ended this copy: another one is asked for, or the table is gone."""
        with self._open_target() as target:
            states = read_table_states(target, self._catchup.stream)
        return all(one.sync_id != state.sync_id for one in states.values())

    @contextmanager
    def _noted(self, request: SyncRequest) -> Iterator[None]:
        """What goes wrong is seen by who asked for it, and is tried again by the next process; what
        waiting may help continues where it was."""
        try:
            yield
        except MillraceError as error:
            if self._stop.is_set():
                raise _Stopped from None
            if may_retry(error):
                self._tell(request, f"waits: {error.message}")
                raise
            requests.note_ended(self._sentinel, request.id, RequestState.QUEUED, error.message)
            raise

    def _state_of(self, request: SyncRequest) -> TableState | None:
        """The state that belongs to the request; None if it is to be taken up."""
        with self._open_target() as target:
            states = read_table_states(target, self._catchup.stream)
        state = states.get((request.schema, request.name))
        if request.state is not RequestState.RUNNING or state is None:
            return None
        is_ours = state.sync_id == request.sync_id and state.state is not SyncState.ABANDONED
        return state if is_ours else None

    def _take_up(self, request: SyncRequest) -> TableState:
        """Look the table up on both sides, and let apply leave it alone from the next batch on."""
        name = request.schema, request.name
        log.info("%s is to be copied again: %s", request.label, request.reason)
        if name in self._settings.left.tables:
            raise ConfigError(
                f"{request.label} is to be copied again, but --filters leaves it out",
                hint=f"withdraw the request: `millrace stream resync --cancel {request.label}`",
            )
        oid = find_table(self._settings.source, name)
        self._target_table(name)
        sync_id, floor = secrets.token_hex(6), self._catchup.position
        requests.note_running(self._sentinel, request.id, sync_id, floor)
        failpoint.hit("sync.taken_up")
        with self._open_target() as target:
            before = read_table_states(target, self._catchup.stream).get(name)
            if before is not None and before.is_unfinished:
                end_copy(self._settings.target, before.sync_id)
            install(target)
            with self._alone(target, name), target.transaction():
                write_copying(
                    target,
                    self._catchup.stream,
                    name,
                    lsn=floor,
                    sync_id=sync_id,
                    source_oid=oid,
                )
        failpoint.hit("sync.copying")
        return TableState(*name, SyncState.COPYING, floor, sync_id, oid)

    def _copy_unlocked(self, request: SyncRequest, state: TableState) -> None:
        """A lock of the source's is waited for as long as it takes: VACUUM, CREATE INDEX and ALTER
        TABLE end."""
        while True:
            try:
                return self._copy(request, state)
            except MillraceError as error:
                if self._stop.is_set() or error.facts.get("sqlstate") != LOCK_NOT_AVAILABLE:
                    raise
                self._tell(request, f"waits for a lock: {error.message}")
                if self._stop.wait(LOCK_PAUSE_SECONDS):
                    raise _Stopped from None

    def _copy(self, request: SyncRequest, state: TableState) -> None:
        settings, name = self._settings, (state.schema, state.name)
        self._target_table(name)
        if self._has_ddl:
            state = replace(state, source_oid=self._await_table(request, state))
        if self._setup.plugin == "pgoutput":
            publish_table(
                settings.source,
                self._setup.slot_name,
                state.source_oid,
                self._stop.is_set,
                lambda step: self._tell(request, step),
            )
        with connect(settings.source, "sync") as source:
            # Before the position is taken: whatever is committed after it gets into the spool.
            take_up(source, self._sentinel, self._setup, state.source_oid)
        self._tell(request, "takes a snapshot of the source")
        with (
            renewing_baseline(
                self._sentinel, settings.source, self._setup, state.source_oid
            ) as look,
            open_sync_snapshot(
                settings.source,
                name,
                state.source_oid,
                # That of an attempt whose connection was lost may still be there.
                slot=f"millrace_sync_{state.sync_id}_{secrets.token_hex(3)}",
                encoding=self._setup.encoding,
                is_stopped=self._stop.is_set,
            ) as snapshot,
        ):
            failpoint.hit("sync.snapshot")
            look(snapshot.id)
            if self._has_ddl:
                self._await_structure(request, state, snapshot.lsn)
            table = self._target_table(name)
            task = TableCopy(
                settings.source,
                settings.target,
                self._catchup.stream,
                state.sync_id,
                snapshot.id,
                snapshot.lsn,
                self._setup.encoding,
                table,
                copy_statements(
                    snapshot.tables, table, name, settings.left, is_strict=settings.is_strict
                ),
            )
            self._tell(request, f"copies it as of {render_lsn(snapshot.lsn)}")
            with self._as_copying(state.sync_id):
                outcome = self._engine.call(copy_table, task, f"copy {state.label}")
            if outcome.error is not None:
                raise outcome.error
        requests.note_copied(self._sentinel, request.id, snapshot.lsn, outcome.rows)
        log.info("%s: copied %d rows as of %s", state.label, outcome.rows, render_lsn(snapshot.lsn))

    def _await_table(self, request: SyncRequest, state: TableState) -> int:
        """The OID of the table that the source has by this name; what became of it there, if it has
        none, comes with the stream."""
        while not has_table(self._settings.source, (state.schema, state.name)):
            self._tell(request, "waits for the stream to say what became of it")
            self._wait_for_stream(state, has_ended=self._finishing.is_set())
        return find_table(self._settings.source, (state.schema, state.name))

    def _await_structure(self, request: SyncRequest, state: TableState, lsn: int) -> None:
        """Until the target's table is what the source's was at a position: all DDL up to there is
        replayed. DDL after it would end this copy."""
        self._tell(request, f"waits for the stream to come to {render_lsn(lsn)}")
        while True:
            # In this order: what was complete then is in the spool that is looked at afterwards.
            has_ended = self._finishing.is_set()
            complete = self._sentinel.read_source().complete_lsn or 0
            position = self._catchup.position
            with closing(self._catchup.worker_of(state.schema, state.name).open_spool()) as spool:
                is_behind = spool.plan(position, 1, lsn) is not None
            if position >= lsn or (complete >= lsn and not is_behind):
                return
            self._wait_for_stream(state, has_ended=has_ended)

    def _wait_for_stream(self, state: TableState, *, has_ended: bool) -> None:
        """A stream that has come to its end position brings nothing more: the copy is left to the
        next one, and the audit names its table."""
        if has_ended or self._stop.wait(STREAM_POLL_SECONDS):
            raise _Stopped
        if self._is_superseded(state):
            raise _Superseded
        if not self._sentinel.read().apply:
            raise ConnectionLost("the stream is paused", sqlstate=None)

    @contextmanager
    def _as_copying(self, sync_id: str) -> Iterator[None]:
        self._copying = sync_id
        try:
            if self._stop.is_set():
                raise _Stopped
            yield
        finally:
            self._copying = None

    def _hand_over(self, request: SyncRequest, state: TableState) -> None:
        """Bring the table to its worker's position, and hand it back."""
        name = state.schema, state.name
        worker = self._catchup.worker_of(*name)
        task = replace(
            worker, share=Share(only=name), sync_id=state.sync_id, directory=None, until_lsn=None
        )
        while True:
            self._tell(request, "catches up")
            self._catch_up(task, worker.stream)
            failpoint.hit("sync.caught_up")
            if self._follow_from_here(task, worker.stream, name):
                failpoint.hit("sync.followed")
                return

    def _catch_up(self, task: ApplyTask, worker: str) -> None:
        """Until it is close, while its worker continues."""
        for _ in range(ROUNDS):
            with self._open_target() as target:
                lsn, position = self._positions(target, task, worker)
            if position <= lsn:
                return
            with closing(task.open_spool()) as spool:
                behind = spool.bytes_after(lsn) - spool.bytes_after(position)
            if behind < HAND_OVER_BYTES:
                return
            self._apply(task, lsn, position)

    def _follow_from_here(self, task: ApplyTask, worker: str, name: TableName) -> bool:
        """False if another session has moved the worker after all."""
        with self._open_target() as target, self._alone(target, name):
            lsn, position = self._positions(target, task, worker)
            if position > lsn:
                self._apply(task, lsn, position)
            with translated("handing a table over"), target.transaction():
                # A pooler may have given us another session than the one that took the lock.
                target.execute(f"SELECT pg_advisory_xact_lock({lock_key_sql(worker)})")
                lsn, position = self._positions(target, task, worker)
                if position > lsn:
                    return False
                assert task.sync_id is not None
                failpoint.hit("sync.before_followed")
                return write_followed(target, task.family, task.sync_id)

    def _apply(self, task: ApplyTask, lsn: int, until_lsn: int) -> None:
        """The table's own changes up to a position."""
        blind = 0
        while lsn < until_lsn:
            if self._stop.is_set():
                raise _Stopped
            outcome = self._engine.call(
                apply_spool,
                replace(task, until_lsn=until_lsn),
                f"catch up {'.'.join(task.share.only or ())}",
            )
            if outcome.error is not None:
                raise outcome.error
            blind = 0 if outcome.position > lsn else blind + 1
            if blind == BLIND_TASKS:
                raise out_of_sight()
            lsn = outcome.position

    def _positions(self, target: Connection, task: ApplyTask, worker: str) -> tuple[int, int]:
        """(of the table, of its worker)."""
        states = read_table_states(target, task.family).values()
        own = next((one for one in states if one.sync_id == task.sync_id), None)
        if own is None or own.state is not SyncState.CATCHING_UP:
            raise ApplyError(
                f"{'.'.join(task.share.only or ())}: its copy was cancelled, or another one begun"
            )
        return own.lsn, read_position(target, worker) or 0

    @contextmanager
    def _alone(self, target: Connection, name: TableName) -> Iterator[None]:
        """No batch of the table's worker is open, and none begins, unless the session is lost."""
        key = lock_key_sql(self._catchup.worker_of(*name).stream)
        with translated("waiting for the batch that is being applied"):
            target.execute(f"SELECT pg_advisory_lock({key})")
        try:
            yield
        finally:
            with suppress(psycopg.Error):  # a session that is lost has let go
                target.execute(f"SELECT pg_advisory_unlock({key})")

    def _target_table(self, name: TableName) -> TargetTable:
        label = ".".join(name)
        with self._open_target() as target, translated(f"looking up {label} on the target"):
            table = read_target_table(target, *self._settings.naming.target(*name))
        if table is None:
            raise ApplyError(
                f"{label}: the target has no such table",
                hint="create it there as it is on the source, then run the same command again; or "
                f"withdraw the request: `millrace stream resync --cancel {label}`",
                table=label,
            )
        return table

    def _open_target(self) -> Connection:
        return connect(self._settings.target, "sync")

    def _tell(self, request: SyncRequest, step: str) -> None:
        if step:
            log.info("%s: %s", request.label, step)
        requests.note_step(self._sentinel, request.id, step)
