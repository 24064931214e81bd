"""How the DDL of a stream is replayed, as it was decided for it.

Invariant: nothing is imported here that takes long to load; every command reads its options.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.ddl.decide import Choices


@dataclass(frozen=True)
class DdlSettings:
    """For one stream."""

    # What people call the source.
    name: str
    choices: Choices = field(default_factory=Choices)
    # Roles that may read what is new.
    readers: tuple[str, ...] = ()
