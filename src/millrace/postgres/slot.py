"""What servers say about slots that can't be used, as our errors."""

from __future__ import annotations

from typing import Final

from millrace.errors import MillraceError, SlotLost

# A slot has one reader.
OBJECT_IN_USE: Final = "55006"
_UNDEFINED_OBJECT = "42704"
_NOT_IN_PREREQUISITE_STATE = "55000"


def slot_error(error: MillraceError, slot: str) -> MillraceError:
    """SlotLost, if that is what the server's words mean; the error as it is otherwise."""
    sqlstate = error.facts.get("sqlstate")
    is_gone = sqlstate == _UNDEFINED_OBJECT and "replication slot" in error.message
    is_invalid = sqlstate == _NOT_IN_PREREQUISITE_STATE and "slot" in error.message
    return slot_lost(slot, error.message) if is_gone or is_invalid else error


def slot_lost(slot: str, reason: str) -> SlotLost:
    return SlotLost(
        f"replication slot {slot} can't be used: {reason}",
        hint="changes are missing that the source no longer has: remove what is left with "
        "`millrace stream cleanup`, and make a new clone",
        slot=slot,
    )
