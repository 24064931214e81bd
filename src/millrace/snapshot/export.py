"""An exported snapshot, held open by one session of the source.

Invariant: while a HeldSnapshot is open, every session that imports its id sees
the same rows; tables locked through it can't be dropped, truncated or rewritten.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import SnapshotLost
from millrace.postgres.connect import connect, translated
from millrace.postgres.quote import literal


class HeldSnapshot(AbstractContextManager["HeldSnapshot"]):
    """A session inside the transaction that exported, or imported, the snapshot."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]], snapshot_id: str) -> None:
        self.connection = connection
        self.id = snapshot_id

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the snapshot and the locks."""
        self.connection.close()

    def check(self) -> None:
        """Raise SnapshotLost if the session is gone."""
        try:
            self.connection.execute("SELECT 1")
        except psycopg.Error as error:
            raise SnapshotLost(
                f"the session that holds snapshot {self.id} on the source is gone: "
                f"{str(error).strip()}",
                hint="nothing more can be read consistently; start again with --restart",
            ) from error


def open_snapshot(dsn: Dsn, snapshot_id: str | None = None) -> HeldSnapshot:
    """Export a snapshot, or take part in one that another session holds."""
    connection = connect(dsn, "snapshot")
    try:
        with translated("taking a snapshot of the source"):
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if snapshot_id is not None:
                connection.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot_id)}")
            else:
                row = connection.execute("SELECT pg_export_snapshot()").fetchone()
                assert row is not None
                snapshot_id = str(row[0])
    except BaseException:
        connection.close()
        raise
    return HeldSnapshot(connection, snapshot_id)
