"""Our records on the target: which run owns it, which parts are committed.

Invariant: the record of a part, or of a step, is written in the transaction that
does the work, by a process of the run's present epoch. Whoever finds the record
has nothing left to do.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.postgres.quote import literal

Connection = psycopg.Connection[tuple[Any, ...]]
# The table's OID and the part's number.
PartKey = tuple[int, int]

# Large objects are recorded as parts of this catalog.
LARGE_OBJECTS_OID = 2613

INSTALL = """
CREATE SCHEMA IF NOT EXISTS millrace;
COMMENT ON SCHEMA millrace IS 'records of a running millrace; dropped when it is done';
CREATE TABLE IF NOT EXISTS millrace.run (
    run_id text PRIMARY KEY,
    epoch int NOT NULL DEFAULT 1,
    source text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE IF NOT EXISTS millrace.copied_part (
    id bigserial,
    run_id text NOT NULL REFERENCES millrace.run,
    table_oid oid NOT NULL,
    part int NOT NULL,
    rows bigint NOT NULL,
    bytes bigint NOT NULL,
    seconds float8 NOT NULL,
    attempt int NOT NULL,
    PRIMARY KEY (run_id, table_oid, part)
);
-- The rows of an unlogged table do not survive a crash of the target; so must its records.
CREATE UNLOGGED TABLE IF NOT EXISTS millrace.copied_unlogged_part
    (LIKE millrace.copied_part INCLUDING DEFAULTS INCLUDING INDEXES);
-- So do unlogged sequences, and this.
CREATE UNLOGGED TABLE IF NOT EXISTS millrace.sequences_set (run_id text PRIMARY KEY);
CREATE TABLE IF NOT EXISTS millrace.done_step (
    run_id text NOT NULL REFERENCES millrace.run,
    step text NOT NULL,
    PRIMARY KEY (run_id, step)
);
"""


@dataclass(frozen=True)
class CopiedPart:
    """A part that is committed on the target."""

    table_oid: int
    part: int
    rows: int
    bytes: int
    seconds: float


def open_run(connection: Connection, run_id: str, source: str) -> int:
    """Make the records, or find them; the epoch that tasks of this process belong to.

    A process that goes on with a run raises the epoch first: tasks that an earlier process
    left behind find it changed and stop.
    """
    with connection.transaction():
        connection.execute(INSTALL)
        row = connection.execute(
            "INSERT INTO millrace.run (run_id, source) VALUES (%s, %s)"
            " ON CONFLICT (run_id) DO UPDATE SET epoch = run.epoch + 1 RETURNING epoch",
            (run_id, source),
        ).fetchone()
    assert row is not None
    return int(row[0])


def read_copied_parts(
    connection: Connection, run_id: str, after_id: int = 0
) -> list[tuple[int, CopiedPart]]:
    """(id, part) committed so far; ids rise, but those in flight may commit out of order."""
    rows = connection.execute(
        "SELECT id, table_oid::int8, part, rows, bytes, seconds FROM"
        " (SELECT * FROM millrace.copied_part UNION ALL"
        " SELECT * FROM millrace.copied_unlogged_part) p WHERE run_id = %s AND id > %s",
        (run_id, after_id),
    )
    return [(row[0], CopiedPart(*row[1:])) for row in rows]


def note_sequences(connection: Connection, run_id: str) -> None:
    """Sequences stand where they should; in the transaction that set them."""
    connection.execute(
        "INSERT INTO millrace.sequences_set VALUES (%s) ON CONFLICT DO NOTHING", (run_id,)
    )


def are_sequences_set(connection: Connection, run_id: str) -> bool:
    """Whether they were set, and no crash has set unlogged ones back since."""
    row = connection.execute("SELECT FROM millrace.sequences_set WHERE run_id = %s", (run_id,))
    return row.fetchone() is not None


def read_runs(connection: Connection) -> list[tuple[str, str]]:
    """(run, source) of the runs that have records here."""
    row = connection.execute("SELECT to_regclass('millrace.run') IS NOT NULL").fetchone()
    if not (row and row[0]):
        return []
    return connection.execute("SELECT run_id, source FROM millrace.run").fetchall()


def read_done_steps(connection: Connection, run_id: str) -> set[str]:
    """The steps that are committed on the target."""
    rows = connection.execute("SELECT step FROM millrace.done_step WHERE run_id = %s", (run_id,))
    return {row[0] for row in rows}


def fenced_step_sql(run_id: str, epoch: int, step: str) -> tuple[str, str]:
    """What goes before and after the statements of a step, in the same transaction: the
    process must still own the run, and the step is recorded as done."""
    fence = (
        "DO $millrace$ BEGIN PERFORM FROM millrace.run"
        f" WHERE run_id = {literal(run_id)} AND epoch = {epoch} FOR SHARE;"
        " IF NOT FOUND THEN RAISE 'this run was taken over by another process'; END IF;"
        " END $millrace$;\n"
    )
    done = (
        "\nINSERT INTO millrace.done_step (run_id, step)"
        f" VALUES ({literal(run_id)}, {literal(step)}) ON CONFLICT DO NOTHING;\n"
    )
    return fence, done


def unlogged_parts_sql(run_id: str, table_oids: Collection[int], parts: int) -> str:
    """Fails, within the transaction of a step, unless so many parts of these unlogged tables have
    their records: a crash has emptied both."""
    oids = ", ".join(map(str, sorted(table_oids)))
    return (
        "DO $millrace$ BEGIN IF (SELECT count(*) FROM millrace.copied_unlogged_part"
        f" WHERE run_id = {literal(run_id)} AND table_oid IN ({oids})) < {parts} THEN"
        " RAISE 'the target crashed and lost unlogged tables: go on with --resume'; END IF;"
        " END $millrace$;\n"
    )


def drop_records(connection: Connection) -> None:
    """Remove every trace of ours from the target.

    The target may have an event trigger by now that forbids just that: it is not meant for us.
    """
    with suppress(psycopg.errors.InsufficientPrivilege), connection.transaction():
        connection.execute("SET session_replication_role = replica")
    connection.execute("DROP SCHEMA IF EXISTS millrace CASCADE")


def claim_sql(run_id: str, epoch: int, table_oid: int, part: int, *, unlogged: bool) -> str:
    """Open a transaction and lock the part; two result sets follow the lock: the run's row if
    this task may write, the part's record if there is nothing left to write."""
    return (
        "BEGIN ISOLATION LEVEL READ COMMITTED;"
        f" SELECT pg_advisory_xact_lock({lock_key_sql(run_id, table_oid, part)});"
        f" SELECT FROM millrace.run WHERE run_id = {literal(run_id)} AND epoch = {epoch}"
        " FOR SHARE;"
        f" SELECT rows, bytes, seconds FROM {_table(unlogged)}"
        f" WHERE run_id = {literal(run_id)} AND table_oid = {table_oid} AND part = {part}"
    )


def record_sql(
    run_id: str,
    table_oid: int,
    part: int,
    rows: int,
    size: int,
    seconds: float,
    attempt: int,
    *,
    unlogged: bool,
) -> str:
    """Write the part's record and commit it with the rows."""
    return (
        f"INSERT INTO {_table(unlogged)}"
        " (run_id, table_oid, part, rows, bytes, seconds, attempt) VALUES"
        f" ({literal(run_id)}, {table_oid}, {part}, {rows}, {size}, {seconds:.6f}, {attempt});"
        " COMMIT"
    )


def lock_key_sql(run_id: str, table_oid: int, part: int) -> str:
    """The advisory lock of a part."""
    return f"hashtextextended({literal(f'millrace {run_id} {table_oid} {part}')}, 0)"


def _table(unlogged: bool) -> str:
    return "millrace.copied_unlogged_part" if unlogged else "millrace.copied_part"
