"""Pods: read in their order, deleted when all their keys are delivered.

Invariant: a pod is deleted only after everything in it was acknowledged. Incremental pods come
before those of backfills, each in the order of their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import datetime
from itertools import count
from typing import Any, NamedTuple

import psycopg

from millrace.postgres.quote import ident, literal
from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.tube import Connection, Tube, TubeTable

# invalid_parameter_value: other partitions; undefined_object and undefined_table: dropped.
_CHANGED = ("22023", "42704", "42P01")


class TubeChanged(Exception):
    """The tube has other partitions than those it was read by, or is gone."""


# A tube has no statistics: without these, it would be sorted as a whole to find its first pods.
_IN_ORDER = "".join(f"SET LOCAL enable_{way} = off; " for way in ("sort", "seqscan", "bitmapscan"))


class Pod(NamedTuple):
    """A row of a tube."""

    seq: int
    op: str
    shard: int
    table_id: int | None
    # In the form they have in documents: a text, or a JSON array of texts.
    keys: tuple[str, ...]
    payload: dict[str, Any] | None
    written_at: datetime

    @property
    def is_control(self) -> bool:
        return not self.keys and self.payload is not None

    @property
    def asks_for_backfill(self) -> bool:
        """Of its table: it was scheduled, or touches were lost."""
        return (self.payload or {}).get("type") in ("backfill_schedule", "lost")


class PodReader:
    """Reads pods through one session."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # Statements that are prepared, by their text, with their names: planning the read of a
        # partition takes the server four times as long as the read of an empty one.
        self._prepared: dict[str, str] = {}
        # No name is used twice: a statement stays prepared when the rest of its message fails.
        self._names = count()

    def fetch(
        self,
        tube: Tube,
        partition: int,
        limit: int,
        *,
        after: int | None = None,
        without: Collection[int] = (),
        without_tables: Collection[int] = (),
    ) -> list[Pod]:
        """The next pods of a partition, but for incremental ones up to a number, for these, and for
        those of these tables."""
        ours = "" if after is None else f"AND (op = 'B', seq) > (false, {after})"
        if without:
            ours += f" AND seq <> ALL ('{{{','.join(map(str, without))}}}')"
        if without_tables:
            ours += f" AND (tbl <> ALL ('{{{','.join(map(str, without_tables))}}}')) IS NOT FALSE"
        # It also says whether the tube still has these partitions, and so is asked each time.
        asked = (
            f"SELECT {ident(tube.schema)}.tube_fetch_sql("
            f"{literal(tube.name)}, {tube.partitions}, {partition})"
        )
        with _checked(tube, "reading pods"):
            if partition not in tube.fetch_sql:
                row = self._connection.execute(asked.encode()).fetchone()
                assert row is not None
                tube.fetch_sql[partition] = row[0]
            query = (
                "SELECT seq, op, shard, tbl, coalesce(keys, ids::text[]), payload, ts"
                f" FROM ({tube.fetch_sql[partition]}) AS pods WHERE true {ours} LIMIT"
            )
            rows = self._rows(f"{_IN_ORDER} {asked};", query, limit, is_kept=not ours)
        return [Pod(seq, op, shard, tbl, tuple(k), p, at) for seq, op, shard, tbl, k, p, at in rows]

    def _rows(self, first: str, query: str, limit: int, *, is_kept: bool) -> list[tuple[Any, ...]]:
        """What a query returns, after other statements in the same message."""
        if not is_kept:
            return self._last_rows(f"{first} {query} {limit}")
        name = self._prepared.get(query)
        if name is None:
            name = f"tube_pods_{next(self._names)}"
            first += f" PREPARE {name} (bigint) AS {query} $1;"
        rows = self._last_rows(f"{first} EXECUTE {name} ({limit})")
        self._prepared[query] = name
        return rows

    def _last_rows(self, statements: str) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statements.encode())
        while cursor.nextset():
            pass
        return cursor.fetchall()


def delete_pods(connection: Connection, tube: Tube, partition: int, seqs: Collection[int]) -> None:
    """What is delivered is gone. Nobody waits for the disk: what a crash brings back is delivered
    again, with a newer version."""
    if not seqs:
        return
    with _checked(tube, "deleting pods"):
        connection.execute(
            "SELECT set_config('synchronous_commit', 'off', true),"
            f" {ident(tube.schema)}.tube_pods_delete(%s, %s, %s, %s::bigint[])".encode(),
            (tube.name, tube.partitions, partition, "{" + ",".join(map(str, seqs)) + "}"),
        )


def rotate(connection: Connection, tube: Tube) -> None:
    """Truncate what is drained: once there is nothing to do, nobody else would."""
    here = ident(tube.schema)
    with _checked(tube, "truncating what is drained"):
        connection.execute(
            f"SELECT {here}._tube_rotate_now(id) FROM {here}._tube_tubes WHERE name = %s".encode(),
            (tube.name,),
        )


def forward(connection: Connection, tube: Tube, table: TubeTable, pods: Collection[Pod]) -> None:
    """Touch what is in these pods again, where the table is now."""
    put = f"SELECT {ident(tube.schema)}._tube_touch_table(%s, %s, %s, %s, 250)".encode()
    with _checked(tube, "forwarding pods"), connection.transaction():
        for pod in pods:
            payload = None if pod.payload is None else json.dumps(pod.payload)
            connection.execute(put, (table.id, list(pod.keys), pod.op, payload))


class _checked:
    """Errors that say that the tube is another one become TubeChanged."""

    def __init__(self, tube: Tube, doing: str) -> None:
        self._tube, self._translated = tube, translated(doing)

    def __enter__(self) -> None:
        self._translated.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, psycopg.Error) and error.sqlstate in _CHANGED:
            raise TubeChanged(self._tube.name) from error
        self._translated.__exit__(kind, error, trace)
