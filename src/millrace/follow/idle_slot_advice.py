"""How long the source keeps a slot that nobody reads.

Invariant: reads only, and only advises: a stream that is never stopped for long needs nothing.

From version 18 on a server can invalidate slots that are not in use, at its next checkpoint. A
slot is in use while a receiver is connected: during `clone --follow`, but not while `millrace
snapshot --follow` holds its snapshot for a copy, and not while the stream is stopped.

Facts: PostgreSQL documentation, idle_replication_slot_timeout; slot.c,
InvalidatePossiblyObsoleteSlot(); walsender.c, CreateReplicationSlot(), which releases the slot.
"""

from __future__ import annotations

from typing import Any

import psycopg

from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

SETTING = "idle_replication_slot_timeout"


def read_idle_advice(connection: Connection) -> list[str]:
    """A sentence about the source's limit; none if it has no limit."""
    with translated("reading the source's settings"):
        row = connection.execute("SELECT current_setting(%s, true)", (SETTING,)).fetchone()
    assert row is not None
    limit = row[0] or "0"
    if limit == "0":
        return []
    return [
        f"it invalidates replication slots that nobody reads for {limit} ({SETTING}): a stream "
        "that is stopped for longer, or a copy under `millrace snapshot --follow` that takes "
        f"longer, can't be continued. To keep the slot: ALTER SYSTEM SET {SETTING} = 0"
    ]
