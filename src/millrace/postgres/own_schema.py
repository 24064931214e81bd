"""Where our tables are on the target: schema `millrace`, and `replication.raw_messages`.

Invariant: a stream's table that an older release made in schema `replication` is moved before it
is read, so that it is never taken for a stream that has not begun. A schema of the user's that has
the name of one of ours is refused and left alone; ours are dropped with their last table.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from millrace.errors import PreflightError, WorkDirError
from millrace.postgres.catalog.schemas import OWN_COMMENT, OWN_SCHEMA, USER_SCHEMA
from millrace.postgres.format import Format

Connection = psycopg.Connection[tuple[Any, ...]]

# Of the table in which a spool is, whose name is documented. Older releases have all tables of
# streams in it, even if it is a schema of the user's.
SPOOL_SCHEMA: Final = "replication"
# 1: every table is in schema `replication`. 2: only raw_messages is.
STREAM_FORMAT: Final = 2
# One process at a time makes a schema of ours, adds to it or drops it: IF NOT EXISTS does not see
# what another transaction is about to commit.
LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended('millrace records', 0))"
# A process of an older release may be using a table that is to be moved.
_MOVE_TIMEOUT: Final = "10s"


@dataclass(frozen=True)
class StreamTable:
    """A table that streams share, and columns by which it is known: a schema of the user's own
    that has our schema's name may have a table of such a name."""

    name: str
    columns: tuple[str, ...]
    schema: str = OWN_SCHEMA

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    def exists_sql(self, schema: str = "") -> str:
        """A condition: there is such a table, and it is ours."""
        names = ", ".join(f"'{column}'" for column in self.columns)
        return (
            f"(SELECT count(*) = {len(self.columns)} FROM pg_attribute AS a"
            f" WHERE a.attrelid = to_regclass('{schema or self.schema}.{self.name}')"
            f" AND a.attname IN ({names}) AND NOT a.attisdropped)"
        )

    @property
    def format(self) -> Format:
        return Format(self.label, STREAM_FORMAT)


STREAM_COPY: Final = StreamTable("stream_copy", ("source", "slot", "run_id", "host", "directory"))
STREAM_POSITION: Final = StreamTable(
    "stream_position", ("stream", "lsn", "committed_at", "applied_at")
)
STREAM_TABLE: Final = StreamTable(
    "stream_table", ("stream", "schema_name", "table_name", "state", "lsn", "sync_id")
)
RAW_MESSAGES: Final = StreamTable(
    "raw_messages", ("stream", "number", "block", "frames", "end_lsn"), SPOOL_SCHEMA
)
RAW_RELATIONS: Final = StreamTable("raw_relations", ("stream", "number", "oid", "frame"))
DDL_STATEMENT: Final = StreamTable("ddl_statement", ("stream", "lsn", "tag", "statement", "status"))
DDL_SCHEMA: Final = StreamTable("ddl_schema", ("stream", "schema_name", "target_name"))
STREAM_TABLES: Final = (
    STREAM_COPY,
    STREAM_POSITION,
    STREAM_TABLE,
    RAW_MESSAGES,
    RAW_RELATIONS,
    DDL_STATEMENT,
    DDL_SCHEMA,
)


def is_foreign(connection: Connection, schema: str = OWN_SCHEMA) -> bool:
    """Whether the database has a schema of that name that is somebody else's."""
    row = connection.execute(f"SELECT {_foreign_sql(schema)}").fetchone()
    return row == (True,)


def foreign_schema(schema: str = OWN_SCHEMA) -> PreflightError:
    return PreflightError(
        f"the target has a schema {schema} that millrace did not make, where it keeps its own "
        "tables",
        hint=f"rename it: ALTER SCHEMA {schema} RENAME TO ...; or drop it if nobody needs it",
    )


def install_schema(connection: Connection, schema: str = OWN_SCHEMA) -> None:
    """Create it unless it exists; until the end of the transaction, nobody else adds to it."""
    connection.execute(LOCK)
    if is_foreign(connection, schema):
        raise foreign_schema(schema)
    row = connection.execute("SELECT to_regnamespace(%s) IS NULL", (schema,)).fetchone()
    if row == (True,):
        connection.execute(create_sql(schema))


def create_sql(schema: str = OWN_SCHEMA) -> bytes:
    return f"CREATE SCHEMA {schema}; COMMENT ON SCHEMA {schema} IS '{OWN_COMMENT}';".encode()


def drop_schemas(connection: Connection) -> None:
    """Drop those that we made and that have no table left."""
    for schema in (OWN_SCHEMA, SPOOL_SCHEMA):
        with (
            suppress(
                psycopg.errors.DependentObjectsStillExist, psycopg.errors.InsufficientPrivilege
            ),
            connection.transaction(),
        ):
            connection.execute(LOCK)
            row = connection.execute(
                f"SELECT FROM pg_namespace n WHERE n.nspname = '{schema}' AND NOT ({USER_SCHEMA})"
            ).fetchone()
            if row is not None:
                connection.execute(f"DROP SCHEMA {schema}")


def drop_unused(connection: Connection) -> None:
    """With the last stream, the tables that streams share, if they are empty, and our schemas.

    While there is another stream it may be about to write to any of them.
    """
    with suppress(psycopg.errors.InsufficientPrivilege), connection.transaction():
        connection.execute(LOCK)
        if has_table(connection, STREAM_COPY):
            return
        for table in (STREAM_POSITION, STREAM_TABLE, DDL_STATEMENT, DDL_SCHEMA):
            if has_table(connection, table) and not _has_rows(connection, table):
                connection.execute(f"DROP TABLE {table.label}")
    drop_schemas(connection)


def _has_rows(connection: Connection, table: StreamTable) -> bool:
    return connection.execute(f"SELECT FROM {table.label} LIMIT 1").fetchone() is not None


def install_table(connection: Connection, table: StreamTable, definition: str) -> None:
    """Create a stream's table, unless it exists."""
    with connection.transaction():
        check_stream_formats(connection)
        install_schema(connection, table.schema)
        has_table(connection, table)
        connection.execute(f"CREATE TABLE IF NOT EXISTS {table.label} {definition}".encode())
        connection.execute(table.format.write_sql().encode())


def has_table(connection: Connection, table: StreamTable) -> bool:
    """Whether the target has this table; one of an older release is moved to its place first."""
    if table.schema == SPOOL_SCHEMA:
        return connection.execute(f"SELECT {table.exists_sql()}").fetchone() == (True,)
    former = f"{SPOOL_SCHEMA}.{table.name}"
    row = connection.execute(
        f"SELECT {table.exists_sql()}, {table.exists_sql(SPOOL_SCHEMA)}"
    ).fetchone()
    if row == (True, True):
        raise WorkDirError(
            f"the target has {table.label} and {former}: an older release has been used on it "
            "after this one",
            hint=f"use this release for all its streams, and see what is in {former}; if no "
            "stream needs it any more, drop it",
        )
    if row == (False, True):
        _move(connection, table, former)
    return row != (False, False)


def check_stream_formats(connection: Connection) -> None:
    """Raise if a stream's table on the target is of a newer release."""
    rows = connection.execute(
        "SELECT obj_description(to_regclass(t), 'pg_class') FROM unnest(%s::text[]) WITH ORDINALITY"
        " AS u (t, number) ORDER BY number",
        ([table.label for table in STREAM_TABLES],),
    )
    for table, (comment,) in zip(STREAM_TABLES, rows.fetchall(), strict=True):
        table.format.parse(comment)


def _foreign_sql(schema: str) -> str:
    """Older releases have put their tables even into a schema of the user's."""
    foreign = f"EXISTS (SELECT FROM pg_namespace n WHERE n.nspname = '{schema}' AND {USER_SCHEMA})"
    if schema != SPOOL_SCHEMA:
        return foreign
    ours = " OR ".join(table.exists_sql(SPOOL_SCHEMA) for table in STREAM_TABLES)
    return f"({foreign} AND NOT ({ours}))"


def _move(connection: Connection, table: StreamTable, former: str) -> None:
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = '{_MOVE_TIMEOUT}'")
            install_schema(connection, table.schema)
            # Not again, if another process has done so meanwhile.
            row = connection.execute(f"SELECT {table.exists_sql()}").fetchone()
            if row != (True,):
                connection.execute(f"ALTER TABLE {former} SET SCHEMA {table.schema}")
                connection.execute(table.format.write_sql().encode())
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable) as error:
        raise WorkDirError(
            f"table {former} on the target was made by an older release, and can't be moved to "
            f"schema {table.schema}: {str(error).strip()}",
            hint="stop processes of the older release, and run this once as a role that owns the "
            "table and may create schemas",
        ) from error
