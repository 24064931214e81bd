"""Following a source: receiver and apply together, until the end position.

Invariant: it ends well only when every transaction that ends at or before the end position is on
the target and none after it; in every other case it ends with an error, or goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Protocol

from millrace.clone.directory import read_setup
from millrace.clone.engine import Engine
from millrace.clone.standing import read_standing
from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, MillraceError, WorkDirError
from millrace.lsn import render_lsn
from millrace.postgres.connect import APPLICATION, cancel_sessions
from millrace.postgres.slot_batch import sizes_from
from millrace.stream.apply_task import ApplyTask, since_1970
from millrace.stream.catchup import Catchup
from millrace.stream.progress import FollowProgress, FollowReporter, FollowResult
from millrace.stream.receive import Received, ReceiveSettings
from millrace.stream.receiver import Receiver
from millrace.stream.sentinel import Sentinel, StreamSetup
from millrace.stream.settings import FollowSettings
from millrace.stream.spool_place import place_of
from millrace.workdir.lock import open_lock

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
REPORT_SECONDS = 0.5


def require_setup(sentinel: Sentinel, directory: Path) -> StreamSetup:
    """What the stream of this directory was set up for."""
    setup = sentinel.read_setup()
    if setup is None:
        raise WorkDirError(
            f"no stream is set up in {directory}",
            hint="check --dir; begin with `millrace clone --follow`, or with `millrace snapshot "
            "--follow` and a clone, or with `millrace stream setup`",
        )
    return setup


def receive_settings(settings: FollowSettings, setup: StreamSetup) -> ReceiveSettings:
    return ReceiveSettings(
        settings.source,
        setup.slot_name,
        setup.plugin,
        setup.encoding,
        max_spool_bytes=settings.max_spool_bytes,
        max_slot_lag_bytes=settings.max_slot_lag_bytes,
        batches=sizes_from(settings.batches_from_bytes),
        binary=settings.binary,
    )


def open_receiver(settings: FollowSettings, setup: StreamSetup) -> Receiver:
    """The receiver of a stream, not started yet."""
    place = place_of(setup, settings.directory, settings.target)
    return Receiver(receive_settings(settings, setup), place, settings.log)


def open_catchup(
    settings: FollowSettings, setup: StreamSetup, engine: Engine, sentinel: Sentinel
) -> Catchup:
    """Apply, with its positions on the target made or found."""
    _require_copied(settings.directory, settings.target)
    place = place_of(setup, settings.directory, settings.target)
    place.prepare()
    task = ApplyTask(
        settings.target,
        place.stream,
        "",
        place.open_reader,
        setup.encoding,
        place.encoding,
        on_conflict=settings.on_conflict,
        left=settings.left,
        # Executors elsewhere have no such directory.
        directory=settings.directory if engine.is_local else None,
    )
    prunes = None if settings.keep_spool else place.prune
    catchup = Catchup(task, settings.apply_jobs, engine, sentinel, prunes=prunes)
    # What an earlier process left behind must not hold the positions.
    cancel_sessions(settings.target, f"{APPLICATION} apply {setup.slot_name}%")
    catchup.setup(setup.start_lsn)
    return catchup


def _require_copied(directory: Path, target: Dsn) -> None:
    """Refuse to apply to half a copy: the rows it lacks would be missing with exit code 0."""
    run = read_setup(directory)
    if run is None or run["finished_at"]:
        return
    # Single steps never say that all is done; the rows are what matters.
    parts = read_standing(directory, target).parts
    if parts.done < parts.total or not parts.total:
        raise WorkDirError(
            f"the copy in {directory} is not done: {parts.done} of {parts.total} parts of tables",
            hint="go on with `millrace clone --follow --resume`, if its snapshot is held, or begin"
            " again with `millrace clone --follow --restart`",
        )


def follow(
    settings: FollowSettings,
    engine: Engine,
    reporter: FollowReporter,
    *,
    receiver: Receiver | None = None,
) -> FollowResult:
    """Receive and apply until the end position; a receiver that runs already is taken over."""
    with open_lock(settings.directory), Sentinel(settings.directory) as sentinel:
        setup = require_setup(sentinel, settings.directory)
        engine.start()
        if receiver is None:
            receiver = open_receiver(settings, setup)
            receiver.start()
        try:
            with closing(open_catchup(settings, setup, engine, sentinel)) as catchup:
                return _Follow(catchup, receiver, sentinel, reporter).run()
        finally:
            receiver.stop()
            _end_sessions(settings.target, setup.slot_name)


def _end_sessions(target: Dsn, slot: str) -> None:
    """What workers left behind; a target that is away has ended them, and how the stream ended
    counts for more."""
    try:
        cancel_sessions(target, f"{APPLICATION} apply {slot}%")
    except MillraceError as error:
        log.warning("%s", error)


def apply_spooled(
    settings: FollowSettings, engine: Engine, reporter: FollowReporter, *, waits: bool
) -> FollowResult:
    """Apply what is spooled; if it `waits`, what another process spools as well, until the end
    position."""
    with open_lock(settings.directory), Sentinel(settings.directory) as sentinel:
        setup = require_setup(sentinel, settings.directory)
        receiver = _Others(sentinel) if waits else _Nobody()
        with closing(open_catchup(settings, setup, engine, sentinel)) as catchup:
            return _Follow(catchup, receiver, sentinel, reporter).run()


class _Source(Protocol):
    """Whoever fills the spool."""

    def check(self) -> Received | None:
        """How it ended, once it has."""


class _Nobody:
    """The spool is what it is."""

    def check(self) -> Received | None:
        return Received(0, 0, False)


class _Others:
    """Another process fills the spool; it tells through the sentinel."""

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel = sentinel

    def check(self) -> Received | None:
        state = self._sentinel.read()
        flushed = state.flushed_lsn or 0
        if state.endpos is None or flushed < state.endpos:
            return None
        return Received(flushed, flushed, True)


class _Follow:
    def __init__(
        self,
        catchup: Catchup,
        receiver: _Source,
        sentinel: Sentinel,
        reporter: FollowReporter,
    ) -> None:
        self._catchup = catchup
        self._receiver = receiver
        self._sentinel = sentinel
        self._watch = Watch(sentinel, catchup)
        self._reporter = reporter
        self._failure: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> FollowResult:
        thread = threading.Thread(target=self._apply, name="catchup", daemon=True)
        thread.start()
        reached = False
        try:
            while not self._done.wait(POLL_SECONDS):
                if not self._catchup.is_whole.is_set():
                    received = self._receiver.check()
                    if received is not None:
                        reached = received.reached_endpos
                        log.info("received everything up to %s", render_lsn(received.complete_lsn))
                        self._catchup.is_whole.set()
                self._reporter.update_follow(self._watch.look())
        finally:
            self._catchup.stop()
            thread.join()
        if self._failure is not None:
            raise self._failure
        self._reporter.update_follow(self._watch.look())
        counts = self._catchup.counts
        return FollowResult(self._catchup.position, reached, counts.transactions, counts.applied)

    def _apply(self) -> None:
        try:
            self._catchup.run()
        except BaseException as error:
            self._failure = error
        finally:
            self._done.set()


class Watch:
    """Reads where a stream stands, and how fast it gets on."""

    def __init__(self, sentinel: Sentinel, catchup: Catchup) -> None:
        self._sentinel = sentinel
        self._catchup = catchup
        self._before = (time.monotonic(), sentinel.read().changes, 0)
        self._progress = FollowProgress()
        self._looked_at = 0.0

    def look(self) -> FollowProgress:
        """Not more often than anyone can see."""
        now = time.monotonic()
        if now - self._looked_at < REPORT_SECONDS:
            return self._progress
        self._looked_at = now
        state, counts = self._sentinel.read(), self._catchup.counts
        applied_lsn = max(state.applied_lsn or 0, self._catchup.position)
        try:
            lag_bytes = self._catchup.spool.bytes_after(applied_lsn)
            waiting = self._catchup.spool.plan(applied_lsn, 1, None)
        except ConnectionLost as error:  # apply waits for the target, so does this
            log.debug("%s", error)
            return self._progress
        lag_seconds = 0.0
        if waiting is not None:  # since the oldest transaction that waits was committed
            lag_seconds = max(0.0, time.time() - since_1970(waiting.committed_at))
        self._progress = FollowProgress(
            state.received_lsn or 0,
            state.flushed_lsn or 0,
            applied_lsn,
            state.endpos,
            lag_bytes,
            lag_seconds,
            state.apply,
            state.transactions,
            state.changes,
            counts.applied.skipped,
            counts.applied.overwritten,
            *self._rates(now, state.changes, lag_bytes),
        )
        return self._progress

    def _rates(self, now: float, changes: int, lag_bytes: int) -> tuple[float, float | None]:
        """(changes a second, seconds until the lag is gone)."""
        then, changes_then, lag_then = self._before
        elapsed = max(now - then, 1e-3)
        rate = (changes - changes_then) / elapsed
        shrinking = (lag_then - lag_bytes) / elapsed
        if elapsed > 5 * REPORT_SECONDS:
            self._before = (now, changes, lag_bytes)
        if not lag_bytes:
            return rate, 0.0
        return rate, lag_bytes / shrinking if shrinking > 0 else None
