"""How each source is doing, as the work directory shows it.

Invariant: reads only, and needs no server. A state that a dead process has left is not shown as
that of a living one, and a lag that nobody has measured lately is not shown as small.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.consolidate.config import Consolidation
from millrace.consolidate.registry import FILE, Registry, SourceRecord, SourceState
from millrace.errors import WorkDirError
from millrace.workdir.lock import read_holder

# A process that runs a source writes its progress down every second.
_STALE_SECONDS = 30.0


@dataclass(frozen=True)
class SourceStatus:
    """One source, for people and for programs."""

    name: str
    # One of SourceState, "new" for one that was not begun, or "removed".
    state: str
    is_running: bool
    # How long it has been in this state.
    seconds: float | None = None
    lag_seconds: float | None = None
    lag_bytes: int | None = None
    changes_per_second: float | None = None
    changes: int | None = None
    wal_status: str = ""
    error: str = ""
    hint: str = ""

    @property
    def is_well(self) -> bool:
        return self.state in (SourceState.COPYING, SourceState.FOLLOWING)


def read_status(directory: Path, consolidation: Consolidation | None) -> list[SourceStatus]:
    """All sources: those of the file, and those that were begun and are no longer in it."""
    is_running = read_holder(directory) is not None
    known = read_records(directory)
    if consolidation is not None:
        known = {
            name: record
            for name, record in known.items()
            if record.state is not SourceState.REMOVED or name in consolidation.sources
        }
    names: Iterable[str] = known
    if consolidation is not None:
        names = [*consolidation.sources, *(known.keys() - consolidation.sources.keys())]
    return [
        _status(known[name], is_running=is_running)
        if name in known
        else SourceStatus(name, "new", is_running)
        for name in names
    ]


def read_records(directory: Path) -> dict[str, SourceRecord]:
    """What is known of sources; nothing where nothing was begun, and nothing is made there."""
    if not (directory / FILE).exists():
        return {}
    with Registry(directory) as registry:
        return registry.read()


def require_begun(directory: Path) -> None:
    if not (directory / FILE).exists():
        raise WorkDirError(
            f"no consolidation was begun in {directory}",
            hint="check --dir; begin with `millrace consolidate run --config FILE`",
        )


def _status(record: SourceRecord, *, is_running: bool) -> SourceStatus:
    if record.is_gone:
        return SourceStatus(record.name, "removed", is_running)
    progress: dict[str, Any] = record.progress
    age = time.time() - progress.get("noted_at", 0.0)
    lag = progress.get("lag_seconds")
    if lag is not None and (age > _STALE_SECONDS or not is_running):
        # Nobody looks after it: it falls behind by a second every second.
        lag += age
    return SourceStatus(
        record.name,
        record.state,
        is_running,
        time.time() - record.since,
        lag,
        progress.get("lag_bytes"),
        progress.get("changes_per_second") if is_running and age < _STALE_SECONDS else 0.0,
        progress.get("changes"),
        progress.get("wal_status", ""),
        record.error,
        record.hint,
    )
