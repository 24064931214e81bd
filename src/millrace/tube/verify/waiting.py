"""What is still in the tube, and so will be delivered: no difference.

Invariant: an id is not waiting only if no pod held it when this was asked, so whatever was touched
before is in the sink by then.
"""

from __future__ import annotations

from collections.abc import Collection

from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.tube import Connection, Tube, TubeTable

# Control pods after which a table's documents are looked at again, all of them.
_REBUILDING = ("truncate", "lost", "backfill_schedule", "backfill_end")


def find_waiting(
    connection: Connection, tube: Tube, tables: Collection[TubeTable], ids: Collection[str]
) -> set[str]:
    """Those of the ids that are in undelivered pods of the tables; all, while a backfill of one of
    them is open, or garbage of one is to be collected."""
    if not ids:
        return set()
    numbers = [table.id for table in tables]
    with translated("looking for undelivered pods"):
        if _is_rebuilding(connection, tube, numbers):
            return set(ids)
        rows = connection.execute(
            "SELECT DISTINCT k.key FROM"
            f" {tube.label} p, unnest(coalesce(p.keys, p.ids::text[])) k (key)"
            " WHERE (p.tbl = ANY (%s) OR p.tbl IS NULL) AND k.key = ANY (%s)".encode(),
            (numbers, list(ids)),
        ).fetchall()
    return {row[0] for row in rows}


def has_waiting(connection: Connection, tube: Tube, table: TubeTable) -> bool:
    """Whether any pod is about the table."""
    with translated("looking for undelivered pods"):
        row = connection.execute(
            f"SELECT FROM {tube.label} WHERE tbl = %s OR tbl IS NULL LIMIT 1".encode(), (table.id,)
        ).fetchone()
    return row is not None


def _is_rebuilding(connection: Connection, tube: Tube, numbers: list[int]) -> bool:
    row = connection.execute(
        f"SELECT EXISTS (SELECT FROM {tube.label} WHERE (tbl = ANY (%s) OR tbl IS NULL)"
        " AND ids = '{}' AND keys IS NULL AND payload->>'type' = ANY (%s))"
        f" OR EXISTS (SELECT FROM {ident(tube.schema)}._tube_backfills"
        "  WHERE tbl = ANY (%s) AND state IN ('begun', 'running'))".encode(),
        (numbers, list(_REBUILDING), numbers),
    ).fetchone()
    return row == (True,)
