"""The source's side of copying one table again: which table it is, and a snapshot with a position.

Invariant: a transaction is in the snapshot if it ends at or before the position, and in the stream
if it ends after it. The table is locked against DROP, TRUNCATE and rewriting before it is trusted;
one that was rewritten between snapshot and lock is refused, and tried again.

Position and snapshot come with a temporary slot, which goes when its session ends, however that
happens. Every transaction that commits after the position began after the slot's creation did: with
an exported snapshot the server waits until that is so, and takes no shortcut.

Facts: snapbuild.c, SnapBuildFindSnapshot() and its "initial point" comment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.apply.table_state import TableName
from millrace.config.dsn import Dsn
from millrace.errors import ApplyError, ConnectionLost, ServerError
from millrace.lsn import parse_lsn
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import connect, server_encoding, translated
from millrace.postgres.wire.slot_creation import SlotSnapshot, create_slot
from millrace.postgres.wire.walsender import open_replication
from millrace.relation import Table

Connection = psycopg.Connection[tuple[Any, ...]]

# Who wants to change the table waits for us, and others wait for them.
LOCK_TIMEOUT = "30s"
# configuration_limit_exceeded: all slots are in use
_NO_SLOT_FREE = "53400"

_NAMED = """
SELECT c.oid::int8, c.relkind, c.relpersistence,
       CASE WHEN c.relispartition THEN pg_partition_root(c.oid)::text END
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %s AND c.relname = %s
"""
# Under the snapshot: pg_partition_tree() would show the tree as it is now.
_TREE = """
WITH RECURSIVE tree (oid) AS (
    SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.oid = %(oid)s AND n.nspname = %(schema)s AND c.relname = %(name)s
    UNION ALL
    SELECT i.inhrelid FROM tree JOIN pg_class p ON p.oid = tree.oid AND p.relkind = 'p'
      JOIN pg_inherits i ON i.inhparent = tree.oid
)
SELECT c.oid::int8, c.relkind FROM tree JOIN pg_class c ON c.oid = tree.oid
"""


@dataclass(frozen=True)
class SyncSnapshot:
    """The source at a position."""

    id: str
    lsn: int
    # The table, or the leaves of a partitioned one; locked.
    tables: tuple[Table, ...]


def find_table(source: Dsn, name: TableName) -> int:
    """Its OID, if it can be followed."""
    label = ".".join(name)
    with connect(source, "sync") as connection, translated(f"looking up {label} on the source"):
        row = connection.execute(_NAMED, name).fetchone()
    if row is None:
        raise ApplyError(
            f"{label}: the source has no such table",
            hint="if it was dropped or renamed there, withdraw the request: `millrace stream "
            f"resync --cancel {label}`",
            table=label,
        )
    oid, kind, persistence, root = row
    if root is not None:
        raise ApplyError(
            f"{label} is a partition of {root}: they are copied together",
            hint=f"name {root}",
            table=label,
        )
    if kind not in ("r", "p") or persistence != "p":
        raise ApplyError(
            f"{label} can't be followed: it is not a permanent table",
            hint="logical replication has no views, no unlogged and no foreign tables",
            table=label,
        )
    return int(oid)


def has_table(source: Dsn, name: TableName) -> bool:
    """Whether the source has a relation of this name."""
    with connect(source, "sync") as connection, translated("looking up a table on the source"):
        return connection.execute(_NAMED, name).fetchone() is not None


def current_lsn(source: Dsn) -> int:
    """A copy made from now on has a later position."""
    with connect(source, "sync") as connection, translated("reading the source's position"):
        row = connection.execute(
            "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()"
            " ELSE pg_current_wal_insert_lsn() END)::text"
        ).fetchone()
    assert row is not None
    return parse_lsn(row[0])


@contextmanager
def open_sync_snapshot(
    source: Dsn,
    name: TableName,
    oid: int,
    *,
    slot: str,
    encoding: str,
    is_stopped: Callable[[], bool],
) -> Iterator[SyncSnapshot]:
    """A snapshot of the source with its position, and the table in it; `encoding` is the one that
    rows travel in."""
    walsender = open_replication(source, "sync", "UTF8")
    try:
        try:
            made = create_slot(
                walsender,
                source,
                slot,
                "pgoutput",
                snapshot=SlotSnapshot.EXPORT,
                is_temporary=True,
                is_stopped=is_stopped,
            )
        except ServerError as error:
            if error.facts.get("sqlstate") == _NO_SLOT_FREE:
                error.hint = (
                    "copying a table of a stream takes a temporary replication slot: raise "
                    "max_replication_slots on the source, or drop a slot that is not used"
                )
            raise
        assert made.snapshot is not None
        with connect(source, "sync") as connection:
            tables = _read_tables(connection, made.snapshot, name, oid, encoding)
            yield SyncSnapshot(made.snapshot, made.start_lsn, tables)
    finally:
        walsender.finish()


def _read_tables(
    connection: Connection, snapshot: str, name: TableName, oid: int, encoding: str
) -> tuple[Table, ...]:
    """Under the snapshot, in a transaction that stays open; locks them."""
    label = ".".join(name)
    schema, table = name
    with translated(f"reading {label} on the source"):
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
        rows = connection.execute(_TREE, {"oid": oid, "schema": schema, "name": table}).fetchall()
        if not rows:
            raise _changed(f"{label} was dropped or renamed on the source")
        leaves = {oid for oid, kind in rows if kind == "r"}
        same = server_encoding(connection) == encoding
        found = [
            one for one in catalog.read_tables(connection, same_encoding=same) if one.oid in leaves
        ]
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
        try:
            catalog.lock_tables(connection, found)
        except psycopg.errors.UndefinedTable:
            raise _changed(f"{label}, or a partition of it, was dropped on the source") from None
        if catalog.read_rewritten(connection, found):
            raise _changed(f"{label} was truncated or rewritten on the source")
    return tuple(found)


def _changed(what: str) -> ConnectionLost:
    """To be tried again with another snapshot."""
    return ConnectionLost(f"{what} while its snapshot was taken", sqlstate=None)
