"""Who keeps our readers of the source waiting, although we hold the lock that they need.

Invariant: reads only, and an error stays the error it was: what is added is its hint.

The session that holds a snapshot has every table locked. A TRUNCATE or ALTER TABLE of the
application waits for that lock, and whoever comes later waits behind it: readers of the
application, pg_dump, our own COPY. The holder waits for those, so nobody would get on. No server
sees a deadlock in that.

Facts: PostgreSQL documentation, "Explicit Locking"; proc.c, ProcSleep(): only a session that has a
conflicting lock itself goes before those that wait.
"""

from __future__ import annotations

import logging
from typing import Final

from millrace.config.dsn import Dsn
from millrace.errors import MillraceError
from millrace.postgres.wire.connect import APPLICATION, connect, translated
from millrace.postgres.wire.slot_wait import shorten_query

log = logging.getLogger(__name__)

LOCK_NOT_AVAILABLE: Final = "55P03"

# Those that a session of ours blocks.
_WAITING = """
SELECT l.relation::regclass::text, a.pid, coalesce(a.application_name, ''), coalesce(a.query, '')
  FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND NOT l.granted
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND EXISTS (SELECT FROM pg_stat_activity ours
                WHERE ours.pid = ANY (pg_blocking_pids(l.pid))
                  AND split_part(ours.application_name, ' ', 1) = %s)
 ORDER BY a.query_start LIMIT 3
"""


def explain_lock_wait(error: BaseException, source: Dsn) -> bool:
    """Say in the hint of a lock timeout which statements are in the way; whether there are any."""
    if not isinstance(error, MillraceError) or error.facts.get("sqlstate") != LOCK_NOT_AVAILABLE:
        return False
    try:
        with connect(source, "locks") as connection, translated("asking who waits for a lock"):
            found = connection.execute(_WAITING, (APPLICATION,)).fetchall()
    except MillraceError as unknown:
        log.debug("%s", unknown)
        return False
    if not found:
        return False
    statements = "; ".join(
        f"process {pid}{f' ({application})' if application else ''} on {table}: "
        f"{shorten_query(query)}"
        for table, pid, application, query in found
    )
    error.hint = (
        "a statement waits for the lock that keeps the snapshot's rows, and all readers of the "
        f"table wait behind it: {statements}. Cancel it (SELECT pg_cancel_backend({found[0][1]})), "
        "or start again with --restart when it is over"
    )
    return True
