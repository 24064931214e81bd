"""A stream: its receiver, its workers and its end, as one object.

Invariant: a stream ends well only when every transaction that ends at or before the end position is
on the target and none after it; in every other case it fails, or continues. Of what it has in hand
(directory, slot, position, threads, tasks, sessions) nothing is shared with another stream of the
process, so that one that fails or is stopped leaves the others alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from millrace.apply.driver import MANY_POLL_SECONDS, POLL_SECONDS, Catchup
from millrace.apply.task import ApplyTask
from millrace.ddl.stream import begin_capture, with_ddl
from millrace.engine import Engine
from millrace.errors import MillraceError, WorkDirError
from millrace.follow.audit.ending import (
    asked_endpos,
    end_stream,
    require_ahead,
    warn_before_begin,
)
from millrace.follow.bound_copy import require_bound, require_copied, require_target
from millrace.follow.feed import Feed, FeedKind, NoFeed, OtherProcess, open_receiver, watched
from millrace.follow.membership import write_beginning
from millrace.follow.progress import FollowProgress, FollowReporter, FollowResult, state_of
from millrace.follow.settings import FollowSettings
from millrace.follow.stream_threads import StreamThreads
from millrace.log import logged_as
from millrace.lsn import render_lsn
from millrace.postgres.origin import stream_name
from millrace.receive.history import require_history
from millrace.receive.process import Receiver
from millrace.spool.place import place_of
from millrace.workdir.lock import open_lock
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.stream_state import StreamState

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1


def require_setup(sentinel: Sentinel, directory: Path) -> StreamSetup:
    """What the stream of this directory was set up for."""
    setup = sentinel.read_setup()
    if setup is None:
        raise WorkDirError(
            f"no stream is set up in {directory}",
            hint="check --dir; begin with `millrace clone --follow`, or with `millrace snapshot "
            "--follow` and a clone, or with `millrace stream setup`",
        )
    return require_bound(setup)


def open_catchup(
    settings: FollowSettings, setup: StreamSetup, engine: Engine, sentinel: Sentinel
) -> Catchup:
    """Apply, with its positions on the target made or found; in the engine, its tasks are a group
    of their own."""
    require_copied(settings.directory, settings.target, setup)
    require_target(
        settings.directory, settings.target, setup, applied_lsn=sentinel.read().applied_lsn
    )
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
        is_strict=settings.is_strict,
        left=settings.left,
        stay_seconds=settings.stay_seconds,
        batch_seconds=settings.batch_seconds,
        naming=settings.naming,
        # Executors elsewhere have no such directory.
        directory=settings.directory if engine.is_local else None,
    )
    if settings.ddl is not None:
        task = with_ddl(task, settings.ddl, setup.slot_name, settings.naming)
    if settings.one_by_one:
        task = replace(task, batch_bytes=1)
    jobs = settings.apply_jobs or sentinel.read().apply_jobs or 1
    prunes = None if settings.keep_spool else place.prune
    poll_seconds = MANY_POLL_SECONDS if settings.is_one_of_many else POLL_SECONDS
    catchup = Catchup(task, jobs, engine, sentinel, prunes=prunes, poll_seconds=poll_seconds)
    require_history(settings.source, sentinel, catchup.spool.extent().complete_lsn)
    # What an earlier process left behind must not hold the positions.
    catchup.end_sessions()
    catchup.setup(setup.start_lsn)
    return catchup


class Stream:
    """One stream; a process may have many.

    `open` it, call `step` again and again until its state is not a running one, then ask for its
    `result`. What goes wrong makes it `FAILED` and is raised by `result` alone; `open` continues a
    stream that has ended or failed. One thread at a time may call these; `state`, `progress` and
    `failure` may be read at any time.

    `open` waits for both servers, and so does the step that ends a stream: a driver of many gives
    each a thread for that. Any other step returns at once.
    """

    def __init__(
        self,
        settings: FollowSettings,
        engine: Engine,
        *,
        name: str = "",
        feed: FeedKind = FeedKind.RECEIVER,
        is_compared: bool = False,
    ) -> None:
        """`name`: what its metrics and log lines are labelled with; by default metrics have the
        slot's name and log lines none. `is_compared`: every table is going to be compared at the
        end, which is better than the audit's counters."""
        self.name = name
        self.settings = settings
        self.state = StreamState.SETTING_UP
        self.progress = FollowProgress(stream=name)
        self.failure: BaseException | None = None
        self._engine = engine
        self._feed_kind = feed
        self._is_compared = is_compared
        self._result: FollowResult | None = None
        self._receiver: Receiver | None = None
        # What it has in hand; None while nothing of it runs.
        self._stack: ExitStack | None = None
        self._sentinel: Sentinel | None = None
        self._threads: StreamThreads | None = None

    def open(self) -> StreamState:
        """Begin, or continue; the state it is in then."""
        if self._stack is None:
            self.failure = self._result = None
            self._reached_endpos = False
            self.state = StreamState.SETTING_UP
            self._stack = ExitStack()
            with self._failing():
                self._open(self._stack)
        return self.state

    def step(self, seconds: float = 0.0) -> StreamState:
        """Look after it, and wait this long at most for its end; the state it is in then."""
        if self._threads is not None:
            with self._failing():
                if self._threads.wait(seconds):
                    self._end(self._threads)
                else:
                    self._look(self._threads)
        return self.state

    def result(self) -> FollowResult:
        """How it ended; raises what made it fail."""
        if self.failure is not None:
            raise self.failure
        if self._result is None:
            raise WorkDirError("the stream was stopped before it ended")
        return self._result

    def stop(self, *, cancels: bool = False) -> None:
        """End it, if it runs: after the tasks under way, or, if it `cancels` them, at once, and
        their batches are rolled back. `open` continues it."""
        with logged_as(self.name):
            self._stop_receiver()
            if self._stack is None:
                return
            try:
                if self._threads is not None:
                    self._threads.stop(cancels=cancels)
                self._close(StreamState.ENDED)
            except Exception as error:
                # It was stopped: what one of its threads failed with is of no use to anybody.
                log.warning("%s", error)

    @property
    def receiver_pid(self) -> int | None:
        return self._receiver.pid if self._receiver else None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Changes are received, and none is applied, while a copy is made under the slot's
        snapshot; `open` takes it from there. If the copy fails, nothing is received any more."""
        settings = self.settings
        with logged_as(self.name), Sentinel(settings.directory) as sentinel:
            setup = require_setup(sentinel, settings.directory)
            if settings.endpos is not None:
                warn_before_begin(setup, settings.endpos)
            with asked_endpos(sentinel, settings.endpos):
                receiver = self._start_receiver(setup, sentinel)
                self._enter(StreamState.COPYING, sentinel)
                try:
                    with watched(receiver):
                        yield
                except BaseException as error:
                    self._stop_receiver()
                    is_failure = isinstance(error, Exception)
                    state = StreamState.FAILED if is_failure else StreamState.ENDED
                    self._enter(state, sentinel, str(error))
                    raise

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What goes wrong ends the stream, and is kept."""
        with logged_as(self.name):
            try:
                yield
            except Exception as error:
                self.failure = error
                try:
                    self._close(StreamState.FAILED, str(error))
                except Exception as another:
                    log.warning("%s", another)

    def _open(self, stack: ExitStack) -> None:
        settings, directory = self.settings, self.settings.directory
        # A receiver that runs since the copy ends with the stream, whatever becomes of it.
        stack.callback(self._stop_receiver)
        stack.enter_context(open_lock(directory))
        sentinel = self._sentinel = stack.enter_context(Sentinel(directory))
        setup = require_setup(sentinel, directory)
        stack.callback(self._note_last_state)
        self._enter(StreamState.SETTING_UP, sentinel)
        self._engine.start()
        engine = self._engine.group(stream_name(setup.source, setup.slot_name, setup.start_lsn))
        catchup = stack.enter_context(closing(open_catchup(settings, setup, engine, sentinel)))
        stack.callback(_end_sessions_left, catchup)
        stack.callback(self._stop_receiver)
        _set_end(settings, setup, catchup, sentinel)
        self._setup, self._catchup = setup, catchup
        self._feed = self._open_feed(setup, sentinel)
        threads = StreamThreads(
            settings, setup, engine, sentinel, catchup, self.name or setup.slot_name
        )
        stack.callback(threads.close)
        threads.start()
        self._look(threads)
        self._threads = threads

    def _open_feed(self, setup: StreamSetup, sentinel: Sentinel) -> Feed:
        if self._feed_kind is FeedKind.NOBODY:
            return NoFeed()
        if self._feed_kind is FeedKind.OTHER_PROCESS:
            return OtherProcess(sentinel)
        return self._receiver or self._start_receiver(setup, sentinel)

    def _start_receiver(self, setup: StreamSetup, sentinel: Sentinel) -> Receiver:
        write_beginning(self.settings.source, sentinel, setup)
        settings = self.settings
        if settings.ddl is not None and begin_capture(
            settings.source, setup.slot_name, settings.filters
        ):
            sentinel.begin_ddl()
        receiver = self._receiver = open_receiver(self.settings, setup, self.name)
        receiver.start()
        return receiver

    def _stop_receiver(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.stop()

    def _look(self, threads: StreamThreads) -> None:
        """At whoever fills the spool, and how far it has come."""
        if not self._catchup.is_whole.is_set():
            received = self._feed.check()
            if received is not None:
                self._reached_endpos = received.reached_endpos
                log.info("received everything up to %s", render_lsn(received.complete_lsn))
                self._catchup.is_whole.set()
        self.progress = threads.look()
        self._enter(state_of(self.progress), self._sentinel)

    def _end(self, threads: StreamThreads) -> None:
        """Apply has ended: normally, or because something has failed."""
        threads.stop()
        if threads.failure is not None:
            raise threads.failure
        self.progress = threads.look()
        threads.close()
        self._result = self._finish()
        self._close(StreamState.ENDED)

    def _finish(self) -> FollowResult:
        """What an end position takes; nothing if there is none, and the spool was all there was."""
        catchup, sentinel = self._catchup, self._sentinel
        assert sentinel is not None
        counts = catchup.counts
        done = FollowResult(catchup.position, False, counts.transactions, counts.applied)
        if sentinel.read().endpos is None and not self._reached_endpos:
            return done
        ending = end_stream(
            self.settings, self._setup, sentinel, catchup, waits=not self._is_compared
        )
        return replace(
            done, reached_endpos=True, sequences=ending.sequences, unfollowed=ending.findings
        )

    def _enter(self, state: StreamState, sentinel: Sentinel | None, error: str = "") -> None:
        """Take note of the state, here and for others."""
        if sentinel is not None and (state is not self.state or state is StreamState.SETTING_UP):
            _write_state(sentinel, state, error)
            log.debug("the stream is %s", state)
        self.state = self.progress.state = state

    def _close(self, state: StreamState, error: str = "") -> None:
        """Let go of everything; it is in this state then."""
        assert self._stack is not None
        stack, self._last_state = self._stack, (state, error)
        self._stack = self._threads = None
        try:
            stack.close()
        finally:
            self.state = self.progress.state = state

    def _note_last_state(self) -> None:
        assert self._sentinel is not None
        _write_state(self._sentinel, *self._last_state)


def _write_state(sentinel: Sentinel, state: StreamState, error: str = "") -> None:
    """For people who look from outside: no stream fails because of it."""
    try:
        sentinel.write_state(state, error)
    except MillraceError as failed:
        log.warning("%s", failed)


def _set_end(
    settings: FollowSettings, setup: StreamSetup, catchup: Catchup, sentinel: Sentinel
) -> None:
    """The end position asked for is in its place, now that nothing else can be wrong; one of
    before is logged if it ends the stream at once."""
    if settings.endpos is not None:
        require_ahead(catchup.spool, setup, settings.endpos, catchup.furthest)
        sentinel.set_endpos(settings.endpos)
        return
    state = sentinel.read()
    if state.endpos is not None and (state.flushed_lsn or 0) >= state.endpos:
        log.warning(
            "the stream ends at %s, an end position that was set before; to continue past it: "
            "millrace stream sentinel set endpos --none",
            render_lsn(state.endpos),
        )


def _end_sessions_left(catchup: Catchup) -> None:
    """What workers left behind; a target that is away has ended them, and how the stream ended
    counts for more."""
    try:
        catchup.end_sessions()
    except MillraceError as error:
        log.warning("%s", error)


def run_to_end(
    stream: Stream, reporter: FollowReporter, stop: threading.Event | None = None
) -> FollowResult:
    """Open a stream and look after it until it has ended; raises what made it fail, or that `stop`
    was set before it ended."""
    try:
        state = stream.open()
        while state.is_running and not (stop and stop.is_set()):
            reporter.update_follow(stream.progress)
            state = stream.step(LOOK_SECONDS)
        if state is StreamState.ENDED:
            reporter.update_follow(stream.progress)
        return stream.result()
    finally:
        stream.stop()


def run_until(stream: Stream, reporter: FollowReporter, is_done: Callable[[], bool]) -> None:
    """Open a stream that has no end, and look after it until that is so; raises what made it
    fail."""
    try:
        state = stream.open()
        while state.is_running and not is_done():
            reporter.update_follow(stream.progress)
            state = stream.step(LOOK_SECONDS)
        if not state.is_running:
            stream.result()
    finally:
        stream.stop()


def follow(
    settings: FollowSettings,
    engine: Engine,
    reporter: FollowReporter,
    *,
    is_compared: bool = False,
) -> FollowResult:
    """Receive and apply until the end position."""
    return run_to_end(Stream(settings, engine, is_compared=is_compared), reporter)


def apply_spooled(
    settings: FollowSettings, engine: Engine, reporter: FollowReporter, *, waits: bool
) -> FollowResult:
    """Apply what is spooled; if it `waits`, what another process spools as well, until the end
    position."""
    feed = FeedKind.OTHER_PROCESS if waits else FeedKind.NOBODY
    return run_to_end(Stream(settings, engine, feed=feed), reporter)
