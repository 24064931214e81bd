"""What workers report, added up: by tube and partition.

Invariant: counts only grow, whatever order reports of several leases come in.
"""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import Final

from millrace.tube.delivery.report import CHANNEL, WorkerCounts, parse_report
from millrace.tube.delivery.tube import Connection

# Rates are over this time.
RATE_SECONDS: Final = 10.0

# Schema, tube, partition.
Place = tuple[str, str, int]


class Traffic:
    """Since it began to listen. Whoever comes late does not know when a lease began: its first
    report is what later ones are counted from."""

    def __init__(self, *, is_late: bool = False) -> None:
        self._is_late = is_late
        self._leases: dict[Place, dict[str, WorkerCounts]] = {}
        self._totals: dict[Place, WorkerCounts] = {}
        # When a report came, and the ids before it.
        self._marks: dict[Place, list[tuple[float, int]]] = {}

    def absorb(self, payload: str) -> None:
        report = parse_report(payload)
        if report is None:
            return
        place = (report.schema, report.tube, report.partition)
        leases = self._leases.setdefault(place, {})
        total = self._totals.setdefault(place, WorkerCounts())
        unknown = report.counts if self._is_late else WorkerCounts()
        before = leases.get(report.lease, unknown)
        self._mark(place, total.ids)
        total.add(report.counts)
        total.add(before, -1)
        leases[report.lease] = report.counts
        # A partition has one owner; the last report of the one before may be late.
        for lease in list(leases)[:-2]:
            del leases[lease]

    def counts(self, schema: str, tube: str) -> dict[int, WorkerCounts]:
        """By partition."""
        return {
            place[2]: WorkerCounts(*astuple(counts))
            for place, counts in list(self._totals.items())
            if place[:2] == (schema, tube)
        }

    def ids_per_second(self, schema: str, tube: str, partition: int) -> float:
        place = (schema, tube, partition)
        since = time.monotonic() - RATE_SECONDS
        recent = [ids for at, ids in self._marks.get(place, ()) if at >= since]
        return (self._totals[place].ids - recent[0]) / RATE_SECONDS if recent else 0.0

    def _mark(self, place: Place, ids: int) -> None:
        now = time.monotonic()
        known = self._marks.get(place, [])
        self._marks[place] = [one for one in known if one[0] >= now - RATE_SECONDS] + [(now, ids)]


def listen(connection: Connection) -> None:
    """From now on reports are kept for `receive`."""
    connection.execute(f"LISTEN {CHANNEL}".encode())


def receive(connection: Connection, traffic: Traffic, seconds: float) -> None:
    """Take in what is reported within this time."""
    for found in connection.notifies(timeout=seconds):
        if found.channel == CHANNEL:
            traffic.absorb(found.payload)
