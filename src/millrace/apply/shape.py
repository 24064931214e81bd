"""Whether a table of the target has the shape of the rows that come for it.

Invariant: rows are applied only to a table that has their columns, with their types, and their
primary key; what differs is reported as a whole, with the statements that make it the same.

A column that was dropped on the source, or got a type that the target's column takes, would do no
harm to the row that comes next: the target would silently be another table than the source.

What can't be seen is not guessed: a generated column of the source is computed by the target, text
plugins do not send names of types, and a domain is sent as what it is based on.

Facts: PostgreSQL documentation, "Logical Replication Message Formats", Relation and Type; proto.c,
logicalrep_write_typ() (a domain is sent as its base type).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg

from millrace.apply.target_table import TargetColumn, TargetTable
from millrace.errors import ApplyError
from millrace.name import Naming
from millrace.postgres.catalog.relations import FIRST_UNPINNED_OID
from millrace.postgres.pgoutput.messages import RelationColumn, RelationVersion
from millrace.postgres.quote import ident, qualified
from millrace.postgres.wire.connect import translated
from millrace.room import AGAIN

QUOTE = '"'

Connection = psycopg.Connection[tuple[Any, ...]]


class Difference(NamedTuple):
    """What differs, and the rest of the ALTER TABLE that changes it on the target."""

    what: str
    action: str


def require_shape(
    connection: Connection,
    relation: RelationVersion,
    table: TargetTable,
    naming: Naming,
    excluded: frozenset[str],
) -> None:
    """Raise if they differ; `excluded` columns are not looked at."""
    found = list(find_differences(relation, table, naming, excluded, _Types(connection, naming)))
    if not found:
        return
    label = f"{relation.schema}.{relation.name}"
    name = qualified(table.schema, table.name)
    actions = ", ".join(one.action for one in found if one.action)
    hint = f"on the target: ALTER TABLE {name} {actions}" if actions else "change it there"
    added, dropped = _names(relation, table, excluded)
    if len(added) == len(dropped) == 1:
        hint += f" (or, if it was renamed: RENAME COLUMN {ident(dropped[0])} TO {ident(added[0])})"
    raise ApplyError(
        f"{label}: {'; '.join(one.what for one in found)}",
        hint=f"{hint}; then {AGAIN}",
        table=label,
    )


def find_differences(
    relation: RelationVersion,
    table: TargetTable,
    naming: Naming,
    excluded: frozenset[str],
    types: _Types,
) -> Iterator[Difference]:
    """All of them, columns first."""
    added, dropped = _names(relation, table, excluded)
    for column in relation.columns:
        if column.name in added:
            rendered = types.render(column)
            yield Difference(
                f"the target has no column {column.name}",
                f"ADD COLUMN {ident(column.name)} {rendered}",
            )
    for name in dropped:
        yield Difference(
            f"the source's rows have no column {name}, and the target has",
            f"DROP COLUMN {ident(name)}",
        )
    for column in relation.columns:
        target = table.column(column.name)
        if target is None or column.name in excluded or _is_same_type(column, target, naming):
            continue
        rendered = types.render(column)
        said = rendered.replace(QUOTE, "")
        yield Difference(
            f"column {column.name} is {said}, and {target.definition} on the target",
            f"ALTER COLUMN {ident(column.name)} TYPE {rendered}",
        )
    yield from _key_differences(relation, table)


def _names(
    relation: RelationVersion, table: TargetTable, excluded: frozenset[str]
) -> tuple[list[str], list[str]]:
    """(columns that only the source has, columns that only the target has)."""
    here = [column.name for column in relation.columns]
    there = [column.name for column in table.columns if not column.is_generated]
    added = [name for name in here if table.column(name) is None and name not in excluded]
    return added, [name for name in there if name not in here and name not in excluded]


def _is_same_type(column: RelationColumn, target: TargetColumn, naming: Naming) -> bool:
    if column.type_oid == 0 or target.is_generated:
        return True  # nobody said; or it is not written
    if column.type_oid < FIRST_UNPINNED_OID:
        return (column.type_oid, column.type_modifier) == (target.type_oid, target.type_modifier)
    if column.type_name is None:
        return True
    schema, name = column.type_name
    if column.type_modifier != target.type_modifier or not _is_same_name(name, target.type_name):
        return False
    if schema == "pg_catalog" or target.is_of_extension:
        return True
    return naming.target(schema, name).schema == target.type_schema


def _is_same_name(one: str, other: str) -> bool:
    """An array's type has underscores before its name, as many as it takes to be alone with it."""
    if one.startswith("_") and other.startswith("_"):
        return one.lstrip("_") == other.lstrip("_")
    return one == other


def _key_differences(relation: RelationVersion, table: TargetTable) -> Iterator[Difference]:
    """Only where the source says which columns its primary key has; partitions may have more of a
    key than their root."""
    if relation.replica_identity != "d" or relation.partition is not None:
        return
    if not any(column.type_oid for column in relation.columns):
        return
    generated = {column.name for column in table.columns if column.is_generated}
    key = {column.name for column in relation.columns if column.is_key} - generated
    there = set(table.primary_key) - generated
    if key == there or {column.name for column in relation.columns}.isdisjoint(key | there):
        return
    names = [column.name for column in relation.columns if column.name in key]
    what = f"the primary key is ({', '.join(names)})" if key else "there is no primary key"
    theirs = ", ".join(table.primary_key)
    yield Difference(
        f"{what}, and {f'({theirs})' if theirs else 'there is none'} on the target",
        f"ADD PRIMARY KEY ({', '.join(map(ident, names))})" if key and not there else "",
    )


class _Types:
    """How the target calls types of the source."""

    def __init__(self, connection: Connection, naming: Naming) -> None:
        self._connection = connection
        self._naming = naming

    def render(self, column: RelationColumn) -> str:
        if column.type_name is not None:
            schema, name = column.type_name
            own = qualified(self._naming.target(schema, name).schema, name)
            return ident(name) if schema == "pg_catalog" else own
        with translated("reading the target's types"):
            row = self._connection.execute(
                "SELECT format_type(%s::oid, %s)", (column.type_oid, column.type_modifier)
            ).fetchone()
        assert row is not None
        return str(row[0])
