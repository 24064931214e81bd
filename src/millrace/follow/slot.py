"""The replication slot: made, looked at, removed with everything that belongs to it.

Invariant: publications are made before the slot, and a slot is dropped only while nobody reads it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import psycopg

from millrace.apply.position import drop_position, read_positions
from millrace.config.dsn import Dsn
from millrace.ddl.capture import LeftOut
from millrace.ddl.capture import install as install_capture
from millrace.ddl.capture import uninstall as uninstall_capture
from millrace.ddl.history import forget as forget_ddl
from millrace.errors import ConfigError, ServerError
from millrace.follow.idle_slot_advice import read_idle_advice
from millrace.follow.publication import (
    create_note_holder,
    create_publications,
    drop_publications,
    find_unpublished,
    read_own_publications,
)
from millrace.follow.published_table import read_published_tables
from millrace.follow.replica_identity import put_back, put_back_copies, set_full
from millrace.follow.settings import DEFAULT_SLOT
from millrace.follow.standby_advice import read_standby_advice
from millrace.lsn import render_lsn
from millrace.name import IDENTITY, Naming
from millrace.postgres.origin import stream_prefix
from millrace.postgres.own_schema import drop_unused
from millrace.postgres.stream_record import remove_follower
from millrace.postgres.wire.connect import connect, translated
from millrace.postgres.wire.slot import SlotState, _read, read_slot, require_slot, require_unlocked
from millrace.receive.plugin_check import require_plugin
from millrace.snapshot.holder import SLOT_ATTEMPTS, create_slot

Connection = psycopg.Connection[tuple[Any, ...]]

PLUGINS = ("pgoutput", "test_decoding", "wal2json")
# A server may take a moment to see that whoever read a slot has gone.
LEAVING_SECONDS = 5.0
POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class CreatedSlot:
    """A new slot, and what a person should know about the tables behind it."""

    start_lsn: int
    warnings: tuple[str, ...]
    # Whether it was not there before.
    is_new: bool = field(default=True, compare=False)


def create_stream(
    dsn: Dsn,
    slot: str,
    plugin: str,
    oids: Collection[int] | None = None,
    *,
    timeout_seconds: float | None = None,
    identity_full: bool = False,
) -> CreatedSlot:
    """Publications and slot, without a snapshot; a slot that is there already is taken as it is."""
    for attempt in range(1, SLOT_ATTEMPTS + 1):
        warnings = prepare_source(dsn, slot, plugin, oids, identity_full=identity_full)
        with connect(dsn, "setup") as connection:
            if read_slot(connection, slot) is not None:
                state = require_slot(connection, slot, plugin)
                return CreatedSlot(state.confirmed_lsn, tuple(warnings), is_new=False)
        created = create_slot(dsn, slot, plugin, timeout_seconds=timeout_seconds)
        with connect(dsn, "setup") as connection:
            if not _has_late(connection, slot, plugin, oids) or attempt == SLOT_ATTEMPTS:
                break
            drop_slot(connection, slot)
    return CreatedSlot(created.start_lsn, tuple(warnings))


def _has_late(connection: Connection, slot: str, plugin: str, oids: Collection[int] | None) -> bool:
    """Whether tables were made while the slot was; after the last attempt they are left to those
    who follow."""
    return plugin == "pgoutput" and bool(find_unpublished(connection, slot, oids))


def prepare_source(
    dsn: Dsn,
    slot: str,
    plugin: str,
    oids: Collection[int] | None = None,
    *,
    identity_full: bool = False,
    capture: LeftOut | None = None,
) -> list[str]:
    """What must be there before the slot; warnings about tables that can't be followed fully.
    `identity_full`: those that have no replica identity get one. `capture`: DDL is captured, but
    for what is left out."""
    if plugin not in PLUGINS:
        raise ConfigError(f"unknown plugin {plugin!r}", hint=f"known are {', '.join(PLUGINS)}")
    with connect(dsn, "setup") as connection:
        require_plugin(connection, plugin)
        advice = read_standby_advice(connection) + read_idle_advice(connection)
        if identity_full and read_slot(connection, slot) is None:
            _set_identities(connection, slot, plugin, oids)
        if plugin == "pgoutput":
            warnings = create_publications(connection, slot, oids)
            if capture is not None:
                install_capture(connection, slot, capture)
            return advice + warnings
        tables = read_published_tables(connection, oids, plugin=plugin)
        return advice + [text for table in tables if (text := table.warning())]


def _set_identities(
    connection: Connection, slot: str, plugin: str, oids: Collection[int] | None
) -> None:
    """The publication that holds the note comes first; the tables are published afterwards."""
    if plugin == "pgoutput":
        create_publications(connection, slot, oids)
    else:
        create_note_holder(connection, slot)
    tables = read_published_tables(connection, oids, plugin=plugin)
    set_full(connection, slot, [table for table in tables if not table.has_identity])


def drop_slot(connection: Connection, name: str) -> bool:
    """Drop the slot, if it is there; one that is being read is refused."""
    until = time.monotonic() + LEAVING_SECONDS
    while (state := read_slot(connection, name)) is not None:
        try:
            _require_unread(connection, state)
        except ServerError:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_SECONDS)
            continue
        with translated(f"dropping replication slot {name}"):
            connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
        return True
    return False


def _require_unread(connection: Connection, state: SlotState) -> None:
    if state.active_pid is not None:
        raise ServerError(
            f"replication slot {state.name} is being read by process {state.active_pid} of the "
            "source",
            hint="stop the receiver first",
        )
    require_unlocked(connection, state.name)


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
    source: Connection,
    target: Connection | None,
    slot: str,
    identity: str = "",
    naming: Naming = IDENTITY,
) -> list[str]:
    """Remove a stream from both servers: the slot, its publications, its positions; `identity` is
    the source's, as the stream was set up for, and `naming` that of its copy."""
    removed = []
    if drop_slot(source, slot):
        removed.append(f"replication slot {slot}")
    former = put_back(source, slot)
    removed += [f"REPLICA IDENTITY FULL of {one.label}" for one in former]
    removed += [f"publication {name}" for name in drop_publications(source, slot)]
    removed += uninstall_capture(source, slot)
    if target is not None:
        put_back_copies(target, former, naming)
        if remove_follower(target, identity, slot):
            removed.append("note of the stream on the target")
        # Numba comes with it: not for those who only look at slots.
        from millrace.apply.table_state import drop_states
        from millrace.spool.table import spooled_stream, uninstall

        drop_states(target, stream_prefix(identity, slot))
        forget_ddl(target, stream_prefix(identity, slot))
        for name in sorted(read_positions(target, stream_prefix(identity, slot))):
            if stream := spooled_stream(name):
                uninstall(target, stream)
                removed.append(f"spool of {stream} on the target")
            elif drop_position(target, name):
                removed.append(f"position {name} on the target")
        with translated("removing our schema from the target"):
            drop_unused(target)
    return removed
