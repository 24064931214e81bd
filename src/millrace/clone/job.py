"""One process at work on one run: what every step needs to know.

Invariant: `run_id` and `epoch` name this process on the target; a step that takes long is
timed and shown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from millrace.clone.progress import Progress, Reporter
from millrace.clone.settings import CloneSettings
from millrace.engine import Engine
from millrace.postgres.program.binaries import Installation
from millrace.workdir.store import Store

log = logging.getLogger(__name__)


@dataclass
class Job:
    """The facts of a run, as far as they are known."""

    settings: CloneSettings
    engine: Engine
    reporter: Reporter
    run_id: str
    store: Store
    tools: Installation
    target_encoding: str
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
    began_at: float = field(default_factory=time.monotonic)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step, and tell people what is going on."""
        self.progress.step = name
        self.reporter.update(self.progress)
        log.info("%s", name)
        began = time.monotonic()
        yield
        self.add_timing(name, time.monotonic() - began)

    def add_timing(self, name: str, seconds: float) -> None:
        self.timings.append((name, seconds))
        self.store.write_timing("step", name, seconds)

    @property
    def replaces(self) -> bool:
        """Whether what the target has already is dropped first."""
        return self.settings.drop_if_exists or self.settings.restart

    def role(self, name: str) -> str:
        """The name of a session of this run, by which it can be found and ended."""
        return f"{name} {self.run_id}"
