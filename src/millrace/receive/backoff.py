"""How long to wait for a source that does not answer.

Invariant: what waiting can't help is raised at once.
"""

from __future__ import annotations

import time

from millrace.errors import MillraceError, SnapshotLost
from millrace.postgres.wire.slot_error import IN_DOUBT, OBJECT_IN_USE
from millrace.retry import is_transient, iter_pauses

# A source that does not come back for so long is not coming back.
GIVE_UP_SECONDS = 3600.0
# A connection that lasted so long was a good one: the pauses begin small again.
STEADY_SECONDS = 10.0
# How often a slot that is in use is tried at first, in eight seconds at least: its reader may be
# dead, and the server looks for its client every five (`postgres.wire.connect`).
IN_USE_ATTEMPTS = 6


class Patience:
    """With one source; it counts from when the connection was lost."""

    def __init__(self, give_up_seconds: float) -> None:
        self._give_up_seconds = give_up_seconds
        self._pauses = iter_pauses()
        self._in_use_pauses = iter_pauses(IN_USE_ATTEMPTS)
        self._lost_at: float | None = None
        self._connected_at: float | None = None
        self._was_connected = False

    def connected(self) -> None:
        self._connected_at = time.monotonic()
        self._was_connected = True

    def after(self, error: MillraceError) -> float:
        """Seconds to wait before the next attempt, or the error again.

        A source that was never there gets the few attempts that anything gets.
        """
        if not may_retry(error):
            raise error
        now = time.monotonic()
        if self._connected_at is not None:
            self._lost_at = now
            if now - self._connected_at > STEADY_SECONDS:
                self._pauses = iter_pauses(1 << 30)
            self._connected_at = None
        if self._lost_at is not None and now - self._lost_at > self._give_up_seconds:
            raise error
        is_slots = _is_about_slot(error) and not self._was_connected
        pause = next(self._in_use_pauses if is_slots else self._pauses, None)
        if pause is None and self._was_connected:
            self._pauses = iter_pauses(1 << 30)
            pause = next(self._pauses)
        if pause is None:
            raise error
        return pause


def may_retry(error: MillraceError) -> bool:
    """Whether waiting can help; a snapshot is lost with its connection, and another one is
    taken."""
    return isinstance(error, SnapshotLost) or is_transient(error) or _is_about_slot(error)


def _is_about_slot(error: MillraceError) -> bool:
    """A slot in use is left by a walsender that does not know yet that its receiver is gone; one in
    doubt is looked at in the catalog by the next attempt."""
    return error.facts.get("sqlstate") == OBJECT_IN_USE or IN_DOUBT in error.facts
