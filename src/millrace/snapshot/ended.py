"""How the snapshot process of a run ended, for whoever looks later.

Invariant: written when the process lets go before the run had read every row, with what that did
to the source; one file per work directory, of the last process.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from millrace.room import AGAIN, writing
from millrace.workdir.store import write_json

log = logging.getLogger(__name__)

FILE: Final = "snapshot-ended.json"


@dataclass(frozen=True)
class SnapshotEnd:
    """A snapshot that is not held any more, although rows were still to be read under it."""

    id: str
    at: str
    reason: str
    # What was removed from the source, or could not be.
    removed: str = ""

    def __str__(self) -> str:
        removed = f"; {self.removed}" if self.removed else ""
        return f"snapshot {self.id} ended at {self.at}: {self.reason}{removed}"


def write_end(directory: Path, end: SnapshotEnd) -> None:
    with writing(directory / FILE, then=AGAIN):
        write_json(directory / FILE, asdict(end))


def read_end_of(directory: Path, snapshot_id: str | None) -> SnapshotEnd | None:
    """How this snapshot ended; None if it is held, was given back, or nobody knows."""
    try:
        found = SnapshotEnd(**json.loads((directory / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.id == snapshot_id else None


def forget_end(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)
