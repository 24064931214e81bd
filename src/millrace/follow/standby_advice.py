"""What a person should know about the source's standbys before a stream begins.

Invariant: reads only, and only advises: a stream works without standbys.

A slot of version 17 or later can be kept in step by a standby, which takes it over when it is
promoted. The standby may still be behind what was received from its primary, unless the primary
waits for it before it sends: that is `synchronized_standby_slots`.

Facts: PostgreSQL documentation, "Logical Replication Failover"; slot.c, StandbySlotsHaveCaughtup().
"""

from __future__ import annotations

from typing import Any

import psycopg

from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

# Slots of standbys, and standbys that are connected without one. Other programs may look like
# them: backups and archivers have a walsender of their own, too.
_STANDBYS = """
SELECT array(SELECT slot_name::text FROM pg_replication_slots
              WHERE slot_type = 'physical' AND NOT temporary ORDER BY 1),
       (SELECT count(*) FROM pg_stat_replication r WHERE r.state = 'streaming'
           AND NOT EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid)),
       coalesce(current_setting('synchronized_standby_slots', true), ''), pg_is_in_recovery()
"""


def read_standby_advice(connection: Connection) -> list[str]:
    """Sentences about the standbys of the source; none if there is nothing to say."""
    with translated("looking for standbys of the source"):
        row = connection.execute(_STANDBYS).fetchone()
    assert row is not None
    slots, without_slot, synchronized, is_standby = row
    if is_standby or not (slots or without_slot):
        return []
    if connection.info.server_version < 170000:
        return [
            "it has standbys, and before version 17 none of them keeps the stream's slot: after a "
            "failover the stream can't be continued"
        ]
    waited_for = {name.strip().strip('"') for name in synchronized.split(",") if name.strip()}
    if set(slots) <= waited_for and not without_slot:
        return []
    return [_advice([name for name in slots if name not in waited_for], sorted(waited_for))]


def _advice(slots: list[str], waited_for: list[str]) -> str:
    whose = f" with slot {', '.join(slots)}" if slots else " without a replication slot"
    names = literal(", ".join([*waited_for, *slots]) or "...").strip()
    return (
        f"it has standbys{whose} that may be behind this stream: a failover to one that is stops "
        "it for good. For one that can take over: on the source ALTER SYSTEM SET "
        f"synchronized_standby_slots = {names}; on the standby sync_replication_slots = on, "
        "hot_standby_feedback = on, primary_slot_name, and a dbname in primary_conninfo"
    )
