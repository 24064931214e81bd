"""Which streams a target database is followed by: a row of ours for each.

Invariant: a database that a stream applies its changes to says so, from the beginning of its copy
until `stream cleanup`. So another copy does not replace what a stream will apply changes to, nor
does a stream apply them to another copy. Positions can't show that: replication origins belong to
the whole server.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.postgres.own_schema import (
    LOCK,
    STREAM_COPY,
    check_stream_formats,
    drop_schemas,
    has_table,
    install_table,
)
from millrace.postgres.wire.connect import translated

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

TABLE = STREAM_COPY.label
DEFINITION = """(
    source text,
    slot text,
    -- Of the copy; '' for rows that came by other ways.
    run_id text NOT NULL,
    host text NOT NULL,
    directory text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, slot)
)"""


@dataclass(frozen=True)
class Follower:
    """A stream that belongs to the database."""

    source: str
    slot: str
    run_id: str
    host: str
    directory: str


def read_followers(connection: Connection) -> list[Follower]:
    with translated("reading which streams the target has"):
        check_stream_formats(connection)
        if not has_table(connection, STREAM_COPY):
            return []
        try:
            rows = connection.execute(
                f"SELECT source, slot, run_id, host, directory FROM {TABLE} ORDER BY 1, 2"
            )
        except psycopg.errors.InsufficientPrivilege:
            return []
        return [Follower(*row) for row in rows]


def write_follower(connection: Connection, follower: Follower) -> None:
    """Record that the stream belongs to this database; a role that may only write rows can't."""
    with translated("noting the stream on the target"):
        try:
            with connection.transaction():
                install_table(connection, STREAM_COPY, DEFINITION)
                connection.execute(
                    f"INSERT INTO {TABLE} (source, slot, run_id, host, directory)"
                    " VALUES (%s, %s, %s, %s, %s) ON CONFLICT (source, slot) DO UPDATE SET"
                    " run_id = excluded.run_id, host = excluded.host,"
                    " directory = excluded.directory",
                    (
                        follower.source,
                        follower.slot,
                        follower.run_id,
                        follower.host,
                        follower.directory,
                    ),
                )
        except psycopg.errors.InsufficientPrivilege as error:
            log.info("the stream could not be noted on the target: %s", str(error).strip())


def remove_follower(connection: Connection, source: str, slot: str) -> bool:
    """Whether it was there; the table goes with its last row."""
    if not any((one.source, one.slot) == (source, slot) for one in read_followers(connection)):
        return False
    with translated("removing the stream from the target"):
        with connection.transaction():
            connection.execute(LOCK)  # else another stream's row could go with the table
            key = (source, slot)
            connection.execute(f"DELETE FROM {TABLE} WHERE (source, slot) = (%s, %s)", key)
            row = connection.execute(f"SELECT FROM {TABLE} LIMIT 1").fetchone()
            if row is None:
                connection.execute(f"DROP TABLE {TABLE}")
        if row is None:
            drop_schemas(connection)
    return True
