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

from millrace.clone.progress import Progress, Reporter
from millrace.clone.run_record import RunRecords
from millrace.clone.settings import CloneSettings
from millrace.engine import Engine
from millrace.errors import MillraceError
from millrace.postgres.program.binaries import Installation
from millrace.postgres.wire.connect import cancel_sessions
from millrace.snapshot.holder import SnapshotHolder
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
    # The source's extensions, by name: their schemas. One that the target has elsewhere is moved
    # while text of the source runs under its names.
    extension_homes: dict[str, str] = field(default_factory=dict)
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

    def stop_sessions(self) -> None:
        """End the sessions of this run on both servers, whichever process left them."""
        for dsn in (self.settings.source, self.settings.target):
            try:
                cancel_sessions(dsn, [self.run_id])
            except MillraceError as error:
                log.debug("could not stop sessions on %s: %s", dsn, error.message)
