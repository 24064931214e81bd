"""Copying parts: what one Spark task does.

Invariant: a part and its completion record commit together; a second attempt,
at the same time or later, finds the record and does nothing. No COPY reads the
source without the snapshot: importing it and copying are one message.

A task body is a plain function over plain values: Spark pickles a CopyTask,
calls `copy_parts`, and gets outcomes back.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from functools import partial

from psycopg.pq.abc import PGconn

from millrace import failpoint
from millrace.clone.progress import part_label
from millrace.clone.trigger_silence import SILENCE, empty_sql
from millrace.config.dsn import Dsn
from millrace.errors import MillraceError, WorkDirError
from millrace.postgres import run_record as record
from millrace.postgres.quote import columns, literal, qualified, selected
from millrace.postgres.wire.connect import APPLICATION
from millrace.postgres.wire.libpq import execute, open_session
from millrace.postgres.wire.lock_wait import explain_lock_wait
from millrace.postgres.wire.relay import CopyResult, relay
from millrace.relation import Part, Table
from millrace.retry import with_retries
from millrace.snapshot.export import snapshot_sql

log = logging.getLogger(__name__)

# How long a copy waits for a lock of the source; then it is tried again, a few times.
LOCK_TIMEOUT = "30s"


@dataclass(frozen=True)
class PartStatements:
    """A part as statements: all that a task has to know of it."""

    table_oid: int
    part: int
    label: str
    copy_out: str
    # Ends with COPY ... FROM STDIN.
    copy_in: str
    # Run on the target after the COPY, in the same transaction.
    after: str = ""
    unlogged: bool = False


@dataclass(frozen=True)
class CopyTask:
    """One task: where from, where to, under which snapshot, which parts."""

    run_id: str
    epoch: int
    source: Dsn
    target: Dsn
    # None only for a source nobody writes to (--not-consistent).
    snapshot: str | None
    encoding: str
    parts: tuple[PartStatements, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of one part; an error here is final, lost connections were tried again."""

    table_oid: int
    part: int
    label: str
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    error: MillraceError | None = None


def part_statements(table: Table, part: Part, *, is_guarded: bool = False) -> PartStatements:
    """The COPY statements of a part.

    An unsplit table is emptied and filled in one transaction, so its rows can be frozen at
    once. A part of a split one is not alone, so the table was emptied before; so it was when
    its rows go through a partitioned table. A guarded one has triggers or foreign keys already.
    """
    name = qualified(table.schema, table.name)
    listed = columns([column.name for column in table.columns])
    own = re.sub(r"(?i)^\s*where\s+", "", table.extension_condition or "")
    conditions = [each for each in (part.condition, own, table.where) if each]
    condition = " AND ".join(f"({each})" for each in conditions)
    form = "text" if table.text_reason else "binary"
    is_computed = any(column.expression for column in table.columns)
    if condition or is_computed or not listed:
        where = f" WHERE {condition}" if condition else ""
        query = f"SELECT {selected(table.columns)} FROM ONLY {name}{where}"
        out = f"COPY ({query}) TO STDOUT (FORMAT {form})"
    else:
        out = f"COPY {name} ({listed}) TO STDOUT (FORMAT {form})"
    target = qualified(*(table.load_via[1:] if table.load_via else table.target))
    into = f"{target} ({listed})" if listed else target
    copy_in = f"COPY {into} FROM STDIN (FORMAT {form})"
    if part.total == 1 and table.extension_condition is None and not table.load_via:
        if not is_guarded:
            copy_in = f"COPY {into} FROM STDIN (FORMAT {form}, FREEZE)"
        copy_in = f"{empty_sql(table, is_guarded=is_guarded)}; {copy_in}"
    elif is_guarded:
        copy_in = SILENCE + copy_in
    label = part_label(table.label, part)
    return PartStatements(table.oid, part.number, label, out, copy_in, unlogged=table.is_unlogged)


def copy_parts(task: CopyTask, attempt: int = 0) -> list[Outcome]:
    """Copy the parts of a task, one after the other; lost connections are opened again."""
    outcomes = []
    with _Pair(task, attempt) as pair:
        for part in task.parts:
            try:
                outcomes.append(with_retries(partial(pair.copy, part), on_retry=_log_retry))
            except MillraceError as error:
                pair.close()
                outcomes.append(
                    Outcome(part.table_oid, part.part, part.label, error=_named(error, part))
                )
    return outcomes


def _named(error: MillraceError, part: PartStatements) -> MillraceError:
    error.message = f"{part.label}: {error.message}"
    error.facts["table"] = part.label
    return error


def _log_retry(error: BaseException, pause: float) -> None:
    hint = getattr(error, "hint", "")
    log.warning("%s%s; trying again in %.1f s", error, f" ({hint})" if hint else "", pause)


class _Pair:
    """A connection to each side, opened when needed, closed after any error."""

    def __init__(self, task: CopyTask, attempt: int) -> None:
        self.task = task
        self.attempt = attempt
        self._source: PGconn | None = None
        self._target: PGconn | None = None

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in (self._source, self._target):
            if connection is not None:
                connection.finish()
        self._source = self._target = None

    def copy(self, part: PartStatements) -> Outcome:
        """One attempt at one part."""
        try:
            return self._copy(part)
        except BaseException as error:
            self.close()
            explain_lock_wait(error, self.task.source)
            raise

    def _copy(self, part: PartStatements) -> Outcome:
        task = self.task
        started = time.monotonic()
        if self._source is None or self._target is None:
            self._source = open_session(task.source, "copy-out", task.encoding)
            # The snapshot's holder has a lock on every table, so what can be in the way is a
            # session that waits for that lock, and would keep us waiting behind it for ever.
            execute(self._source, f"SET lock_timeout = '{LOCK_TIMEOUT}'")
            self._target = open_session(task.target, "copy-in", task.encoding)
        name = f"{APPLICATION} copy {task.run_id} {part.table_oid}.{part.part}"
        for connection in (self._source, self._target):
            execute(connection, f"SET application_name = {literal(name)}")
        done = claim(self._target, task, part, self.attempt)
        if done is not None:
            execute(self._target, "ROLLBACK")
            return Outcome(part.table_oid, part.part, part.label, *done)
        failpoint.hit("copy.begin")
        copied = self._relay(part)
        failpoint.hit("copy.before-commit")
        if part.after:
            execute(self._target, part.after)
            failpoint.hit("large-objects.stored")
        seconds = time.monotonic() - started
        execute(
            self._target,
            record.record_sql(
                task.run_id,
                part.table_oid,
                part.part,
                copied.rows,
                copied.bytes,
                seconds,
                self.attempt,
                unlogged=part.unlogged,
            ),
        )
        failpoint.hit("copy.after-commit")
        return Outcome(part.table_oid, part.part, part.label, copied.rows, copied.bytes, seconds)

    def _relay(self, part: PartStatements) -> CopyResult:
        assert self._source is not None
        assert self._target is not None
        return relay(
            self._source,
            self._target,
            snapshot_sql(self.task.snapshot) + part.copy_out,
            part.copy_in,
        )


def claim(
    target: PGconn, task: CopyTask, part: PartStatements, attempt: int
) -> tuple[int, int, float] | None:
    """Take the part's lock in a new transaction; its record if it is done already."""
    if attempt:
        _evict_earlier_attempt(target, task, part)
    results = execute(
        target,
        record.claim_sql(
            task.run_id, task.epoch, part.table_oid, part.part, unlogged=part.unlogged
        ),
    )
    if not results[2].ntuples:
        raise WorkDirError(
            f"run {task.run_id} was taken over by another process",
            hint="another millrace process is continuing this run; let it finish",
        )
    if not results[3].ntuples:
        return None
    rows, size, seconds = (results[3].get_value(0, column) or b"0" for column in range(3))
    return int(rows), int(size), float(seconds)


def _evict_earlier_attempt(target: PGconn, task: CopyTask, part: PartStatements) -> None:
    """End the session of an earlier attempt that still holds the part's lock.

    Spark runs an attempt with a higher number only after it gave up the one before; that one
    may be frozen, with its connection open, and would hold the lock for ever.
    """
    key = record.lock_key_sql(task.run_id, part.table_oid, part.part)
    execute(
        target,
        "SELECT pg_terminate_backend(l.pid) FROM pg_locks l,"
        f" (SELECT {key} AS key) k"
        " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1"
        " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND l.classid = ((k.key >> 32) & 4294967295)::bigint::oid"
        " AND l.objid = (k.key & 4294967295)::oid AND l.pid <> pg_backend_pid()",
    )
