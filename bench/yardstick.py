"""How fast the machine itself is while a run lasts.

A shared machine changes its speed from one minute to the next: its cores by half, its memory to a
third. A run that fell into a slow minute would look like a slow program. So a short piece of work
that never changes, a loop and a copy in memory that take about the same time, is timed all the
while, in CPU time of its own thread: waiting for a core does not count, a slower one does. Run
times divided by it can be compared although the machine was not the same. It takes 1 % of one core,
from every contestant alike.
"""

from __future__ import annotations

import statistics
import threading
import time

STEPS = 15_000
# More than the caches of one core.
COPIED_BYTES = 8 << 20
PAUSE_SECONDS = 0.2
# With fewer in the window, those of the whole run tell more.
FEWEST = 5


class Yardstick:
    """Times the loop while the block runs."""

    def __init__(self) -> None:
        # Monotonic clock, milliseconds of CPU.
        self._samples: list[tuple[float, float]] = []
        self._from, self._to = bytearray(COPIED_BYTES), bytearray(COPIED_BYTES)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="yardstick", daemon=True)

    def __enter__(self) -> Yardstick:
        self._measure()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def milliseconds(self, window: tuple[float, float] | None = None) -> float:
        """The mean, of all or of what was measured between two moments."""
        begin, end = window or (0.0, float("inf"))
        inside = [spent for at, spent in self._samples if begin <= at <= end]
        if len(inside) < FEWEST:
            inside = [spent for _, spent in self._samples]
        return statistics.fmean(inside)

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            self._measure()

    def _measure(self) -> None:
        began = time.thread_time()
        total = 0
        for step in range(STEPS):
            total += step * step
        self._to[:] = self._from
        self._samples.append((time.monotonic(), (time.thread_time() - began) * 1000))
