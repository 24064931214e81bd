"""Copying one table of a stream again: what one Spark task does.

Invariant: the table is emptied and filled, and its state written, in one transaction of the target;
whoever looks sees the old rows or the new ones with their position, and a copy that another one has
taken the place of changes nothing.

The rows of a partitioned table go through the target's root, however that is partitioned.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from psycopg.pq.abc import PGconn

from millrace import failpoint
from millrace.apply.prepare import TruncateWork
from millrace.apply.table_state import SyncState, copied_sql, locked_state_sql
from millrace.apply.target_table import TargetTable
from millrace.apply.task import SESSION
from millrace.apply.trigger_silence import Silencer
from millrace.apply.truncate import truncate
from millrace.clone.copy_task import part_statements
from millrace.config.dsn import Dsn
from millrace.errors import ApplyError, MillraceError, WorkDirError
from millrace.filter.apply import hash_columns
from millrace.filter.exclusions import Exclusions
from millrace.postgres.wire.connect import cancel_sessions
from millrace.postgres.wire.libpq import command_rows, execute, open_session
from millrace.postgres.wire.relay import relay
from millrace.relation import Column, Part, Table
from millrace.snapshot.export import snapshot_sql

# What the session is called that copies; the copy's id follows.
JOB: Final = "sync"
# How long the application waits at most.
LOCK_TIMEOUT: Final = "3s"


@dataclass(frozen=True)
class TableCopy:
    """One task: which table, from where, under which snapshot, to where."""

    source: Dsn
    target: Dsn
    stream: str
    sync_id: str
    # Of the snapshot.
    snapshot: str
    lsn: int
    encoding: str
    table: TargetTable
    # COPY out of the source and into the target, for each table with rows.
    statements: tuple[tuple[str, str], ...]

    @property
    def label(self) -> str:
        return f"{self.table.schema}.{self.table.name}"


@dataclass(frozen=True)
class TableCopyResult:
    """What became of it; an error is the caller's to try again."""

    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    error: MillraceError | None = None


def copy_table(task: TableCopy, attempt: int = 0) -> TableCopyResult:
    """Empty the table and fill it; does nothing if that is done already."""
    try:
        if attempt:
            end_copy(task.target, task.sync_id)
        return _copy(task)
    except MillraceError as error:
        error.message = f"{task.label}: {error.message}"
        error.facts["table"] = task.label
        return TableCopyResult(error=error)


def end_copy(target: Dsn, sync_id: str) -> None:
    """End the session of a copy, so that it rolls back: of an attempt that Spark has given up, or
    of a process that is gone."""
    cancel_sessions(target, [sync_id], JOB)


def copy_statements(
    tables: Sequence[Table],
    table: TargetTable,
    name: tuple[str, str],
    left: Exclusions,
    *,
    is_strict: bool = False,
) -> tuple[tuple[str, str], ...]:
    """COPY out and COPY in for each table of the source that has rows: the table itself, or its
    leaves; `name` is what the source calls it. `is_strict`: both must have the same columns."""
    excluded = left.columns.get(name, frozenset())
    if is_strict:
        _require_columns(tables, table, excluded)
    there = {column.name: column for column in table.columns}
    found = []
    for one in tables:
        columns = [column for column in one.columns if column.name not in excluded]
        if lacking := [column.name for column in columns if column.name not in there]:
            raise ApplyError(
                f"{table.schema}.{table.name}: the target lacks columns of the source: "
                f"{', '.join(lacking)}",
                hint="add them there, or leave them out with --filters",
                table=f"{table.schema}.{table.name}",
            )
        copied = [column for column in columns if not there[column.name].is_generated]
        definitions = {column.name: column.definition for column in table.columns}
        wanted = replace(
            one,
            columns=hash_columns(
                one.label,
                [_checked(column, definitions) for column in copied],
                left.hashed.get(name, frozenset()),
            ),
            where=left.where.get(name) or None,
            load_via=(one.oid, table.schema, table.name),
        )
        part = part_statements(wanted, Part(one.oid, 1, 1, "", "", 0, 0))
        found.append((part.copy_out, part.copy_in))
    return tuple(found)


def _require_columns(tables: Sequence[Table], table: TargetTable, excluded: frozenset[str]) -> None:
    """Raise if the target has columns that the source has not: they would stay empty."""
    here = excluded.union(*({column.name for column in one.columns} for one in tables))
    extra = [one.name for one in table.columns if not one.is_generated and one.name not in here]
    if tables and extra:
        raise ApplyError(
            f"{table.schema}.{table.name}: the source has no column {', '.join(extra)}",
            hint="drop them there, then copy it again",
            table=f"{table.schema}.{table.name}",
        )


def _checked(column: Column, definitions: Mapping[str, str]) -> Column:
    """In binary only if both sides say the same about the type."""
    definition = definitions[column.name].partition(" COLLATE ")[0]
    if definition == column.type_name:
        return column
    return replace(column, text_reason=f"type {definition} on the target")


def _copy(task: TableCopy) -> TableCopyResult:
    began = time.monotonic()
    target = open_session(task.target, f"{JOB} {task.sync_id}", task.encoding)
    try:
        execute(target, SESSION)
        state = execute(target, f"BEGIN; {locked_state_sql(task.stream, task.sync_id)}")[-1]
        found = state.get_value(0, 0) if state.ntuples else None
        if found == SyncState.CATCHING_UP.encode():
            return TableCopyResult()  # committed, and its answer was lost
        if found != SyncState.COPYING.encode():
            raise WorkDirError("another copy of the table has begun")
        failpoint.hit("sync.copy_begin")
        silencer = Silencer(target)
        silencer.begin()
        silencer.silence(task.table)
        rows, size = _refill(task, target)
        silencer.end()
        failpoint.hit("sync.before_copy_commit")
        written = execute(target, copied_sql(task.stream, task.sync_id, task.lsn, rows))
        if command_rows(written[0]) != 1:
            raise WorkDirError("another copy of the table has begun")
        execute(target, "COMMIT")
        failpoint.hit("sync.after_copy_commit")
        return TableCopyResult(rows, size, time.monotonic() - began)
    finally:
        target.finish()


def _refill(task: TableCopy, target: PGconn) -> tuple[int, int]:
    """(rows, bytes) of all its tables."""
    truncate(target, TruncateWork((task.table,), (), False, task.lsn))
    source = open_session(task.source, "copy-out", task.encoding)
    rows = size = 0
    try:
        # A TRUNCATE of the application may wait for the lock that keeps the snapshot's rows, and
        # this session behind it: whoever holds that lock gives it up then, and begins again.
        execute(source, f"SET lock_timeout = '{LOCK_TIMEOUT}'")
        for copy_out, copy_in in task.statements:
            copied = relay(source, target, snapshot_sql(task.snapshot) + copy_out, copy_in)
            rows, size = rows + copied.rows, size + copied.bytes
    finally:
        source.finish()
    return rows, size
