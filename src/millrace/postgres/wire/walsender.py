"""Walsender sessions: opened with our settings, and asked who they are.

Invariant: a walsender starts with the same settings as every other session, so that no timeout of
server, database or role can end it while it waits or holds a snapshot.

Facts: PostgreSQL documentation, "Streaming Replication Protocol": with `replication=database` a
walsender takes SQL as well; timeline.c, readTimeLineHistory().
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg import pq
from psycopg.pq.abc import PGconn

from millrace.config.dsn import Dsn
from millrace.lsn import parse_lsn
from millrace.postgres.wire.connect import APPLICATION, error_for, session_sql
from millrace.postgres.wire.libpq import execute

# Ours, whatever the server's is: silence is never mistaken for death while we say something every
# ten seconds, and a walsender whose receiver vanished frees the slot after a minute.
WAL_SENDER_TIMEOUT: Final = "60s"
# No two servers start in the same microsecond.
STARTED_AT: Final = "pg_postmaster_start_time()::text"


def open_replication(dsn: Dsn, role: str, encoding: str, **more: str) -> PGconn:
    """A walsender that also takes SQL, with our session settings."""
    conninfo = dsn.conninfo(replication="database", application_name=f"{APPLICATION} {role}")
    connection = pq.PGconn.connect(conninfo.encode())
    if connection.status != pq.ConnStatus.OK:
        message = connection.error_message.decode(errors="replace").strip()
        connection.finish()
        raise error_for(None, message, f"can't open a replication connection to {dsn}")
    try:
        settings = {"client_encoding": encoding, "wal_sender_timeout": WAL_SENDER_TIMEOUT, **more}
        execute(connection, session_sql(connection.server_version, **settings))
    except BaseException:
        connection.finish()
        raise
    return connection


@dataclass(frozen=True)
class TimelineEnd:
    """A timeline of the past, and the position at which it was left for the next one."""

    timeline: int
    end_lsn: int


@dataclass(frozen=True)
class SystemState:
    """Which cluster a server is, and its position in its history."""

    # A standby has its primary's.
    identifier: str
    timeline: int
    # What is on its disk; on a standby, what was received or replayed.
    flushed_lsn: int
    is_standby: bool
    # Of its postmaster, as the server prints it: no other server has the same.
    started_at: str
    # The timelines that lead to its own, oldest first.
    history: tuple[TimelineEnd, ...] = ()


def identify_system(connection: PGconn) -> SystemState:
    (result,) = execute(connection, "IDENTIFY_SYSTEM")
    identifier, timeline, lsn = (result.get_value(0, at) or b"" for at in range(3))
    (started,) = execute(connection, f"SELECT {STARTED_AT}, pg_is_in_recovery()")
    return SystemState(
        identifier.decode(),
        int(timeline),
        parse_lsn(lsn.decode()),
        started.get_value(0, 1) == b"t",
        (started.get_value(0, 0) or b"").decode(),
        _read_history(connection, int(timeline)),
    )


def _read_history(connection: PGconn, timeline: int) -> tuple[TimelineEnd, ...]:
    if timeline == 1:
        return ()  # the first has no history, and no file of it
    (result,) = execute(connection, f"TIMELINE_HISTORY {timeline}")
    return parse_history((result.get_value(0, 1) or b"").decode(errors="replace"))


def parse_history(text: str) -> tuple[TimelineEnd, ...]:
    """The lines of a history file: timeline, where it was left, why."""
    lines = (line.split() for line in text.splitlines() if not line.lstrip().startswith("#"))
    return tuple(TimelineEnd(int(words[0]), parse_lsn(words[1])) for words in lines if words)
