"""Who serves which partition of a tube.

Invariant: a partition is served by at most one session, also while the tube gets another number of
partitions: the locks carry that number, and nobody begins while one with another number is held.
The lock belongs to the session that reads the pods, so it goes when that ends. A sink is not
fenced by it: a worker that was frozen and writes late loses by version there.
Where keys of several partitions could meet, `holds` keeps them apart.

Facts: PostgreSQL documentation, Advisory Locks: two integers name a lock of the database; pg_locks
shows them as classid and objid with objsubid 2.
"""

from __future__ import annotations

import zlib

from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.tube import Connection, Tube

MOST_PARTITIONS = 10_000


def try_own(connection: Connection, tube: Tube, partition: int) -> str | None:
    """None if the partition is this session's now; otherwise who has it, or what it waits for."""
    class_, object_ = _lock(tube, partition)
    with translated("claiming a partition"):
        row = connection.execute(
            "SELECT pg_try_advisory_lock(%s, %s)", (class_, object_)
        ).fetchone()
        if row != (True,):
            return _holder(connection, "l.objid = %s", class_, object_)
        other = _holder(connection, "l.objid / %s <> %s", class_, MOST_PARTITIONS, tube.partitions)
        if other is not None:
            connection.execute("SELECT pg_advisory_unlock(%s, %s)", (class_, object_))
        return other


def give_up(connection: Connection) -> None:
    """All partitions of this session, and whatever else it holds."""
    with translated("giving partitions up"):
        connection.execute("SELECT pg_advisory_unlock_all()")


def _lock(tube: Tube, partition: int) -> tuple[int, int]:
    class_ = zlib.crc32(f"millrace tube {tube.schema}.{tube.name}".encode())
    return class_ - (1 << 31), tube.partitions * MOST_PARTITIONS + partition


def _holder(connection: Connection, which: str, class_: int, *values: int) -> str | None:
    row = connection.execute(
        "SELECT l.pid, coalesce(a.application_name, ''), coalesce(host(a.client_addr), 'local')"
        " FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid"
        " WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted"
        " AND l.pid <> pg_backend_pid()"
        " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        f" AND l.classid = %s::int8 & 4294967295 AND {which.replace('l.objid', 'l.objid::int8')}"
        " LIMIT 1".encode(),
        (class_, *values),
    ).fetchone()
    return None if row is None else f"process {row[0]} of the server ({row[1]}, {row[2]})"
