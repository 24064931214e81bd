"""Whether a connection is a session of its own, or shares one through a pooler.

Invariant: advisory locks, LISTEN and settings are of a session. A connection that goes through a
pooler in transaction mode is refused before anything depends on them; one in session mode is not.

Facts: libpq, PQbackendPID(): what the server, or a pooler in its place, said at the start. A pooler
answers with a number of its own. In transaction mode it gives a server to another client as soon as
a transaction ends, by default the one that was used last.
"""

from __future__ import annotations

import select
from typing import Final

import psycopg
from psycopg import pq

from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.postgres.wire.connect import translated
from millrace.postgres.wire.libpq import drain
from millrace.tube.delivery.tube import Connection

# A pool in session mode that is exhausted lets a second client wait; that is no sharing.
_ANSWER_SECONDS: Final = 10.0


def require_session(connection: Connection, dsn: Dsn) -> None:
    """A pooler that shares sessions would lose our locks."""
    with translated("looking for a pooler"):
        first = _pid(connection)
        if first == connection.info.backend_pid:
            return
        # Some pooler answered. Another client of it, in a transaction, gets our server, or makes
        # us change ours, if servers are shared.
        with _other_client(dsn) as other:
            second = _pid_in_transaction(other)
            # One that waits for a server holds none, and must not make us wait for it in turn.
            is_shared = second is not None and (second == first or _pid(connection) != first)
    if is_shared:
        raise ServerError(
            "the connection goes through a pooler in transaction mode, and tubes need a session"
            " for their locks",
            hint="connect to the server itself, or use a pool in session mode",
            sqlstate="55000",
        )


class _other_client:
    def __init__(self, dsn: Dsn) -> None:
        self._connection = pq.PGconn.connect(dsn.conninfo().encode())

    def __enter__(self) -> pq.abc.PGconn:
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.finish()


def _pid(connection: psycopg.Connection[tuple[int]]) -> int | None:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    return None if row is None else row[0]


def _pid_in_transaction(connection: pq.abc.PGconn) -> int | None:
    """None if no server answers."""
    if connection.status != pq.ConnStatus.OK:
        return None
    connection.send_query(b"BEGIN; SELECT pg_backend_pid()")
    if not select.select([connection.socket], [], [], _ANSWER_SECONDS)[0]:
        return None
    found = drain(connection)[-1]
    return int(found.get_value(0, 0) or 0) if found.ntuples else None
