"""Bare libpq sessions, for COPY and for tasks.

Invariant: a session starts with the same settings as `connect` gives; every result
is looked at, and the first error is raised as ours.
"""

from __future__ import annotations

import select

from psycopg import Error as PsycopgError
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, InvariantError, MillraceError, ServerError
from millrace.postgres.wire.connect import APPLICATION, error_for, session_sql
from millrace.postgres.wire.encoding import python_encoding


def open_session(dsn: Dsn, role: str, encoding: str) -> PGconn:
    """Connect; `encoding` is the client encoding, which both ends of a COPY must share."""
    connection = pq.PGconn.connect(dsn.conninfo(application_name=f"{APPLICATION} {role}").encode())
    if connection.status != pq.ConnStatus.OK:
        message = connection.error_message.decode(errors="replace").strip()
        connection.finish()
        raise error_for(None, message, f"can't connect to {dsn}")
    execute(connection, session_sql(connection.server_version, client_encoding=encoding))
    return connection


def execute(connection: PGconn, statements: str, what: str = "") -> list[PGresult]:
    """Run statements in one message; all their results, or the first error, which is named after
    the first word or after `what`."""
    try:
        connection.send_query(_encode(connection, statements))
    except PsycopgError as error:
        raise ConnectionLost(f"the connection broke: {error}".strip(), sqlstate=None) from error
    results = drain(connection)
    for result in results:
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise result_error(result, what or statements.split(maxsplit=1)[0])
    if not results:
        raise InvariantError("a query had no result")
    return results


def fetch(connection: PGconn, query: str) -> list[tuple[str | None, ...]]:
    """The rows of the last of some queries, as text."""
    result = execute(connection, query)[-1]
    encoding = session_encoding(connection)
    return [
        tuple(
            None if (value := result.get_value(row, column)) is None else value.decode(encoding)
            for column in range(result.nfields)
        )
        for row in range(result.ntuples)
    ]


def session_encoding(connection: PGconn) -> str:
    """Python's name of the encoding of statements and results."""
    name = connection.parameter_status(b"client_encoding") or b"UTF8"
    return python_encoding(name.decode())


def _encode(connection: PGconn, statements: str) -> bytes:
    """Names need not be ASCII, and the server reads them in the session's encoding."""
    if statements.isascii():
        return statements.encode()
    try:
        return statements.encode(session_encoding(connection))
    except UnicodeEncodeError as error:
        raise ServerError(
            f"a statement contains a character that encoding {error.encoding} does not have",
            hint="create the target database with the source's encoding, or UTF8",
            sqlstate="22P05",
        ) from None


def drain(connection: PGconn) -> list[PGresult]:
    """Every result up to the end of the message.

    Waits in Python, not in libpq: there no signal would reach us before the server answers.
    """
    results: list[PGresult] = []
    while True:
        _wait_until_idle(connection)
        result = connection.get_result()
        if result is None:
            return results
        results.append(result)


def _wait_until_idle(connection: PGconn) -> None:
    try:
        while connection.is_busy():
            select.select([connection.socket], [], [])
            connection.consume_input()
    except PsycopgError:
        return  # the connection broke: the next result says how


def result_error(result: PGresult, what: str) -> MillraceError:
    """Our error for a failed result."""

    def field(code: pq.DiagnosticField) -> str | None:
        value = result.error_field(code)
        return value.decode(errors="replace") if value else None

    return error_for(
        field(pq.DiagnosticField.SQLSTATE),
        field(pq.DiagnosticField.MESSAGE_PRIMARY)
        or result.error_message.decode(errors="replace").strip()
        or "the connection broke",
        what,
        where=field(pq.DiagnosticField.CONTEXT),
    )


# libpq keeps what it can't send yet: pieces, so that it never holds a whole stream.
_COPY_PIECE_BYTES = 1 << 20


def copy_in(connection: PGconn, statement: str, data: memoryview) -> int:
    """Run COPY ... FROM STDIN with this data; the number of rows stored."""
    started = connection.exec_(_encode(connection, statement))
    if started.status != pq.ExecStatus.COPY_IN:
        raise result_error(started, "starting COPY on the target")
    try:
        for start in range(0, len(data), _COPY_PIECE_BYTES):
            connection.put_copy_data(data[start : start + _COPY_PIECE_BYTES])
        connection.put_copy_end()
    except PsycopgError as error:
        results = drain(connection)
        if results and results[0].error_message:
            raise result_error(results[0], "writing to the target") from None
        raise ConnectionLost(f"writing to the target: {error}".strip(), sqlstate=None) from None
    results = drain(connection)
    if not results:
        raise ConnectionLost("writing to the target: the connection broke", sqlstate=None)
    if results[0].status != pq.ExecStatus.COMMAND_OK:
        raise result_error(results[0], "writing to the target")
    return command_rows(results[0])


def copy_out(connection: PGconn, statement: str, what: str) -> bytes:
    """Run COPY ... TO STDOUT; all it sends. One message for each row comes from the server, and no
    more than a call and a list entry is spent on it here."""
    rows: list[bytes | memoryview] = []
    try:
        connection.send_query(_encode(connection, statement))
        _wait_until_idle(connection)
        started = connection.get_result()
        if started is not None and started.status == pq.ExecStatus.COPY_OUT:
            while True:
                size, data = connection.get_copy_data(1)
                if size > 0:
                    rows.append(data)
                elif size == 0:
                    select.select([connection.socket], [], [])
                    connection.consume_input()
                else:
                    break
    except PsycopgError as error:
        raise ConnectionLost(f"{what}: {error}".strip(), sqlstate=None) from error
    results = drain(connection)
    if started is not None and started.status != pq.ExecStatus.COPY_OUT:
        results = [started, *results]
    if not results:
        raise ConnectionLost(f"{what}: the connection broke", sqlstate=None)
    if results[0].status != pq.ExecStatus.COMMAND_OK:
        raise result_error(results[0], what)
    return b"".join(rows)


def command_rows(result: PGresult) -> int:
    """How many rows a command says it touched."""
    return int(result.command_tuples or 0)
