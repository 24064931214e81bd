"""The source's current position, asked on a connection beside the stream.

Invariant: whatever becomes of the stream, and of the source, nobody waits for the answer: it is
asked by a thread of its own, and what is known is what was answered last, with its age.

A stream that is silent looks like one with nothing to send. Only another session can distinguish
the two.

Facts: PostgreSQL documentation, "pg_replication_slots": wal_status and safe_wal_size.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import MillraceError
from millrace.lsn import parse_lsn
from millrace.postgres.wire.connect import connect, translated
from millrace.postgres.wire.slot import SlotState, read_slot

log = logging.getLogger(__name__)

ASK_SECONDS = 2.0
# The same, where there are many streams.
MANY_ASK_SECONDS = 5.0
# An answer that takes longer is none.
ANSWER_SECONDS: Final = 10
# Over how long it is measured how fast a slot comes nearer to being lost.
RATE_SECONDS = 60.0
# Positions that are remembered; of more, neighbours become one.
MOST_POSITIONS = 1000

# What can be received: on a primary what is on its disk, on a standby what it has replayed.
_POSITION = """
SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
             ELSE pg_current_wal_flush_lsn() END)::text
"""


@dataclass(frozen=True)
class SourceView:
    """An answer of the source; times are of the monotonic clock."""

    at: float
    wal_lsn: int
    # None if the slot is not there.
    slot: SlotState | None


class SourceHistory:
    """What the source has answered so far; filled by one thread, read by others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: SourceView | None = None
        # When each position was seen first, rising.
        self._positions: list[tuple[float, int]] = []
        # How much the slot had left.
        self._safe: list[tuple[float, int]] = []

    def add(self, view: SourceView) -> None:
        with self._lock:
            self._last = view
            if not self._positions or view.wal_lsn > self._positions[-1][1]:
                self._positions.append((view.at, view.wal_lsn))
            if len(self._positions) > MOST_POSITIONS:
                # With the earlier time: a lag may be shown as older than it is, never as younger.
                pairs = zip(self._positions[::2], self._positions[1::2], strict=False)
                odd = self._positions[-1:] if len(self._positions) % 2 else []
                self._positions = [(first[0], second[1]) for first, second in pairs] + odd
            if view.slot is None or view.slot.safe_wal_bytes is None:
                self._safe.clear()
            else:
                self._safe.append((view.at, view.slot.safe_wal_bytes))
                while self._safe[0][0] < view.at - RATE_SECONDS:
                    del self._safe[0]

    @property
    def last(self) -> SourceView | None:
        with self._lock:
            return self._last

    def ahead_since(self, lsn: int) -> float | None:
        """Since when the source is known to be beyond a position, which only rises; None if it is
        not."""
        with self._lock:
            while len(self._positions) > 1 and self._positions[0][1] <= lsn:
                del self._positions[0]
            return next((at for at, wal_lsn in self._positions if wal_lsn > lsn), None)

    def seconds_until_lost(self) -> float | None:
        """When the slot is lost, at the rate of the last minute; None if it never is."""
        with self._lock:
            if not self._safe:
                return None
            (then, before), (now, left) = self._safe[0], self._safe[-1]
        if left <= 0:
            return 0.0
        if now <= then or before <= left:
            return None
        return left * (now - then) / (before - left)


@contextmanager
def watching_source(
    source: Dsn, slot: str, ask_seconds: float = ASK_SECONDS
) -> Iterator[SourceHistory]:
    """Ask the source every so often, as long as the context is open."""
    watch = _Watch(source, slot, ask_seconds)
    watch.start()
    try:
        yield watch.history
    finally:
        watch.stop()


class _Watch(threading.Thread):
    def __init__(self, source: Dsn, slot: str, ask_seconds: float) -> None:
        super().__init__(name="watch source", daemon=True)
        self._ask_seconds = ask_seconds
        # A server that vanished is given up soon: the answer would be of no use.
        self._source = source.with_(
            connect_timeout=str(ANSWER_SECONDS), tcp_user_timeout=str(1000 * ANSWER_SECONDS)
        )
        self._slot = slot
        self._stopping = threading.Event()
        self.history = SourceHistory()

    def stop(self) -> None:
        self._stopping.set()
        self.join(ASK_SECONDS)  # one that hangs ends with the process

    def run(self) -> None:
        connection: psycopg.Connection[tuple[Any, ...]] | None = None
        try:
            while not self._stopping.is_set():
                try:
                    connection = connection or self._connect()
                    self.history.add(self._ask(connection))
                except MillraceError as error:
                    log.debug("%s", error)
                    if connection is not None:
                        connection.close()
                    connection = None
                self._stopping.wait(self._ask_seconds)
        finally:
            if connection is not None:
                connection.close()

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return connect(self._source, "watch", statement_timeout=f"{ANSWER_SECONDS}s")

    def _ask(self, connection: psycopg.Connection[tuple[Any, ...]]) -> SourceView:
        with translated("asking the source for its position"):
            row = connection.execute(_POSITION).fetchone()
        assert row is not None
        slot = read_slot(connection, self._slot)
        return SourceView(time.monotonic(), parse_lsn(row[0] or "0/0"), slot)
