"""What preflight finds.

Invariant: each problem comes with what fixes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that would make the run fail, or a warning about what it will do."""

    side: str
    what: str
    fix: str
    is_warning: bool = False


def render_problems(problems: Sequence[Problem]) -> tuple[str, str]:
    """How many they are, and a list of them, each with its fix."""
    lines = [f"  {n}. {p.side}: {p.what}\n     fix: {p.fix}" for n, p in enumerate(problems, 1)]
    return "1 problem" if len(problems) == 1 else f"{len(problems)} problems", "\n".join(lines)
