"""Tables that can't be delivered for now, because their sink is away or refuses all of them.

Invariant: a table that rests keeps no other one waiting. With --until-empty nobody waits for ever:
a sink that stays away for longer than a limit is an error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from millrace.errors import MillraceError, SinkError
from millrace.retry import is_transient
from millrace.tube.delivery.tube import TubeTable

FIRST_REST_SECONDS: Final = 0.5
MOST_REST_SECONDS: Final = 30.0


class Rest(Exception):
    """A table can't be delivered for now."""


@dataclass(frozen=True)
class _Resting:
    label: str
    since: float
    until: float
    pause: float
    error: MillraceError


class RestingTables:
    """Those of one worker, by id."""

    def __init__(self) -> None:
        self._resting: dict[int, _Resting] = {}

    def __bool__(self) -> bool:
        return bool(self._resting)

    def rest(self, table: TubeTable, error: MillraceError, most: float) -> float:
        """Leave a table alone for a while, longer each time up to `most` seconds; how long."""
        before = self._resting.get(table.id)
        pause = FIRST_REST_SECONDS if before is None else 2 * before.pause
        pause = min(pause, most, MOST_REST_SECONDS)
        now = time.monotonic()
        since = now if before is None else before.since
        self._resting[table.id] = _Resting(table.label, since, now + pause, pause, error)
        return pause

    def wake(self, id_: int) -> None:
        """It was delivered, or is not there any more."""
        self._resting.pop(id_, None)

    def ids(self) -> list[int]:
        """Tables that are left alone now."""
        now = time.monotonic()
        return [id_ for id_, one in self._resting.items() if now < one.until]

    def raise_lasting(self, patience_seconds: float) -> None:
        """Raise what does not go away by itself, or has not done so for long."""
        for one in self._resting.values():
            if not is_transient(one.error):
                raise one.error
            away = time.monotonic() - one.since
            if away >= patience_seconds:
                raise SinkError(
                    f"{one.label} could not be delivered for {away:.0f} s: {one.error.message}",
                    hint="what was not delivered is still in the tube; run the same command again"
                    " when the sink is back",
                ) from one.error
