"""The position of apply: kept on the target, advanced by the transaction that applies.

Invariant: the position is the end of the last source transaction whose changes are committed on
the target, and only one session can advance it at a time.

A replication origin is the natural place: any DBA sees it in pg_replication_origin_status, and the
server lets only one session hold it. Where the role may not use origins, it is a row, locked by the
transaction that advances it.

Facts: PostgreSQL documentation, "Replication Progress Tracking".
"""

from __future__ import annotations

import re
import time
from typing import Any, Protocol

import psycopg
from psycopg.pq.abc import PGconn

from millrace.errors import MillraceError, ServerError
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.origin import TAKE_OVER_SECONDS, drop_origin
from millrace.postgres.own_schema import (
    STREAM_POSITION,
    check_stream_formats,
    has_table,
    install_table,
)
from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import translated
from millrace.postgres.wire.libpq import execute

Connection = psycopg.Connection[tuple[Any, ...]]

TABLE = STREAM_POSITION.label
DEFINITION = """(
    stream text PRIMARY KEY,
    lsn pg_lsn NOT NULL,
    committed_at timestamptz,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)"""
# Codes by which a server says that origins are not for this role.
_NOT_ALLOWED = ("42501",)
_IN_USE = "55006"


def worker_name(stream: str, number: int, jobs: int) -> str:
    """The name of one worker's position."""
    return stream if jobs == 1 else f"{stream}_{jobs}_{number}"


class Position(Protocol):
    """The position of one stream, as one session sees it."""

    def take(self, session: PGconn) -> int:
        """Make this session the one that advances it; the position."""

    def lock_sql(self) -> str:
        """What a transaction starts with."""

    def advance_sql(self, lsn: int, committed_at: str) -> str:
        """What a transaction ends with, before COMMIT."""


class OriginPosition:
    """A replication origin."""

    def __init__(self, name: str) -> None:
        self._name = name

    def take(self, session: PGconn) -> int:
        deadline = time.monotonic() + TAKE_OVER_SECONDS
        while True:
            try:
                execute(
                    session, f"SELECT pg_replication_origin_session_setup({literal(self._name)})"
                )
                break
            except MillraceError as error:
                if error.facts.get("sqlstate") != _IN_USE or time.monotonic() > deadline:
                    raise
                _end_older(session, error)
        result = execute(session, "SELECT pg_replication_origin_session_progress(true)")[0]
        value = result.get_value(0, 0)
        return parse_lsn(value.decode()) if value else 0

    def lock_sql(self) -> str:
        return "BEGIN"

    def advance_sql(self, lsn: int, committed_at: str) -> str:
        # A transaction that wrote nothing moves no origin, and waits for no disk.
        return (
            "SELECT pg_logical_emit_message(true, 'millrace', '')"
            " WHERE pg_current_xact_id_if_assigned() IS NULL;"
            f" SELECT pg_replication_origin_xact_setup('{render_lsn(lsn)}',"
            f" '{committed_at}'::timestamptz)"
        )


class TablePosition:
    """A row of our table."""

    def __init__(self, name: str) -> None:
        self._name = name

    def take(self, session: PGconn) -> int:
        statement = f"SELECT lsn FROM {TABLE} WHERE stream = {literal(self._name)}"
        value = execute(session, statement)[0].get_value(0, 0)
        if value is None:
            raise ServerError(f"the position of stream {self._name} is not in {TABLE}")
        return parse_lsn(value.decode())

    def lock_sql(self) -> str:
        return f"BEGIN; SELECT lsn FROM {TABLE} WHERE stream = {literal(self._name)} FOR UPDATE"

    def advance_sql(self, lsn: int, committed_at: str) -> str:
        return (
            f"UPDATE {TABLE} SET lsn = '{render_lsn(lsn)}',"
            f" committed_at = '{committed_at}'::timestamptz, applied_at = clock_timestamp()"
            f" WHERE stream = {literal(self._name)}"
        )


def setup_position(connection: Connection, name: str, start_lsn: int) -> str:
    """Make the position of a new stream, or find it; "origin" or "table".

    An origin if the role may have one. A position that is there already stays where it is.
    """
    with translated("setting up the position on the target"):
        check_stream_formats(connection)
        if read_position(connection, name) is not None:
            return position_kind(connection, name)
        try:
            with connection.transaction():
                connection.execute("SELECT pg_replication_origin_create(%s)", (name,))
                connection.execute(
                    "SELECT pg_replication_origin_advance(%s, %s)", (name, render_lsn(start_lsn))
                )
            return "origin"
        except psycopg.Error as error:
            if error.sqlstate not in _NOT_ALLOWED:
                raise
        with connection.transaction():
            install_table(connection, STREAM_POSITION, DEFINITION)
            connection.execute(
                f"INSERT INTO {TABLE} (stream, lsn) VALUES (%s, %s) ON CONFLICT DO NOTHING",
                (name, render_lsn(start_lsn)),
            )
        return "table"


def position_kind(connection: Connection, name: str) -> str:
    found = connection.execute(
        "SELECT FROM pg_replication_origin WHERE roname = %s", (name,)
    ).fetchone()
    return "table" if found is None else "origin"


def open_position(kind: str, name: str) -> Position:
    return OriginPosition(name) if kind == "origin" else TablePosition(name)


def read_position(connection: Connection, name: str) -> int | None:
    """The position of the stream; None if the target knows no such stream."""
    with translated("reading the position on the target"):
        origin = connection.execute(
            "SELECT coalesce(s.remote_lsn, '0/0')::text FROM pg_replication_origin AS o"
            " LEFT JOIN pg_replication_origin_status AS s ON s.local_id = o.roident"
            " WHERE o.roname = %s",
            (name,),
        ).fetchone()
        if origin:
            return parse_lsn(origin[0])
        if not has_table(connection, STREAM_POSITION):
            return None
        row = connection.execute(
            f"SELECT lsn::text FROM {TABLE} WHERE stream = %s", (name,)
        ).fetchone()
    return parse_lsn(row[0]) if row else None


def read_positions(connection: Connection, prefix: str) -> dict[str, int]:
    """The positions on the target whose names begin so."""
    with translated("reading the positions on the target"):
        rows = connection.execute(
            "SELECT roname::text FROM pg_replication_origin WHERE starts_with(roname, %s)",
            (prefix,),
        ).fetchall()
        if has_table(connection, STREAM_POSITION):
            rows += connection.execute(
                f"SELECT stream FROM {TABLE} WHERE starts_with(stream, %s)", (prefix,)
            ).fetchall()
    return {name: read_position(connection, name) or 0 for (name,) in rows}


def read_worker_positions(connection: Connection, stream: str) -> dict[str, int]:
    """The positions of all workers of a stream."""
    own = re.compile(re.escape(stream) + r"(_\d+_\d+)?")
    found = read_positions(connection, stream)
    return {name: lsn for name, lsn in found.items() if own.fullmatch(name)}


def drop_position(connection: Connection, name: str) -> bool:
    """Forget the stream; whether there was anything to forget."""
    with translated("removing the position on the target"):
        dropped = drop_origin(connection, name)
        if read_position(connection, name) is not None:
            connection.execute(f"DELETE FROM {TABLE} WHERE stream = %s", (name,))
            return True
    return dropped


def _end_older(session: PGconn, error: MillraceError) -> None:
    """The origin is held by a session of an attempt that Spark has given up: end it."""
    match = re.search(r"PID (\d+)", error.message)
    if match:
        execute(
            session,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            f" WHERE pid = {match[1]} AND application_name = current_setting('application_name')",
        )
    time.sleep(0.05)
