"""Timelines: which one each position of the WAL belongs to.

Invariant: a position has one timeline, the newest of the history that had begun by then, so that
what an old primary wrote after a promotion is never read.

Facts: timeline.c; XLogFileReadAnyTLI() in xlogrecovery.c. After a promotion the segment of the
switch exists on both timelines; the new one holds a copy up to the switch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from millrace.errors import FormatError
from millrace.lsn import parse_lsn, render_lsn

_LINE = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})(\s.*)?")


@dataclass(frozen=True, slots=True)
class History:
    """Timelines from the oldest to the newest, each with the position at which it begins."""

    timelines: tuple[int, ...]
    begins: tuple[int, ...]

    @property
    def newest(self) -> int:
        return self.timelines[-1]

    def timeline_at(self, lsn: int) -> int:
        for timeline, begin in zip(reversed(self.timelines), reversed(self.begins), strict=True):
            if begin <= lsn:
                return timeline
        return self.timelines[0]

    def end_of(self, timeline: int) -> int | None:
        """Where the next one begins; None for the newest."""
        place = self.timelines.index(timeline)
        return self.begins[place + 1] if place + 1 < len(self.begins) else None


def single_history(timeline: int) -> History:
    """Of a timeline without a history file: the first, or one whose past is not asked for."""
    return History((timeline,), (0,))


def parse_history(text: str, timeline: int, file: str) -> History:
    """From a history file: a line for each ancestor, with the position at which it was left."""
    timelines: list[int] = []
    begins = [0]
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise _bad_line(file, number, "expected a timeline and a WAL position")
        timelines.append(int(match[1]))
        begins.append(parse_lsn(match[2]))
        _check_order(timelines, begins, timeline, file, number)
    return History((*timelines, timeline), tuple(begins))


def _check_order(
    timelines: list[int], begins: list[int], timeline: int, file: str, number: int
) -> None:
    if timelines[-1] >= timeline or timelines[-2:-1] >= timelines[-1:]:
        raise _bad_line(file, number, f"timeline {timelines[-1]} is out of order")
    if begins[-1] < begins[-2]:
        raise _bad_line(file, number, f"position {render_lsn(begins[-1])} is out of order")


def _bad_line(file: str, number: int, what: str) -> FormatError:
    return FormatError(
        f"{file}, line {number}: {what}",
        hint="fetch the timeline history file again from the archive",
        file=file,
    )
