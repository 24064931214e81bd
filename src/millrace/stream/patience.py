"""How long a source that does not answer is waited for.

Invariant: what waiting can't help is raised at once.
"""

from __future__ import annotations

import time

from millrace.errors import MillraceError
from millrace.postgres.slot import OBJECT_IN_USE
from millrace.retry import is_transient, iter_pauses

# A source that does not come back for so long is not coming back.
GIVE_UP_SECONDS = 3600.0
# A connection that lasted so long was a good one: the pauses begin small again.
STEADY_SECONDS = 10.0
# How often a slot that is in use is tried at first, in eight seconds at least: its reader may be
# dead, and the server looks for its client every five (`postgres.connect`).
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
        if not _may_retry(error):
            raise error
        now = time.monotonic()
        if self._connected_at is not None:
            self._lost_at = now
            if now - self._connected_at > STEADY_SECONDS:
                self._pauses = iter_pauses(1 << 30)
            self._connected_at = None
        if self._lost_at is not None and now - self._lost_at > self._give_up_seconds:
            raise error
        is_in_use = error.facts.get("sqlstate") == OBJECT_IN_USE and not self._was_connected
        pause = next(self._in_use_pauses if is_in_use else self._pauses, None)
        if pause is None and self._was_connected:
            self._pauses = iter_pauses(1 << 30)
            pause = next(self._pauses)
        if pause is None:
            raise error
        return pause


def _may_retry(error: MillraceError) -> bool:
    """A slot in use is left by a walsender that does not know yet that its receiver is gone."""
    return is_transient(error) or error.facts.get("sqlstate") == OBJECT_IN_USE
