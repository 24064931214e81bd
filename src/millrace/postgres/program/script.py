"""SQL scripts written by pg_restore and pg_dumpall, run over one connection.

Invariant: a script runs as one message, so it is one transaction: all of it happens, or
nothing. If this process dies, the server notices and rolls back; a psql of its own would
go on.

Facts: PostgreSQL documentation, "Simple Query": several statements in one message form a
transaction; the message is converted from the client encoding as a whole.
"""

from __future__ import annotations

import re

from psycopg import Error as PsycopgError
from psycopg import pq

from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, MillraceError
from millrace.postgres.wire.libpq import drain, open_session, result_error

_CLIENT_ENCODING = re.compile(rb"^SET client_encoding = '([^']+)';$", re.M)
# For psql only; it is what keeps a hostile dump from running psql's own commands.
_PSQL_COMMAND = re.compile(rb"^\\(?:un)?restrict [^\n]*\n", re.M)
# pg_dump 17 and later write this for servers that may not know it.
_UNKNOWN_BEFORE_17 = b"SET transaction_timeout = 0;\n"


def run_script(
    dsn: Dsn, script: bytes, what: str, *, role: str, before: str = "", after: str = ""
) -> None:
    """Run `before`, the script and `after` in one transaction."""
    encoding = _CLIENT_ENCODING.search(script)
    connection = open_session(dsn, role, encoding[1].decode() if encoding else "UTF8")
    try:
        script = plain_script(script, connection.server_version)
        query = before.encode() + script + after.encode()
        connection.send_query(query)
        for result in drain(connection):
            if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
                error = result_error(result, what)
                position = result.error_field(pq.DiagnosticField.STATEMENT_POSITION)
                raise _with_statement(error, query, position)
    except PsycopgError as error:
        raise ConnectionLost(f"{what}: {error}".strip(), sqlstate=None) from error
    finally:
        connection.finish()


def plain_script(script: bytes, server_version: int) -> bytes:
    """Only what a server of this version understands."""
    script = _PSQL_COMMAND.sub(b"", script)
    return script if server_version >= 170000 else script.replace(_UNKNOWN_BEFORE_17, b"", 1)


def _with_statement(error: MillraceError, query: bytes, position: bytes | None) -> MillraceError:
    """Add the first line of the statement that failed, if the server said where."""
    if position:
        text = query.decode(errors="replace")
        start = text.rfind("\n\n", 0, int(position)) + 2
        line = text[start:].split("\n", 1)[0]
        error.message += f" (in: {line[:200]})"
    return error
