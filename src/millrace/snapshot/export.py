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
from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import connect, translated


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


class ReleasedSnapshot(AbstractContextManager["ReleasedSnapshot"]):
    """The name of a snapshot under which everything was read that is needed: nothing holds it."""

    def __init__(self, snapshot_id: str) -> None:
        self.id = snapshot_id

    def __exit__(self, *_: object) -> None:
        """Nothing to let go of."""

    def close(self) -> None:
        """Nothing to let go of."""

    def check(self) -> None:
        """Nothing can be lost."""


def open_snapshot(dsn: Dsn, snapshot_id: str | None = None) -> HeldSnapshot:
    """Export a snapshot, or take part in one that another session holds."""
    connection = connect(dsn, "snapshot" if snapshot_id is None else "view")
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


def snapshot_sql(snapshot: str | None) -> str:
    """What every read of the source starts with."""
    begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; "
    if snapshot is None:
        return begin
    return f"{begin}SET TRANSACTION SNAPSHOT {literal(snapshot)}; "
