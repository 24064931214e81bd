"""PgQ beside tubes: the same writes recorded by its trigger, the same number of events read back.

It is taken if its extension is on this machine, and never required. PgQ records whole rows where a
tube records keys, and its readers get them without another look at the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]

# As Debian's package postgresql-15-pgq3 installs it.
CONTROL_FILE = Path("/usr/share/postgresql/15/extension/pgq.control")
SERVER_VERSION = 15
QUEUE, CONSUMER = "bench", "reader"


def is_installed() -> bool:
    return CONTROL_FILE.exists()


def read_version() -> str | None:
    """What the extension says of itself."""
    if not is_installed():
        return None
    lines = CONTROL_FILE.read_text().splitlines()
    found = [line.partition("=")[2] for line in lines if line.startswith("default_version")]
    return found[0].strip().strip("'") if found else None


def install(connection: Connection) -> None:
    connection.execute("CREATE EXTENSION IF NOT EXISTS pgq CASCADE")
    reset(connection)


def attach(connection: Connection, table: str) -> None:
    connection.execute(
        f"CREATE TRIGGER pgq AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW"
        f" EXECUTE FUNCTION pgq.logutriga('{QUEUE}')".encode()
    )


def reset(connection: Connection) -> None:
    """An empty queue with one consumer."""
    connection.execute(
        "SELECT pgq.drop_queue(queue_name, true) FROM pgq.queue WHERE queue_name = %s", (QUEUE,)
    )
    connection.execute("SELECT pgq.create_queue(%s)", (QUEUE,))
    connection.execute("SELECT pgq.register_consumer(%s, %s)", (QUEUE, CONSUMER))
    connection.execute("SELECT pgq.force_tick(%s)", (QUEUE,))
    connection.execute("SELECT pgq.ticker(%s)", (QUEUE,))


def fill(connection: Connection, events: int) -> None:
    connection.execute(
        "SELECT count(pgq.insert_event(%s, 'U', i::text)) FROM generate_series(1, %s) i",
        (QUEUE, events),
    )
    connection.execute("SELECT pgq.force_tick(%s)", (QUEUE,))
    connection.execute("SELECT pgq.ticker(%s)", (QUEUE,))


def drain(connection: Connection) -> int:
    """Read and finish every batch there is; the number of events."""
    total = 0
    while True:
        row = connection.execute("SELECT pgq.next_batch(%s, %s)", (QUEUE, CONSUMER)).fetchone()
        if row is None or row[0] is None:
            return total
        events = connection.execute("SELECT * FROM pgq.get_batch_events(%s)", (row[0],)).fetchall()
        total += len(events)
        connection.execute("SELECT pgq.finish_batch(%s)", (row[0],))
