"""A slot's snapshot in a process that outlives the copy made under it.

Invariant: the slot stays as long as the snapshot is held, and after it only if every row is
copied: without the snapshot nobody could use it, and it would make the source keep its WAL.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.clone.ready import has_every_row
from millrace.clone.settings import CloneSettings
from millrace.clone.status import read_run_status
from millrace.errors import MillraceError
from millrace.follow.bound_copy import read_stream
from millrace.follow.settings import SlotSettings
from millrace.follow.setup import (
    join_held,
    make_slot_snapshot,
    prepare_slot,
    remove_stream,
)
from millrace.snapshot.holder import SnapshotHolder
from millrace.snapshot.process import KEEP_SECONDS, Opened, start

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotHolding:
    """What the process of a copy that is to be followed holds."""

    settings: CloneSettings
    slot: SlotSettings
    encoding: str
    keep_seconds: float = KEEP_SECONDS

    @property
    def directory(self) -> Path:
        return self.settings.directory

    def open(self) -> Opened:
        return make_slot_snapshot(self.settings.route, self.slot, self.encoding, self.keep_seconds)

    @property
    def leaves_something(self) -> bool:
        return True

    def take_back(self, held: SnapshotHolder) -> str | None:
        route = self.settings.route
        if self.directory.exists():
            stream = read_stream(self.directory)
            if stream is None or stream.snapshot != held.id:
                return ""  # the slot was removed; what is there now is another run's
            if _is_copied(self.settings):
                return None
        remove_stream(route, self.slot.name, route.source.identity())
        return f"replication slot {self.slot.name} and its publications are dropped"


@contextmanager
def open_kept_slot_snapshot(
    settings: CloneSettings, slot: SlotSettings, keep_seconds: float
) -> Iterator[SnapshotHolder]:
    """A snapshot that came with a slot: the one held for the directory, or a new one in a process
    of its own, which drops the slot if nobody continues."""
    slot, encoding = prepare_slot(settings.route, slot)
    held = join_held(settings.route, slot, encoding)
    yield held or start(SlotHolding(settings, slot, encoding, keep_seconds))


def _is_copied(settings: CloneSettings) -> bool:
    """As the target says, or, if it can't be asked, as the work directory does: what is written
    there was committed."""
    try:
        return has_every_row(settings)
    except MillraceError as error:
        log.warning("%s", error)
    try:
        found = read_run_status(settings.directory)
    except MillraceError as error:
        log.debug("%s", error)
        return False
    counts = (found.parts, found.large_objects)
    return bool(found.parts.total) and all(one.done == one.total for one in counts)
