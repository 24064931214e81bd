"""What a run that stopped leaves behind, and how it is continued.

Invariant: what is said is looked up when it is said: whether the snapshot is still held, what that
costs the source, and whether the run could be continued.
"""

from __future__ import annotations

import logging
from enum import Enum
from pathlib import Path

from millrace.clone.directory import read_setup
from millrace.clone.ready import has_every_row
from millrace.clone.settings import CloneSettings
from millrace.config.duration import render_duration
from millrace.errors import MillraceError, WorkDirError
from millrace.snapshot.cost import read_cost
from millrace.snapshot.holder import SnapshotHolder, read_held
from millrace.workdir.stream_binding import has_stream

log = logging.getLogger(__name__)


class Continuation(Enum):
    """How a run goes on, by the option that does it."""

    # There is no run, or none that anything is left of.
    NEW = ""
    RESUME = "--resume"
    RESTART = "--restart"


def tell_kept_snapshot(settings: CloneSettings) -> None:
    """Say that the run's own snapshot process lives, until when, and at what cost."""
    held = find_held(settings.directory)
    if held is None or not held.is_of_run:
        return
    try:
        cost = str(read_cost(settings.source, held))
    except MillraceError as error:
        log.debug("%s", error)
        cost = "what it costs the source could not be read"
    log.warning(
        "snapshot %s stays held by process %d for %s, so that the run can be continued: %s; give "
        "it up with: millrace snapshot --stop --dir %s",
        held.id,
        held.pid,
        render_duration(held.keep_seconds or 0.0),
        cost,
        settings.directory,
    )


def find_held(directory: Path) -> SnapshotHolder | None:
    """The snapshot held for the directory; None also for one that is only being taken."""
    try:
        return read_held(directory)
    except WorkDirError as error:
        log.debug("%s", error)
        return None


def find_continuation(settings: CloneSettings) -> Continuation:
    """How the run of the directory can be continued now."""
    setup = read_setup(settings.directory)
    held = find_held(settings.directory)
    if setup is None:
        return Continuation.RESUME if held is not None and held.is_of_run else Continuation.NEW
    if setup["finished_at"]:
        # What is left of a copy that is followed is its stream.
        return Continuation.RESUME if has_stream(settings.directory) else Continuation.NEW
    if _has_snapshot(settings, setup["snapshot"], held) or _is_copied(settings):
        return Continuation.RESUME
    return Continuation.RESTART


def _has_snapshot(
    settings: CloneSettings, snapshot: str | None, held: SnapshotHolder | None
) -> bool:
    if held is not None:
        return not snapshot or held.id == snapshot
    if settings.snapshot or settings.not_consistent:
        return True
    # Before it has a snapshot, a run takes any; that of a stream came with its slot.
    return not snapshot and not has_stream(settings.directory)


def _is_copied(settings: CloneSettings) -> bool:
    try:
        return has_every_row(settings)
    except MillraceError as error:
        log.debug("%s", error)
        return False
