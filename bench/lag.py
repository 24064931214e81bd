"""How long a transaction takes to be seen on the target while others keep coming.

pgbench writes at a steady rate: half of what can be followed, or half of what it reaches itself.
Beside it a beat is committed every 25 ms, and the target is asked
every 20 ms for the last beat it has. A beat's lag is the time from the reply to its COMMIT until
it is seen, by one clock, so half of the 20 ms is the measuring's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench.changes import (
    BULK_SCRIPT,
    LAG_BULK,
    ROWS_PER_PGBENCH,
    ROWS_PER_TRANSACTION,
    Load,
    Place,
    run_pgbench,
)

BEAT_SECONDS = 0.025
LOOK_SECONDS = 0.02
# How long the last beat may take.
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Pace:
    """How fast to write which kind of transaction, and for how long."""

    load: Load
    rows_per_second: float
    seconds: float

    @property
    def rows_per_transaction(self) -> int:
        return ROWS_PER_TRANSACTION if self.load is LAG_BULK else ROWS_PER_PGBENCH

    @property
    def tps(self) -> float:
        return self.rows_per_second / self.rows_per_transaction


@dataclass(frozen=True)
class Steady:
    """What was asked of the writers, what they reached, and the lag of each beat."""

    pace: Pace
    reached_tps: float
    lags: Sequence[float]

    def figures(self) -> dict[str, float]:
        return {
            "asked_tps": self.pace.tps,
            "reached_tps": self.reached_tps,
            "load_rows_per_second": self.reached_tps * self.pace.rows_per_transaction,
            # Below 1 the writers were held up, and the lag is that of a smaller load.
            "load_share": self.reached_tps / self.pace.tps,
            "beats": len(self.lags),
            "lag_p50_seconds": percentile(self.lags, 0.50),
            "lag_p99_seconds": percentile(self.lags, 0.99),
            "lag_max_seconds": max(self.lags),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def lags_of(committed_at: Mapping[int, float], looks: Sequence[tuple[float, int]]) -> list[float]:
    """The lag of each beat; a look is a time and the last beat that was seen then."""
    lags = []
    ids = iter(sorted(committed_at))
    beat = next(ids, None)
    for seen_at, last in looks:
        while beat is not None and beat <= last:
            lags.append(max(0.0, seen_at - committed_at[beat]))
            beat = next(ids, None)
    return lags


def measure_lag(place: Place, target: str, pace: Pace, work_dir: Path) -> Steady:
    """Write at that pace; ends when the target has the last beat."""
    options = ["-M", "prepared", "-R", f"{pace.tps:.1f}", "-T", f"{pace.seconds:.0f}"]
    if pace.load is LAG_BULK:
        script = work_dir / "bulk.sql"
        script.write_text(BULK_SCRIPT)
        options += ["-f", str(script)]
    with Beats(place.uri, target) as beats:
        reached = run_pgbench(place, *options)
    return Steady(pace, reached, beats.lags())


class Beats:
    """Commits beats and looks for them, each in a thread, while the block runs."""

    def __init__(self, source: str, target: str) -> None:
        self._source = psycopg.connect(source, autocommit=True)
        self._target = psycopg.connect(target, autocommit=True)
        self._first = self._last(self._source)
        self._committed_at: dict[int, float] = {}
        self._looks: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._is_written = threading.Event()
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._write, self._look)
        ]

    def __enter__(self) -> Beats:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._source.close()
        self._target.close()

    def lags(self) -> list[float]:
        lags = lags_of(self._committed_at, self._looks)
        if len(lags) < len(self._committed_at):
            raise TimeoutError("the last beats are not on the target")
        return lags

    def _write(self) -> None:
        beat = self._first
        for _ in _every(BEAT_SECONDS, self._is_over.is_set):
            beat += 1
            self._source.execute("INSERT INTO bench.beat VALUES (%s)", (beat,))
            self._committed_at[beat] = time.monotonic()
        self._is_written.set()

    def _look(self) -> None:
        deadline = None
        for _ in _every(LOOK_SECONDS, lambda: False):
            last = self._last(self._target)
            self._looks.append((time.monotonic(), last))
            if self._is_written.is_set():
                deadline = deadline or time.monotonic() + PATIENCE_SECONDS
                if last >= max(self._committed_at, default=0) or time.monotonic() > deadline:
                    return

    def _last(self, connection: psycopg.Connection[tuple[int]]) -> int:
        row = connection.execute("SELECT coalesce(max(id), 0) FROM bench.beat").fetchone()
        assert row is not None
        return row[0]


def _every(seconds: float, is_over: Callable[[], bool]):
    """Yield at even times, as far as what is done in between allows it."""
    due = time.monotonic()
    while not is_over():
        yield
        due = max(due + seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
