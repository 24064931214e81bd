"""The state of one run, built in two stages: `Beginning`, then `Run`.

Invariant: a `Beginning` has read the directory and changed nothing; a `Run` has its directory open
and its servers checked. `run_id` and `epoch` name this process on the target; a step that takes
long is timed and shown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from millrace import failpoint
from millrace.clone.kept_view import GIVEN_BACK_AT
from millrace.clone.progress import Progress, Reporter
from millrace.clone.run_record import RunRecords
from millrace.clone.settings import CloneSettings
from millrace.engine import Engine
from millrace.errors import MillraceError
from millrace.name import QualifiedName
from millrace.postgres.program.binaries import Installation
from millrace.postgres.wire.connect import cancel_sessions
from millrace.snapshot import process
from millrace.snapshot.holder import SnapshotHolder, give_back, stop_held
from millrace.workdir.store import Store
from millrace.workdir.stream_binding import StreamBinding

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """A run as its directory and its source describe it."""

    run_id: str
    # Of the run that is continued; None for a new one.
    setup: dict[str, Any] | None
    # With --restart: the run that is replaced, and whether the target has its records.
    former: str
    owns_target: bool
    # The target's names of those that the run fills.
    schemas: frozenset[str]
    # The snapshot that another process holds for the directory, and the directory's stream.
    held: SnapshotHolder | None
    stream: StreamBinding | None
    began_at: float = field(default_factory=time.monotonic)

    @property
    def is_planned(self) -> bool:
        """Whether an earlier process has made the plan."""
        return self.setup is not None and bool(self.setup["snapshot"])

    @property
    def was_finished(self) -> bool:
        """Whether an earlier process brought the run to its end."""
        return self.setup is not None and bool(self.setup["finished_at"])


@dataclass
class Run:
    """A run at work: what every step needs to know."""

    settings: CloneSettings
    beginning: Beginning
    engine: Engine
    reporter: Reporter
    store: Store
    records: RunRecords
    tools: Installation
    target_encoding: str
    # Whether rows of the source are still to be read. Without any, an archive of the schema is all
    # that is needed of the source, and the snapshot is released.
    needs_rows: bool = True
    is_released: bool = False
    epoch: int = 1
    # Steps and transactions of the schema that are committed on the target.
    done: set[str] = field(default_factory=set)
    # Tables, by OID, that have triggers or foreign keys on the target before they have rows.
    guarded: frozenset[int] = frozenset()
    # Tables whose statistics come from the source: they are not analyzed. How many got theirs.
    carried: frozenset[QualifiedName] = frozenset()
    statistics_carried: int = 0
    # The source's extensions, by name: their schemas. One that the target has elsewhere is moved
    # while text of the source runs under its names.
    extension_homes: dict[str, str] = field(default_factory=dict)
    # The snapshot that another process holds for the run.
    held: SnapshotHolder | None = None
    progress: Progress = field(default_factory=Progress)
    timings: list[tuple[str, float]] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        return self.beginning.run_id

    @property
    def replaces(self) -> bool:
        """Whether what the target has already is dropped first."""
        return self.settings.drop_if_exists or self.settings.restart

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step, and show which one it is."""
        self.progress.step = name
        self.reporter.update(self.progress)
        log.info("%s", name)
        began = time.monotonic()
        yield
        self.add_timing(name, time.monotonic() - began)

    def add_timing(self, name: str, seconds: float) -> None:
        self.timings.append((name, seconds))
        self.store.write_timing("step", name, seconds)

    def role(self, name: str) -> str:
        """The name of a session of this run, by which it can be found and ended."""
        return f"{name} {self.run_id}"

    def renew_snapshot(self) -> str:
        """A new snapshot, held by a process of the run's own."""
        settings = self.settings
        assert settings.snapshot_keep_seconds is not None
        if self.held is not None:
            stop_held(settings.directory)
        self.held = process.start(
            process.PlainHolding(
                settings.source, settings.directory, settings.snapshot_keep_seconds
            )
        )
        failpoint.hit("snapshot.held")
        return self.held.id

    def give_back_snapshot(self) -> None:
        """Every row and large object is committed on the target: end the run's own process."""
        if self.held is None or not self.held.is_of_run:
            return
        if give_back(self.settings.directory, self.held):
            log.info("snapshot %s is given back: every row is copied", self.held.id)
            self.store.write_kept(GIVEN_BACK_AT, time.strftime("%Y-%m-%d %H:%M:%S"))

    def stop_sessions(self) -> None:
        """End the sessions of this run on both servers, whichever process left them."""
        for dsn in (self.settings.source, self.settings.target):
            try:
                cancel_sessions(dsn, [self.run_id])
            except MillraceError as error:
                log.debug("could not stop sessions on %s: %s", dsn, error.message)
