"""The state of a replication slot, and whether we can read it.

Invariant: a slot is read only if it was made for the same plugin and database, and has all the WAL
that it needs; what may still become usable is not reported as lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.errors import ConfigError
from millrace.lsn import parse_lsn
from millrace.postgres.wire.connect import translated
from millrace.postgres.wire.slot_error import lock_sql, slot_in_use, slot_lost, slot_not_ready

Connection = psycopg.Connection[tuple[Any, ...]]

_STATE = """
SELECT s.slot_name, s.plugin, s.database, s.active_pid, s.confirmed_flush_lsn::text,
       s.restart_lsn::text, coalesce(s.wal_status, ''), {reason}, {synced},
       coalesce(pg_wal_lsn_diff(
         CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
         s.restart_lsn), 0)::int8, s.safe_wal_size
  FROM pg_replication_slots s
 WHERE s.slot_type = 'logical' AND {condition}
 ORDER BY s.slot_name
"""


@dataclass(frozen=True)
class SlotState:
    """A slot as the source sees it."""

    name: str
    plugin: str
    database: str
    # The walsender that reads it, if one does.
    active_pid: int | None
    # What was confirmed, and what the source still needs to decode the rest.
    confirmed_lsn: int
    restart_lsn: int
    wal_status: str
    invalidation_reason: str
    # WAL the source keeps because of the slot.
    lag_bytes: int
    # On a standby: a copy of its primary's (17+).
    is_synced: bool = False
    # How much more the source may write before it can remove WAL that the slot needs; None where
    # max_slot_wal_keep_size sets no limit, and for a lost slot.
    safe_wal_bytes: int | None = None

    @property
    def wal_lsn(self) -> int:
        """How far the source has written, or replayed."""
        return self.restart_lsn + self.lag_bytes

    @property
    def is_lost(self) -> bool:
        return self.wal_status == "lost" or bool(self.invalidation_reason)


def read_slot(connection: Connection, name: str) -> SlotState | None:
    found = _read(connection, "s.slot_name = %s", name)
    return found[0] if found else None


def require_slot(connection: Connection, name: str, plugin: str) -> SlotState:
    """The slot, fit to be read by us; SlotLost otherwise."""
    state = read_slot(connection, name)
    _require_ready(connection, name, state)
    if state is None:
        raise slot_lost(name, "it does not exist")
    if state.is_lost:
        raise slot_lost(name, _why_lost(state))
    if state.plugin != plugin:
        raise ConfigError(
            f"replication slot {name} was made for plugin {state.plugin}, not {plugin}",
            hint=f"give --plugin {state.plugin}, or choose another --slot-name",
        )
    database = connection.info.dbname
    if state.database != database:
        raise ConfigError(
            f"replication slot {name} belongs to database {state.database}, not {database}",
            hint="choose another --slot-name: slots belong to the whole server",
        )
    return state


def _why_lost(state: SlotState) -> str:
    if state.invalidation_reason == "idle_timeout":  # 18+
        return "nobody read it for longer than the source's idle_replication_slot_timeout"
    reason = state.invalidation_reason or state.wal_status
    return f"the source has removed WAL that it needs ({reason})"


def _require_ready(connection: Connection, name: str, state: SlotState | None) -> None:
    """On a standby a slot may still come, or is its primary's until it is promoted."""
    with translated("asking the source for its role"):
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    if row != (True,):
        return
    if state is None:
        raise slot_not_ready(name, "the source is a standby that does not have it")
    if state.is_synced:
        raise slot_not_ready(name, "the source is a standby that keeps it in step with its primary")


def require_unlocked(connection: Connection, name: str) -> None:
    """Raise if somebody reads a batch of the slot."""
    with translated(f"looking at replication slot {name}"):
        row = connection.execute(f"SELECT {lock_sql(name, is_kept=False)}".encode()).fetchone()
    if row != (True,):
        raise slot_in_use(name)


def _read(connection: Connection, condition: str, value: str) -> list[SlotState]:
    version = connection.info.server_version
    reason = "''"
    synced = "s.synced" if version >= 170000 else "false"
    if version >= 170000:
        reason = "coalesce(s.invalidation_reason, '')"
    elif version >= 160000:
        reason = "CASE WHEN s.conflicting THEN 'conflicting' ELSE '' END"
    with translated("reading replication slots"):
        rows = connection.execute(
            _STATE.format(reason=reason, synced=synced, condition=condition), (value,)
        ).fetchall()
    return [_slot_state(*row) for row in rows]


def _slot_state(
    name: str,
    plugin: str,
    database: str,
    pid: int | None,
    confirmed: str | None,
    restart: str | None,
    status: str,
    reason: str,
    is_synced: bool,
    lag_bytes: int,
    safe_wal_bytes: int | None,
) -> SlotState:
    return SlotState(
        name,
        plugin,
        database,
        pid,
        parse_lsn(confirmed or "0/0"),
        parse_lsn(restart or "0/0"),
        status,
        reason,
        max(0, lag_bytes),
        is_synced,
        safe_wal_bytes,
    )
