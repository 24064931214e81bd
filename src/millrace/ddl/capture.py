"""Capture of DDL on a source: event triggers, and the table they write to.

Invariant: installing is one transaction, comes before the slot, and can be repeated; no statement
of the application ever fails because of what is installed. Our schema on a source is marked as
ours: it is followed, and never copied or compared.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import psycopg

from millrace.errors import PreflightError
from millrace.filter.rules import FilterRules
from millrace.postgres.catalog.schemas import DDL_TABLE, OWN_SCHEMA, publication_names
from millrace.postgres.own_schema import (
    drop_schemas,
    foreign_schema,
    install_schema,
    is_foreign,
)
from millrace.postgres.quote import ident, qualified
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

TRIGGERS: Final = ("millrace_ddl", "millrace_ddl_drop", "millrace_ddl_rewrite")


_TABLES: Final = ("exclude-schema", "exclude-table")
_OF_NO_TABLE: Final = (
    "exclude-table-data",
    "exclude-index",
    "exclude-view",
    "include-only-extension",
    "exclude-extension",
    "exclude-kind",
    "table-where",
    "exclude-column",
)


@dataclass(frozen=True)
class LeftOut:
    """What the event trigger must not publish."""

    # False if only those who follow can say it.
    is_known: bool = True
    schemas: Collection[str] = ()
    # As schema.name.
    tables: Collection[str] = ()

    @classmethod
    def of(cls, rules: FilterRules) -> LeftOut:
        """What filters leave out, as far as the event trigger can tell by names."""
        named = [rule for rule in rules.rules if rule.section not in _OF_NO_TABLE]
        return cls(
            all(rule.section in _TABLES and rule.is_exact for rule in named),
            tuple(rule.parts[0].text for rule in rules.of("exclude-schema")),
            tuple(".".join(part.text for part in rule.parts) for rule in rules.of("exclude-table")),
        )


def install(connection: Connection, slot: str, left: LeftOut) -> None:
    """Capture DDL for a slot; its publications must be there."""
    if is_foreign(connection):
        raise foreign_schema()
    try:
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '10s'")
            install_schema(connection)
            connection.execute(f"REVOKE ALL ON SCHEMA {OWN_SCHEMA} FROM PUBLIC".encode())
            connection.execute(render_sql().encode())
            _register(connection, slot, left)
    except psycopg.errors.InsufficientPrivilege as error:
        raise PreflightError(
            f"{connection.info.user} may not create event triggers on the source: "
            f"{error.diag.message_primary}",
            hint='it takes a superuser, or what the provider has instead; or ddl = "halt"',
        ) from error
    except psycopg.Error:
        with translated("installing the capture of DDL"):
            raise


def render_sql() -> str:
    """All that is installed."""
    folder = files("millrace.ddl").joinpath("sql")
    parts = sorted((part for part in folder.iterdir()), key=lambda part: part.name)
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)


def is_installed(connection: Connection, slot: str) -> bool:
    """Whether DDL is captured for a slot."""
    with translated("looking for the capture of DDL"):
        query = (
            "SELECT count(*) FROM pg_event_trigger WHERE evtname = ANY(%s) AND evtenabled <> 'D'"
        )
        row = connection.execute(query, (list(TRIGGERS),)).fetchone()
        if row != (len(TRIGGERS),):
            return False
        query = f"SELECT FROM {OWN_SCHEMA}.ddl_publication WHERE slot = %s"
        return connection.execute(query, (slot,)).fetchone() is not None


def _register(connection: Connection, slot: str, left: LeftOut) -> None:
    with_identity, insert_only = publication_names(slot)
    connection.execute(
        f"INSERT INTO {OWN_SCHEMA}.ddl_publication VALUES (%s, %s, %s, %s, %s, %s)"
        " ON CONFLICT (slot) DO UPDATE SET is_extended = excluded.is_extended,"
        " left_out_schemas = excluded.left_out_schemas, left_out_tables ="
        " excluded.left_out_tables",
        (slot, with_identity, insert_only, left.is_known, list(left.schemas), list(left.tables)),
    )
    row = connection.execute(
        "SELECT p.puballtables OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid"
        " AND r.prrelid = %s::regclass) FROM pg_publication p WHERE p.pubname = %s",
        (qualified(*DDL_TABLE), insert_only),
    ).fetchone()
    if row == (False,):
        connection.execute(
            f"ALTER PUBLICATION {ident(insert_only)} ADD TABLE {qualified(*DDL_TABLE)}".encode()
        )


def uninstall(connection: Connection, slot: str) -> list[str]:
    """Stop capturing for a slot; with the last one, everything goes."""
    with translated("removing the capture of DDL"), connection.transaction():
        table = f"{OWN_SCHEMA}.ddl_publication"
        row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (table,)).fetchone()
        if row != (True,):
            return []
        connection.execute(f"DELETE FROM {table} WHERE slot = %s", (slot,))
        if connection.execute(f"SELECT FROM {table} LIMIT 1").fetchone() is not None:
            return []
        for trigger in TRIGGERS:
            connection.execute(f"DROP EVENT TRIGGER IF EXISTS {trigger}".encode())
        functions = connection.execute(
            "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n"
            " ON n.oid = p.pronamespace WHERE n.nspname = %s AND starts_with(p.proname, 'ddl_')",
            (OWN_SCHEMA,),
        ).fetchall()
        for (function,) in functions:
            connection.execute(f"DROP FUNCTION {function} CASCADE".encode())
        connection.execute(f"DROP TABLE {qualified(*DDL_TABLE)}, {table}".encode())
    drop_schemas(connection)
    return ["the capture of DDL on the source"]
