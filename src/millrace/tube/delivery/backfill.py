"""Backfills that were scheduled in the tube, run by whoever serves the partition.

Invariant: one at a time; page by page, in a session of its own, so that deliveries go on meanwhile.
Its control pod goes when the last page is written; after a crash it is found again, and the
backfill continues where its last page ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from types import TracebackType

import psycopg

from millrace import failpoint
from millrace.errors import MillraceError
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import connect, translated
from millrace.retry import ATTEMPTS, is_transient
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.pod import Pod
from millrace.tube.delivery.tube import Connection, TubeTable

log = logging.getLogger(__name__)

# How long a backfill that failed is left alone.
PAUSE_SECONDS = 5.0
# And one that has to wait for another of the same table.
TURN_SECONDS = 0.5
_IN_USE = "55006"


class BackfillRunner:
    """A thread for one backfill."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._seq: int | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._session: Connection | None = None
        # (partition, seq) of control pods whose backfill is done.
        self._done: list[tuple[int, int]] = []
        self._not_before = 0.0
        # Whether the last one has to wait until what another one wrote is delivered.
        self.waits_for_turn = False
        # Errors in a row that may go away by themselves.
        self._failed = 0
        # Why the last one that failed did so.
        self.failure: MillraceError | None = None

    def __enter__(self) -> BackfillRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        session = self._session
        if session is not None:
            # It may be waiting for a transaction of somebody else.
            with contextlib.suppress(psycopg.Error):
                session.cancel_safe()
        if self._thread is not None:
            self._thread.join()

    @property
    def is_busy(self) -> bool:
        """Whether another one has to wait."""
        return self._seq is not None or time.monotonic() < self._not_before

    @property
    def is_idle(self) -> bool:
        return not self.is_busy and not self._done

    def has(self, seq: int) -> bool:
        """Whether this pod's backfill is running, or waits for its turn."""
        return seq == self._seq or any(seq == one for _, one in self._done)

    def begin(self, partition: int, pod: Pod, table: TubeTable, order_col: str | None) -> None:
        """Only if it is not busy."""
        self._seq = pod.seq
        self._thread = threading.Thread(
            target=self._work,
            args=(partition, pod.seq, table, order_col),
            name="backfill",
            daemon=True,
        )
        self._thread.start()

    def take_done(self, partition: int) -> list[int]:
        done = [seq for at, seq in self._done if at == partition]
        self._done = [one for one in self._done if one[0] != partition]
        return done

    def _work(self, partition: int, seq: int, table: TubeTable, order_col: str | None) -> None:
        try:
            self._run(table, order_col)
            self.waits_for_turn = False
            if not self._stop.is_set():
                self._done.append((partition, seq))
                self.failure, self._failed = None, 0
        except MillraceError as error:
            self._not_before = time.monotonic() + PAUSE_SECONDS
            self.waits_for_turn = error.facts.get("sqlstate") == _IN_USE
            if self.waits_for_turn:
                # Perhaps the one that a killed worker was at. What it wrote is delivered first.
                self._not_before = time.monotonic() + TURN_SECONDS
            elif is_transient(error) and self._failed < ATTEMPTS:
                self._failed += 1
                log.warning("backfilling %s: %s; trying again", table.label, error)
            elif not self._stop.is_set():
                log.error("backfilling %s: %s", table.label, error)
                self.failure = error
        finally:
            self._session, self._seq = None, None

    def _run(self, table: TubeTable, order_col: str | None) -> None:
        limits, here = self._delivery.limits, ident(self._delivery.schema)
        name = f"{ident(table.schema)}.{ident(table.name)}"
        with (
            connect(self._delivery.source, f"tube {self._delivery.tube} pages") as session,
            translated(f"backfilling {table.label}"),
        ):
            self._session = session
            row = session.execute(
                f"SELECT {here}.tube_backfill_begin(%s, %s::regclass, %s)".encode(),
                (self._delivery.tube, name, order_col),
            ).fetchone()
            assert row is not None
            session.execute(f"SELECT {here}.tube_backfill_step2()".encode())
            while not self._stop.is_set():
                failpoint.hit("tube.before_page")
                page = session.execute(
                    f"SELECT {here}.tube_backfill_page(%s, %s)".encode(), (row[0], limits.page_rows)
                ).fetchone()
                failpoint.hit("tube.after_page")
                if page == (True,):
                    return
                self._stop.wait(limits.page_pause_seconds)
