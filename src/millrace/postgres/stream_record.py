"""Which streams a target database is followed by: a row of ours for each.

Invariant: a database that a stream goes with says so, from the beginning of its copy until `stream
cleanup`. So another copy does not replace what a stream will apply changes to, nor does a stream
apply them to another copy. Positions can't tell that: replication origins belong to the whole
server.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.postgres.catalog.schemas import (
    DROP_STREAM_SCHEMA,
    INSTALL_STREAM_SCHEMA,
    STREAM_SCHEMA,
    own_table_sql,
)
from millrace.postgres.format import check_stream_formats, format_of
from millrace.postgres.wire.connect import translated

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

TABLE = f"{STREAM_SCHEMA}.stream_copy"
INSTALL = f"""{INSTALL_STREAM_SCHEMA}
CREATE TABLE IF NOT EXISTS {TABLE} (
    source text,
    slot text,
    -- Of the copy; '' for rows that came by other ways.
    run_id text NOT NULL,
    host text NOT NULL,
    directory text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, slot)
);
{format_of(TABLE).write_sql()}
"""


@dataclass(frozen=True)
class Follower:
    """A stream that goes with the database."""

    source: str
    slot: str
    run_id: str
    host: str
    directory: str


def read_followers(connection: Connection) -> list[Follower]:
    with translated("reading which streams the target has"):
        check_stream_formats(connection)
        row = connection.execute(f"SELECT {own_table_sql('stream_copy')}").fetchone()
        if row != (True,):
            return []
        try:
            rows = connection.execute(
                f"SELECT source, slot, run_id, host, directory FROM {TABLE} ORDER BY 1, 2"
            )
        except psycopg.errors.InsufficientPrivilege:
            return []
        return [Follower(*row) for row in rows]


def write_follower(connection: Connection, follower: Follower) -> None:
    """Say that the stream goes with this database; a role that may only write rows can't."""
    with translated("noting the stream on the target"):
        try:
            with connection.transaction():
                connection.execute(INSTALL)
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
            log.info("the target does not say that it is followed: %s", str(error).strip())


def remove_follower(connection: Connection, source: str, slot: str) -> bool:
    """Whether it was there; the table goes with its last row."""
    if not any((one.source, one.slot) == (source, slot) for one in read_followers(connection)):
        return False
    with translated("removing the stream from the target"), connection.transaction():
        connection.execute(f"DELETE FROM {TABLE} WHERE (source, slot) = (%s, %s)", (source, slot))
        row = connection.execute(f"SELECT FROM {TABLE} LIMIT 1").fetchone()
        if row is None:
            connection.execute(f"DROP TABLE {TABLE}")
    if row is None:
        drop_stream_schema(connection)
    return True


def drop_stream_schema(connection: Connection) -> None:
    """The schema goes, if we made it and nothing is left in it."""
    with suppress(psycopg.errors.DependentObjectsStillExist, psycopg.errors.InsufficientPrivilege):
        connection.execute(DROP_STREAM_SCHEMA)
