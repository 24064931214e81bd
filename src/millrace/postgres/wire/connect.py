"""Connections, and server errors turned into ours.

Invariant: every session starts with the settings below, so that what the
database or role sets (timeouts, date styles, currency, search_path, row security)
can neither stop the work nor change what a value looks like.

`row_security = off` makes a query that a policy would filter fail instead of
returning fewer rows.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg

from millrace.config.dsn import Dsn, resolved
from millrace.errors import ConnectionLost, MillraceError, ServerError, SnapshotLost
from millrace.log import redact
from millrace.retry import is_transient_code

APPLICATION = "millrace"

SESSION_SETTINGS = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read committed",
    "search_path": "pg_catalog",
    "row_security": "off",
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "lc_monetary": "C",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "xmloption": "content",
    "standard_conforming_strings": "on",
    "client_min_messages": "error",
    # A server whose client vanished without a word ends the session, and lets go of its locks and
    # its snapshot, as soon as we give up on a silent server. They mean nothing to a local socket.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "6",
}
# The server looks every so often if its client is still there while it works (14+),
# so that the backend of a killed task does not keep running.
CLIENT_CHECK_INTERVAL = "5s"
# What is committed must survive a crash of the target: later steps, and the summary, rest on
# it. A server that waits for its standbys keeps waiting.
_COMMITS_LAST = (
    "CASE current_setting('synchronous_commit') WHEN 'off'"
    " THEN set_config('synchronous_commit', 'local', false) END"
)
# Leaves room for "millrace apply " before it and " catalog" behind it.
OWNER_BYTES = 40
_DIGITS = 12
# How long a session that was terminated may take to roll back.
END_SECONDS = 30.0

_SNAPSHOT_GONE = re.compile(
    r"invalid snapshot identifier|could not import the requested snapshot"
    r"|snapshot \".*\" does not exist"
)

_HINTS = {
    "28P01": "check the user and the password, or add the server to ~/.pgpass",
    "28000": "check pg_hba.conf on the server, and the user name",
    "3D000": "create the database first: createdb, or CREATE DATABASE",
    "53100": "free disk space on that server, then run the same command again",
    "53200": "the server is out of memory or lock slots: raise max_locks_per_transaction, "
    "or ask for fewer jobs",
    "53300": "raise max_connections on that server, or ask for fewer jobs",
    "42501": "grant the missing right to the connecting role, or connect as a superuser",
    "42P01": "something was dropped there while it was needed; start again with --restart",
    "22021": "the source holds bytes that are not valid in the target's encoding: "
    "create the target database with the source's encoding",
    "22P05": "the target's encoding can't hold a character of the source: "
    "create the target database with the source's encoding, or UTF8",
    "23514": "a row of the source violates a check of the target: clean the data on the source, "
    "or drop the check there and add it again as NOT VALID",
    "23503": "a row of the source violates a foreign key: clean the data on the source, "
    "or make that foreign key NOT VALID there",
    "23505": "duplicate keys on the source, perhaps a corrupted index there: REINDEX it and look",
}


def session_sql(server_version: int, **more: str) -> str:
    """One statement that puts all session settings in place."""
    settings = SESSION_SETTINGS | more
    if server_version >= 140000:
        settings["client_connection_check_interval"] = CLIENT_CHECK_INTERVAL
        settings["idle_session_timeout"] = "0"
    if server_version >= 170000:
        settings["transaction_timeout"] = "0"
    calls = [f"set_config('{k}', '{v}', false)" for k, v in settings.items()]
    if "synchronous_commit" not in more:
        calls.append(_COMMITS_LAST)
    return f"SELECT {', '.join(calls)}"


class _Session(psycopg.Connection[tuple[Any, ...]]):
    """Where every statement commits on its own, the end of a block has nothing to commit; psycopg
    would try, and raise an error of its own if the server has gone meanwhile."""

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(dsn: Dsn, role: str, **more: str) -> psycopg.Connection[tuple[Any, ...]]:
    """An autocommit session; `role` is its job, shown in pg_stat_activity.

    `more` are further session settings.
    """
    with translated(f"can't connect to {dsn}"):
        connection = _Session.connect(
            dsn.conninfo(application_name=f"{APPLICATION} {role}", client_encoding="UTF8"),
            autocommit=True,
            prepare_threshold=None,  # poolers in transaction mode keep no prepared statements
        )
        connection.execute(session_sql(connection.info.server_version, **more))
    return connection


def resolve(dsn: Dsn) -> Dsn:
    """A Dsn with nothing left to look up: works on any machine of a cluster.

    Service files, passfiles and PG* variables are read once, here, by libpq.
    """
    with connect(replace(dsn, settings={}), "resolve") as connection:
        info = connection.info
        return replace(resolved(info.get_parameters(), info.password), settings=dsn.settings)


def server_encoding(connection: psycopg.Connection[Any]) -> str:
    """The encoding of the database."""
    return str(connection.info.parameter_status("server_encoding"))


@contextmanager
def translated(what: str, **facts: Any) -> Iterator[None]:
    """Turn psycopg's errors into ours."""
    try:
        yield
    except psycopg.Error as error:
        raise server_error(error, what, **facts) from error


def server_error(error: psycopg.Error, what: str, **facts: Any) -> MillraceError:
    """Ours for psycopg's: what was done, the server's words, its code, a hint."""
    message = error.diag.message_primary or str(error).strip() or "the connection broke"
    return error_for(error.sqlstate, message, what, where=error.diag.context, **facts)


def error_for(
    sqlstate: str | None, message: str, what: str, *, where: str | None = None, **facts: Any
) -> MillraceError:
    """The error for a SQLSTATE. `where`, the server's context, may quote row values: only
    its name of table, line and column is kept."""
    place = _place(where)
    text = redact(f"{what}: {_without_values(sqlstate, message)}{place}")
    facts["sqlstate"] = sqlstate
    if _SNAPSHOT_GONE.search(message):
        return SnapshotLost(
            text,
            hint="the session that exported the snapshot has ended; start again with --restart",
            **facts,
        )
    if sqlstate is None or sqlstate[:2] == "08" or sqlstate in ("57P01", "57P02", "57P03"):
        hint = "check the host, the port and that the server is running and reachable"
        if "password authentication" in message or "no password supplied" in message:
            return ServerError(text, hint=_HINTS["28P01"], **(facts | {"sqlstate": "28P01"}))
        if 'database "' in message and "does not exist" in message:
            return ServerError(text, hint=_HINTS["3D000"], **(facts | {"sqlstate": "3D000"}))
        return ConnectionLost(text, hint=hint, **facts)
    hint = _HINTS.get(sqlstate, "")
    if not hint and is_transient_code(sqlstate):
        hint = "run the same command again"
    return ServerError(text, hint=hint, **facts)


def _place(where: str | None) -> str:
    if not where:
        return ""
    match = re.search(r"COPY (\S+), line (\d+)(?:, column ([^\s:]+))?", where)
    if not match:
        return ""
    column = f", column {match[3]}" if match[3] else ""
    return f" (COPY {match[1]}, line {match[2]}{column})"


def _without_values(sqlstate: str | None, message: str) -> str:
    """Data exceptions (class 22) quote the offending value; drop it."""
    if sqlstate is None or not sqlstate.startswith("22"):
        return message
    return re.sub(r'value "[^"]*"', "a value", message).split(": ", 1)[0]


def session_owner(name: str) -> str:
    """The name of a run or a stream as a word of an application_name.

    The server cuts that to 63 bytes. What is too long to leave room for a job before it and a word
    behind it is cut here, with a hash of the whole instead: two owners never have one name.
    """
    if len(name.encode()) <= OWNER_BYTES and " " not in name:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    kept = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[: OWNER_BYTES - _DIGITS - 1]
    return f"{kept}~{digest}"


def read_sessions(connection: psycopg.Connection[Any], owner: str) -> list[str]:
    """The sessions of this database that are called after the owner, and where they come from."""
    rows = connection.execute(
        "SELECT application_name, coalesce(host(client_addr), 'this host'), pid"
        " FROM pg_stat_activity WHERE split_part(application_name, ' ', 1) = %s"
        " AND split_part(application_name, ' ', 3) = %s"
        " AND pid <> pg_backend_pid() AND datname = current_database() ORDER BY backend_start",
        (APPLICATION, session_owner(owner)),
    )
    return [f"{name} from {place}, server process {pid}" for name, place, pid in rows]


def cancel_sessions(dsn: Dsn, owners: Collection[str], job: str | None = None) -> int:
    """Terminate the sessions on `dsn` that are called "millrace JOB OWNER ..." after one of these
    owners, and wait until they are gone: until then one of them may still commit. The number of
    them."""
    with connect(dsn, "cancel") as connection, translated("stopping sessions"):
        ended = connection.execute(
            "SELECT pid, backend_start, pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE split_part(application_name, ' ', 1) = %s"
            " AND split_part(application_name, ' ', 3) = ANY(%s)"
            " AND coalesce(split_part(application_name, ' ', 2) = %s, true)"
            " AND pid <> pg_backend_pid() AND datname = current_database()",
            (APPLICATION, [session_owner(owner) for owner in owners], job),
        ).fetchall()
        deadline = time.monotonic() + END_SECONDS
        pids, starts = [row[0] for row in ended], [row[1] for row in ended]
        while pids and time.monotonic() < deadline:
            found = connection.execute(
                "SELECT FROM pg_stat_activity JOIN unnest(%s::int[], %s::timestamptz[])"
                " AS ended (pid, backend_start) USING (pid, backend_start)",
                (pids, starts),
            )
            if found.fetchone() is None:  # a row without columns is an empty tuple
                break
            time.sleep(0.02)
    return len(pids)
