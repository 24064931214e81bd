"""When a stream begins and ends, seen from outside and in the same way for every contestant.

It begins when the slot is taken, which is after every kind of start-up, and ends when the last
change can be seen on the target. A receiver ends with its process: it may have given the slot back
before all is on its disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from bench.changes import see_mark

# Two small queries so often take 1 % of a core; a run lasts seconds.
POLL_SECONDS = 0.02


@dataclass
class Seen:
    """By the clock that never goes back; None for what did not happen."""

    started_at: float
    taken_at: float | None = None
    visible_at: float | None = None

    def note(self, now: float, *, is_taken: bool, is_visible: bool) -> None:
        if is_taken:
            self.taken_at = self.taken_at or now
        if is_visible:
            self.visible_at = self.visible_at or now

    def windows(self, ended_at: float | None) -> dict[str, tuple[float, float]]:
        """Begin and end of what is timed, as far as it was seen; `ended_at`: the process."""
        ends = {
            "whole_seconds": (self.started_at, self.visible_at),
            "catch_up_seconds": (self.taken_at, self.visible_at),
            "receive_seconds": (self.taken_at, ended_at),
        }
        return {
            name: (begin, end)
            for name, (begin, end) in ends.items()
            if begin is not None and end is not None
        }


class Watch:
    """Looks at the slot and at the mark while the block runs."""

    def __init__(self, source: str, target: str, slot: str) -> None:
        self._source = psycopg.connect(source, autocommit=True)
        self._target = psycopg.connect(target, autocommit=True)
        self._slot = slot
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.seen = Seen(time.monotonic())

    def __enter__(self) -> Watch:
        self.seen.started_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        self._source.close()
        self._target.close()

    def wait_for(self, is_so: Callable[[Seen], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_so(self.seen):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing of slot {self._slot} after {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        row = self._source.execute(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", (self._slot,)
        ).fetchone()
        is_visible = self.seen.visible_at is None and see_mark(self._target)
        is_taken = bool(row and row[0])
        self.seen.note(time.monotonic(), is_taken=is_taken, is_visible=is_visible)
