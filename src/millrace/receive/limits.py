"""What a receiver may use: room for the spool here, WAL kept for the slot there.

Invariant: reading stops before the spool outgrows its limit, unless only reading on can bring the
end of what is open.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from millrace.config.dsn import Dsn
from millrace.config.size import render_size
from millrace.errors import ServerError
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.slot import read_slot
from millrace.spool.interface import Writer

log = logging.getLogger(__name__)

SLOT_LAG_SECONDS = 30.0
# After the limit of the spool, reading begins again when this share of it is free.
FREE_SHARE = 0.1


@dataclass(frozen=True)
class ReceiveLimits:
    """In bytes; None for no limit."""

    max_spool_bytes: int | None = None
    max_slot_lag_bytes: int | None = None


class Limits:
    """The limits of one receiver, looked at now and then."""

    def __init__(self, source: Dsn, slot: str, limits: ReceiveLimits) -> None:
        self._source = source
        self._slot = slot
        self._limits = limits
        self._looked_at = time.monotonic()

    def over(self, spool: Writer, applied_lsn: int, *, is_held: bool) -> str | None:
        """Why reading must stop for now; None if it need not."""
        limit = self._limits.max_spool_bytes
        if limit is None:
            return None
        used = spool.bytes
        if used < (limit * (1 - FREE_SHARE) if is_held else limit):
            return None
        if applied_lsn >= spool.last_end_lsn:
            # All there is to apply is applied: only continuing can bring the end of what is open.
            return None
        return f"the spool has {render_size(used)}, --max-spool is {render_size(limit)}"

    def guard_slot(self, now: float, held: str | None) -> None:
        """Warn about a slot that keeps too much, and stop if nothing is done about it: while it is
        `held` back, for that reason."""
        limit = self._limits.max_slot_lag_bytes
        if limit is None or now - self._looked_at < SLOT_LAG_SECONDS:
            return
        self._looked_at = now
        with connect(self._source, "receive") as catalog:
            state = read_slot(catalog, self._slot)
        if state is None or state.lag_bytes <= limit:
            return
        what = (
            f"slot {self._slot} makes the source keep {render_size(state.lag_bytes)} of WAL, more "
            f"than --max-slot-lag {render_size(limit)}"
        )
        if held:
            raise ServerError(
                f"{what}, while {held}",
                hint="make room for the spool or apply faster; to free the source's disk at the "
                "price of a new clone: `millrace stream cleanup`",
            )
        log.warning("%s; still catching up", what)
