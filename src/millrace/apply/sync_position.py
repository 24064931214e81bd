"""The position of a table that catches up on its own.

Invariant: its position is advanced by the transaction that applies its changes, as long as no other
copy of the table has begun; it is a stream of one table, with a position of its own.
"""

from __future__ import annotations

from psycopg.pq.abc import PGconn

from millrace.apply.table_state import SyncState, advance_sql, locked_lsn_sql, read_lsn_sql
from millrace.errors import ServerError
from millrace.lsn import parse_lsn
from millrace.postgres.wire.libpq import execute


class SyncPosition:
    """The position of a table's state; a `position.Position`."""

    def __init__(self, stream: str, sync_id: str) -> None:
        self._stream = stream
        self._sync_id = sync_id

    def take(self, session: PGconn) -> int:
        result = execute(session, read_lsn_sql(self._stream, self._sync_id))[0]
        value = result.get_value(0, 0) if result.ntuples else None
        if value is None:
            raise ServerError(f"copy {self._sync_id} of a table is not {SyncState.CATCHING_UP}")
        return parse_lsn(value.decode())

    def lock_sql(self) -> str:
        return f"BEGIN; {locked_lsn_sql(self._stream, self._sync_id)}"

    def advance_sql(self, lsn: int, committed_at: str) -> str:
        return advance_sql(self._stream, self._sync_id, lsn)
