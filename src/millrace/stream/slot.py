"""The replication slot: made, looked at, removed with everything that belongs to it.

Invariant: publications are made before the slot, and a slot is dropped only while nobody reads it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, ServerError
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.connect import connect, translated
from millrace.postgres.slot import lock_sql, slot_in_use, slot_lost
from millrace.snapshot.holder import create_slot
from millrace.stream.position import drop_position, read_positions, stream_prefix
from millrace.stream.publication import (
    create_publications,
    drop_publications,
    read_own_publications,
    read_published_tables,
)

Connection = psycopg.Connection[tuple[Any, ...]]

PLUGINS = ("pgoutput", "test_decoding", "wal2json")
DEFAULT_SLOT = "millrace"

_STATE = """
SELECT s.slot_name, s.plugin, s.database, s.active_pid, s.confirmed_flush_lsn::text,
       s.restart_lsn::text, coalesce(s.wal_status, ''), {reason},
       coalesce(pg_wal_lsn_diff(
         CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
         s.restart_lsn), 0)::int8
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
    if state is None:
        raise slot_lost(name, "it does not exist")
    if state.is_lost:
        raise slot_lost(
            name,
            "the source has removed WAL that it needs"
            f" ({state.invalidation_reason or state.wal_status})",
        )
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


@dataclass(frozen=True)
class CreatedSlot:
    """A new slot, and what a person should know about the tables behind it."""

    start_lsn: int
    warnings: tuple[str, ...]


def create_stream(
    dsn: Dsn, slot: str, plugin: str, oids: Collection[int] | None = None
) -> CreatedSlot:
    """Publications and slot, without a snapshot; a slot that is there already is taken as it is."""
    warnings = prepare_source(dsn, slot, plugin, oids)
    with connect(dsn, "setup") as connection:
        found = read_slot(connection, slot)
        if found is not None:
            state = require_slot(connection, slot, plugin)
            return CreatedSlot(state.confirmed_lsn, tuple(warnings))
    created = create_slot(dsn, slot, plugin)
    return CreatedSlot(parse_lsn(created), tuple(warnings))


def prepare_source(
    dsn: Dsn, slot: str, plugin: str, oids: Collection[int] | None = None
) -> list[str]:
    """What must be there before the slot; warnings about tables that can't be followed fully."""
    if plugin not in PLUGINS:
        raise ConfigError(f"unknown plugin {plugin!r}", hint=f"known are {', '.join(PLUGINS)}")
    with connect(dsn, "setup") as connection:
        if plugin == "pgoutput":
            return create_publications(connection, slot, oids)
        tables = read_published_tables(connection, oids)
        return [text for table in tables if (text := table.warning())]


def require_unlocked(connection: Connection, name: str) -> None:
    """Raise if somebody reads a batch of the slot."""
    with translated(f"looking at replication slot {name}"):
        row = connection.execute(f"SELECT {lock_sql(name, is_kept=False)}".encode()).fetchone()
    if row != (True,):
        raise slot_in_use(name)


def drop_slot(connection: Connection, name: str) -> bool:
    """Drop the slot, if it is there; one that is being read is refused."""
    state = read_slot(connection, name)
    if state is None:
        return False
    if state.active_pid is not None:
        raise ServerError(
            f"replication slot {name} is being read by process {state.active_pid} of the source",
            hint="stop the receiver first",
        )
    require_unlocked(connection, name)
    with translated(f"dropping replication slot {name}"):
        connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
    return True


@dataclass(frozen=True)
class Leftovers:
    """What streams have left on the servers: on the source slots and publications, on the target
    positions."""

    slots: tuple[SlotState, ...]
    publications: tuple[tuple[str, str], ...]
    origins: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "slots": [
                asdict(slot)
                | {
                    "confirmed_lsn": render_lsn(slot.confirmed_lsn),
                    "restart_lsn": render_lsn(slot.restart_lsn),
                }
                for slot in self.slots
            ],
            "publications": [{"name": n, "slot": slot} for n, slot in self.publications],
            "origins": [{"name": name, "lsn": lsn} for name, lsn in self.origins],
        }


def read_leftovers(
    source: Connection, target: Connection | None, prefix: str = DEFAULT_SLOT
) -> Leftovers:
    """Slots and origins whose name begins with `prefix`, and all publications that we made."""
    slots = _read(
        source, "starts_with(s.slot_name, %s) AND s.database = current_database()", prefix
    )
    origins: list[tuple[str, str]] = []
    if target is not None:
        with translated("reading replication origins"):
            origins = target.execute(
                "SELECT o.roname, coalesce(s.remote_lsn, '0/0')::text FROM pg_replication_origin o"
                " LEFT JOIN pg_replication_origin_status s ON s.local_id = o.roident"
                " WHERE starts_with(o.roname, %s) ORDER BY 1",
                (prefix,),
            ).fetchall()
    publications = read_own_publications(source)
    return Leftovers(tuple(slots), tuple(publications), tuple(origins))


def cleanup(
    source: Connection, target: Connection | None, slot: str, identity: str = ""
) -> list[str]:
    """Remove a stream from both servers: the slot, its publications, its positions; `identity` is
    the source's, as the stream was set up for."""
    removed = []
    if drop_slot(source, slot):
        removed.append(f"replication slot {slot}")
    removed += [f"publication {name}" for name in drop_publications(source, slot)]
    if target is not None:
        # Numba comes with it: not for those who only look at slots.
        from millrace.stream.table_spool import spooled_stream, uninstall

        for name in sorted(read_positions(target, stream_prefix(identity, slot))):
            if stream := spooled_stream(name):
                uninstall(target, stream)
                removed.append(f"spool of {stream} on the target")
            elif drop_position(target, name):
                removed.append(f"position {name} on the target")
    return removed


def _read(connection: Connection, condition: str, value: str) -> list[SlotState]:
    version = connection.info.server_version
    reason = "''"
    if version >= 170000:
        reason = "coalesce(s.invalidation_reason, '')"
    elif version >= 160000:
        reason = "CASE WHEN s.conflicting THEN 'conflicting' ELSE '' END"
    with translated("reading replication slots"):
        rows = connection.execute(
            _STATE.format(reason=reason, condition=condition), (value,)
        ).fetchall()
    return [
        SlotState(
            name,
            plugin,
            database,
            pid,
            parse_lsn(confirmed or "0/0"),
            parse_lsn(restart or "0/0"),
            status,
            why,
            max(0, lag),
        )
        for name, plugin, database, pid, confirmed, restart, status, why, lag in rows
    ]
