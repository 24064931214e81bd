"""Indexes and the constraints that rest on them.

Invariant: an index starts when its table has no unfinished part. Building one
that is already there does nothing; one left invalid is built again.
"""

from __future__ import annotations

from typing import Any

import psycopg

from millrace import failpoint
from millrace.postgres.quote import ident, literal, qualified
from millrace.postgres.wire.connect import translated
from millrace.relation import Index, Table

Connection = psycopg.Connection[tuple[Any, ...]]


def constraint_statement(index: Index, table: Table) -> str:
    """The constraint on its built index, or whole if it can't be made from one."""
    assert index.constraint_name is not None
    name = ident(index.constraint_name)
    head = f"ALTER TABLE ONLY {qualified(*table.target)} ADD CONSTRAINT {name}"
    if index.built_whole:
        return f"{head} {index.constraint_definition}"
    kind = {"p": "PRIMARY KEY", "u": "UNIQUE"}[index.constraint_type or ""]
    statement = f"{head} {kind} USING INDEX {ident(index.name)}"
    if index.deferrable:
        statement += " DEFERRABLE"
    if index.deferred:
        statement += " INITIALLY DEFERRED"
    return statement


def build_index(
    connection: Connection, index: Index, table: Table, *, tablespaces: bool = True
) -> None:
    """Build one index, or the whole of a constraint that brings its own, in its tablespace."""
    statement = constraint_statement(index, table) if index.built_whole else index.definition
    with translated(f"creating index {index.schema}.{index.name}"):
        state = _state(connection, index)
        if state == "invalid":
            connection.execute(f"DROP INDEX {qualified(index.schema, index.name)}")
        if state != "valid":
            failpoint.hit("index.begin")
            _execute_in(connection, index.tablespace if tablespaces else None, statement)
            failpoint.hit("index.done")


def finish_index(connection: Connection, index: Index, table: Table) -> None:
    """Add the constraint and what else was set on the index; all of a table's are built."""
    with translated(f"adding constraint {index.constraint_name or index.name} to {table.label}"):
        if (
            index.constraint_name
            and not index.built_whole
            and not _constraint_exists(connection, index, table)
        ):
            failpoint.hit("constraint.begin")
            connection.execute(constraint_statement(index, table))
            failpoint.hit("constraint.done")
        for statement in index.after:
            connection.execute(statement)


def _execute_in(connection: Connection, tablespace: str | None, statement: str) -> None:
    """Definitions do not say where an index is; the session's default says it for one statement."""
    if tablespace is None:
        connection.execute(statement)
        return
    with connection.transaction():
        connection.execute("SELECT set_config('default_tablespace', %s, true)", (tablespace,))
        connection.execute(statement)


def _state(connection: Connection, index: Index) -> str:
    row = connection.execute(
        "SELECT indisvalid AND indisready FROM pg_index WHERE indexrelid ="
        f" to_regclass({literal(qualified(index.schema, index.name))})"
    ).fetchone()
    if row is None:
        return "absent"
    return "valid" if row[0] else "invalid"


def _constraint_exists(connection: Connection, index: Index, table: Table) -> bool:
    row = connection.execute(
        "SELECT FROM pg_constraint WHERE conname = %s AND conrelid = to_regclass(%s)",
        (index.constraint_name, qualified(*table.target)),
    ).fetchone()
    return row is not None
