"""The changes of a slot as the result of a query: how a large lag is caught up.

Invariant: a batch begins at the slot's position, which is the end of the spool, and ends at a
position before which nothing is missing; both are read in the session that gives the batch. The
slot moves only when the batch is confirmed, so one that breaks off is simply sent again, by
whoever reads the slot next.

A walsender sends each change by a system call of its own, which takes most of its time and wakes
its reader for every row. `pg_logical_slot_peek_binary_changes` gives the same messages as rows of
a query, which the server sends by the buffer: two to three times as many changes a second, for half
of the source's CPU. It decodes all it gives before it sends the first, into a temporary file if
that is large, and begins where the slot's WAL begins. So a batch has a size, and is not asked for
when the way to its beginning is long; no transaction of it is larger than both together.

A batch is a COPY with three columns, whose rows are rewritten in place into the frames that a
walsender would have sent; a frame's header is as long as what comes before the message in a row:

    'd' length:4  columns:2 8:4 lsn:8 3:4 zeros:3 length:4  message      as it comes
    'd' length:4  'w'       start_lsn:8  end_lsn:8  time:8  message      as it goes

Facts: logicalfuncs.c, pg_logical_slot_get_changes_guts(): it reads records until one ends at or
after `upto_lsn`, and not beyond what was flushed when it began, and lets go of the slot before its
first row is sent; slotfuncs.c, pg_replication_slot_advance(); copyto.c: the signature is part of
the first row's message. Release notes of 17.5: before it, and in older branches before the minor
releases of the same day, moving a slot could let go of catalog rows that decoding still needs.
"""

from __future__ import annotations

import logging
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import psycopg
from psycopg.pq.abc import PGconn

from millrace.config.dsn import Dsn
from millrace.config.size import render_size
from millrace.errors import ConnectionLost, FormatError, MillraceError
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.kernel import be32, kernel
from millrace.postgres.pgoutput.messages import MAX_FRAME_BYTES, encode_keepalive
from millrace.postgres.quote import literal
from millrace.postgres.wire.libpq import execute, open_session
from millrace.postgres.wire.replication import (
    CopyStream,
    FrameBuffer,
    send_copy,
    take_other_message,
)
from millrace.postgres.wire.slot_error import lock_sql, slot_error, slot_in_use, slot_moved
from millrace.postgres.wire.walsender import STARTED_AT

log = logging.getLogger(__name__)

# Before it asks for the batch, and when the slot is moved: nobody hears a stop meanwhile.
_SET_TIMEOUT: Final = "SET statement_timeout = '120s'"

_STATE = """
SELECT confirmed_flush_lsn, restart_lsn,
       CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_flush_lsn() END
  FROM pg_replication_slots WHERE slot_name = {slot}
"""
# The first minor release of each version that moves slots without harm; all of those after them.
_SOUND_MINORS = {13: 21, 14: 18, 15: 13, 16: 9, 17: 5}

_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_DATA, _COPY_DONE = ord("d"), ord("c")
# CopyOutResponse comes with the first data.
_BEFORE_DATA = b"H"
_TRAILER_BYTES = 7

# Why the rewriting of rows stopped.
_MORE, _TRAILER, _OTHER, _BAD = range(4)


@dataclass(frozen=True)
class BatchSizes:
    """In bytes of WAL, unless it says otherwise."""

    # Less than this is left to the replication protocol, which is there at once.
    least_bytes: int = 16 * 1024 * 1024
    # The next batch, and how large they become.
    next_bytes: int = 32 * 1024 * 1024
    most_bytes: int = 256 * 1024 * 1024
    # What the source may have to keep for a batch, in bytes of messages; and how many of these a
    # byte of WAL was in the last one: large values are compressed there.
    most_decoded_bytes: int = 512 * 1024 * 1024
    decoded_share: float = 1.0

    def end_of(self, begin_lsn: int, restart_lsn: int, flushed_lsn: int) -> int | None:
        """Where a batch that begins at `begin_lsn` should end, or None if there should be none.

        The way from `restart_lsn` is decoded again for each batch, so a long one makes it larger.
        With a transaction always open it is about one and a half times the size of a batch.
        """
        again, rest = begin_lsn - restart_lsn, flushed_lsn - begin_lsn
        most = min(self.most_bytes, int(self.most_decoded_bytes / self.decoded_share))
        if rest < self.least_bytes or again > 2 * most:
            return None
        size = min(max(self.next_bytes, again), most)
        return flushed_lsn if rest < size + min(self.least_bytes, most) else begin_lsn + size

    def after(self, wal_bytes: int, decoded_bytes: int) -> BatchSizes:
        """Those after a batch of this size."""
        return replace(
            self,
            next_bytes=min(max(4 * wal_bytes, self.next_bytes), self.most_bytes),
            decoded_share=max(1.0, decoded_bytes / max(1, wal_bytes)),
        )


def sizes_from(least_bytes: int) -> BatchSizes:
    """With batches from this number of bytes on; 0 for none ever."""
    return BatchSizes(least_bytes=least_bytes or sys.maxsize)


class BatchStream:
    """One batch, if there should be one: `is_over` from the start otherwise, and when it is
    confirmed."""

    def __init__(
        self,
        dsn: Dsn,
        slot: str,
        begin_lsn: int,
        options: Mapping[str, str],
        *,
        encoding: str,
        sizes: BatchSizes,
        endpos: int | None = None,
        started_at: str | None = None,
    ) -> None:
        """`started_at` says which server it must be, if several may answer."""
        self.awaited_lsn: int | None = None
        self.is_over = False
        self.wal_bytes = 0
        self.decoded_bytes = 0
        self._dsn = dsn
        self._slot = slot
        self._end_lsn = 0
        self._received = FrameBuffer()
        self._is_first = True
        self._copy: CopyStream | None = None
        self._is_lost = False
        self._session = open_session(dsn, "receive", encoding)
        try:
            self._require_server(started_at)
            end_lsn = self._find_end(begin_lsn, sizes, endpos)
            if end_lsn is None:
                self.is_over = True
                # It may live on for a moment.
                execute(self._session, "SELECT pg_advisory_unlock_all()")
                return
            size = render_size(end_lsn - begin_lsn)
            log.info("catching up: %s of WAL from %s", size, render_lsn(begin_lsn))
            self._end_lsn, self.wal_bytes = end_lsn, end_lsn - begin_lsn
            execute(self._session, "SET statement_timeout = 0")
            self._copy = send_copy(self._session, slot, _peek(slot, end_lsn, options))
            make_frames(np.empty(0, np.uint8))  # loads machine code, while the server decodes
        except BaseException:
            self.close()
            raise

    def read(self, buffer: FrameBuffer) -> int:
        if self._copy is None:
            return 0
        try:
            received = self._copy.read(self._received)
        except ConnectionLost:
            self._is_lost = True
            raise
        self.decoded_bytes += received
        while self._pass_on(buffer):
            continue
        return received

    def wait(self, seconds: float) -> bool:
        if self._copy is None:
            time.sleep(0.0 if self.is_over else seconds)
            return False
        return self._copy.wait(seconds)

    def confirm(self, written_lsn: int, flushed_lsn: int, *, reply_requested: bool) -> None:
        """Move the slot, if all of the batch is on disk."""
        if self.awaited_lsn is None or flushed_lsn < self.awaited_lsn:
            return
        session = open_session(self._dsn, "receive", "UTF8")
        try:
            execute(session, _SET_TIMEOUT)
            _advance(session, self._slot, flushed_lsn)
        finally:
            session.finish()
        self.awaited_lsn = None
        self.is_over = True

    def close(self) -> None:
        if self._copy is None:
            self._session.finish()
            return
        if not self._is_lost:
            # The server decodes to the end of the batch otherwise, and has the slot until then.
            with suppress(psycopg.Error):
                self._session.get_cancel().cancel()
        self._close_copy()

    def _require_server(self, started_at: str | None) -> None:
        if started_at is None:
            return
        if _query(self._session, self._slot, f"SELECT {STARTED_AT}") != (started_at,):
            raise ConnectionLost(
                "the source was replaced by another server (failover)", sqlstate=None
            )

    def _find_end(self, begin_lsn: int, sizes: BatchSizes, endpos: int | None) -> int | None:
        """Bring the slot to where the batch begins, and look how far it may go. All of that in
        the session that gives the batch: another one may be another server's, or one's that was
        restarted meanwhile and has forgotten where the slot was."""
        session, slot = self._session, self._slot
        execute(session, _SET_TIMEOUT)
        if _query(session, slot, f"SELECT {lock_sql(slot)}") != ("t",):
            raise slot_in_use(slot)
        confirmed_lsn = _read_state(session, slot)[0]
        if confirmed_lsn > begin_lsn:
            raise slot_moved(slot, confirmed_lsn, begin_lsn)
        if confirmed_lsn < begin_lsn:
            _advance(session, slot, begin_lsn)
        _, restart_lsn, flushed_lsn = _read_state(session, slot)
        if endpos is not None:
            flushed_lsn = min(flushed_lsn, endpos)
        return sizes.end_of(begin_lsn, restart_lsn, flushed_lsn)

    def _pass_on(self, buffer: FrameBuffer) -> bool:
        """Pass on what has come whole; whether there may be more."""
        received = self._received
        if not received.filled or self._copy is None:
            return False
        first = received.view(1)[0]
        if first == _COPY_DONE:
            self._end(buffer)
            return False
        if first != _COPY_DATA:
            return take_other_message(received, self._slot, also_ignored=_BEFORE_DATA)
        if self._is_first and not self._drop_signature():
            return False
        size, found = make_frames(np.frombuffer(received.view(received.filled), np.uint8))
        if found == _BAD:
            raise FormatError(f"slot {self._slot}: expected a change, found another kind of row")
        if size:
            buffer.put(received.view(size))
        received.drop(size + (_TRAILER_BYTES if found == _TRAILER else 0))
        received.make_room()
        return bool(found != _MORE)

    def _drop_signature(self) -> bool:
        """Leave the first row in a message of its own; False if too little has come."""
        received = self._received
        size = 5 + len(_SIGNATURE)
        if received.filled < size:
            return False
        head = received.view(size)
        (length,) = struct.unpack(">I", head[1:5])
        if head[5:] != _SIGNATURE:
            raise FormatError(f"slot {self._slot}: expected COPY's signature")
        head[-5:] = struct.pack(">cI", b"d", length - len(_SIGNATURE))
        received.drop(len(_SIGNATURE))
        self._is_first = False
        return True

    def _end(self, buffer: FrameBuffer) -> None:
        """All of the batch has come: say so as a walsender does."""
        self._close_copy()
        self.awaited_lsn = self._end_lsn
        buffer.put(encode_keepalive(self._end_lsn, reply_requested=True))

    def _close_copy(self) -> None:
        if self._copy is not None:
            self._copy.close()
        self._copy = None


def moves_slots(server_version: int) -> bool:
    """Whether this release can be trusted with moving a slot."""
    major, minor = divmod(server_version, 10000)
    return minor >= _SOUND_MINORS.get(major, 0)


def _peek(slot: str, end_lsn: int, options: Mapping[str, str]) -> str:
    listed = ", ".join(literal(part) for pair in options.items() for part in pair)
    return (
        "COPY (SELECT lsn, '\\x000000'::bytea, data FROM pg_logical_slot_peek_binary_changes("
        f"{literal(slot)}, {literal(render_lsn(end_lsn))}, NULL, VARIADIC ARRAY[{listed}]::text[]))"
        " TO STDOUT (FORMAT binary)"
    )


def _read_state(session: PGconn, slot: str) -> tuple[int, int, int]:
    """Confirmed, needed for decoding, and flushed by the source."""
    found = _query(session, slot, _STATE.format(slot=literal(slot)))
    confirmed, restart, flushed = (parse_lsn(lsn or "0/0") for lsn in found)
    return confirmed, restart, flushed


def _advance(session: PGconn, slot: str, lsn: int) -> None:
    statement = (
        "SELECT end_lsn FROM pg_replication_slot_advance("
        f"{literal(slot)}, {literal(render_lsn(lsn))})"
    )
    (end,) = _query(session, slot, statement)
    if parse_lsn(end or "0/0") != lsn:
        # Its WAL is shorter than what was received: the server is another one by now.
        raise ConnectionLost(
            f"slot {slot} moved to {end} instead of {render_lsn(lsn)}", sqlstate=None
        )


def _query(session: PGconn, slot: str, statement: str) -> tuple[str | None, ...]:
    """The first row, as text; nulls if there is none."""
    try:
        result = execute(session, statement, f"reading slot {slot}")[0]
    except MillraceError as error:
        raise slot_error(error, slot) from error
    values = (result.get_value(0, place) for place in range(result.nfields))
    return tuple(value.decode() if value is not None else None for value in values)


@kernel
def make_frames(buffer: Any) -> tuple[int, int]:
    """Rewrite the whole rows of a buffer into frames; (bytes of them, why it ended there)."""
    at = 0
    while at + 5 <= len(buffer):
        if buffer[at] != 100:
            return at, _OTHER
        length = be32(buffer, at + 1)
        if length > MAX_FRAME_BYTES:
            return at, _BAD
        if at + 1 + length > len(buffer):
            break
        if length == 6:
            return at, _TRAILER
        if length < 29 or be32(buffer, at + 7) != 8 or be32(buffer, at + 26) != length - 29:
            return at, _BAD
        for i in range(8):
            buffer[at + 6 + i] = buffer[at + 11 + i]
        for i in range(8):
            buffer[at + 14 + i] = buffer[at + 6 + i]
            buffer[at + 22 + i] = 0
        buffer[at + 5] = 119
        at += 1 + length
    if at < len(buffer) and buffer[at] != 100:
        return at, _OTHER
    return at, _MORE
