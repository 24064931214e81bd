"""`consolidate run`: every source of the file, copied and followed until it is stopped.

Invariant: one process runs a consolidation; each source lives in a thread of its own and none waits
for another, but for its turn to copy and to apply: nothing here asks a source's server but in that
source's thread. What the file says counts when a source begins; what was decided for it then is
kept (`millrace.consolidate.plan`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path

from millrace.clone.directory import pinned, read_setup
from millrace.consolidate.config import Order, SourceConfig, read_config
from millrace.consolidate.foreign_key_index import ForeignKeyIndexes
from millrace.consolidate.plan import SourcePlan, read_plan
from millrace.consolidate.readers import grant_to_readers
from millrace.consolidate.receive_run import ReceiveRun
from millrace.consolidate.registry import (
    Registry,
    SourceRecord,
    SourceState,
    source_directory,
)
from millrace.consolidate.settings import SourceSettings, source_settings
from millrace.consolidate.source_run import SourceRun
from millrace.consolidate.source_thread import SourceThread
from millrace.consolidate.turns import SharedEngine, Turns
from millrace.engine import Engine
from millrace.errors import ConfigError, EngineLost, WorkDirError
from millrace.follow.feed import FeedKind
from millrace.follow.progress import NEAR_SECONDS, FollowProgress
from millrace.log import LogSettings
from millrace.name import Naming
from millrace.postgres.wire.connect import connect, resolve
from millrace.workdir.lock import open_lock
from millrace.workdir.sentinel import Sentinel

log = logging.getLogger(__name__)

# How often the file is looked at for sources that came or went.
LOOK_SECONDS = 2.0
# How long sources may take to end, each with what it has under way.
END_SECONDS = 120.0
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
        # Why no task can run any more.
        self._lost: list[EngineLost] = []
        # Two sources that are planned at once must not get the same schema.
        self._planning = threading.Lock()
        self._target = resolve(self._consolidation.target)

    def run(self, stop: threading.Event) -> None:
        """Until `stop`; raises EngineLost if it takes a new process to continue."""
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
                while not self._lost:
                    self._look(registry)
                    if stop.wait(LOOK_SECONDS):
                        return
            finally:
                self._end()
            raise self._lost[0]

    def _end(self) -> None:
        for run in self._runs.values():
            run.stop()
        until = time.monotonic() + END_SECONDS
        for run in self._runs.values():
            if not run.join(max(0.0, until - time.monotonic())):
                log.warning("source %s does not end by itself: it is left as it is", run.name)

    def _look(self, registry: Registry) -> None:
        """Begin what the file has, and stop what it no longer has."""
        self._reread()
        if self._service is Service.RECEIVE:
            self._look_to_receive(registry)
            return
        wanted = self._consolidation.sources
        for name, record in registry.read().items():
            if name in self._runs and self._runs[name].is_alive:
                if name not in wanted:
                    self._runs[name].stop()
                continue
            self._runs.pop(name, None)
            if record.is_gone and name not in wanted:
                registry.forget(name)
            elif record.is_removed:
                registry.release(name)
            elif name not in wanted:
                self._leave(registry, record)
            else:
                self._begin(registry, name)
        for name in wanted.keys() - registry.read().keys():
            registry.begin(name)
            self._begin(registry, name)

    def _look_to_receive(self, registry: Registry) -> None:
        """Receive what the file has; whoever applies it looks after all the rest."""
        for name, record in registry.read().items():
            is_wanted = name in self._consolidation.sources and not record.is_removed
            run = self._runs.get(name)
            if run is not None and not is_wanted:
                run.stop()
            if is_wanted and record.is_planned and (run is None or not run.is_alive):
                find = partial(self._settings, registry)
                run = self._runs[name] = ReceiveRun(name, find, registry)
                run.start()

    def _leave(self, registry: Registry, record: SourceRecord) -> None:
        """Nobody looks after a source that is no longer in the file."""
        error = f"it is no longer in {self._path}: neither received nor applied"
        if record.error != error:
            log.warning("source %s: %s; its slot stays", record.name, error)
        hint = f"put it back, or: millrace consolidate remove {record.name}"
        registry.enter(record.name, SourceState.FAILED, error, hint)

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

    def _begin(self, registry: Registry, name: str) -> None:
        run = SourceRun(
            name,
            partial(self._settings, registry),
            self._engine,
            registry,
            copies=self._copies,
            feed=FeedKind.OTHER_PROCESS if self._service is Service.REPLAY else FeedKind.RECEIVER,
            on_progress=self._on_progress,
            on_copied=self._grant,
            on_lost=self._lost.append,
        )
        self._runs[name] = run
        run.begin(registry.require(name))
        run.start()

    def _settings(self, registry: Registry, record: SourceRecord) -> SourceSettings:
        """Of a source, as the file has it now, planned before if it was not; asks its server."""
        self._reread()
        source = self._consolidation.require(record.name)
        if not record.is_planned:
            self._plan(registry, source)
            record = registry.require(record.name)
        require_same(source, record)
        settings = source_settings(
            source, self._consolidation, record.plan, self._directory, self._log, self._target
        )
        require_pins(settings)
        return settings

    def _plan(self, registry: Registry, source: SourceConfig) -> None:
        resolved = resolve(source.dsn)
        copy = read_setup(source_directory(self._directory, source.name))
        if copy is not None and copy["finished_at"]:
            # The registry was lost, and what was decided is in the copy.
            with Sentinel(source_directory(self._directory, source.name)) as sentinel:
                plan = SourcePlan.of_copy(copy, source, sentinel.read().apply_jobs or 1)
        else:
            with connect(resolved, "consolidate") as connection:
                workers = self._consolidation.workers_of(source)
                plan = read_plan(connection, source, workers)
        with self._planning:
            require_own_names(source.name, plan.naming, registry.read())
            registry.write_plan(source.name, resolved.identity(), plan)

    def _grant(self, settings: SourceSettings) -> None:
        grant_to_readers(self._target, settings.route.naming, self._consolidation.readers)


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
    if (record.plan.workers > 1) is not (source.order is Order.BY_TABLE):
        raise WorkDirError(
            f"source {source.name} was begun with {record.plan.workers} workers, and the file now "
            f'says order = "{source.order}"',
            hint="write it as before; or remove the source and add it again, which copies it",
        )
    for schema, new in record.plan.naming.schemas.items():
        if source.target_schema(schema) != new:
            raise WorkDirError(
                f"schema {schema} of source {source.name} is called {new} on the target, and the "
                f"file now says {source.target_schema(schema)}",
                hint="write it as before; or remove the source and add it again, which copies it",
            )


def require_pins(settings: SourceSettings) -> None:
    """Raise if what is left out, or a name, is another than when the source was copied: what was
    left out then is not on the target, and what is now would stay there as it is."""
    copy = read_setup(settings.directory)
    if copy is None or not copy["finished_at"]:
        return
    now = pinned(settings.clone())
    for field, what in (("filters", "filters, columns or hash key"), ("rename_schema", "schemas")):
        if now[field] != copy[field]:
            raise WorkDirError(
                f"source {settings.name} was copied with other {what} than the file now has",
                hint="write them as before; or remove the source and add it again, which copies it",
                before=copy[field],
                now=now[field],
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
