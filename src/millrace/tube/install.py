"""The SQL of tubes: put into a database, upgraded in place, removed.

Invariant: installing is one transaction, and the same SQL whoever runs it: `--print` and psql, or
this module. It goes into the first schema of the search path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import psycopg

from millrace.errors import ConfigError, NoSuchTube, PreflightError
from millrace.postgres.quote import ident, qualified
from millrace.postgres.wire.connect import server_error, translated

Connection = psycopg.Connection[tuple[Any, ...]]

DEFAULT_SCHEMA = "tube"
# Classes of SQLSTATE: data exception, syntax or access rule, object state.
_MISTAKES = ("22", "42", "55", "P0")
# For words of the server's own that say what is wrong, and not what to do.
_HINTS = {
    "42P01": "write a table with its schema, and odd names in double quotes, as in SQL",
    "3F000": "write a table with its schema, and odd names in double quotes, as in SQL",
    "42703": "names of columns are written as they are in the table",
    "42809": "attach the tables that its rows come from",
}


def render_sql() -> str:
    """All of it, as psql would read it."""
    folder = files("millrace.tube").joinpath("sql")
    parts = sorted((part for part in folder.iterdir()), key=lambda part: part.name)
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)


def install(connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
    """Install, or upgrade what is there: also pg-tube's, with its pods."""
    require_primary(connection)
    with translated("installing tubes"), connection.transaction():
        if not _has_schema(connection, schema):
            connection.execute(f"CREATE SCHEMA {ident(schema)}".encode())
        # Expressions of users may name what is in public.
        use_schema(connection, schema, for_transaction=True)
        connection.execute(render_sql().encode())


def uninstall(connection: Connection, schema: str, *, drop_tubes: bool) -> list[str]:
    """Remove everything; the tubes that went with it. The schema stays."""
    with translated("removing tubes"), connection.transaction():
        use_schema(connection, schema, for_transaction=True)
        names = [row[0] for row in connection.execute("SELECT DISTINCT tube FROM tube_list()")]
        if names and not drop_tubes:
            raise ConfigError(
                f"schema {schema} has tubes: {', '.join(sorted(names))}",
                hint="drop them first with `millrace tube drop`, or pass --drop-tubes",
            )
        for name in names:
            connection.execute("SELECT tube_ensure_absent(%s)", (name,))
        functions = connection.execute(
            "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n"
            " ON n.oid = p.pronamespace WHERE n.nspname = %s AND p.prokind = 'f'"
            " AND (starts_with(p.proname, '_tube_') OR p.proname ~ '^tube_')",
            (schema,),
        ).fetchall()
        connection.execute(
            "DROP TABLE _tube_dead, _tube_backfills, _tube_tables, _tube_slots, _tube_tubes,"
            " _tube_epoch CASCADE"
        )
        for (function,) in functions:
            connection.execute(f"DROP FUNCTION IF EXISTS {function} CASCADE".encode())
        connection.execute("DROP SEQUENCE tube_seq CASCADE")
    return names


def find_schema(connection: Connection, wanted: str | None, tube: str | None = None) -> str:
    """Where tubes are installed: as told, or the only place there is; if a tube is named, the only
    one that has it."""
    with translated("looking for tubes"):
        rows = connection.execute(
            "SELECT n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE c.relname = '_tube_tubes' AND c.relkind = 'r' ORDER BY 1"
        ).fetchall()
    found = [row[0] for row in rows if wanted in (None, row[0])]
    if not found:
        where = "this database" if wanted is None else f"schema {wanted}"
        raise PreflightError(
            f"tubes are not installed in {where}",
            hint="install them with `millrace tube install`, or name another --schema",
        )
    if tube is not None:
        with translated("looking for the tube"):
            found = [schema for schema in found if _has_tube(connection, schema, tube)]
        if not found:
            raise NoSuchTube(
                f"there is no tube {tube}", hint="`millrace tube list` shows those there are"
            )
    if len(found) > 1:
        what = "tubes are installed" if tube is None else f"there is a tube {tube}"
        raise ConfigError(
            f"{what} in several schemas: {', '.join(found)}",
            hint="choose one with --schema",
        )
    return str(found[0])


def use_schema(connection: Connection, schema: str, *, for_transaction: bool = False) -> None:
    """Calls of this session find the functions of tubes."""
    path = f"{ident(schema)}, public"
    connection.execute(
        "SELECT set_config('search_path', %s, %s), set_config('client_min_messages', %s, %s)",
        (path, for_transaction, "warning" if for_transaction else "notice", for_transaction),
    )


@contextmanager
def refused() -> Iterator[None]:
    """What a function of tubes refuses is a mistake of its caller: its own words and hint."""
    try:
        yield
    except psycopg.Error as error:
        if (error.sqlstate or "")[:2] in _MISTAKES and error.diag.message_primary:
            raise ConfigError(
                error.diag.message_primary,
                hint=error.diag.message_hint or _HINTS.get(error.sqlstate or "", ""),
                sqlstate=error.sqlstate,
            ) from error
        raise server_error(error, "tube") from error


def require_primary(connection: Connection) -> None:
    """A standby can't have triggers or pods of its own."""
    with translated("looking at the server"):
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    if row is not None and row[0]:
        raise PreflightError(
            "the server is a standby, and tubes have to be written",
            hint="connect to its primary",
        )


def _has_schema(connection: Connection, schema: str) -> bool:
    found = connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", (schema,))
    return found.rowcount > 0


def _has_tube(connection: Connection, schema: str, tube: str) -> bool:
    query = f"SELECT FROM {qualified(schema, '_tube_tubes')} WHERE name = %s"
    return connection.execute(query.encode(), (tube,)).rowcount > 0
