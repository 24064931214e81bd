"""The position of a stream, and its lag behind what the source has written.

Invariant: no lag is reported as zero unless the source was asked, and everything that it had is on
the target. What is not known is None.
"""

from __future__ import annotations

import logging
import time

from millrace.apply.driver import Catchup
from millrace.apply.task import since_1970
from millrace.config.size import render_size
from millrace.errors import ConnectionLost
from millrace.follow.progress import FollowProgress, SourceProgress
from millrace.follow.source_watch import SourceHistory
from millrace.workdir.sentinel import Sentinel, SourceRecord

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
# What needs attention is said again this often.
WARN_SECONDS = 60.0
# A slot that is lost sooner, at the present rate, is warned of.
LOST_SOON_SECONDS = 3600.0


class Watch:
    """Reads the position of a stream, and its rate."""

    def __init__(
        self, sentinel: Sentinel, catchup: Catchup, source: SourceHistory, slot: str, stream: str
    ) -> None:
        self._sentinel = sentinel
        self._catchup = catchup
        self._source = source
        self._slot = slot
        self._before = (time.monotonic(), sentinel.read().changes, 0)
        self._stream = stream
        self._progress = FollowProgress(stream=stream)
        self._looked_at = 0.0
        self._began = time.monotonic()
        self._warned_at: dict[str, float] = {}

    def look(self) -> FollowProgress:
        """Not more often than anyone can see."""
        now = time.monotonic()
        if now - self._looked_at < REPORT_SECONDS:
            return self._progress
        self._looked_at = now
        # In this order: what was complete then is in the spool that is looked at afterwards.
        record = self._sentinel.read_source()
        state, counts = self._sentinel.read(), self._catchup.counts
        applied_lsn = max(state.applied_lsn or 0, self._catchup.position)
        try:
            waiting_bytes = self._catchup.spool.bytes_after(applied_lsn)
            waiting = self._catchup.spool.plan(applied_lsn, 1, None)
        except ConnectionLost as error:  # apply waits for the target, so does this
            log.debug("%s", error)
            return self._progress
        position, lag_seconds = applied_lsn, 0.0
        if waiting is None:
            position = max(applied_lsn, record.complete_lsn or 0)
        else:  # since the oldest transaction that waits was committed
            lag_seconds = max(0.0, time.time() - since_1970(waiting.committed_at))
        source = self._look_at_source(now, record, position)
        if (since := self._source.ahead_since(position)) is not None:
            lag_seconds = max(lag_seconds, now - since)
        # What is applied was received, even if the receiver has not said so yet.
        flushed_lsn = max(state.flushed_lsn or 0, applied_lsn)
        self._progress = FollowProgress(
            max(state.received_lsn or 0, flushed_lsn),
            flushed_lsn,
            applied_lsn,
            state.endpos,
            source.lag_bytes,
            None if source.lag_bytes is None else lag_seconds,
            state.apply,
            state.transactions,
            state.changes,
            counts.applied.skipped,
            counts.applied.overwritten,
            *self._rates(now, state.changes, source.lag_bytes or waiting_bytes),
            waiting_bytes=waiting_bytes,
            source=source,
            stream=self._stream,
        )
        self._warn(now, source)
        return self._progress

    def _look_at_source(self, now: float, record: SourceRecord, position: int) -> SourceProgress:
        contact = None
        if record.heard_at is not None and not self._catchup.is_whole.is_set():
            # What was noted before is old, and the receiver may just have begun.
            contact = min(max(0.0, time.time() - record.heard_at), now - self._began)
        view = self._source.last
        if view is None:
            return SourceProgress(contact_seconds=contact, held=record.held)
        slot = view.slot
        return SourceProgress(
            view.wal_lsn,
            now - view.at,
            max(0, view.wal_lsn - position),
            contact,
            record.held,
            slot.wal_status if slot else "gone",
            slot.lag_bytes if slot else None,
            slot.safe_wal_bytes if slot else None,
            self._source.seconds_until_lost(),
        )

    def _warn(self, now: float, source: SourceProgress) -> None:
        if source.is_silent:
            self._say(now, "silent", "%s", source.describe_silence())
        if source.wal_status in ("unreserved", "lost", "gone"):
            self._say(
                now,
                "status",
                "slot %s is %s: the source may have removed WAL that the stream needs",
                self._slot,
                source.wal_status,
            )
        left = source.seconds_until_lost
        if left is not None and left < LOST_SOON_SECONDS:
            self._say(
                now,
                "lost",
                "slot %s is lost in about %.0f minutes at the present rate: the source keeps %s of "
                "WAL for it, and %s more are allowed; raise max_slot_wal_keep_size there",
                self._slot,
                left / 60,
                render_size(source.retained_bytes or 0),
                render_size(source.safe_wal_bytes or 0),
            )

    def _say(self, now: float, what: str, text: str, *values: object) -> None:
        if now - self._warned_at.get(what, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned_at[what] = now
            log.warning(text, *values)

    def _rates(self, now: float, changes: int, lag_bytes: int) -> tuple[float, float | None]:
        """(changes a second, seconds until the lag is gone)."""
        then, changes_then, lag_then = self._before
        elapsed = max(now - then, 1e-3)
        rate = (changes - changes_then) / elapsed
        shrinking = (lag_then - lag_bytes) / elapsed
        if elapsed > 5 * REPORT_SECONDS:
            self._before = (now, changes, lag_bytes)
        if not lag_bytes:
            return rate, 0.0
        return rate, lag_bytes / shrinking if shrinking > 0 else None
