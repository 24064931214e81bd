"""`consolidate run`: every source of the file, copied and followed until it is stopped.

Invariant: one process runs a consolidation; each source lives in a thread of its own and none waits
for another, but for its turn to copy and to apply. What the file says counts when a source begins;
what was decided for it then is kept (`millrace.consolidate.plan`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path

from millrace.consolidate.config import SourceConfig, read_config
from millrace.consolidate.foreign_key_index import ForeignKeyIndexes
from millrace.consolidate.plan import SourcePlan, read_plan
from millrace.consolidate.readers import grant_to_readers
from millrace.consolidate.receive_run import ReceiveRun
from millrace.consolidate.registry import Registry, SourceRecord, SourceState
from millrace.consolidate.settings import SourceSettings, source_settings
from millrace.consolidate.source_run import SourceRun
from millrace.consolidate.source_thread import SourceThread
from millrace.consolidate.turns import SharedEngine, Turns
from millrace.engine import Engine
from millrace.errors import ConfigError, MillraceError, WorkDirError
from millrace.follow.feed import FeedKind
from millrace.follow.progress import NEAR_SECONDS, FollowProgress
from millrace.log import LogSettings
from millrace.name import Naming
from millrace.postgres.wire.connect import connect, resolve
from millrace.workdir.lock import open_lock

log = logging.getLogger(__name__)

# How often the file is looked at for sources that came or went.
LOOK_SECONDS = 2.0
# Base copies that are made at once: each has as many tasks as a clone.
COPIES_AT_ONCE = 1


class Service(StrEnum):
    """What a process does for the sources."""

    # Base copies, receiving and applying.
    BOTH = "run"
    # Receiving what is copied.
    RECEIVE = "receive"
    # Base copies, and applying what another process receives.
    REPLAY = "replay"


class Consolidator:
    """All sources of one file."""

    def __init__(
        self,
        path: Path,
        directory: Path,
        engine: Engine,
        log_settings: LogSettings,
        *,
        service: Service = Service.BOTH,
        on_progress: Callable[[FollowProgress], None] = lambda progress: None,
    ) -> None:
        self._path = path
        self._directory = directory
        self._log = log_settings
        self._service = service
        self._on_progress = on_progress
        self._consolidation = read_config(path)
        self._of_the_process = (self._consolidation.target, self._consolidation.apply_jobs)
        self._problem = ""
        self._engine = SharedEngine(engine, Turns(self._consolidation.apply_jobs))
        self._copies = threading.Semaphore(COPIES_AT_ONCE)
        self._runs: dict[str, SourceThread] = {}
        self._target = resolve(self._consolidation.target)

    def run(self, stop: threading.Event) -> None:
        """Until `stop`."""
        receives = self._service is Service.RECEIVE
        # Two services may have one directory, and two of a kind may not.
        place = self._directory / Service.RECEIVE if receives else self._directory
        with open_lock(place), Registry(self._directory) as registry, ExitStack() as stack:
            if not receives:
                self._engine.start()
                indexes = ForeignKeyIndexes(
                    self._target, partial(followed_schemas, registry), partial(is_quiet, registry)
                )
                stack.callback(indexes.stop)
                indexes.start()
            try:
                while True:
                    self._look(registry)
                    if stop.wait(LOOK_SECONDS):
                        return
            finally:
                for run in self._runs.values():
                    run.stop()
                for run in self._runs.values():
                    run.join()

    def _look(self, registry: Registry) -> None:
        """Begin what the file has, and leave alone what it has not."""
        self._reread()
        known = registry.read()
        for name, source in self._consolidation.sources.items():
            if name in self._runs and self._runs[name].is_alive:
                continue
            record = known.get(name)
            if record is not None and record.is_removed:
                continue
            try:
                self._begin(registry, source, record)
            except MillraceError as error:
                self._refuse(registry, name, error, is_known=record is not None)
        for name, record in known.items():
            if record.state is SourceState.REMOVED and name not in self._consolidation.sources:
                registry.forget(name)
        for name in self._runs.keys() - self._consolidation.sources.keys():
            run = self._runs.pop(name)
            if name in known and not known[name].is_removed:
                log.warning(
                    "source %s is no longer in %s: it is stopped, and its slot stays; write it "
                    "there again to follow it, or to remove it with `millrace consolidate remove"
                    " %s`",
                    name,
                    self._path,
                    name,
                )
            run.stop()
            run.join()

    def _reread(self) -> None:
        """What the file says now; if it can't be read, what it said before counts."""
        problem = ""
        try:
            found = read_config(self._path)
        except ConfigError as error:
            problem = error.message
        else:
            if (found.target, found.apply_jobs) == self._of_the_process:
                self._consolidation = found
            else:
                problem = f"{self._path}: another target or apply_jobs takes a new process"
        if problem and problem != self._problem:
            log.error("%s; what it said before counts", problem)
        self._problem = problem

    def _begin(self, registry: Registry, source: SourceConfig, record: SourceRecord | None) -> None:
        if record is None:
            if self._service is Service.RECEIVE:
                return  # whoever copies it makes the plan
            plan = self._plan(registry, source)
            registry.add(source.name, resolve(source.dsn).identity(), plan)
        run = self._runs[source.name] = self._thread(source.name, registry)
        run.start()

    def _thread(self, name: str, registry: Registry) -> SourceThread:
        if self._service is Service.RECEIVE:
            return ReceiveRun(name, self._settings, registry)
        is_fed = self._service is Service.REPLAY
        return SourceRun(
            name,
            self._settings,
            self._engine,
            registry,
            copies=self._copies,
            feed=FeedKind.OTHER_PROCESS if is_fed else FeedKind.RECEIVER,
            on_progress=self._on_progress,
            on_copied=self._grant,
        )

    def _plan(self, registry: Registry, source: SourceConfig) -> SourcePlan:
        with connect(resolve(source.dsn), "consolidate") as connection:
            plan = read_plan(connection, source)
        require_own_names(source.name, plan.naming, registry.read())
        return plan

    def _settings(self, record: SourceRecord) -> SourceSettings:
        source = self._consolidation.require(record.name)
        require_same(source, record)
        return source_settings(
            source, self._consolidation, record.plan, self._directory, self._log, self._target
        )

    def _grant(self, settings: SourceSettings) -> None:
        grant_to_readers(self._target, settings.route.naming, self._consolidation.readers)

    def _refuse(
        self, registry: Registry, name: str, error: MillraceError, *, is_known: bool
    ) -> None:
        """A source that can't begin is tried again with the next look."""
        if is_known:
            registry.enter(name, SourceState.FAILED, error.message, error.hint)
        log.error("source %s: %s%s", name, error, f" ({error.hint})" if error.hint else "")


def followed_schemas(registry: Registry) -> set[str]:
    """The target's schemas of sources whose base copy is made."""
    return {
        schema
        for record in registry.read().values()
        if record.state is not SourceState.COPYING and not record.is_removed
        for schema in record.plan.naming.schemas.values()
    }


def is_quiet(registry: Registry) -> bool:
    """Whether every source is followed and none is behind."""
    records = [one for one in registry.read().values() if not one.is_removed]
    return bool(records) and all(
        record.state is SourceState.FOLLOWING
        and record.progress.get("lag_seconds") is not None
        and record.progress["lag_seconds"] <= NEAR_SECONDS
        for record in records
    )


def require_same(source: SourceConfig, record: SourceRecord) -> None:
    """Raise if the file now says something that a source which was begun can't follow."""
    now, before = resolve(source.dsn).identity(), record.source
    if now != before:
        raise WorkDirError(
            f"source {source.name} was begun from {before}, and the file now says {now}",
            hint="write it as before; or remove the source and add it again, which copies it",
        )
    for schema, new in record.plan.naming.schemas.items():
        if source.target_schema(schema) != new:
            raise WorkDirError(
                f"schema {schema} of source {source.name} is called {new} on the target, and the "
                f"file now says {source.target_schema(schema)}",
                hint="write it as before; or remove the source and add it again, which copies it",
            )


def require_own_names(name: str, naming: Naming, known: dict[str, SourceRecord]) -> None:
    """Raise if another source has one of these schemas."""
    for other in known.values():
        shared = set(naming.schemas.values()) & set(other.plan.naming.schemas.values())
        if other.name != name and shared and not other.is_removed:
            raise ConfigError(
                f"sources {other.name} and {name} would share schema {min(shared)}",
                hint=f"give it another name: [source.{name}] schemas = {{ ... }}",
            )
