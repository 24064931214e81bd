"""Columns that were added in mid-stream with a default that each server computes on its own.

Invariant: a column is passed over only if the rows that its table had got no value from the
default, or the same value on both sides.

ADD COLUMN fills in the rows that are there, and nothing of that is sent. A constant is the same on
both sides. Of a function that is not volatile, such as now(), the server keeps the one value that
all these rows have. With a volatile one, such as gen_random_uuid() or nextval(), it writes
the table anew.

Facts: PostgreSQL documentation, "ALTER TABLE", Notes, and "pg_attribute" (attmissingval).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.follow.audit.source_state import SourceTable
from millrace.name import Naming
from millrace.postgres.sql_text import is_constant
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

_COLUMNS = """
SELECT a.attrelid::int8, a.attnum::int4, a.attname, coalesce(pg_get_expr(d.adbin, d.adrelid), ''),
       a.attidentity <> '', a.attmissingval::text
  FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
 WHERE a.attrelid = ANY(%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
   AND (d.adbin IS NOT NULL OR a.attidentity <> '' OR a.attmissingval IS NOT NULL)
"""
_MISSING = """
SELECT n.nspname, c.relname, a.attname, a.attmissingval::text
  FROM pg_attribute a
  JOIN pg_class c ON c.oid = a.attrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE a.attnum > 0 AND a.attmissingval IS NOT NULL AND c.relname = ANY(%s)
"""


@dataclass(frozen=True)
class AddedColumn:
    """A column whose values in older rows may differ."""

    table: SourceTable
    name: str


def find_added_columns(
    source: Connection,
    target: Connection,
    before: Iterable[SourceTable],
    now: Iterable[SourceTable],
    naming: Naming,
) -> list[AddedColumn]:
    """Those of tables that are in both states."""
    then = {table.oid: table for table in before}
    added = {
        table.oid: (table, numbers)
        for table in now
        if table.oid in then and (numbers := table.column_numbers - then[table.oid].column_numbers)
    }
    if not added:
        return []
    with translated("reading the source's columns"):
        rows = source.execute(_COLUMNS, (list(added),)).fetchall()
    known = _read_missing(
        target, [naming.target(table.schema, table.name).name for table, _ in added.values()]
    )
    found = []
    for oid, number, name, default, is_identity, missing in rows:
        table, numbers = added[oid]
        if number not in numbers:
            continue
        if missing is not None:
            is_same = known.get((*naming.target(table.schema, table.name), name)) == missing
        elif table.filenode == then[oid].filenode:
            is_same = True  # not rewritten: the default came after the column
        else:
            is_same = not is_identity and bool(default) and is_constant(default)
        if not is_same:
            found.append(AddedColumn(table, name))
    return found


def _read_missing(target: Connection, names: Collection[str]) -> dict[tuple[str, str, str], str]:
    """By (schema, table, column): the value of rows that are older than the column."""
    with translated("reading the target's columns"):
        rows = target.execute(_MISSING, (list(names),)).fetchall()
    return {(schema, table, column): value for schema, table, column, value in rows}
