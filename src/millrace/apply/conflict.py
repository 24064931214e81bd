"""What apply does when the target differs from what a change expects, and what it has done.

Invariant: every skipped or overwritten row is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


@dataclass
class ApplyCounts:
    """What was done."""

    changes: int = 0
    deleted: int = 0
    updated: int = 0
    inserted: int = 0
    skipped: int = 0
    overwritten: int = 0

    def add(self, other: ApplyCounts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class OnConflict(StrEnum):
    """What to do when the row to change does not exist on the target, or the row to insert
    already does."""

    STOP = "stop"
    SKIP = "skip-and-log"
    OVERWRITE = "overwrite"
