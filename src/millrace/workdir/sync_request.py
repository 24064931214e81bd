"""Requests to copy a table of a stream again: a queue in the work directory.

Invariant: a request is done only after the target has committed that the table is followed; until
then it stays in the queue, whatever ends the process. Any process may add one at any time.

Whoever follows the stream takes requests up (`follow.table_sync`). The state of each table is
kept on the target, with its rows (`apply.table_state`): losing the queue loses what was not begun.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from enum import StrEnum

from millrace.lsn import parse_lsn, render_lsn
from millrace.workdir.sentinel import Sentinel


class RequestState(StrEnum):
    """How far a request has come."""

    # Waits for a process that follows; one that failed waits again, with its error.
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


UNFINISHED = (RequestState.QUEUED, RequestState.RUNNING)


@dataclass(frozen=True)
class SyncRequest:
    """A table that is to be copied while the stream continues."""

    id: int
    schema: str
    name: str
    # For people: why.
    reason: str
    state: RequestState
    # What is being done, or waited for.
    step: str = ""
    sync_id: str | None = None
    # The table holds what was committed up to here, when the copy was done.
    copied_lsn: int | None = None
    rows: int | None = None
    # Of the last attempt.
    error: str = ""

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def is_unfinished(self) -> bool:
        return self.state in UNFINISHED


def request_sync(sentinel: Sentinel, schema: str, name: str, reason: str) -> SyncRequest:
    """Queue a table to be copied again; for a partitioned one name the root.

    A table that waits in the queue already is not queued twice. One that is being copied at this
    moment is: that copy may be older than the reason for this request.
    """
    sentinel.write(
        "INSERT OR IGNORE INTO table_sync (schema, name, reason, requested_at) VALUES (?, ?, ?, ?)",
        schema,
        name,
        reason,
        time.time(),
    )
    found = sentinel.rows(
        "SELECT * FROM table_sync WHERE schema = ? AND name = ? ORDER BY id DESC LIMIT 1",
        schema,
        name,
    )
    return _request(found[0])


def read_requests(sentinel: Sentinel, *, unfinished: bool = False) -> list[SyncRequest]:
    """All requests in their order, or those that are not done yet."""
    condition = " WHERE state IN ('queued', 'running')" if unfinished else ""
    return [_request(row) for row in sentinel.rows(f"SELECT * FROM table_sync{condition}")]


def read_request(sentinel: Sentinel, id_: int) -> SyncRequest | None:
    rows = sentinel.rows("SELECT * FROM table_sync WHERE id = ?", id_)
    return _request(rows[0]) if rows else None


def spool_floor(sentinel: Sentinel) -> int | None:
    """The spool must be kept from here on, for tables that are not followed yet; None if there are
    no such tables."""
    rows = sentinel.rows(
        "SELECT floor_lsn FROM table_sync WHERE state IN ('queued', 'running')"
        " AND floor_lsn IS NOT NULL"
    )
    return min((parse_lsn(row["floor_lsn"]) for row in rows), default=None)


def note_running(sentinel: Sentinel, id_: int, sync_id: str, floor_lsn: int) -> None:
    """A process has taken it up."""
    sentinel.write(
        "UPDATE table_sync SET state = 'running', sync_id = ?, floor_lsn = ?, error = ''"
        " WHERE id = ?",
        sync_id,
        render_lsn(floor_lsn),
        id_,
    )


def note_step(sentinel: Sentinel, id_: int, step: str) -> None:
    sentinel.write("UPDATE table_sync SET step = ? WHERE id = ?", step, id_)


def note_copied(sentinel: Sentinel, id_: int, lsn: int, rows: int) -> None:
    """Its rows, as of a position, are committed on the target."""
    sentinel.write(
        "UPDATE table_sync SET copied_lsn = ?, rows = ? WHERE id = ?", render_lsn(lsn), rows, id_
    )


def note_ended(sentinel: Sentinel, id_: int, state: RequestState, error: str = "") -> None:
    """Done, cancelled, or failed: then it is queued again, unless the table is already."""
    done = sentinel.write(
        "UPDATE OR IGNORE table_sync SET state = ?, error = ?, step = '', ended_at = ?"
        " WHERE id = ?",
        state,
        error,
        time.time(),
        id_,
    )
    if not done:  # A newer request of the same table waits, and counts for both.
        sentinel.write("UPDATE table_sync SET state = 'cancelled' WHERE id = ?", id_)


def _request(row: sqlite3.Row) -> SyncRequest:
    copied = row["copied_lsn"]
    return SyncRequest(
        row["id"],
        row["schema"],
        row["name"],
        row["reason"],
        RequestState(row["state"]),
        row["step"],
        row["sync_id"],
        None if copied is None else parse_lsn(copied),
        row["rows"],
        row["error"],
    )
