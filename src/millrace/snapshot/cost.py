"""What a held snapshot costs its source.

Invariant: looked up on the server that pays; what can't be seen (another role's session, a pooler
in between) is not guessed.

Facts: "Vacuuming", xmin horizon; view pg_replication_slots, restart_lsn.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config.dsn import Dsn
from millrace.config.size import render_size
from millrace.postgres.wire.connect import connect, translated
from millrace.snapshot.holder import SnapshotHolder

_COST = """
SELECT (SELECT age(a.backend_xmin)::int8 FROM pg_stat_activity a WHERE a.pid = %(backend)s),
       (SELECT pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                                    ELSE pg_current_wal_lsn() END, s.restart_lsn)::int8
          FROM pg_replication_slots s WHERE s.slot_name = %(slot)s)
"""


@dataclass(frozen=True)
class SnapshotCost:
    """None for what is not known, or not there."""

    # Transactions since the one that vacuum can't remove rows behind.
    xmin_age: int | None
    # That the slot makes the source keep.
    wal_bytes: int | None

    def __str__(self) -> str:
        held = "it holds back vacuum on the source"
        if self.xmin_age is not None:
            held += f" (xmin is {self.xmin_age:,} transactions old)"
        if self.wal_bytes is not None:
            held += f", and its slot keeps {render_size(self.wal_bytes)} of WAL there"
        return held


def read_cost(dsn: Dsn, held: SnapshotHolder) -> SnapshotCost:
    with connect(dsn, "cost") as connection, translated("reading what the snapshot costs"):
        row = connection.execute(
            _COST, {"backend": held.backend_pid, "slot": held.slot or ""}
        ).fetchone()
    assert row is not None
    return SnapshotCost(row[0], row[1])
