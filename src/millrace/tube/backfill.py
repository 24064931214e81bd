"""A backfill page by page: resumed, throttled, cancelled.

Invariant: a page's pods and its position commit together, so that a page is never emitted twice or
left out; no page begins before every transaction that was open when the backfill began has ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from millrace.errors import ConfigError
from millrace.tube.install import refused

Connection = psycopg.Connection[tuple[Any, ...]]

# Rows of the first page; then as many as the time for a page allows.
FIRST_ROWS: Final = 2000
MOST_ROWS: Final = 200_000

_OPEN = (
    "SELECT backfill FROM tube_backfill_progress(%s)"
    " WHERE tbl = %s::regclass AND state IN ('begun', 'running')"
)


@dataclass(frozen=True)
class Pace:
    """How much a backfill may take of the server."""

    page_seconds: float = 1.0
    pause_seconds: float = 0.0
    timeout_seconds: float = 60.0


def run(
    connection: Connection, tube: str, table: str, order: str | None, pace: Pace
) -> dict[str, Any]:
    """Begin a backfill or continue the one that is open, to its end."""
    with refused():
        row = connection.execute(
            "SELECT tube_backfill_begin(%s, %s::regclass, %s)", (tube, table, order)
        ).fetchone()
        backfill = int(row[0]) if row else 0
        # Also when it continues: cheap, and the barrier may not have been reached before.
        connection.execute(
            "SELECT tube_backfill_step2(make_interval(secs => %s))", (pace.timeout_seconds,)
        )
        rows = FIRST_ROWS
        while True:
            began = time.monotonic()
            row = connection.execute(
                "SELECT tube_backfill_page(%s, %s)", (backfill, rows)
            ).fetchone()
            if row is not None and row[0]:
                break
            rows = next_rows(rows, time.monotonic() - began, pace.page_seconds)
            time.sleep(pace.pause_seconds)
    return read(connection, backfill)


def next_rows(rows: int, took_seconds: float, page_seconds: float) -> int:
    """The size of the next page: half of the time it may take, and at most twice as large."""
    wanted = rows * page_seconds / 2 / max(took_seconds, 1e-6)
    return int(min(max(wanted, 1), rows * 2, MOST_ROWS))


def cancel(connection: Connection, tube: str, table: str) -> dict[str, Any]:
    """No further page; what was emitted stays."""
    with refused():
        row = connection.execute(_OPEN, (tube, table)).fetchone()
        if row is None:
            raise ConfigError(
                f"{table} has no open backfill in tube {tube}",
                hint="`millrace tube stats` shows backfills",
            )
        connection.execute("SELECT tube_backfill_cancel(%s)", (row[0],))
    return read(connection, row[0])


def read(connection: Connection, backfill: int) -> dict[str, Any]:
    """How far it is."""
    with refused():
        found = connection.execute(
            "SELECT backfill, tube, tbl::text AS tbl, start_seq, state, ids, pages"
            " FROM tube_backfill_progress() WHERE backfill = %s",
            (backfill,),
        )
        names = [column.name for column in found.description or ()]
        row = found.fetchone() or ()
    return dict(zip(names, row, strict=False))
