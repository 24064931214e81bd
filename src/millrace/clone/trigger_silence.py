"""Rows copied into tables that already have triggers and foreign keys.

Invariant: a table with triggers on the target, those of foreign keys too, is filled with all of
them silent, but for those that are meant to see it (catalog.exempt_trigger); one that could not be
silenced is refused.

In a whole clone rows come first. Single steps may come in another order, and a target that
crashed at the very end has lost its unlogged tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from millrace.errors import ServerError
from millrace.postgres.catalog.exempt_trigger import is_exempt_sql
from millrace.postgres.quote import qualified
from millrace.postgres.wire.connect import translated
from millrace.relation import Table

Connection = psycopg.Connection[tuple[Any, ...]]

# For the rest of the transaction.
SILENCE = "SELECT set_config('session_replication_role', 'replica', true); "


def read_guarded(connection: Connection, tables: Iterable[Table]) -> frozenset[int]:
    """The tables, by their OIDs on the source, whose triggers must be silent."""
    with translated("looking for triggers on the target"):
        rows = connection.execute(
            "SELECT n.nspname, c.relname,"
            # Rules matter to DELETE; COPY passes them by.
            f" bool_or(t.tgenabled IN ('A', 'R') AND NOT {is_exempt_sql('t.tgfoid')}"
            " OR EXISTS (SELECT FROM pg_rewrite AS r"
            " WHERE r.ev_class = c.oid AND r.ev_enabled IN ('A', 'R') AND r.ev_type = '4'))"
            " FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid"
            " JOIN pg_namespace AS n ON n.oid = c.relnamespace"
            " WHERE t.tgenabled <> 'D' GROUP BY 1, 2"
        ).fetchall()
    found = {(schema, name): is_loud for schema, name, is_loud in rows}
    guarded, loud = set(), set()
    for table in tables:
        names: list[tuple[str, str]] = [table.target]
        if table.load_via:
            names.append(table.load_via[1:])
        for name in names:
            if name in found:
                guarded.add(table.oid)
            if found.get(name):
                loud.add(qualified(*name))
    if loud:
        raise ServerError(
            "rows are still to be copied into tables whose triggers or rules fire always: "
            f"{', '.join(sorted(loud)[:5])}",
            hint="disable them (ALTER TABLE ... DISABLE TRIGGER, or RULE) and run the same "
            "command again, or start over with --restart",
        )
    return frozenset(guarded)


def empty_sql(table: Table, *, is_guarded: bool) -> str:
    """Empty a table: a foreign key that points to it forbids TRUNCATE."""
    name = qualified(*table.target)
    return f"{SILENCE}DELETE FROM ONLY {name}" if is_guarded else f"TRUNCATE ONLY {name}"
