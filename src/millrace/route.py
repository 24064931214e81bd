"""The way that data takes: from where, to where, under which names, and what is left out.

Invariant: every step of one run or stream works on the same route. So what is copied is what is
followed, compared and cut over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from millrace.config.dsn import Dsn
from millrace.filter.rules import FilterRules
from millrace.name import Naming


@dataclass(frozen=True)
class Route:
    """One source, one target, and what happens to names and rows in between."""

    source: Dsn
    target: Dsn
    # Where the run or stream keeps its state; a comparison has none.
    directory: Path | None = None
    # What schemas of the source are called on the target.
    naming: Naming = field(default_factory=Naming)
    filters: FilterRules = field(default_factory=FilterRules)

    @property
    def place(self) -> Path:
        """The directory of a run or stream, which has one."""
        assert self.directory is not None
        return self.directory


class RouteSettings:
    """Settings that are about one route, which are asked for its parts."""

    route: Route

    @property
    def source(self) -> Dsn:
        return self.route.source

    @property
    def target(self) -> Dsn:
        return self.route.target

    @property
    def directory(self) -> Path:
        return self.route.place

    @property
    def naming(self) -> Naming:
        return self.route.naming

    @property
    def filters(self) -> FilterRules:
        return self.route.filters
