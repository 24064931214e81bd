"""Names of streams on the target, and the replication origins that go by them.

Invariant: two streams never share a name: it has the slot, the identity of the source, and the
position where the stream begins.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]

# How long an older session of ours may take to end.
TAKE_OVER_SECONDS = 30.0


def stream_prefix(source: str, slot: str) -> str:
    """What the names of all positions of this slot begin with; `source` is its identity."""
    return f"{slot}_{zlib.crc32(source.encode()):08x}_"


def stream_name(source: str, slot: str, start_lsn: int) -> str:
    """The name of a stream's position.

    Origins belong to the whole target server. The stream of another source, or an earlier one of
    this slot, must not be taken for this one: its position would skip changes, or repeat them.
    """
    return f"{stream_prefix(source, slot)}{start_lsn:X}"


def drop_origin(connection: Connection, name: str) -> bool:
    """Whether it was there."""
    deadline = time.monotonic() + TAKE_OVER_SECONDS
    while True:
        try:
            found = connection.execute(
                "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin"
                " WHERE roname = %s",
                (name,),
            ).fetchone()
            return found is not None
        except psycopg.errors.ObjectInUse:
            # A session that has just ended may not be gone yet.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
