"""When a receiver asks for a batch instead of reading the replication protocol.

Invariant: after a batch that broke off the protocol has its turn, and after two in a row there are
no more; a source that refuses one is never asked again.
"""

from __future__ import annotations

from millrace.errors import ConnectionLost, ServerError, SlotLost
from millrace.postgres.wire.slot import SlotState
from millrace.postgres.wire.slot_batch import BatchSizes, BatchStream
from millrace.postgres.wire.slot_error import OBJECT_IN_USE

# After so much has come by the protocol, and if so much is still there, it is done in batches.
LOOK_BYTES = 64 * 1024 * 1024
# Batches that broke off one after the other: something there does not like them.
MAX_BROKEN = 2


class Batches:
    """What one receiver has learned about batches of its source."""

    def __init__(self, sizes: BatchSizes) -> None:
        self.sizes = sizes
        self._broken = 0
        # Whether one may be next; and whether none may ever be.
        self._may_be_next = True
        self._are_over = False

    def give_up(self) -> None:
        """None any more: the source can't be trusted with them, or they are of no use."""
        self._are_over = True

    def may_begin(self, state: SlotState, begin_lsn: int, endpos: int | None) -> bool:
        """Whether a connection begins with one."""
        return self._may_be_next and self._is_far(state, begin_lsn, endpos, 0)

    def is_time_to_look(self, streamed_bytes: int) -> bool:
        """Whether enough has come by the protocol to ask how far the source is."""
        return streamed_bytes >= LOOK_BYTES and not self._are_over

    def should_take_over(self, state: SlotState, begin_lsn: int, endpos: int | None) -> bool:
        """Whether the protocol falls behind what the source writes."""
        self._may_be_next = self._is_far(state, begin_lsn, endpos, LOOK_BYTES)
        return self._may_be_next

    def begin(self) -> None:
        """One is asked for; unless it is `take`n, the next is not."""
        self._may_be_next = False

    def take(self, batch: BatchStream) -> None:
        """One has come whole."""
        self._may_be_next = True
        self._broken = 0
        self.sizes = self.sizes.after(batch.wal_bytes, batch.decoded_bytes)

    def break_off(self, error: ServerError) -> bool:
        """Whether the source does not want to give a batch; other errors are others' to handle."""
        sqlstate = error.facts.get("sqlstate")
        if sqlstate == OBJECT_IN_USE:
            return False
        is_refusal = not isinstance(error, ConnectionLost | SlotLost) and sqlstate is not None
        self._broken += 1
        self._are_over |= is_refusal or self._broken >= MAX_BROKEN
        return is_refusal

    def _is_far(self, state: SlotState, begin_lsn: int, endpos: int | None, by_bytes: int) -> bool:
        if self._are_over:
            return False
        wal_lsn = state.wal_lsn if endpos is None else min(state.wal_lsn, endpos)
        end_lsn = self.sizes.end_of(begin_lsn, state.restart_lsn, wal_lsn)
        return end_lsn is not None and wal_lsn - begin_lsn >= by_bytes
