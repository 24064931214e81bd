"""What became of each captured command: a table of the target.

Invariant: a command that is done is written down in the transaction that did it; one that failed,
after that is rolled back. What a person has decided about a command counts for that one alone, by
its place in the stream, and only until it is done.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg.pq.abc import PGconn

from millrace.ddl.renaming import SCHEMA_DEFINITION
from millrace.lsn import render_lsn
from millrace.postgres.own_schema import DDL_SCHEMA, DDL_STATEMENT, has_table, install_table
from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import translated
from millrace.postgres.wire.libpq import execute, fetch

if TYPE_CHECKING:  # Numba comes with it: not for those who only look
    from millrace.ddl.entry import Entry

Connection = psycopg.Connection[tuple[Any, ...]]

TABLE: Final = DDL_STATEMENT.label
DEFINITION: Final = """(
    stream text NOT NULL,
    -- Of the captured row, and of the end of its transaction.
    lsn pg_lsn NOT NULL,
    end_lsn pg_lsn NOT NULL,
    committed_at timestamptz NOT NULL,
    tag text NOT NULL,
    object text NOT NULL,
    role text NOT NULL,
    -- What ran, or would have; and what the client of the source sent.
    statement text NOT NULL,
    query text NOT NULL,
    status text NOT NULL,
    -- Why it failed, or was left out.
    reason text NOT NULL DEFAULT '',
    -- What a person wants to become of it.
    action text,
    action_text text,
    action_by text,
    action_at timestamptz,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream, lsn)
)"""
_COLUMNS: Final = (
    "lsn::text, end_lsn::text, committed_at::text, tag, object, role, statement, query, status,"
    " reason, action, action_text, action_by, action_at::text, changed_at::text"
)


class Status(StrEnum):
    """What became of a command."""

    REPLAYED = "replayed"
    # Another text ran in its place.
    EDITED = "edited"
    # Somebody has decided that nothing runs.
    SKIPPED = "skipped"
    # It means nothing on the target.
    LEFT_OUT = "left out"
    # The source is halted there.
    FAILED = "failed"
    # Others hold a lock that it needs; it is tried again.
    BLOCKED = "blocked"

    @property
    def is_pending(self) -> bool:
        return self in (Status.FAILED, Status.BLOCKED)


class Action(StrEnum):
    """What a person wants to become of a command."""

    EDIT = "edit"
    SKIP = "skip"


@dataclass(frozen=True)
class DdlRecord:
    """A command as the target knows it."""

    lsn: str
    end_lsn: str
    committed_at: str
    tag: str
    object: str
    role: str
    statement: str
    query: str
    status: Status
    reason: str
    action: str | None
    action_text: str | None
    action_by: str | None
    action_at: str | None
    changed_at: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Resolution:
    """What a person has decided."""

    action: Action
    text: str = ""


def install(connection: Connection) -> None:
    """Make our tables on the target, if they are not there."""
    with translated("making the tables of captured DDL on the target"):
        install_table(connection, DDL_STATEMENT, DEFINITION)
        install_table(connection, DDL_SCHEMA, SCHEMA_DEFINITION)


def read_history(
    connection: Connection, stream: str, *, limit: int | None = None, lsn: str | None = None
) -> list[DdlRecord]:
    """The newest first."""
    with translated("reading captured DDL on the target"):
        if not has_table(connection, DDL_STATEMENT):
            return []
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM {TABLE} WHERE stream = %s"
            " AND (%s::pg_lsn IS NULL OR lsn = %s::pg_lsn) ORDER BY lsn DESC LIMIT %s",
            (stream, lsn, lsn, limit),
        ).fetchall()
    return [_record(*row) for row in rows]


def _record(*row: Any) -> DdlRecord:
    values = list(row)
    values[8] = Status(values[8])
    return DdlRecord(*values)


def decide(
    connection: Connection, stream: str, lsn: str, action: Action, text: str, by: str
) -> bool:
    """Write down what is to become of a command that is still pending; whether it was."""
    with translated("deciding about a captured command"):
        return bool(
            connection.execute(
                f"UPDATE {TABLE} SET action = %s, action_text = %s, action_by = %s,"
                " action_at = clock_timestamp() WHERE stream = %s AND lsn = %s::pg_lsn"
                " AND status IN ('failed', 'blocked')",
                (action, text, by, stream, lsn),
            ).rowcount
        )


def find_resolution(session: PGconn, stream: str, entry: Entry) -> Resolution | None:
    """What was decided about a command; locked, so that it is not changed meanwhile."""
    rows = fetch(
        session,
        f"SELECT action, action_text FROM {TABLE} WHERE {_is(stream, entry)}"
        " AND action IS NOT NULL FOR UPDATE",
    )
    return Resolution(Action(str(rows[0][0])), rows[0][1] or "") if rows else None


def write(
    session: PGconn, stream: str, entry: Entry, statement: str, status: Status, reason: str = ""
) -> None:
    """In the session's transaction."""
    main = entry.main
    values = (
        stream,
        render_lsn(entry.place.lsn),
        render_lsn(entry.place.end_lsn),
        entry.place.committed_at,
        entry.tag,
        main.identity if main else "",
        entry.role,
        statement,
        entry.query,
        status,
        reason,
    )
    execute(
        session,
        f"INSERT INTO {TABLE} (stream, lsn, end_lsn, committed_at, tag, object, role, statement,"
        f" query, status, reason) VALUES ({', '.join(map(literal, values))})"
        " ON CONFLICT (stream, lsn) DO UPDATE SET statement = excluded.statement, status ="
        " excluded.status, reason = excluded.reason, changed_at = clock_timestamp()",
    )


def forget(connection: Connection, prefix: str) -> None:
    """Of streams whose names begin so."""
    for table in (DDL_STATEMENT, DDL_SCHEMA):
        if has_table(connection, table):
            connection.execute(
                f"DELETE FROM {table.label} WHERE starts_with(stream, %s)", (prefix,)
            )


def _is(stream: str, entry: Entry) -> str:
    return f"stream = {literal(stream)} AND lsn = '{render_lsn(entry.place.lsn)}'"
