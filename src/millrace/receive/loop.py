"""Replication connection into spool; confirms what is on disk.

Invariant: the flush position we send to the source is never past the last fsync of the spool. The
source may remove WAL up to that position, so sending it is a promise to never ask again.

A connection that breaks is opened again, for as long as `retry` says that can help; what came of an
unfinished transaction is cut first, because the source sends it again from its beginning.

Facts: PostgreSQL documentation, "Streaming Replication Protocol", Standby status update;
walsender.c, ProcessStandbyReplyMessage() and WalSndKeepalive(): a keepalive's position is behind
everything that was sent before it; snapbuild.c, SnapBuildXactNeedsSkip(): a transaction is sent
again unless its commit record begins before the position that was asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from millrace import failpoint
from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, InvariantError, MillraceError, ServerError
from millrace.lsn import render_lsn
from millrace.postgres.pgoutput.messages import Messages
from millrace.postgres.wire.connect import connect, translated
from millrace.postgres.wire.replication import (
    SILENCE_SECONDS,
    FrameBuffer,
    ReplicationStream,
    start_replication,
    take_other_message,
)
from millrace.postgres.wire.slot import SlotState, read_slot, require_slot, require_unlocked
from millrace.postgres.wire.slot_batch import BatchSizes, BatchStream, moves_slots
from millrace.postgres.wire.slot_error import slot_lost, slot_moved
from millrace.postgres.wire.walsender import open_replication
from millrace.receive.backoff import GIVE_UP_SECONDS, Patience
from millrace.receive.batch_policy import Batches
from millrace.receive.endpos import before_end, is_past
from millrace.receive.history import SourceServer
from millrace.receive.limits import Limits, ReceiveLimits
from millrace.receive.mask import Mask, Masker
from millrace.receive.partitions import Partitions
from millrace.receive.plugin import Plugin, UnsafeBinary, open_plugin
from millrace.spool.interface import Writer
from millrace.workdir.followed_table import FollowedTables
from millrace.workdir.sentinel import Sentinel

log = logging.getLogger(__name__)

FEEDBACK_SECONDS = 10.0
# After an fsync it goes out sooner, but each one makes the server write down its slot.
FEEDBACK_PAUSE_SECONDS = 0.1
# While an end position is waited for and nothing comes, the server is asked how far it is: soon,
# then less and less often.
ASK_SECONDS = 0.02
LONGEST_ASK_SECONDS = 1.0
# A server that has said nothing for so long is asked for a word, so that silence means something.
CONTACT_SECONDS = 2.0
# What was heard is noted for others this often.
NOTE_SECONDS = 1.0
# The sentinel is looked at this often; by one of many receivers, of which most have nothing to do,
# that often.
CONTROL_SECONDS = 0.25
MANY_CONTROL_SECONDS = 1.0
# What waits for an fsync: at most so much, for at most so long, and not more often than that.
SYNC_BYTES = 8 * 1024 * 1024
SYNC_SECONDS = 0.5
SYNC_PAUSE_SECONDS = 0.02
# How soon the end of an fsync is noticed.
SYNC_LOOK_SECONDS = 0.002
# A busy server sends a packet for each row, and a socket holds few of them, so they are read at
# once; what was read is looked at when there is enough of it, when nothing more comes for a moment,
# or after so long.
GATHER_BYTES = 256 * 1024
GATHER_PAUSE_SECONDS = 0.0004
GATHER_SECONDS = 0.01
# An idle source's position is written down this often; asking for a reply does it at once.
IDLE_SECONDS = 10.0
_COMMIT = ord("C")


@dataclass(frozen=True)
class ReceiveSettings:
    """What to receive, and within which limits."""

    source: Dsn
    slot: str
    plugin: str = "pgoutput"
    # The client encoding of what is spooled: the target's, as for the clone.
    encoding: str = "UTF8"
    # Receive up to here; the sentinel's is used as well, and can change.
    endpos: int | None = None
    max_spool_bytes: int | None = None
    max_slot_lag_bytes: int | None = None
    # False keeps to text, whatever the types.
    binary: bool = True
    # The source's DDL comes with its changes: tables are what they are at their place.
    ddl: bool = False
    batches: BatchSizes = field(default_factory=BatchSizes)
    control_seconds: float = CONTROL_SECONDS
    # Tables whose changes nobody wants, and values that are not to be spooled.
    left_out: frozenset[tuple[str, str]] = frozenset()
    mask: Mask = field(default_factory=Mask)
    give_up_seconds: float = GIVE_UP_SECONDS

    @property
    def limits(self) -> ReceiveLimits:
        return ReceiveLimits(self.max_spool_bytes, self.max_slot_lag_bytes)


@dataclass(frozen=True)
class ReceiveResult:
    """How far a receiver came, and whether that was the end position."""

    end_lsn: int
    complete_lsn: int
    reached_endpos: bool


class Stop(Protocol):
    """Told when to stop: threading.Event is one."""

    def is_set(self) -> bool: ...


class NeverStop:
    """Goes on until the end position."""

    def is_set(self) -> bool:
        return False


@dataclass
class _Clock:
    """When each of the things was done last that are done every so often."""

    feedback: float = 0.0
    ask: float = 0.0
    ask_pause: float = ASK_SECONDS
    control: float = 0.0
    sync: float = 0.0
    idle: float = 0.0
    noted: float = 0.0
    heard: float = 0.0
    unsynced: float | None = None


def receive(
    settings: ReceiveSettings,
    spool: Writer,
    sentinel: Sentinel | None = None,
    *,
    stop: Stop | None = None,
    on_progress: Callable[[int, int], None] = lambda received_lsn, durable_lsn: None,
) -> ReceiveResult:
    """Receive until the end position, or until stopped."""
    receiver = _Receiver(settings, spool, sentinel, stop or NeverStop(), on_progress)
    return receiver.run()


class _Receiver:
    def __init__(
        self,
        settings: ReceiveSettings,
        spool: Writer,
        sentinel: Sentinel | None,
        stop: Stop,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._settings = settings
        self._spool = spool
        self._sentinel = sentinel
        self._stop = stop
        self._on_progress = on_progress
        self._buffer = FrameBuffer()
        self._clock = _Clock()
        self._patience = Patience(settings.give_up_seconds)
        self._binary = settings.binary
        self._endpos = settings.endpos
        self._prefetch = True
        self._applied_lsn = 0
        self._held: str | None = None
        self._reached = False
        # The last position the server has sent, in any way.
        self._received_lsn = spool.complete_lsn
        # What was on disk when that was looked at last.
        self._durable_lsn = spool.durable_lsn
        # From a keepalive after which no transaction is open; not yet in the spool.
        self._idle_lsn = 0
        self._server = SourceServer(settings.source, sentinel)
        self._limits = Limits(settings.source, settings.slot, settings.limits)
        self._followed = FollowedTables(sentinel, has_all=settings.ddl)
        self._partitions = Partitions(settings.encoding, self._followed, ddl=settings.ddl)
        self._batches = Batches(settings.batches)
        self._masker = Masker(settings.mask, settings.encoding, settings.source.settings)
        # Since it was looked how far the source is ahead; and whether a transaction just ended.
        self._streamed_bytes = 0
        self._has_commit = False

    def run(self) -> ReceiveResult:
        """Connect, stream, and connect again after what can go away."""
        self._buffer.scan(any_kind=False)  # loads machine code, before the source waits for it
        while not self._stop.is_set():
            try:
                self._read_control()
                if self._is_done():
                    break
                self._connect_and_stream()
            except UnsafeBinary as error:
                log.info("%s: continuing in text format", error)
                self._binary = False
            except MillraceError as error:
                pause = self._patience.after(error)
                log.warning("%s; trying again in %.1f seconds", error, pause)
                self._settle()
                self._sleep(pause)
        self._spool.cut_unfinished()
        self._report(self._spool.durable_lsn)
        return ReceiveResult(self._spool.last_end_lsn, self._spool.complete_lsn, self._is_done())

    def _settle(self) -> None:
        """Let what is whole be applied meanwhile; a spool out of reach is asked again later."""
        try:
            self._spool.cut_unfinished()
        except ConnectionLost as error:
            log.debug("%s", error)

    def _connect_and_stream(self) -> None:
        self._buffer.clear()
        self._spool.cut_unfinished()
        self._durable_lsn = self._spool.durable_lsn
        self._idle_lsn = 0
        settings = self._settings
        state, plugin = self._read_slot()
        connection = open_replication(settings.source, "receive", settings.encoding)
        try:
            self._server.check(connection, self._spool.complete_lsn)
        except BaseException:
            connection.finish()
            raise
        log.info(
            "receiving from slot %s after %s, %s",
            settings.slot,
            render_lsn(self._spool.complete_lsn),
            plugin.describe(),
        )
        complete_lsn = self._spool.complete_lsn
        if not self._held and self._batches.may_begin(state, complete_lsn, self._endpos):
            connection.finish()
            self._take_batch(plugin)
            return
        stream = start_replication(connection, settings.slot, complete_lsn, plugin.options)
        self._run_stream(stream, plugin, self._falls_behind)

    def _read_slot(self) -> tuple[SlotState, Plugin]:
        """The slot, fit to be read, and who reads its messages."""
        settings = self._settings
        with connect(settings.source, "receive") as catalog, translated("reading the source"):
            self._server.see(catalog)
            state = require_slot(catalog, settings.slot, settings.plugin)
            require_unlocked(catalog, settings.slot)
            self._check_start(state.confirmed_lsn)
            if not moves_slots(catalog.info.server_version):
                self._batches.give_up()
            plugin = open_plugin(
                settings.plugin,
                catalog,
                settings.slot,
                settings.encoding,
                binary=self._binary,
                reconnect=lambda: connect(settings.source, "receive"),
                partitions=self._partitions,
                followed=self._followed,
                left_out=settings.left_out,
            )
        return state, plugin

    def _take_batch(self, plugin: Plugin) -> None:
        """One batch; after it everything is checked again. What breaks it off is met by the
        protocol as well, or was the batch's alone."""
        settings, batches = self._settings, self._batches
        batches.begin()
        try:
            batch = BatchStream(
                settings.source,
                settings.slot,
                self._spool.complete_lsn,
                plugin.options,
                encoding=settings.encoding,
                sizes=batches.sizes,
                endpos=self._endpos,
                started_at=self._server.started_at,
            )
            self._run_stream(batch, plugin, lambda: batch.is_over or bool(self._held))
        except ServerError as error:
            if not batches.break_off(error):
                raise
            log.warning("%s; continuing with the replication protocol", error)
            return
        if batch.wal_bytes and batch.is_over:
            batches.take(batch)
        elif self._held and self._prefetch:
            batches.give_up()  # whoever applies is slower than the protocol

    def _falls_behind(self) -> bool:
        """Not looked at in the middle of a long transaction, which would be sent again."""
        if not self._has_commit or not self._batches.is_time_to_look(self._streamed_bytes):
            return False
        self._streamed_bytes = 0
        try:
            with connect(self._settings.source, "receive") as catalog:
                state = read_slot(catalog, self._settings.slot)
        except MillraceError as error:
            log.debug("%s", error)
            return False
        complete_lsn = self._spool.complete_lsn
        return state is not None and self._batches.should_take_over(
            state, complete_lsn, self._endpos
        )

    def _run_stream(
        self, stream: ReplicationStream, plugin: Plugin, is_over: Callable[[], bool]
    ) -> None:
        try:
            self._clock = _Clock(heard=time.monotonic())
            self._patience.connected()
            self._streamed_bytes = 0
            self._stream(stream, plugin, is_over)
        finally:
            stream.close()

    def _check_start(self, confirmed_lsn: int) -> None:
        """Begin where the slot begins; later, nobody else may have moved it."""
        complete = self._spool.complete_lsn
        if complete == 0:
            setup = self._sentinel.read_setup() if self._sentinel else None
            if setup is not None and setup.start_lsn < confirmed_lsn:
                raise slot_lost(
                    self._settings.slot,
                    f"the stream began at {render_lsn(setup.start_lsn)} and the slot is at "
                    f"{render_lsn(confirmed_lsn)}, but the spool with the changes between is gone",
                )
            self._spool.mark_idle(confirmed_lsn)
            self._spool.sync()
        elif confirmed_lsn > complete:
            raise slot_moved(self._settings.slot, confirmed_lsn, complete)

    def _stream(
        self, stream: ReplicationStream, plugin: Plugin, is_over: Callable[[], bool]
    ) -> None:
        """Everything between the begin of a stream and its end."""
        while True:
            self._read_control()
            received = 0 if self._held else self._gather(stream)
            if received:
                self._clock.heard = time.monotonic()
                self._streamed_bytes += received
                self._take(plugin)
            self._sync_if_due(is_quiet=received == 0)
            if self._is_done() or self._stop.is_set() or is_over():
                self._finish(stream)
                return
            self._feedback_if_due(stream)
            if not received:
                self._wait(stream)

    def _gather(self, stream: ReplicationStream) -> int:
        """Read until there is enough to look at, or nothing more for now."""
        received = stream.read(self._buffer)
        if not received:
            return 0
        until = time.monotonic() + GATHER_SECONDS
        while self._buffer.filled < GATHER_BYTES and time.monotonic() < until:
            time.sleep(GATHER_PAUSE_SECONDS)
            more = stream.read(self._buffer)
            if not more:
                break
            received += more
        return received

    def _wait(self, stream: ReplicationStream) -> None:
        """Until there is something to read, or something else to do."""
        clock = self._clock
        now = time.monotonic()
        if self._held:
            time.sleep(self._settings.control_seconds)
            return
        if now - clock.heard > SILENCE_SECONDS and stream.awaited_lsn is None:
            raise ConnectionLost(
                "receiving from the source: no data or keepalive arrived in time", sqlstate=None
            )
        pause = self._settings.control_seconds
        if self._endpos is not None:
            pause = min(pause, clock.ask_pause)
        if self._spool.is_syncing:
            pause = SYNC_LOOK_SECONDS
        elif clock.unsynced is not None:
            pause = min(pause, max(0.0, clock.sync + SYNC_PAUSE_SECONDS - now))
        stream.wait(pause)

    def _take(self, plugin: Plugin) -> None:
        """Pass on the whole frames of the buffer."""
        while True:
            messages = self._buffer.scan(any_kind=plugin.is_text)
            frames = self._buffer.view(messages.consumed)
            frames, translated = plugin.translate(frames, messages)
            frames, translated = self._masker.translate(frames, translated)
            if len(translated):
                self._append(frames, translated)
            self._note_keepalive(messages)
            if messages.consumed:
                del frames
                self._buffer.drop(messages.consumed)
            if not messages.is_over or self._reached:
                return
            if not take_other_message(self._buffer, self._settings.slot):
                return

    def _append(self, frames: memoryview, messages: Messages) -> None:
        taken = self._before_endpos(frames, messages)
        if len(taken):
            self._has_commit = bool((taken.kind == _COMMIT).any())
            self._spool.append(frames[: taken.consumed], taken)
            self._received_lsn = max(self._received_lsn, int(taken.lsn.max()))
            now = time.monotonic()
            self._clock.ask, self._clock.ask_pause = now, ASK_SECONDS
            if self._clock.unsynced is None:
                self._clock.unsynced = now
        if self._reached:
            self._spool.cut_unfinished()
        else:
            self._idle_lsn = 0

    def _before_endpos(self, frames: memoryview, messages: Messages) -> Messages:
        """The messages of transactions that end at or before the end position."""
        if self._reached:
            return messages.slice(0, 0, 0)
        if self._endpos is None:
            return messages
        taken, idle_lsn = before_end(frames, messages, self._endpos)
        if idle_lsn is not None:
            self._reached, self._idle_lsn = True, idle_lsn
        return taken

    def _note_keepalive(self, messages: Messages) -> None:
        if messages.wal_end is None or self._reached:
            return
        self._received_lsn = max(self._received_lsn, messages.wal_end)
        if messages.reply_requested:
            self._clock.feedback = 0.0
            self._clock.idle = 0.0
        # Only what came before the keepalive is known to be complete; anything after it opened
        # a transaction, or ended one beyond it.
        if not self._spool.is_in_transaction:
            self._idle_lsn = messages.wal_end

    def _sync_if_due(self, *, is_quiet: bool) -> None:
        clock, spool = self._clock, self._spool
        now = time.monotonic()
        self._mark_idle_if_due(now)
        if clock.unsynced is not None and not spool.is_syncing:
            is_due = spool.unsynced_bytes >= SYNC_BYTES or self._reached
            if spool.complete_lsn > spool.durable_lsn:  # there is something to confirm
                is_due |= now - clock.unsynced >= SYNC_SECONDS
                is_due |= is_quiet and now - clock.sync >= SYNC_PAUSE_SECONDS
            if is_due:
                failpoint.hit("receive.before_sync")
                spool.sync_soon()
                clock.sync, clock.unsynced = now, None
        durable = spool.durable_lsn
        if durable > self._durable_lsn:
            failpoint.hit("receive.after_sync")
            self._durable_lsn = durable
            clock.feedback = min(clock.feedback, now - FEEDBACK_SECONDS + FEEDBACK_PAUSE_SECONDS)

    def _mark_idle_if_due(self, now: float) -> None:
        """Write down how far the source is known to be idle: every so often, or at the end."""
        clock, spool = self._clock, self._spool
        if self._idle_lsn <= spool.complete_lsn or spool.is_in_transaction:
            return
        is_end = self._endpos is not None and is_past(self._idle_lsn, self._endpos)
        if self._reached or is_end or now - clock.idle >= IDLE_SECONDS:
            spool.mark_idle(self._endpos if is_end and self._endpos else self._idle_lsn)
            clock.idle = now
            clock.unsynced = clock.unsynced or now

    def _feedback_if_due(self, stream: ReplicationStream) -> None:
        clock = self._clock
        now = time.monotonic()
        is_asking = self._endpos is not None and now - clock.ask >= clock.ask_pause
        if not self._held:
            is_asking |= now - max(clock.heard, clock.ask) >= CONTACT_SECONDS
        is_awaited = stream.awaited_lsn is not None and self._durable_lsn >= stream.awaited_lsn
        if not is_asking and not is_awaited and now - clock.feedback < FEEDBACK_SECONDS:
            return
        self._send_feedback(stream, reply_requested=is_asking)
        clock.feedback = now
        if is_awaited:
            clock.heard = time.monotonic()
        if is_asking:
            clock.ask = now
            clock.ask_pause = min(2 * clock.ask_pause, LONGEST_ASK_SECONDS)

    def _send_feedback(self, stream: ReplicationStream, *, reply_requested: bool) -> None:
        durable = self._spool.durable_lsn
        if durable > self._spool.complete_lsn:
            raise InvariantError("the spool is said to be on disk beyond its end")
        failpoint.hit("receive.before_feedback")
        received = max(self._received_lsn, durable)
        stream.confirm(received, durable, reply_requested=reply_requested)
        failpoint.hit("receive.after_feedback")
        self._report(durable)

    def _report(self, durable: int) -> None:
        flushed = durable
        if self._reached and self._endpos is not None and durable == self._spool.complete_lsn:
            # It lies within a commit record: nothing ends between this record's begin, which is
            # what may be confirmed to the source, and there.
            flushed = max(durable, self._endpos)
        self._on_progress(self._received_lsn, flushed)
        if self._sentinel is not None:
            self._sentinel.write_received(max(self._received_lsn, flushed), flushed)

    def _note_contact(self, now: float) -> None:
        """Tell others when the source was heard, and up to where nothing is missing: on disk, or
        known to be idle after that."""
        clock, spool = self._clock, self._spool
        if self._sentinel is None or not clock.heard or now - clock.noted < NOTE_SECONDS:
            return
        clock.noted = now
        durable = spool.durable_lsn
        is_idle = not spool.is_in_transaction and spool.complete_lsn == durable
        complete = max(durable, self._idle_lsn) if is_idle else durable
        heard_at = time.time() - (now - clock.heard)
        self._sentinel.write_heard(complete, heard_at, self._held or "")

    def _finish(self, stream: ReplicationStream) -> None:
        """Cut, sync, and confirm to the source before closing."""
        self._spool.cut_unfinished()
        self._spool.sync()
        try:
            self._send_feedback(stream, reply_requested=False)
        except ConnectionLost as error:
            log.debug("the last feedback was not sent: %s", error)

    def _is_done(self) -> bool:
        if self._endpos is None:
            return False
        return self._reached or self._spool.durable_lsn >= self._endpos

    def _read_control(self) -> None:
        """Every so often: look at the sentinel, which people change, and at the limits."""
        now = time.monotonic()
        if now - self._clock.control < self._settings.control_seconds:
            return
        self._clock.control = now
        if self._sentinel is not None:
            state = self._sentinel.read()
            self._prefetch = state.prefetch
            self._applied_lsn = state.applied_lsn or 0
            endpos = state.endpos if state.endpos is not None else self._settings.endpos
            if endpos != self._endpos:
                log.info("end position: %s", render_lsn(endpos) if endpos else "none")
                self._endpos, self._reached = endpos, False
        self._hold_back()
        self._limits.guard_slot(now, self._held)
        self._server.look(now)
        self._note_contact(now)

    def _hold_back(self) -> None:
        """Stop reading while the spool is full or prefetch is off; say so once."""
        reason = self._limits.over(self._spool, self._applied_lsn, is_held=bool(self._held))
        if not self._prefetch:
            reason = "prefetch is off"
        if reason and not self._held:
            log.warning("holding back: %s; the source keeps the changes", reason)
        if self._held and not reason:
            log.info("receiving again")
            self._clock.heard = time.monotonic()
        self._held = reason

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stop.is_set():
            time.sleep(min(0.1, seconds))
