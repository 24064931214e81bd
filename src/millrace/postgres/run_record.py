"""Our records on the target: which runs fill it, which parts are committed.

Invariant: the record of a part, or of a step, is written in the transaction that
does the work, by a process of the run's present epoch. Whoever finds the record
has nothing left to do. No two runs fill one schema; the tables of the records are
dropped with the last run.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.errors import WorkDirError
from millrace.postgres.format import Format
from millrace.postgres.own_schema import LOCK, drop_schemas, install_schema, is_foreign
from millrace.postgres.quote import literal

Connection = psycopg.Connection[tuple[Any, ...]]
# The table's OID and the part's number.
PartKey = tuple[int, int]

# Those of one run, each after what refers to it.
_TABLES = ("copied_part", "copied_unlogged_part", "sequences_set", "done_step", "run")
TABLES = ", ".join(f"millrace.{name}" for name in _TABLES)
# Large objects are recorded as parts of this catalog.
LARGE_OBJECTS_OID = 2613

# 1: a run has the whole database to itself. 2: it fills schemas, and others may fill others. 3: the
# schema `millrace` has tables of streams too, and is not dropped with the last run.
FORMAT = Format("millrace.run", 3)
INSTALL = f"""
CREATE TABLE IF NOT EXISTS millrace.run (
    run_id text PRIMARY KEY,
    epoch int NOT NULL DEFAULT 1,
    source text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
-- The target's names of the schemas that the run fills; NULL if it began with an older release.
ALTER TABLE millrace.run ADD COLUMN IF NOT EXISTS schemas text[];
ALTER TABLE millrace.run ADD COLUMN IF NOT EXISTS host text NOT NULL DEFAULT '';
ALTER TABLE millrace.run ADD COLUMN IF NOT EXISTS directory text NOT NULL DEFAULT '';
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
{FORMAT.write_sql()}
"""


@dataclass(frozen=True)
class RunRecord:
    """A run that has begun, and is not finished."""

    run_id: str
    source: str
    # The target's names; None for a run of an older release, which has the whole database.
    schemas: frozenset[str] | None = None
    # Of its work directory.
    host: str = ""
    directory: str = ""

    def meets(self, other: RunRecord) -> bool:
        """Whether both fill a schema."""
        if self.schemas is None or other.schemas is None:
            return True
        return not self.schemas.isdisjoint(other.schemas)


@dataclass(frozen=True)
class CopiedPart:
    """A part that is committed on the target."""

    table_oid: int
    part: int
    rows: int
    bytes: int
    seconds: float


def open_run(connection: Connection, run: RunRecord) -> int:
    """Make the records, or find them; the epoch that tasks of this process belong to.

    A process that continues a run raises the epoch first: tasks that an earlier process
    left behind find it changed and stop.
    """
    with connection.transaction():
        install_schema(connection)
        if FORMAT.read(connection) != FORMAT.version:
            connection.execute(INSTALL)
        for other in read_runs(connection):
            if other.run_id != run.run_id and other.meets(run):
                raise owned_schemas(other, run)
        row = connection.execute(
            "INSERT INTO millrace.run (run_id, source, schemas, host, directory)"
            " VALUES (%s, %s, %s, %s, %s) ON CONFLICT (run_id) DO UPDATE SET"
            " epoch = run.epoch + 1, host = excluded.host,"
            " schemas = array(SELECT unnest(run.schemas) UNION SELECT unnest(excluded.schemas)"
            " ORDER BY 1),"
            " directory = excluded.directory RETURNING epoch",
            (
                run.run_id,
                run.source,
                None if run.schemas is None else sorted(run.schemas),
                run.host,
                run.directory,
            ),
        ).fetchone()
    assert row is not None
    return int(row[0])


def owned_schemas(other: RunRecord, run: RunRecord) -> WorkDirError:
    """The error of a run that would fill what another one fills."""
    both = sorted((other.schemas or frozenset()) & (run.schemas or frozenset()))
    what = f"schema {', '.join(both[:5])} of the target" if both else "the target"
    place = f" in {other.directory} on {other.host}" if other.directory else ""
    return WorkDirError(
        f"{what} is being filled by an unfinished run, {other.run_id}, from {other.source}{place}",
        hint="continue that run in its own --dir (--resume); or choose other schema names "
        "(--rename-schema) or another --target; or, if that run is dead, remove its records and "
        "what it has copied: --drop-if-exists",
        run_id=other.run_id,
    )


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
    """Record that sequences are set, in the transaction that set them."""
    connection.execute(
        "INSERT INTO millrace.sequences_set VALUES (%s) ON CONFLICT DO NOTHING", (run_id,)
    )


def are_sequences_set(connection: Connection, run_id: str) -> bool:
    """Whether they were set, and no crash has set unlogged ones back since."""
    row = connection.execute("SELECT FROM millrace.sequences_set WHERE run_id = %s", (run_id,))
    return row.fetchone() is not None


def read_runs(connection: Connection) -> list[RunRecord]:
    """The runs that have records here."""
    if is_foreign(connection):
        return []
    version = FORMAT.read(connection)
    if version is None:
        return []
    more = "schemas, host, directory" if version > 1 else "NULL::text[], '', ''"
    rows = connection.execute(f"SELECT run_id, source, {more} FROM millrace.run ORDER BY 1")
    return [
        RunRecord(run_id, source, None if schemas is None else frozenset(schemas), *place)
        for run_id, source, schemas, *place in rows
    ]


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
    """Fails, within the transaction of a step, unless that number of parts of these unlogged tables
    have their records: a crash has emptied both."""
    oids = ", ".join(map(str, sorted(table_oids)))
    return (
        "DO $millrace$ BEGIN IF (SELECT count(*) FROM millrace.copied_unlogged_part"
        f" WHERE run_id = {literal(run_id)} AND table_oid IN ({oids})) < {parts} THEN"
        " RAISE 'the target crashed and lost unlogged tables: continue with --resume'; END IF;"
        " END $millrace$;\n"
    )


def drop_records(connection: Connection, run_id: str) -> None:
    """Remove every trace of a run; the tables go with the last one.

    The target may have an event trigger by now that forbids just that: it is not meant for us.
    """
    with suppress(psycopg.errors.InsufficientPrivilege), connection.transaction():
        connection.execute("SET session_replication_role = replica")
    with connection.transaction():
        connection.execute(LOCK)
        if any(run.run_id != run_id for run in read_runs(connection)):
            for table in _TABLES:
                connection.execute(f"DELETE FROM millrace.{table} WHERE run_id = %s", (run_id,))
        elif not is_foreign(connection):
            connection.execute(f"DROP TABLE IF EXISTS {TABLES}")
            drop_schemas(connection)


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
