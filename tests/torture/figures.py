"""What a campaign has done so far, counted, and written as JSON.

Invariant: the file of a run holds all that the page on reliability says of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torture.ingredients import Incident, Ingredient
from tests.torture.interrupt import CampaignFailed
from tests.torture.pair import Verdict
from tests.torture.schedule import TUBE_KINDS, Interruption
from tests.torture.tube_tables import TubeIngredient


@dataclass
class Figures:
    """Of any campaign."""

    seed: int
    processes: int = 0
    interruptions: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    # Drawn, but it was done before, or the process to be killed was not there.
    not_reached: int = 0
    tables_compared: int = 0
    rows_compared: int = 0
    differences: int = 0
    transactions_meanwhile: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.interruptions.values())

    def count(self, interruption: Interruption) -> None:
        """It was applied."""
        self.interruptions[interruption.kind] += 1
        self.moments[interruption.moment.after] += 1

    def judge(self, verdict: Verdict) -> None:
        """Count what was compared; a difference ends the campaign."""
        self.tables_compared += verdict.tables
        self.rows_compared += verdict.rows
        self.differences += len(verdict.differences)
        if verdict.differences:
            raise CampaignFailed("\n".join(["the target differs:", *verdict.differences]))

    def write(self, path: Path, **more: Any) -> None:
        """The figures so far, as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        counted = {**vars(self), "total_interruptions": self.total, **more}
        path.write_text(json.dumps(counted, indent=2) + "\n")


@dataclass
class CloneFigures(Figures):
    """Of clones."""

    clones: int = 0
    most_in_one_clone: int = 0


@dataclass
class FollowFigures(Figures):
    """Of streams: each is compared several times on its way."""

    streams: int = 0
    rounds: int = 0
    rows_changed: int = 0
    transactions_rolled_back: int = 0
    columns_added: int = 0
    # The target was looked at so often while changes were applied.
    torn_looks: int = 0
    ingredients: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(Ingredient, 0)))

    def missing(self) -> list[str]:
        """Ingredients that never came up: nothing is known of them."""
        return [name for name, count in self.ingredients.items() if not count]


@dataclass
class TubeFigures(Figures):
    """Of tubes: each round has a table of its own."""

    rounds: int = 0
    ingredients: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(TubeIngredient, 0))
    )

    def missing(self) -> list[str]:
        """Ingredients and interruptions that never came up: nothing is known of them."""
        return [name for name, count in self.ingredients.items() if not count] + [
            kind for kind in TUBE_KINDS if not self.interruptions[kind]
        ]


@dataclass
class ConsolidateFigures(Figures):
    """Of many sources in one target, all compared after every round."""

    sources: int = 0
    rounds: int = 0
    rows_changed: int = 0
    ingredients: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(Incident, 0)))

    def missing(self, kinds: Iterable[str]) -> list[str]:
        """What never came up: ingredients, and these kinds of interruption."""
        counts = {kind: self.interruptions[kind] for kind in kinds} | self.ingredients
        return [name for name, count in counts.items() if not count]
