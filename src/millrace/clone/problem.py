"""What preflight finds.

Invariant: each problem comes with what fixes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that would make the run fail, or a warning about what it will do."""

    side: str
    what: str
    fix: str
    is_warning: bool = False
