"""One source, from its base copy on: copied, followed, halted and resumed, in a thread of its own.

Invariant: whatever happens to a source happens to it alone, and is in the registry. While it is
paused or halted its changes are still received, so that its server can let go of them; a halted
source has everything applied that was committed before the change that it can't apply.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from millrace.clone.directory import read_setup
from millrace.clone.progress import Progress
from millrace.clone.ready import has_every_row, is_finished
from millrace.consolidate.extension import create_extensions
from millrace.consolidate.registry import (
    Registry,
    SourceRecord,
    SourceState,
    source_directory,
)
from millrace.consolidate.remove import take_back
from millrace.consolidate.settings import SourceSettings
from millrace.consolidate.source_thread import SourceThread, Stopped
from millrace.engine import Engine
from millrace.errors import (
    ApplyError,
    EngineLost,
    FormatError,
    MillraceError,
    ServerError,
    SnapshotLost,
    WorkDirError,
    as_bug,
)
from millrace.follow.bound_copy import read_stream
from millrace.follow.clone_follow import clone_for, prepare_clone
from millrace.follow.feed import FeedKind, open_receiver, watched
from millrace.follow.progress import FollowProgress
from millrace.follow.stream import Stream
from millrace.receive.process import Receiver
from millrace.retry import is_transient
from millrace.room import AGAIN
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.stream_state import StreamState

log = logging.getLogger(__name__)

# How often a source is looked after.
POLL_SECONDS = 1.0
# How often its progress is written down.
NOTE_SECONDS = 2.0
# Pauses after an error that may go away.
FIRST_PAUSE_SECONDS = 1.0
MOST_PAUSE_SECONDS = 60.0


class _Halted(Exception):
    """A change can't be applied, and everything before it is."""

    def __init__(self, cause: MillraceError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class SourceRun(SourceThread):
    """One source. What it meets is in the registry, and never raised."""

    def __init__(
        self,
        name: str,
        find_settings: Callable[[SourceRecord], SourceSettings],
        engine: Engine,
        registry: Registry,
        *,
        copies: threading.Semaphore,
        feed: FeedKind = FeedKind.RECEIVER,
        on_progress: Callable[[FollowProgress], None] = lambda progress: None,
        on_copied: Callable[[SourceSettings], None] = lambda settings: None,
        on_lost: Callable[[EngineLost], None] = lambda error: None,
    ) -> None:
        """`find_settings` may ask servers. `copies`: so many base copies at once. `feed`: who
        receives once it is copied. `on_lost`: the engine is gone, for all sources."""
        super().__init__(name, registry)
        self._find_settings = find_settings
        self._engine = engine
        self._copies = copies
        self._feed = feed
        self._on_progress = on_progress
        self._on_copied = on_copied
        self._on_lost = on_lost
        self._noted_at = 0.0
        # As it was written down last, and not changed since by anything but that.
        self._noted_state: SourceState | None = None

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._is_over():
            began = time.monotonic()
            try:
                with as_bug(f"source {self.name}"):
                    self._live()
            except (MillraceError, OSError, MemoryError) as error:
                self._fail(error)
                if time.monotonic() - began > 2 * MOST_PAUSE_SECONDS:
                    pause = FIRST_PAUSE_SECONDS
                self._wait_for_retry(pause if _may_pass(error) else None)
                pause = min(2 * pause, MOST_PAUSE_SECONDS)

    def begin(self, record: SourceRecord) -> None:
        """A process starts anew what an earlier one could not bring further."""
        if not record.is_paused and not record.state.is_well:
            self._registry.ask_retry(self.name)
            self._take_retry()

    def _take_retry(self) -> bool:
        """Whether somebody has asked to try again."""
        is_copied = is_finished(source_directory(self._registry.directory, self.name))
        state = SourceState.FOLLOWING if is_copied else SourceState.COPYING
        return self._registry.take_retry(self.name, state)

    def _fail(self, error: Exception) -> None:
        hint = self._hint(error)
        log.error("%s%s", error, f" ({hint})" if hint else "")
        self._registry.enter(self.name, SourceState.FAILED, str(error), hint)
        if isinstance(error, EngineLost):
            self._on_lost(error)

    def _hint(self, error: Exception) -> str:
        """What to do, in the words of this command: others are run again, here one source is."""
        return str(getattr(error, "hint", "")).replace(
            AGAIN, f"millrace consolidate resume {self.name}"
        )

    def _wait_for_retry(self, seconds: float | None) -> None:
        """For so long, or until somebody asks; meanwhile, changes are received if they can be."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._receiving():
            while not self._is_over() and not self._take_retry():
                if until is not None and time.monotonic() > until:
                    return
                self._stopping.wait(POLL_SECONDS)

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Receive a source that is copied, as far as it can be."""
        receiver = self._find_receiver()
        if receiver is None:
            yield
            return
        with receiving(receiver), watched(receiver):
            yield

    def _find_receiver(self) -> Receiver | None:
        if self._feed is not FeedKind.RECEIVER:
            return None
        try:
            settings = self._find_settings(self._record())
            setup = read_stream(settings.directory)
            if setup is None or not is_finished(settings.directory):
                return None
            return open_receiver(settings.follow(), setup, self.name)
        except MillraceError as error:
            log.debug("%s", error)
            return None

    def _live(self) -> None:
        """Until it is told to stop; raises what it can't live with."""
        settings = self._find_settings(self._record())
        if not is_finished(settings.directory):
            self._wait_while_paused()
            with self._turn_to_copy():
                self._copy(settings)
            settings = self._find_settings(self._record())
        self._on_copied(settings)
        self._follow_on(settings)

    def _follow_on(self, settings: SourceSettings) -> None:
        """Follow; halt where a change can't be applied, with everything before it applied; go on
        when somebody asks for it."""
        suspect = ""
        while not self._is_over():
            try:
                self._follow(settings, one_by_one=False)
                continue
            except _Halted as halted:
                cause: MillraceError | None = halted.cause
                log.warning("%s; applying what comes before it", halted)
            try:
                self._follow(settings, one_by_one=True)
                # Not found among the changes: it went away, or has another reason and comes again.
                if suspect != str(cause):
                    suspect = str(cause)
                    continue
            except _Halted as halted:
                cause = halted.cause
            while cause is not None and not self._is_over():
                cause = self._halt(settings, cause)
            # What was made by hand meanwhile is for the readers, too.
            if not self._is_over():
                self._on_copied(settings)
            suspect = ""

    def _wait_while_paused(self) -> None:
        """Before it is copied: afterwards, what is paused is received."""
        while not self._is_over() and self._record().is_paused:
            self._registry.enter(self.name, SourceState.PAUSED)
            self._stopping.wait(POLL_SECONDS)

    @contextmanager
    def _turn_to_copy(self) -> Iterator[None]:
        """With one of the base copies that are made at once."""
        while not self._copies.acquire(timeout=POLL_SECONDS):
            self._require_wanted()
        try:
            self._require_wanted()
            yield
        finally:
            self._copies.release()

    def _require_wanted(self, _: object = None) -> None:
        if self._is_over():
            raise Stopped

    def _copy(self, settings: SourceSettings) -> None:
        """The base copy: begun, or, if an earlier one was interrupted, continued or made anew."""
        self._registry.enter(self.name, SourceState.COPYING)
        begun = read_setup(settings.directory) is not None
        resumes = begun and has_every_row(settings.clone())
        if not resumes and (begun or read_stream(settings.directory) is not None):
            log.warning("the base copy was interrupted, and is made anew")
            take_back(settings)
            settings = self._plan_anew()
        create_extensions(settings.route)
        asked = settings.clone(resume=resumes)
        slot = prepare_clone(asked, settings.slot)
        stream = Stream(settings.follow(), self._engine, name=self.name)
        try:
            clone_for(stream, asked, slot, self._engine, _Watch(self._require_wanted))
        finally:
            stream.stop()
        log.info("copied")

    def _plan_anew(self) -> SourceSettings:
        """Schemas may have come and gone since it was planned, and nothing is copied by that plan
        any more."""
        self._registry.forget_plan(self.name)
        return self._find_settings(self._record())

    def _follow(self, settings: SourceSettings, *, one_by_one: bool) -> None:
        """Apply until told to stop, or until a change can't be applied; one by one, until there is
        nothing left."""
        self._noted_state = None
        with Sentinel(settings.directory) as sentinel:
            sentinel.set_apply(not self._record().is_paused)
            stream = self._open_stream(settings, one_by_one=one_by_one)
            try:
                # What is asked from now on counts if this attempt fails.
                self._take_retry()
                state = stream.open()
                while state.is_running:
                    record = self._find_wanted()
                    if record is None:
                        break
                    paused = record.is_paused
                    if sentinel.read().apply is paused:
                        sentinel.set_apply(not paused)
                    self._note(stream, SourceState.PAUSED if paused else SourceState.FOLLOWING)
                    state = stream.step(POLL_SECONDS)
                    if one_by_one and state is StreamState.FOLLOWING:
                        return
                self._require_running(stream)
            finally:
                stream.stop(cancels=True)

    def _open_stream(self, settings: SourceSettings, *, one_by_one: bool = False) -> Stream:
        follow = settings.follow(one_by_one=one_by_one)
        return Stream(follow, self._engine, name=self.name, feed=self._feed)

    def _require_running(self, stream: Stream) -> None:
        """Raise what has ended a stream, if something has."""
        if stream.failure is not None:
            if isinstance(stream.failure, ApplyError | FormatError):
                raise _Halted(stream.failure)
            raise stream.failure
        if not stream.state.is_running:
            raise WorkDirError(
                "its stream has an end position, and has come to it",
                hint="take it away: millrace stream sentinel set endpos --none --dir "
                f"{stream.settings.directory}",
            )

    def _halt(self, settings: SourceSettings, cause: MillraceError) -> MillraceError | None:
        """Receive, and apply nothing, until somebody has mended what is wrong: None; or until
        something else is wrong with the source's tables."""
        hint = self._hint(cause)
        log.error("halted: %s%s", cause, f" ({hint})" if hint else "")
        self._registry.enter(self.name, SourceState.HALTED, cause.message, hint)
        with Sentinel(settings.directory) as sentinel:
            sentinel.set_apply(False)
            stream = self._open_stream(settings)
            try:
                state = stream.open()
                while state.is_running and not self._is_over():
                    if self._take_retry():
                        return None
                    self._note(stream, None)
                    state = stream.step(POLL_SECONDS)
                self._require_running(stream)
            except _Halted as another:
                return another.cause
            finally:
                stream.stop()
        return None

    def _note(self, stream: Stream, state: SourceState | None) -> None:
        """Write down how it is doing; None leaves the state as it is."""
        self._on_progress(stream.progress)
        if state is not None and state is not self._noted_state:
            self._registry.enter(self.name, state)
        self._noted_state = state
        if time.monotonic() - self._noted_at < NOTE_SECONDS:
            return
        self._noted_at = time.monotonic()
        self._registry.note_progress(self.name, describe_progress(stream.progress))


@contextmanager
def receiving(receiver: Receiver) -> Iterator[None]:
    """A receiver alone, for as long as nothing can be applied."""
    receiver.start()
    try:
        yield
    finally:
        receiver.stop()


class _Watch:
    """Nobody watches a base copy part by part, but it is asked now and then whether it is still
    wanted."""

    def __init__(self, update: Callable[[Progress], None]) -> None:
        self.update = update


def describe_progress(progress: FollowProgress) -> dict[str, object]:
    """For the registry; what is not known is None."""
    found = asdict(progress)
    kept = ("received_lsn", "applied_lsn", "lag_bytes", "lag_seconds", "changes_per_second")
    source = progress.source
    if progress.lag_seconds is not None and source.is_out_of_reach:
        # What it has written since it was last asked, nobody knows.
        found["lag_seconds"] = progress.lag_seconds + (source.age_seconds or 0.0)
    return {
        **{name: found[name] for name in kept},
        "changes": progress.changes,
        "wal_status": source.wal_status,
        "retained_bytes": source.retained_bytes,
        "seconds_until_lost": source.seconds_until_lost,
        "is_silent": source.is_silent,
        "noted_at": time.time(),
    }


def _may_pass(error: Exception) -> bool:
    """Whether trying again without anybody's help makes sense: servers and tasks come back, and a
    copy that has lost its snapshot is made anew."""
    is_of_a_task = type(error) is ServerError and "sqlstate" not in error.facts
    return is_transient(error) or is_of_a_task or isinstance(error, SnapshotLost)
