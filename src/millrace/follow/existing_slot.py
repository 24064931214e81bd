"""A slot that exists already, described for the person who has to decide about it.

Invariant: reads only; what the role may not see is left out.
"""

from __future__ import annotations

from contextlib import suppress

from millrace.config.size import render_size
from millrace.errors import MillraceError, PreflightError
from millrace.follow.publication import read_own_publications
from millrace.follow.slot import Connection
from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import translated
from millrace.postgres.wire.slot import SlotState

_READER = """
SELECT coalesce(application_name, ''), coalesce(usename, ''), coalesce(host(client_addr), ''),
       to_char(backend_start, 'YYYY-MM-DD HH24:MI:SS TZ')
  FROM pg_stat_activity WHERE pid = %s
"""
_INACTIVE_SINCE = """
SELECT to_char(inactive_since, 'YYYY-MM-DD HH24:MI:SS TZ')
  FROM pg_replication_slots WHERE slot_name = %s
"""
# Before 17 nobody writes down when a slot was read last: the WAL that comes next was written then,
# or later.
_SEGMENT_WRITTEN = """
SELECT to_char(w.modification, 'YYYY-MM-DD HH24:MI:SS TZ')
  FROM pg_replication_slots s
  JOIN pg_ls_waldir() w ON w.name = pg_walfile_name(s.confirmed_flush_lsn)
 WHERE s.slot_name = %s
"""


def slot_exists(connection: Connection, state: SlotState) -> PreflightError:
    """The refusal to make a slot of this name."""
    known = describe_slot(connection, state)
    return PreflightError(
        f"the source has a replication slot {state.name} already: {known}",
        hint=_hint(connection, state),
        slot=state.name,
    )


def describe_slot(connection: Connection, state: SlotState) -> str:
    """Whose it is, since when, and what it costs the source."""
    origin = (
        "made by millrace" if _is_ours(connection, state.name) else "not known to be millrace's"
    )
    parts = [
        f"of database {state.database}, for plugin {state.plugin}, {origin}",
        _reader(connection, state) if state.active_pid else _idle(connection, state.name),
        f"the source keeps {render_size(state.lag_bytes)} of WAL for it",
    ]
    if state.is_lost:
        parts.append("it is lost: the source has removed WAL that it needs")
    return "; ".join(parts)


def _hint(connection: Connection, state: SlotState) -> str:
    if state.active_pid is not None:
        return "choose another --slot-name, or stop its reader"
    here = state.database == connection.info.dbname
    remove = f"millrace stream cleanup --slot-name {state.name}"
    if not here or not _is_ours(connection, state.name):
        remove = f"SELECT pg_drop_replication_slot({literal(state.name).strip()})"
    hint = f"choose another --slot-name; or, if nobody needs it, remove it: {remove}"
    if here and not state.is_lost:
        hint += (
            "; or, if the target has the rows that the source had when it was made, continue from "
            f"it: millrace stream setup --slot-name {state.name} --plugin {state.plugin}"
        )
    return hint


def _is_ours(connection: Connection, slot: str) -> bool:
    return any(of == slot for _, of in read_own_publications(connection))


def _reader(connection: Connection, state: SlotState) -> str:
    text = f"read by process {state.active_pid} of the source"
    with suppress(MillraceError), translated("asking who reads the slot"):
        row = connection.execute(_READER, (state.active_pid,)).fetchone()
        if row is not None:
            application, user, address, since = row
            known = (
                f"application {application!r}" if application else "",
                f"user {user}" if user else "",
                f"from {address}" if address else "",
                f"since {since}" if since else "",
            )
            text += f" ({', '.join(filter(None, known))})"
    return text


def _idle(connection: Connection, slot: str) -> str:
    has_time = connection.info.server_version >= 170000
    with suppress(MillraceError), translated("asking since when the slot is idle"):
        row = connection.execute(_INACTIVE_SINCE if has_time else _SEGMENT_WRITTEN, (slot,))
        if (found := row.fetchone()) and found[0]:
            return f"not read since {'' if has_time else 'about '}{found[0]}"
    return "not being read"
