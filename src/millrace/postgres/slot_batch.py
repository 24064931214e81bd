"""The changes of a slot as answers to queries: how a long way is caught up with.

Invariant: a batch is asked for only when all before it is confirmed, and ends at a position before
which nothing is missing; the slot moves only when that was confirmed. So a batch that breaks off
is simply sent again, by whoever reads the slot next.

A walsender sends each change by a system call of its own, which takes most of its time and wakes
its reader for every row. `pg_logical_slot_peek_binary_changes` gives the same messages as rows of
a query, which the server sends by the buffer: two to three times as many changes a second, for half
of the source's CPU. It decodes all it gives before it sends the first, and begins where the slot's
WAL begins, so a batch has a size, and is not asked for when the way to its beginning is long. For
the same reason no transaction of a batch is larger than that way and the batch together, which
bounds what the source keeps in a temporary file.

A batch is a COPY with three columns, whose rows are rewritten in place into the frames that a
walsender would have sent; a frame's header is as long as what comes before the message in a row:

    'd' length:4  columns:2 8:4 lsn:8 3:4 zeros:3 length:4  message      as it comes
    'd' length:4  'w'       start_lsn:8  end_lsn:8  time:8  message      as it goes

Facts: logicalfuncs.c, pg_logical_slot_get_changes_guts(): it reads records until one ends at or
after `upto_lsn`, and not beyond what was flushed when it began; slotfuncs.c,
pg_replication_slot_advance(); copyto.c: the signature is part of the first row's message.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import psycopg
from psycopg.pq.abc import PGconn

from millrace.config.dsn import Dsn
from millrace.config.size import render_size
from millrace.errors import FormatError, InvariantError
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.connect import connect, server_error
from millrace.postgres.kernel import be32, kernel
from millrace.postgres.libpq import open_session
from millrace.postgres.pgoutput import MAX_FRAME_BYTES, encode_keepalive
from millrace.postgres.quote import literal
from millrace.postgres.replication import (
    CopyStream,
    FrameBuffer,
    send_copy,
    take_other_message,
)
from millrace.postgres.slot import slot_error

log = logging.getLogger(__name__)

_STATE = """
SELECT confirmed_flush_lsn::text, restart_lsn::text,
       CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_flush_lsn()::text END
  FROM pg_replication_slots WHERE slot_name = %s
"""
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_DATA, _COPY_DONE = ord("d"), ord("c")
# CopyOutResponse comes with the first data.
_BEFORE_DATA = b"H"
_TRAILER_BYTES = 7

# Why the rewriting of rows stopped.
_MORE, _TRAILER, _OTHER, _BAD = range(4)


@dataclass(frozen=True)
class BatchSizes:
    """In bytes of WAL."""

    # Less than this is left to the replication protocol, which is there at once.
    least_bytes: int = 16 * 1024 * 1024
    # The first batch, and how large they become.
    first_bytes: int = 64 * 1024 * 1024
    most_bytes: int = 256 * 1024 * 1024

    def end_of(
        self, begin_lsn: int, restart_lsn: int, flushed_lsn: int, wished_bytes: int
    ) -> int | None:
        """Where a batch that begins at `begin_lsn` should end, or None if there should be none.

        The way from `restart_lsn` is decoded again for each batch: none is smaller than that.
        """
        again, rest = begin_lsn - restart_lsn, flushed_lsn - begin_lsn
        if again > self.most_bytes or rest < self.least_bytes:
            return None
        size = min(max(wished_bytes, again), self.most_bytes)
        return flushed_lsn if rest < size + self.least_bytes else begin_lsn + size


class BatchStream:
    """A slot, batch after batch, until the rest is small; it may be that from the start."""

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
    ) -> None:
        self.awaited_lsn: int | None = None
        self.is_over = False
        self._dsn = dsn
        self._slot = slot
        self._options = options
        self._encoding = encoding
        self._endpos = endpos
        self._sizes = sizes
        self._wished_bytes = sizes.first_bytes
        # The batch that is being read.
        self._end_lsn = 0
        self._connection: PGconn | None = None
        self._copy: CopyStream | None = None
        self._received = FrameBuffer()
        self._is_first = True
        self._catalog = connect(dsn, "receive")
        try:
            self._begin(begin_lsn)
            make_frames(np.empty(0, np.uint8))  # loads machine code, while the server decodes
        except BaseException:
            self.close()
            raise

    def read(self, buffer: FrameBuffer) -> int:
        if self._copy is None:
            return 0
        received = self._copy.read(self._received)
        while self._pass_on(buffer):
            continue
        return received

    def wait(self, seconds: float) -> bool:
        if self._copy is None:
            time.sleep(0.0 if self.is_over else seconds)
            return False
        return self._copy.wait(seconds)

    def confirm(self, written_lsn: int, flushed_lsn: int, *, reply_requested: bool) -> None:
        """Go on to the next batch, if this one is on disk."""
        if self.awaited_lsn is not None and flushed_lsn >= self.awaited_lsn:
            self.awaited_lsn = None
            self._advance(flushed_lsn)
            self._begin(flushed_lsn)

    def close(self) -> None:
        if self._copy is not None:
            assert self._connection is not None
            # The server decodes to the end of the batch otherwise, and has the slot until then.
            with suppress(psycopg.Error):
                self._connection.get_cancel().cancel()
        self._close_copy()
        self._catalog.close()

    def _begin(self, begin_lsn: int) -> None:
        """Ask for what follows, if it is a batch."""
        confirmed_lsn, restart_lsn, flushed_lsn = self._read_state()
        if self._endpos is not None:
            flushed_lsn = min(flushed_lsn, self._endpos)
        end_lsn = self._sizes.end_of(begin_lsn, restart_lsn, flushed_lsn, self._wished_bytes)
        if end_lsn is None:
            self.is_over = True
            return
        if confirmed_lsn < begin_lsn:
            self._advance(begin_lsn)
        log.info(
            "catching up: %s of WAL from %s",
            render_size(end_lsn - begin_lsn),
            render_lsn(begin_lsn),
        )
        self._end_lsn = end_lsn
        self._wished_bytes = min(2 * self._wished_bytes, self._sizes.most_bytes)
        self._is_first = True
        self._received.clear()
        self._connection = open_session(self._dsn, "receive", self._encoding)
        self._copy = send_copy(self._connection, self._slot, self._command(end_lsn))

    def _command(self, end_lsn: int) -> str:
        options = ", ".join(literal(part) for pair in self._options.items() for part in pair)
        return (
            "COPY (SELECT lsn, '\\x000000'::bytea, data FROM pg_logical_slot_peek_binary_changes("
            f"{literal(self._slot)}, {literal(render_lsn(end_lsn))}, NULL,"
            f" VARIADIC ARRAY[{options}]::text[])) TO STDOUT (FORMAT binary)"
        )

    def _read_state(self) -> tuple[int, int, int]:
        """Confirmed, needed for decoding, and flushed by the source."""
        found = self._query(_STATE, self._slot) or (None, None, None)
        confirmed, restart, flushed = (parse_lsn(lsn or "0/0") for lsn in found)
        return confirmed, restart, flushed

    def _advance(self, lsn: int) -> None:
        statement = "SELECT end_lsn::text FROM pg_replication_slot_advance(%s, %s)"
        found = self._query(statement, self._slot, render_lsn(lsn))
        if found is None or parse_lsn(found[0]) != lsn:
            raise InvariantError(f"slot {self._slot} was to move to {render_lsn(lsn)}: {found}")

    def _query(self, statement: str, *values: str) -> Any:
        try:
            return self._catalog.execute(statement.encode(), values).fetchone()
        except psycopg.Error as error:
            what = f"reading slot {self._slot}"
            raise slot_error(server_error(error, what), self._slot) from error

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
        self._copy = self._connection = None


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
