"""What a closing audit finds: a table that may differ from the source.

Invariant: a finding goes away only by a comparison of the table, or of all the partitions that it
is about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# What findings call large objects, and how people accept them.
LARGE_OBJECTS: Final = "pg_catalog.pg_largeobject"


class FindingKind(StrEnum):
    """What is wrong with a table, or may be."""

    # Changes of it are missing on the target.
    NOT_FOLLOWED = "not followed"
    # Another table than the one that was copied.
    RECREATED = "recreated"
    # The target still has it.
    DROPPED = "dropped"
    # Something was done to it that is not followed; whether it matters, a comparison says.
    UNPROVED = "unproved"


@dataclass(frozen=True)
class Finding:
    """A table that may differ; of a partitioned table, the root."""

    table: str
    kind: FindingKind
    reason: str
    is_accepted: bool = False
    # Partitions that it is about.
    partitions: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """A comparison names the table, or of each of these."""
        return self.partitions or (self.table,)


def acquit(findings: Iterable[Finding], equal: Collection[str]) -> tuple[Finding, ...]:
    """Without the tables that a comparison found to be equal."""
    return tuple(
        one
        for one in findings
        if one.table not in equal and not all(name in equal for name in one.names)
    )
