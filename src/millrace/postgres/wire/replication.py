"""A connection that streams changes: frames come in, feedback goes out.

Invariant: what `read` puts into the buffer are the bytes of the server's CopyData messages, in
order, with nothing between them; every other message is an error, or is dropped as of no interest.

libpq connects (TLS, passfiles, service files work). If the connection is not encrypted, the socket
is then read directly: the command is sent by us, so libpq has read nothing of the stream. An
encrypted connection is read message by message through libpq, which gives the same frames.

`slot_batch` reads a slot in another way, as the same kind of stream.

Facts: PostgreSQL documentation, "Streaming Replication Protocol"; walsender.c.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from psycopg import Error as PsycopgError
from psycopg import pq
from psycopg.pq.abc import PGconn

from millrace.errors import ConnectionLost, FormatError, MillraceError
from millrace.lsn import render_lsn
from millrace.postgres.pgoutput.messages import (
    MAX_FRAME_BYTES,
    MICROSECONDS_1970_TO_2000,
    Bytes,
    Messages,
    scan,
)
from millrace.postgres.quote import ident, literal
from millrace.postgres.wire.connect import error_for
from millrace.postgres.wire.libpq import drain, result_error
from millrace.postgres.wire.slot_error import slot_error

# What one read may take; a larger frame makes the buffer grow until it is passed on.
BUFFER_BYTES: Final = 4 * 1024 * 1024
# The server asks for a reply after half of `walsender.WAL_SENDER_TIMEOUT`; twice as much silence
# is a broken connection.
SILENCE_SECONDS: Final = 120.0

# How long a server gets to end a stream that we end.
GOODBYE_SECONDS: Final = 1.0

COPY_DONE: Final = b"c\0\0\0\4"

# Notices, changed parameters and notifications have no meaning here.
_IGNORED = b"NSA"


class FrameBuffer:
    """Bytes received and not yet passed on: whole frames and the beginning of one more."""

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self._size = size
        self._array: Bytes = np.empty(size, np.uint8)
        self.filled = 0

    @property
    def free(self) -> memoryview:
        """Where the next bytes go."""
        return self._array.data[self.filled :]

    @property
    def is_full(self) -> bool:
        return self.filled == len(self._array)

    def view(self, size: int) -> memoryview:
        return self._array.data[:size]

    def scan(self, *, any_kind: bool = False) -> Messages:
        """The messages in it; grows if not even one frame fits."""
        messages = scan(self._array, self.filled, stop_at_other=True, any_kind=any_kind)
        if messages.consumed == 0 and not messages.is_over:
            self.make_room()
        return messages

    def make_room(self) -> None:
        """Grow, if it is full with not even one frame."""
        if self.is_full:
            self._grow(1 + int.from_bytes(self._array[1:5].tobytes(), "big"))

    def put(self, data: bytes | memoryview) -> None:
        """Add bytes, however many."""
        needed = self.filled + len(data)
        if needed > len(self._array):
            self._grow(needed)
        self._array[self.filled : needed] = np.frombuffer(data, np.uint8)
        self.filled = needed

    def drop(self, size: int) -> None:
        """Forget the first bytes, which were passed on."""
        rest = self._array[size : self.filled].copy()
        if len(self._array) > self._size and len(rest) <= self._size:
            self._array = np.empty(self._size, np.uint8)
        self._array[: len(rest)] = rest
        self.filled = len(rest)

    def clear(self) -> None:
        self.drop(self.filled)

    def _grow(self, size: int) -> None:
        if size > 2 * MAX_FRAME_BYTES:
            raise FormatError(f"replication stream: expected a frame of at most 1 GB, not {size}")
        larger: Bytes = np.empty(max(size, self._size), np.uint8)
        larger[: self.filled] = self._array[: self.filled]
        self._array = larger


class ReplicationStream(Protocol):
    """The changes of a slot, as frames."""

    # Nothing more comes until this position is confirmed.
    awaited_lsn: int | None

    def read(self, buffer: FrameBuffer) -> int:
        """Take what is there now; how many bytes that was."""

    def wait(self, seconds: float) -> bool:
        """Whether there is something to read within that time."""

    def confirm(self, written_lsn: int, flushed_lsn: int, *, reply_requested: bool) -> None:
        """Tell the server how far we are, as soon as it listens; it may forget what is before
        `flushed_lsn`."""

    def close(self) -> None: ...


def start_replication(
    connection: PGconn, slot: str, start_lsn: int, options: Mapping[str, str]
) -> ReplicationStream:
    """Begin to stream; the connection belongs to the stream from here on."""
    pairs = ", ".join(f"{ident(name)} {_option(value)}" for name, value in options.items())
    command = f"START_REPLICATION SLOT {ident(slot)} LOGICAL {render_lsn(start_lsn)}"
    command += f" ({pairs})" if pairs else ""
    stream = send_copy(connection, slot, command)
    try:
        stream.wait_for_start()
    except BaseException:
        stream.close()
        raise
    return stream


def send_copy(connection: PGconn, slot: str, command: str) -> CopyStream:
    """Send a command that answers with CopyData; the connection belongs to the stream from here
    on. Before the data, or instead, there may be other messages."""
    is_encrypted = connection.ssl_in_use or connection.used_gssapi
    return (_LibpqStream if is_encrypted else _RawStream)(connection, slot, command)


def _encode_feedback(written_lsn: int, flushed_lsn: int, *, reply_requested: bool) -> bytes:
    """Standby status update."""
    now = time.time_ns() // 1000 - MICROSECONDS_1970_TO_2000
    positions = written_lsn, flushed_lsn, flushed_lsn
    return struct.pack(">cQQQqB", b"r", *positions, now, reply_requested)


@dataclass(frozen=True)
class _Message:
    """A message of the server that is not CopyData."""

    kind: bytes
    body: bytes


class _RawStream:
    """Frames straight from the socket."""

    awaited_lsn: int | None = None

    def __init__(self, connection: PGconn, slot: str, command: str) -> None:
        self._connection = connection
        self._slot = slot
        self._unsent = b""
        self._socket = socket.socket(fileno=os.dup(connection.socket))
        self._socket.setblocking(False)
        self._early = b""
        try:
            query = command.encode()
            self._push(b"Q" + struct.pack(">I", len(query) + 5) + query + b"\0")
        except BaseException:
            self.close()
            raise

    def read(self, buffer: FrameBuffer) -> int:
        if self._early:
            early, self._early = self._early, b""
            buffer.put(early)
            return len(early)
        self._flush()
        received = 0
        while not buffer.is_full:
            try:
                size = self._socket.recv_into(buffer.free)
            except BlockingIOError:
                break
            except OSError as error:
                raise _lost(str(error)) from None
            if not size:
                if received:
                    break  # what came before may say why
                raise _lost("the server closed the connection")
            buffer.filled += size
            received += size
        return received

    def wait(self, seconds: float) -> bool:
        if self._early:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return bool(poller.poll(seconds * 1000))

    def confirm(self, written_lsn: int, flushed_lsn: int, *, reply_requested: bool) -> None:
        if not self._unsent:  # an older one still waits: the next will say as much
            message = _encode_feedback(written_lsn, flushed_lsn, reply_requested=reply_requested)
            self._push(b"d" + struct.pack(">I", len(message) + 4) + message)

    def close(self) -> None:
        """Hang up, and wait a moment for the server to let go of the slot."""
        with suppress(OSError):
            self._socket.send(COPY_DONE + b"X\0\0\0\4")
            until = time.monotonic() + GOODBYE_SECONDS
            while (left := until - time.monotonic()) > 0:
                if self.wait(left) and not self._socket.recv(BUFFER_BYTES):
                    break
        self._socket.close()
        self._connection.finish()

    def _push(self, data: bytes) -> None:
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise _lost(str(error)) from None
            self._unsent = self._unsent[sent:]

    def wait_for_start(self) -> None:
        """Read up to CopyBothResponse; anything after it is the stream's beginning."""
        data = b""
        deadline = time.monotonic() + SILENCE_SECONDS
        while True:
            while len(data) >= 5:
                size = 1 + int.from_bytes(data[1:5], "big")
                if len(data) < size:
                    break
                kind, body, data = data[:1], data[5:size], data[size:]
                if kind == b"E":
                    raise stream_error(_Message(kind, body), self._slot)
                if kind == b"W":
                    self._early = data
                    return
            if not self.wait(max(0.0, deadline - time.monotonic())):
                raise _lost("the server does not answer")
            self._flush()
            with suppress(BlockingIOError):
                try:
                    part = self._socket.recv(65536)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise _lost(str(error)) from None
                if not part:
                    raise _lost("the server closed the connection")
                data += part


class _LibpqStream:
    """Frames made of what libpq hands over: for encrypted connections."""

    awaited_lsn: int | None = None

    def __init__(self, connection: PGconn, slot: str, command: str) -> None:
        self._connection = connection
        self._slot = slot
        self._has_started = False
        try:
            connection.send_query(command.encode())
            connection.nonblocking = 1
        except PsycopgError as error:
            self.close()
            raise _lost(str(error).strip()) from None

    def read(self, buffer: FrameBuffer) -> int:
        before = buffer.filled
        try:
            self._connection.flush()
            self._connection.consume_input()
            if not self._has_started and not self._start():
                return 0
            while buffer.filled - before < BUFFER_BYTES:
                size, data = self._connection.get_copy_data(1)
                if size == 0:
                    # libpq takes one TLS record at a time, which is one message of the server.
                    if not self.wait(0):
                        break
                    self._connection.consume_input()
                    continue
                if size < 0:
                    if buffer.filled == before:
                        self._end(buffer)
                    break  # the next call meets the end again
                buffer.put(b"d" + struct.pack(">I", size + 4) + bytes(data))
        except PsycopgError as error:
            if buffer.filled == before:
                raise _lost(str(error).strip()) from None
        return buffer.filled - before

    def wait(self, seconds: float) -> bool:
        poller = select.poll()
        try:
            poller.register(self._connection.socket, select.POLLIN)
        except PsycopgError as error:
            raise _lost(str(error).strip()) from None
        return bool(poller.poll(seconds * 1000))

    def confirm(self, written_lsn: int, flushed_lsn: int, *, reply_requested: bool) -> None:
        message = _encode_feedback(written_lsn, flushed_lsn, reply_requested=reply_requested)
        try:
            self._connection.put_copy_data(message)
            self._connection.flush()
        except PsycopgError as error:
            raise _lost(str(error).strip()) from None

    def close(self) -> None:
        with suppress(PsycopgError):
            self._connection.put_copy_end()
            self._connection.flush()
        self._connection.finish()

    def wait_for_start(self) -> None:
        try:
            while not self._start():
                if not self.wait(SILENCE_SECONDS):
                    raise _lost("the server does not answer")
                self._connection.consume_input()
        except PsycopgError as error:
            raise _lost(str(error).strip()) from None

    def _start(self) -> bool:
        """Whether the server has agreed, as far as we know."""
        if self._connection.is_busy():
            return False
        result = self._connection.get_result()
        if result is None:
            raise _lost("the server closed the connection")
        if result.status not in (pq.ExecStatus.COPY_BOTH, pq.ExecStatus.COPY_OUT):
            raise slot_error(result_error(result, f"streaming from slot {self._slot}"), self._slot)
        self._has_started = True
        return True

    def _end(self, buffer: FrameBuffer) -> None:
        """The server ended the stream: its error, or the message that says so."""
        for result in drain(self._connection):
            if result.status == pq.ExecStatus.FATAL_ERROR:
                error = result_error(result, f"streaming from slot {self._slot}")
                raise slot_error(error, self._slot)
        buffer.put(COPY_DONE)


CopyStream = _RawStream | _LibpqStream


def take_other_message(buffer: FrameBuffer, slot: str, also_ignored: bytes = b"") -> bool:
    """Deal with a message at the start of the buffer that is not CopyData: drop it, or raise what
    it means. False if it has not come whole."""
    head = buffer.view(min(5, buffer.filled)).tobytes()
    if len(head) < 5:
        return False
    size = 1 + int.from_bytes(head[1:5], "big")
    if size < 5 or size > BUFFER_BYTES:
        raise FormatError(f"replication stream: expected a message, found {head.hex(' ')}")
    if buffer.filled < size:
        return False
    if head[:1] not in _IGNORED + also_ignored:
        raise stream_error(_Message(head[:1], buffer.view(size)[5:].tobytes()), slot)
    buffer.drop(size)
    return True


def stream_error(message: _Message, slot: str) -> MillraceError:
    """What the end of a stream means."""
    if message.kind in b"cCZ":
        return _lost("the server ended the stream")
    if message.kind != b"E":
        return FormatError(f"replication stream: expected CopyData, found {message.kind!r}")
    fields = {
        field[:1]: field[1:].decode(errors="replace")
        for field in message.body.split(b"\0")
        if field
    }
    error = error_for(
        fields.get(b"C"),
        fields.get(b"M", "it failed without a message"),
        f"streaming from slot {slot}",
    )
    return slot_error(error, slot)


def _option(value: str) -> str:
    return literal(value).strip()


def _lost(reason: str) -> ConnectionLost:
    return ConnectionLost(f"receiving from the source: {reason}", sqlstate=None)
