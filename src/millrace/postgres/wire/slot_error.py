"""Errors of servers about slots that can't be used, as ours.

Invariant: SlotLost means that changes are gone for good; whatever may pass is another error.
"""

from __future__ import annotations

from typing import Final

from millrace.errors import MillraceError, ServerError, SlotLost
from millrace.lsn import render_lsn
from millrace.postgres.quote import literal

# A slot has one reader.
OBJECT_IN_USE: Final = "55006"
_UNDEFINED_OBJECT = "42704"
NOT_IN_PREREQUISITE_STATE: Final = "55000"
# The fact of an error after which the slot may be fine, or not.
IN_DOUBT: Final = "slot_in_doubt"


def slot_error(error: MillraceError, slot: str) -> MillraceError:
    """The error as one that leaves the slot in doubt, if it is about the slot.

    What the server says is in its own language, and means different things: lost for good, or not
    ready because a standby is being promoted. So the catalog is asked, with the next attempt.
    """
    sqlstate = error.facts.get("sqlstate")
    is_gone = sqlstate == _UNDEFINED_OBJECT and "replication slot" in error.message
    if is_gone or sqlstate == NOT_IN_PREREQUISITE_STATE:
        error.facts[IN_DOUBT] = slot
    return error


def slot_not_ready(slot: str, reason: str) -> ServerError:
    """A slot that may become usable."""
    return ServerError(
        f"replication slot {slot} can't be used yet: {reason}",
        hint="it can be read when this standby is promoted; to read it now, connect to the "
        "primary, for example with target_session_attrs=read-write and both hosts",
        sqlstate=NOT_IN_PREREQUISITE_STATE,
        **{IN_DOUBT: slot},
    )


def slot_lost(slot: str, reason: str) -> SlotLost:
    return SlotLost(
        f"replication slot {slot} can't be used: {reason}",
        hint="changes are missing that the source no longer has: remove what is left with "
        "`millrace stream cleanup`, and make a new clone",
        slot=slot,
    )


def slot_moved(slot: str, confirmed_lsn: int, complete_lsn: int) -> SlotLost:
    """The slot is beyond what was received."""
    return slot_lost(
        slot,
        f"it is at {render_lsn(confirmed_lsn)}, but the spool ends at "
        f"{render_lsn(complete_lsn)}: another client has read it",
    )


def slot_in_use(slot: str) -> ServerError:
    """As the server says it of a slot that a walsender reads."""
    return ServerError(
        f"replication slot {slot} is active: another receiver reads it",
        hint="stop the other receiver first",
        sqlstate=OBJECT_IN_USE,
    )


def lock_sql(slot: str, *, is_kept: bool = True) -> str:
    """Whether we may have the slot: who reads a batch of it has this lock, because the server takes
    the slot for free while it sends one. It is kept until the session ends, or not at all."""
    kind = "pg_try_advisory_lock" if is_kept else "pg_try_advisory_xact_lock"
    return f"{kind}(hashtextextended({literal(f'millrace slot {slot}')}, 0))"
