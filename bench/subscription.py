"""Native logical replication: a subscription that finds its slot filled.

Invariant: the subscription is made, with its tables, before the clock starts; the run is nothing
but enabling it and waiting for the mark.

Its work is done by the servers, so the client of this contestant only looks.

Run as a program: python -m bench.subscription TARGET MARK SECONDS
"""

from __future__ import annotations

import sys

import psycopg
from psycopg import sql

from bench.changes import wait_for_mark

SLOT = PUBLICATION = NAME = "native"
# As CREATE SUBSCRIPTION makes it; and with values in binary, as Millrace asks for them.
TEXT, BINARY = "false", "true"


def create(source: str, target: str, binary: str) -> None:
    """The subscription, not enabled, on the slot that is there; the target has the rows."""
    statement = sql.SQL(
        "CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH (slot_name = {}, enabled = false,"
        " create_slot = false, copy_data = false, binary = {})"
    ).format(
        *map(sql.Identifier, (NAME,)), source, *map(sql.Identifier, (PUBLICATION, SLOT)), binary
    )
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute(statement)


def drop(target: str) -> None:
    """Without its slot, which belongs to the bench."""
    with psycopg.connect(target, autocommit=True) as connection:
        found = connection.execute(
            "SELECT FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid"
            " WHERE d.datname = current_database()"
        )
        if found.fetchone() is None:
            return
        for statement in ("DISABLE", "SET (slot_name = NONE)"):
            connection.execute(f"ALTER SUBSCRIPTION {NAME} {statement}".encode())
        connection.execute(f"DROP SUBSCRIPTION {NAME}".encode())


def main() -> None:
    target, mark, seconds = sys.argv[1:]
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute(f"ALTER SUBSCRIPTION {NAME} ENABLE".encode())
        wait_for_mark(connection, int(mark), float(seconds))


if __name__ == "__main__":
    main()
