"""Dead letters: ids that could not be delivered.

Invariant: an id is given up only after its own tries, alone, and with the error that it met; its
shard goes on. It stays in the table until somebody retries or discards it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.tube import Connection, Tube, TubeTable

_ERROR_CHARACTERS = 1000


@dataclass(frozen=True)
class DeadLetter:
    """An id that was given up."""

    table: str
    shard: int
    key: str
    tries: int
    error: str
    last_at: datetime


def bury(
    connection: Connection,
    tube: Tube,
    table: TubeTable,
    shard: int,
    key: str,
    tries: int,
    error: str,
) -> None:
    here = ident(tube.schema)
    with translated("writing a dead letter"):
        connection.execute(
            f"INSERT INTO {here}._tube_dead AS d (tube, tbl, shard, key, op, tries, error)"
            f" SELECT t.id, %s, %s, %s, 'T', %s, %s FROM {here}._tube_tubes t WHERE t.name = %s"
            " ON CONFLICT (tube, tbl, shard, key) DO UPDATE SET tries = d.tries + excluded.tries,"
            " error = excluded.error, last_at = clock_timestamp()".encode(),
            (table.id, shard, key, tries, error[:_ERROR_CHARACTERS], tube.name),
        )


def forget(connection: Connection, tube: Tube, table: TubeTable, keys: list[str]) -> None:
    """What was delivered after all."""
    with translated("forgetting dead letters"):
        connection.execute(
            f"DELETE FROM {ident(tube.schema)}._tube_dead"
            " WHERE tbl = %s AND key = ANY (%s)".encode(),
            (table.id, keys),
        )


def tables_with_dead(connection: Connection, tube: Tube) -> set[int]:
    """The ids of tables that have dead letters."""
    rows = connection.execute(
        f"SELECT DISTINCT tbl FROM {ident(tube.schema)}._tube_dead WHERE tbl = ANY (%s)".encode(),
        ([table.id for table in tube.tables],),
    ).fetchall()
    return {row[0] for row in rows}


def read_dead(connection: Connection, tube: Tube) -> list[DeadLetter]:
    here = ident(tube.schema)
    with translated("reading dead letters"):
        rows = connection.execute(
            "SELECT n.nspname || '.' || c.relname, d.shard, d.key, d.tries, d.error, d.last_at"
            f" FROM {here}._tube_dead d JOIN {here}._tube_tubes u ON u.id = d.tube"
            f" JOIN {here}._tube_tables t ON t.id = d.tbl JOIN pg_class c ON c.oid = t.tbl"
            " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE u.name = %s"
            " ORDER BY d.last_at, d.key".encode(),
            (tube.name,),
        ).fetchall()
    return [DeadLetter(*row) for row in rows]


def retry_dead(connection: Connection, tube: Tube, keys: list[str] | None) -> int:
    """Touch them again, and forget them; how many."""
    here = ident(tube.schema)
    with translated("retrying dead letters"), connection.transaction():
        rows = connection.execute(
            f"DELETE FROM {here}._tube_dead d USING {here}._tube_tubes u, {here}._tube_tables t"
            " WHERE u.id = d.tube AND u.name = %s AND t.id = d.tbl"
            " AND (%s::text[] IS NULL OR d.key = ANY (%s)) RETURNING t.tbl::oid, d.key".encode(),
            (tube.name, keys, keys),
        ).fetchall()
        for oid in {row[0] for row in rows}:
            connection.execute(
                f"SELECT {here}.tube_touch(%s, %s::regclass, %s)".encode(),
                (tube.name, oid, [key for table, key in rows if table == oid]),
            )
    return len(rows)


def discard_dead(connection: Connection, tube: Tube, keys: list[str] | None) -> int:
    """Forget them; how many."""
    here = ident(tube.schema)
    with translated("discarding dead letters"):
        return connection.execute(
            f"DELETE FROM {here}._tube_dead d USING {here}._tube_tubes u WHERE u.id = d.tube"
            " AND u.name = %s AND (%s::text[] IS NULL OR d.key = ANY (%s))".encode(),
            (tube.name, keys, keys),
        ).rowcount
