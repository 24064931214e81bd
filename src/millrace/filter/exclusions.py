"""What filters leave out of a stream of changes, or hide, by name.

Invariant: it names what is left out, never what is kept, so that nothing is lost when in doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Exclusions:
    """What of the source is left out by the user's filters; tables as (schema, name)."""

    tables: frozenset[tuple[str, str]] = frozenset()
    columns: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    # Conditions that rows must meet to be on the target.
    where: Mapping[tuple[str, str], str] = field(default_factory=dict)
    sequences: frozenset[tuple[str, str]] = frozenset()
    # Columns that arrive as digests.
    hashed: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
