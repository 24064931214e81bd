"""The sink `checked`: another one, and a watch over it that no document is in flight twice.

Invariant: a document is in flight from its first write to the commit, or to the end of the session
of whoever writes it. Meanwhile an advisory lock in the sink's database stands for it; whoever finds
it taken notes the process that has it in `flight_conflict`.

Workers find it by its entry point: `install_sink` makes a distribution that has it, to be put on
PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from millrace.postgres.wire.connect import translated
from millrace.sink.document import DocumentBatch, DocumentOrigin, Version
from millrace.sink.protocol import ListingSink, ShardChoice
from millrace.sink.registry import GROUP, open_document_sink

CONFLICTS = """
CREATE TABLE flight_conflict (
    id text, mine int, other text, noted_at timestamptz DEFAULT clock_timestamp()
)"""
_NAME = "flight of process "
# The lock of a document, and who has it; pg_locks shows both halves of a bigint.
_LOCK = """
WITH locks AS (
    SELECT id, hashtextextended(id, 7) AS lock FROM unnest(%(ids)s::text[]) id
), refused AS MATERIALIZED (
    SELECT id, lock FROM locks WHERE NOT pg_try_advisory_lock(lock)
)
INSERT INTO flight_conflict (id, mine, other)
SELECT r.id, %(pid)s, (SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
                          AND l.database = a.datid AND a.datname = current_database()
                          AND (l.classid::bigint << 32 | l.objid::bigint) = r.lock LIMIT 1)
  FROM refused r, pg_sleep(random() * 0.005)
"""


def open_sink(address: str) -> CheckedSink:
    """`checked:URI` of a table."""
    sink = open_document_sink(address)
    assert isinstance(sink, ListingSink)
    return CheckedSink(sink, address)


class CheckedSink:
    """Does what the other one does."""

    def __init__(self, sink: ListingSink, uri: str) -> None:
        self._sink = sink
        self.capabilities = sink.capabilities
        self.position = 0
        place, _, query = uri.partition("?")
        kept = "&".join(one for one in query.split("&") if not one.startswith("table="))
        with translated("watching documents in flight"):
            self._flight: psycopg.Connection[Any] = psycopg.connect(
                f"{place}?{kept}", autocommit=True, application_name=f"{_NAME}{os.getpid()}"
            )

    def begin_documents(self, origin: DocumentOrigin, body: pa.Schema) -> None:
        self._sink.begin_documents(origin, body)

    def write_documents(self, batch: DocumentBatch) -> None:
        with translated("watching documents in flight"):
            self._flight.execute(_LOCK, {"ids": batch.ids.to_pylist(), "pid": os.getpid()})
        self._sink.write_documents(batch)

    def commit(self, position: int) -> None:
        self._sink.commit(position)
        with translated("watching documents in flight"):
            self._flight.execute("SELECT pg_advisory_unlock_all()")

    def close(self) -> None:
        self._flight.close()
        self._sink.close()

    def list_ids(self, choice: ShardChoice, older_than: Version, limit: int) -> dict[str, int]:
        return self._sink.list_ids(choice, older_than, limit)

    def forget_deleted(self, choice: ShardChoice, older_than: Version) -> None:
        self._sink.forget_deleted(choice, older_than)


def read_conflicts(uri: str) -> list[tuple[str, int, int]]:
    """Documents that were in flight twice: which, in which process, and in which before."""
    with psycopg.connect(uri) as connection:
        rows = connection.execute("SELECT id, mine, other FROM flight_conflict").fetchall()
    return [
        (id_, mine, int((other or _NAME + "0").removeprefix(_NAME))) for id_, mine, other in rows
    ]


def install_sink(folder: Path) -> Path:
    """What has to be on PYTHONPATH, besides the folder of the tests."""
    place = folder / "checked_sink-1.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: checked-sink\nVersion: 1\n")
    (place / "entry_points.txt").write_text(f"[{GROUP}]\nchecked = {__name__}:open_sink\n")
    return folder
