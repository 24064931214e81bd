"""Where the source's WAL ends now.

Invariant: every transaction whose commit was acknowledged before the call ends at or before the
position, also one that did not wait for the disk.
"""

from __future__ import annotations

from typing import Any

import psycopg

from millrace.lsn import parse_lsn
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]


def read_end(connection: Connection) -> int:
    """The source's position now, with everything committed before it on its disk. On a standby:
    how far it has replayed, which is all that it can send."""
    with translated("reading the source's position"):
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        if row and row[0]:
            function = "pg_last_wal_replay_lsn"
        else:
            # A commit that waits for the disk takes the ones before it along. It must have
            # written something, else it does not wait.
            connection.execute(
                "BEGIN; SET LOCAL synchronous_commit = local;"
                " SELECT pg_logical_emit_message(true, 'millrace', 'end'); COMMIT"
            )
            function = "pg_current_wal_flush_lsn"
        row = connection.execute(f"SELECT {function}()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])
