"""Counts of workers, told while they work: by NOTIFY, to whoever listens.

Invariant: a report is for people: what can't be told is not, and delivery goes on. Counts are of
one lease, from its beginning, so that a report that is missed is made up by the next one. Nothing
is stored in the database, and an idle worker says nothing.

Facts: PostgreSQL documentation, NOTIFY: a payload has less than 8000 bytes; it is delivered at
commit. Only sessions of ours notify: never an application's.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from dataclasses import astuple, dataclass, fields
from typing import Final

import psycopg

from millrace.tube.delivery.tube import Connection

log = logging.getLogger(__name__)

CHANNEL: Final = "millrace_tube"
REPORT_SECONDS: Final = 1.0


@dataclass
class WorkerCounts:
    """What a worker has done, for people."""

    pods: int = 0
    ids: int = 0
    deleted: int = 0
    dead: int = 0
    collected: int = 0
    # Deliveries that failed, and those that were tried again after a pause.
    errors: int = 0
    retries: int = 0

    def add(self, more: WorkerCounts, sign: int = 1) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + sign * getattr(more, one.name))


@dataclass(frozen=True)
class LeaseReport:
    """What one lease has done in one partition so far."""

    schema: str
    tube: str
    lease: str
    partition: int
    counts: WorkerCounts


class LeaseReporter:
    """Of one lease."""

    def __init__(self, schema: str, tube: str) -> None:
        self._schema, self._tube, self._lease = schema, tube, uuid.uuid4().hex[:12]
        self._seen = WorkerCounts()
        self._partitions: dict[int, WorkerCounts] = {}
        self._changed: set[int] = set()
        self._next = 0.0

    def note(self, partition: int, total: WorkerCounts) -> None:
        """What was done since the last note was done in this partition."""
        if total == self._seen:
            return
        counts = self._partitions.setdefault(partition, WorkerCounts())
        counts.add(total)
        counts.add(self._seen, -1)
        self._seen = WorkerCounts(*astuple(total))
        self._changed.add(partition)

    def send(self, connection: Connection, *, is_last: bool = False) -> None:
        """At most once a second, but for the last time."""
        now = time.monotonic()
        if not self._changed or (now < self._next and not is_last):
            return
        self._next = now + REPORT_SECONDS
        payloads = [
            json.dumps(
                [self._schema, self._tube, self._lease, one, *astuple(self._partitions[one])]
            )
            for one in sorted(self._changed)
        ]
        self._changed.clear()
        try:
            connection.execute(
                "SELECT pg_notify(%s, p) FROM unnest(%s::text[]) p", (CHANNEL, payloads)
            )
        except psycopg.Error as error:
            # A session that is lost is met by the next statement that matters.
            log.debug("progress was not told: %s", error)


def parse_report(payload: str) -> LeaseReport | None:
    """None if somebody else uses the channel."""
    try:
        schema, tube, lease, partition, *counts = json.loads(payload)
        return LeaseReport(schema, tube, lease, partition, WorkerCounts(*counts))
    except (ValueError, TypeError):
        return None
