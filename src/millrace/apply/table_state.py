"""The state of single tables of a stream: rows on the target, changed together with the table.

Invariant: a state commits together with the rows that it describes, and while no batch of the
table's worker is open; so a batch is applied under one set of states, from its begin to its commit.

A table without a row here is followed from the stream's beginning. One that is copied again goes
through these states:

    copying ──► catching_up ──► followed
       │             │
       └─────────────┴────────► abandoned    `stream resync --cancel`

Until it is followed, apply leaves out all its changes. Then it leaves out those of transactions
that end at or before its position, which the copy holds already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psycopg
from psycopg.pq.abc import PGconn

from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.own_schema import STREAM_TABLE, has_table, install_table
from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import translated
from millrace.postgres.wire.libpq import execute, session_encoding

Connection = psycopg.Connection[tuple[Any, ...]]
# Schema and name, of a partitioned table those of its root.
TableName = tuple[str, str]

TABLE = STREAM_TABLE.label
DEFINITION = """(
    stream text NOT NULL,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    state text NOT NULL,
    -- copying: the spool is needed from here on; catching_up: applied up to here;
    -- followed: transactions that end at or before this are in the table already.
    lsn pg_lsn NOT NULL,
    -- Of the copy, and of the source's table.
    sync_id text NOT NULL,
    source_oid bigint NOT NULL,
    copied_lsn pg_lsn,
    copied_rows bigint,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream, schema_name, table_name)
)"""
_COLUMNS = (
    "schema_name, table_name, state, lsn::text, sync_id, source_oid, copied_lsn::text, copied_rows"
)


class SyncState(StrEnum):
    """How far the copy of a table has come."""

    # Its rows are those of before, and get older.
    COPYING = "copying"
    # It has the rows of a snapshot, and changes up to its position.
    CATCHING_UP = "catching_up"
    # Apply has it again.
    FOLLOWED = "followed"
    # Given up on: its rows are old, and stay so.
    ABANDONED = "abandoned"


@dataclass(frozen=True)
class TableState:
    """One table of a stream that was copied again, or is to be."""

    schema: str
    name: str
    state: SyncState
    lsn: int
    sync_id: str
    # Of the table that was copied: one that was dropped and created again has another.
    source_oid: int
    # The position of the copy's snapshot, and how many rows it had.
    copied_lsn: int | None = None
    copied_rows: int | None = None

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def is_unfinished(self) -> bool:
        return self.state in (SyncState.COPYING, SyncState.CATCHING_UP)

    def skips(self, end_lsn: int) -> bool:
        """Whether apply leaves out this table's changes of a transaction that ends there."""
        return self.state is not SyncState.FOLLOWED or end_lsn <= self.lsn

    @property
    def view(self) -> tuple[bool, int]:
        """All that apply has to know: two states of one view are the same to it."""
        is_followed = self.state is SyncState.FOLLOWED
        return is_followed, self.lsn if is_followed else 0


TableStates = Mapping[TableName, TableState]


def install(connection: Connection) -> None:
    """Make the table on the target, if it is not there."""
    with translated("making the table of synced tables on the target"):
        install_table(connection, STREAM_TABLE, DEFINITION)


def read_table_states(connection: Connection, stream: str) -> dict[TableName, TableState]:
    """The tables of a stream that are not simply followed from its beginning."""
    with translated("reading the states of tables on the target"):
        if not has_table(connection, STREAM_TABLE):
            return {}
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM {TABLE} WHERE stream = %s", (stream,)
        ).fetchall()
    return {(state.schema, state.name): state for state in (_state(*row) for row in rows)}


def lock_states(session: PGconn, stream: str, worker: str) -> dict[TableName, TableState] | None:
    """The states, which stay as they are until the session's transaction ends; None if somebody is
    about to change one.

    It does not wait: on a cluster with few cores, who changes a state may need the very place that
    this task has. The transaction must be READ COMMITTED: what is read is newer than the lock.
    """
    results = execute(
        session,
        f"SELECT pg_try_advisory_xact_lock_shared({lock_key_sql(worker)});"
        f" SELECT {STREAM_TABLE.exists_sql()}",
    )
    if results[0].get_value(0, 0) != b"t":
        return None
    if results[1].get_value(0, 0) != b"t":
        return {}
    result = execute(session, f"SELECT {_COLUMNS} FROM {TABLE} WHERE stream = {literal(stream)}")[0]
    encoding = session_encoding(session)
    found = {}
    for number in range(result.ntuples):
        values = (result.get_value(number, column) for column in range(result.nfields))
        texts: list[Any] = [None if value is None else value.decode(encoding) for value in values]
        state = _state(*texts)
        found[state.schema, state.name] = state
    return found


def lock_key_sql(worker: str) -> str:
    """Of the advisory lock that batches of a worker share; who changes a state holds it alone."""
    return f"hashtextextended({literal('millrace tables of ' + worker)}, 0)"


def views(states: TableStates) -> dict[TableName, tuple[bool, int]]:
    """What apply sees of the states."""
    return {name: state.view for name, state in states.items()}


def skipped_tables(states: TableStates, end_lsn: int) -> frozenset[TableName]:
    """The tables whose changes are left out of transactions that end there."""
    return frozenset(name for name, state in states.items() if state.skips(end_lsn))


def cuts(states: TableStates, after_lsn: int) -> list[int]:
    """Positions that a batch must not reach across, because some table's changes count only
    beyond them."""
    return sorted(
        {
            state.lsn
            for state in states.values()
            if state.state is SyncState.FOLLOWED and state.lsn > after_lsn
        }
    )


def read_spool_floor(connection: Connection, stream: str) -> int | None:
    """The spool is needed from here on, by tables that are not followed yet."""
    states = read_table_states(connection, stream).values()
    return min((one.lsn for one in states if one.is_unfinished), default=None)


def write_copying(
    connection: Connection,
    stream: str,
    name: TableName,
    *,
    lsn: int,
    sync_id: str,
    source_oid: int,
) -> None:
    """A copy of the table begins; apply leaves it alone from the next batch on."""
    with translated("writing the state of a table"):
        connection.execute(
            f"INSERT INTO {TABLE} (stream, schema_name, table_name, state, lsn, sync_id,"
            " source_oid) VALUES (%s, %s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (stream, schema_name, table_name) DO UPDATE SET state = excluded.state,"
            " lsn = excluded.lsn, sync_id = excluded.sync_id, source_oid = excluded.source_oid,"
            " copied_lsn = NULL, copied_rows = NULL, changed_at = clock_timestamp()",
            (stream, *name, SyncState.COPYING, render_lsn(lsn), sync_id, source_oid),
        )


def copying_sql(stream: str, name: TableName, lsn: int, sync_id: str, source_oid: int) -> str:
    """The same, for a transaction that changes the table: apply leaves it alone from here on."""
    values = ", ".join(
        map(literal, (stream, *name, SyncState.COPYING, render_lsn(lsn), sync_id, str(source_oid)))
    )
    return (
        f"INSERT INTO {TABLE} (stream, schema_name, table_name, state, lsn, sync_id, source_oid)"
        f" VALUES ({values}) ON CONFLICT (stream, schema_name, table_name) DO UPDATE SET"
        " state = excluded.state, lsn = excluded.lsn, sync_id = excluded.sync_id, source_oid ="
        " excluded.source_oid, copied_lsn = NULL, copied_rows = NULL, changed_at ="
        " clock_timestamp()"
    )


def forget_sql(stream: str, name: TableName) -> str:
    """A table is no more, or is called something else."""
    schema, table = map(literal, name)
    return (
        f"DELETE FROM {TABLE} WHERE stream = {literal(stream)} AND schema_name = {schema}"
        f" AND table_name = {table}"
    )


def copied_sql(stream: str, sync_id: str, lsn: int, rows: int) -> str:
    """What the transaction that copies ends with: one row, or another copy has begun since."""
    at = f"'{render_lsn(lsn)}'"
    return (
        f"UPDATE {TABLE} SET state = '{SyncState.CATCHING_UP}', lsn = {at}, copied_lsn = {at},"
        f" copied_rows = {rows}, changed_at = clock_timestamp()"
        f" WHERE {_is(stream, sync_id)} AND state = '{SyncState.COPYING}'"
    )


def locked_state_sql(stream: str, sync_id: str) -> str:
    """The state of a copy, locked; no row if another one has begun since."""
    return f"SELECT state FROM {TABLE} WHERE {_is(stream, sync_id)} FOR UPDATE"


def read_lsn_sql(stream: str, sync_id: str) -> str:
    """The position of a table that catches up; no row if it does not."""
    return (
        f"SELECT lsn FROM {TABLE} WHERE {_is(stream, sync_id)}"
        f" AND state = '{SyncState.CATCHING_UP}'"
    )


def locked_lsn_sql(stream: str, sync_id: str) -> str:
    """The same, locked; 0/0 for no row."""
    query = read_lsn_sql(stream, sync_id)
    return f"SELECT coalesce(({query} FOR UPDATE), '0/0')"


def advance_sql(stream: str, sync_id: str, lsn: int) -> str:
    """Changes up to a position are applied; part of the transaction that applies them."""
    return (
        f"UPDATE {TABLE} SET lsn = '{render_lsn(lsn)}', changed_at = clock_timestamp()"
        f" WHERE {_is(stream, sync_id)} AND state = '{SyncState.CATCHING_UP}'"
    )


def write_followed(connection: Connection, stream: str, sync_id: str) -> bool:
    """Apply has the table again, from its position on; whether it was catching up."""
    with translated("writing the state of a table"):
        return bool(
            connection.execute(
                f"UPDATE {TABLE} SET state = '{SyncState.FOLLOWED}', changed_at ="
                f" clock_timestamp() WHERE {_is(stream, sync_id)}"
                f" AND state = '{SyncState.CATCHING_UP}'"
            ).rowcount
        )


def write_abandoned(connection: Connection, stream: str, name: TableName) -> bool:
    """Give up on a table that is not followed yet; whether there was anything to give up."""
    with translated("writing the state of a table"):
        return bool(
            connection.execute(
                f"UPDATE {TABLE} SET state = '{SyncState.ABANDONED}', changed_at ="
                " clock_timestamp() WHERE stream = %s AND schema_name = %s AND table_name = %s"
                f" AND state IN ('{SyncState.COPYING}', '{SyncState.CATCHING_UP}')",
                (stream, *name),
            ).rowcount
        )


def drop_states(connection: Connection, prefix: str) -> int:
    """Forget the tables of streams whose names begin so; the number of rows."""
    with translated("removing the states of tables on the target"):
        if not has_table(connection, STREAM_TABLE):
            return 0
        return connection.execute(
            f"DELETE FROM {TABLE} WHERE starts_with(stream, %s)", (prefix,)
        ).rowcount


def _is(stream: str, sync_id: str) -> str:
    """Without the table's name, which not every session can write in its encoding."""
    return f"stream = {literal(stream)} AND sync_id = {literal(sync_id)}"


def _state(
    schema: str,
    name: str,
    state: str,
    lsn: str,
    sync_id: str,
    source_oid: Any,
    copied_lsn: str | None,
    copied_rows: Any,
) -> TableState:
    return TableState(
        schema,
        name,
        SyncState(state),
        parse_lsn(lsn),
        sync_id,
        int(source_oid),
        None if copied_lsn is None else parse_lsn(copied_lsn),
        None if copied_rows is None else int(copied_rows),
    )
