"""Where a stream stands: for the live view, the log and the metrics."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

from millrace.clone.progress import Reporter


@dataclass
class Applied:
    """What was done."""

    changes: int = 0
    deleted: int = 0
    updated: int = 0
    inserted: int = 0
    skipped: int = 0
    overwritten: int = 0

    def add(self, other: Applied) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class FollowProgress:
    """Where a stream stands."""

    received_lsn: int = 0
    flushed_lsn: int = 0
    applied_lsn: int = 0
    endpos: int | None = None
    # Received but not applied.
    lag_bytes: int = 0
    # By the source's clock: how old the last applied transaction is, 0 when all is applied.
    lag_seconds: float = 0.0
    is_applying: bool = True
    # Applied since the stream began.
    transactions: int = 0
    changes: int = 0
    # By this process, for conflicts.
    skipped: int = 0
    overwritten: int = 0
    changes_per_second: float = 0.0
    # At the present rates; None when it does not get nearer.
    seconds_left: float | None = None


class FollowReporter(Reporter, Protocol):
    """Shows where a stream stands, and a clone before it."""

    def update_follow(self, progress: FollowProgress) -> None: ...


@dataclass(frozen=True)
class FollowResult:
    """How a stream ended."""

    position: int
    reached_endpos: bool
    transactions: int
    applied: Applied
