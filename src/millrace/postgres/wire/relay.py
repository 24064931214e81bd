"""COPY out of one server into another: buffers are passed on, rows never looked at.

Invariant: `relay` returns only if the source said it sent n rows and the target
said it stored n rows; every other end is an exception, and then the caller's
transaction on the target must be rolled back.

A CopyData message out of one server is a valid CopyData message into the
other, so the bytes between the two sockets can stay as they are. The one thing
to find in the stream is its end. Walking the messages would cost a step for
each row. Instead the COPY is followed, in the same breath, by a second query
that returns a random nonce: the stream is over exactly when its last bytes are
that answer. The nonce query succeeds whether COPY succeeded or failed (it rolls
back first), so there is no third case. `HOLD` bytes are held back all the time,
so that no control message ever reaches the target.

Encrypted connections have no raw socket to offer; for those the same COPY goes
through libpq, in batches.

Facts: PostgreSQL documentation, "Message Formats" and "COPY Operations".
"""

from __future__ import annotations

import os
import re
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg import Error as PsycopgError
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from millrace import failpoint
from millrace.errors import (
    ConnectionLost,
    FormatError,
    InvariantError,
    MillraceError,
    ServerError,
)
from millrace.postgres.wire.connect import error_for
from millrace.postgres.wire.encoding import python_encoding
from millrace.postgres.wire.libpq import drain, result_error

# Large enough that the system calls do not show, small enough for any socket buffer.
CHUNK_BYTES = 256 * 1024
# The longest possible end of the stream is 170 bytes; see _Ending.
HOLD = 256
# How much of the received tail is searched for an error message.
ERROR_WINDOW_BYTES = 64 * 1024
# What a server says to a message that has no place where it came.
PROTOCOL_VIOLATION = "08P01"

# CopyDone and the command's tag, the last before ReadyForQuery.
_COPY_DONE = re.compile(rb"c\0\0\0\x04C\0\0\0[\0-\xff]COPY (\d+)\0\Z")


@dataclass(frozen=True)
class CopyResult:
    """What one COPY moved."""

    rows: int
    bytes: int


def relay(source: PGconn, target: PGconn, copy_out: str, copy_in: str) -> CopyResult:
    """Run `copy_out` on the source into `copy_in` on the target.

    `copy_out` is the whole text of a query whose last statement is COPY ... TO STDOUT and
    which opens a transaction itself; the source is idle, with no transaction, at the end.
    `copy_in` ends with COPY ... FROM STDIN; the target's transaction is left to the caller.
    After an exception both connections are in the middle of a message: close them.
    """
    raw = not (source.ssl_in_use or target.ssl_in_use or source.used_gssapi or target.used_gssapi)
    encoding = _python_encoding(target)
    started = target.exec_(copy_in.encode(encoding))
    if started.status != pq.ExecStatus.COPY_IN:
        raise result_error(started, "starting COPY on the target")
    sent = (_relay_raw if raw else _relay_libpq)(source, target, copy_out.encode(encoding))
    try:
        target.put_copy_end()
    except PsycopgError as error:
        raise ConnectionLost(f"writing to the target: {error}".strip(), sqlstate=None) from None
    stored_rows = _command_rows(_last_result(target))
    if stored_rows != sent.rows:
        raise InvariantError(f"the source sent {sent.rows} rows, the target stored {stored_rows}")
    return sent


class _TargetSpoke(Exception):
    """The target sent something, or hung up, while it should only have been listening."""


class _Ending:
    """The bytes that end a COPY stream: known but for one number.

    c | C COPY n | Z in transaction | C ROLLBACK | T one column | D nonce | C SELECT 1 | Z idle
    """

    def __init__(self) -> None:
        nonce = secrets.token_hex(16)
        self.query = f"ROLLBACK; SELECT '{nonce}'"
        value = nonce.encode()
        row = struct.pack(">hi", 1, len(value)) + value
        column = b"?column?\0" + struct.pack(">ihihih", 0, 0, 25, -1, -1, 0)
        self.last = _message(b"D", row) + _message(b"C", b"SELECT 1\0") + _message(b"Z", b"I")
        between = _message(b"C", b"ROLLBACK\0") + _message(b"T", struct.pack(">h", 1) + column)
        self._after_success = _message(b"Z", b"T") + between + self.last
        # After an error: ReadyForQuery, which says whether there was a transaction, and the same.
        self.after_error_size = len(self._after_success)

    def parse(self, tail: bytes) -> tuple[int, int] | None:
        """(length of the ending, rows copied), or None if the COPY failed."""
        if not tail.endswith(self._after_success):
            return None
        match = _COPY_DONE.search(tail, 0, len(tail) - len(self._after_success))
        return (len(tail) - match.start(), int(match[1])) if match else None


def _relay_raw(source: PGconn, target: PGconn, copy_out: bytes) -> CopyResult:
    with _socket_of(source) as incoming, _socket_of(target) as outgoing:
        stream = _Stream(incoming)
        stream.begin(copy_out)
        total = 0
        listening = select.poll()
        listening.register(outgoing, select.POLLIN | select.POLLHUP | select.POLLERR)
        try:
            while (ready := stream.receive()) is not None:
                if listening.poll(0):
                    raise _TargetSpoke
                outgoing.sendall(ready)
                failpoint.hit("copy.middle")
                total += len(ready)
                stream.forget(len(ready))
            rest, rows = stream.ending()
            outgoing.sendall(rest)
        except (_TargetSpoke, OSError):
            error = _target_error(target)
            if error.facts.get("sqlstate") == PROTOCOL_VIOLATION:
                # The first bytes of the source's own error have reached the target.
                stream.raise_error()
            raise error from None
        return CopyResult(rows, total + len(rest))


class _Stream:
    """What the source sends from the start of a COPY to the nonce."""

    def __init__(self, incoming: socket.socket) -> None:
        self._incoming = incoming
        self._ending = _Ending()
        self._buffer = bytearray(HOLD + CHUNK_BYTES)
        self._view = memoryview(self._buffer)
        # Bytes of the buffer that are filled; the last HOLD of them are held back.
        self._filled = 0
        # What was passed on last, in case it was the beginning of an error message.
        self._recent: deque[bytes] = deque()
        self._recent_bytes = 0

    def begin(self, copy_out: bytes) -> None:
        """Send both queries and read up to CopyOutResponse."""
        query = self._ending.query.encode()
        try:
            self._incoming.sendall(_message(b"Q", copy_out + b"\0") + _message(b"Q", query + b"\0"))
        except OSError as error:
            raise self._lost(str(error)) from None
        at = 0
        while True:
            self._fill()
            while self._filled - at >= 5:
                kind, length = struct.unpack_from(">cI", self._buffer, at)
                if self._filled - at < 1 + length:
                    break
                at += 1 + length
                if kind == b"H":
                    self._keep_from(at)
                    return
            if self._is_over():
                raise self._error()

    def receive(self) -> memoryview | None:
        """The next bytes to pass on; None when the stream is over. `forget` them afterwards."""
        while not self._is_over():
            ready = self._filled - HOLD
            if ready > 0:
                return self._view[:ready]
            self._fill()
        return None

    def forget(self, size: int) -> None:
        """These bytes have been passed on."""
        self._recent.append(bytes(self._view[max(0, size - ERROR_WINDOW_BYTES) : size]))
        self._recent_bytes += len(self._recent[-1])
        while self._recent_bytes - len(self._recent[0]) > ERROR_WINDOW_BYTES:
            self._recent_bytes -= len(self._recent.popleft())
        self._keep_from(size)
        if not self._is_over():
            self._fill()

    def ending(self) -> tuple[bytes, int]:
        """(the last bytes of rows, the number of rows), or the source's error."""
        tail = bytes(self._view[: self._filled])
        parsed = self._ending.parse(tail)
        if parsed is None:
            raise self._error()
        size, rows = parsed
        return tail[: len(tail) - size], rows

    def raise_error(self) -> None:
        """Read to the end and raise the source's error, if that is how it ends."""
        while self.receive() is not None:
            self.forget(self._filled - HOLD)
        self.ending()

    def _is_over(self) -> bool:
        last = self._ending.last
        start = self._filled - len(last)
        return start >= 0 and self._buffer[start : self._filled] == last

    def _fill(self) -> None:
        try:
            received = self._incoming.recv_into(self._view[self._filled :])
        except OSError as error:
            raise self._lost(str(error)) from None
        if not received:
            raise self._lost("the source closed the connection")
        self._filled += received

    def _keep_from(self, at: int) -> None:
        rest = bytes(self._view[at : self._filled])
        self._buffer[: len(rest)] = rest
        self._filled = len(rest)

    def _error(self) -> MillraceError:
        window = b"".join(self._recent) + bytes(self._view[: self._filled])
        error = _error_at_end(window[: -self._ending.after_error_size])
        return error or ServerError(
            "reading from the source: it failed, with an error message too long to read",
            sqlstate="XX000",
        )

    def _lost(self, reason: str) -> MillraceError:
        window = b"".join(self._recent) + bytes(self._view[: self._filled])
        error = _error_at_end(window)
        return error or ConnectionLost(f"reading from the source: {reason}", sqlstate=None)


def _error_at_end(window: bytes) -> MillraceError | None:
    """The ErrorResponse that ends the window: it is known by its length, not by its looks, since
    rows may look like anything. Its body holds no two zero bytes but at its end, so no other
    beginning inside it could fit."""
    at = len(window)
    while (at := window.rfind(b"E", 0, at)) >= 0:
        if int.from_bytes(window[at + 1 : at + 5], "big") == len(window) - at - 1:
            return _parse_error(window[at + 5 :])
    return None


def _parse_error(body: bytes) -> MillraceError:
    fields = {field[:1]: field[1:].decode(errors="replace") for field in body.split(b"\0") if field}
    return error_for(
        fields.get(b"C"),
        fields.get(b"M", "it failed without a message"),
        "reading from the source",
        where=fields.get(b"W"),
    )


def _relay_libpq(source: PGconn, target: PGconn, copy_out: bytes) -> CopyResult:
    started = source.exec_(copy_out)
    if started.status != pq.ExecStatus.COPY_OUT:
        error = result_error(started, "starting COPY on the source")
        source.exec_(b"ROLLBACK")
        raise error
    batch: list[bytes] = []
    total, size = 0, 0
    listening = select.poll()
    listening.register(target.socket, select.POLLIN | select.POLLHUP | select.POLLERR)
    try:
        while (received := _get(source, batch)) >= 0:
            size += received
            if size >= CHUNK_BYTES:
                if listening.poll(0):
                    raise _TargetSpoke
                _put(target, batch)
                failpoint.hit("copy.middle")
                total, size, batch = total + size, 0, []
        if batch:
            _put(target, batch)
    except _TargetSpoke:
        raise _target_error(target) from None
    results = drain(source)
    if not results:
        raise ConnectionLost("reading from the source: the connection broke", sqlstate=None)
    if received == -2 or results[0].status != pq.ExecStatus.COMMAND_OK:
        raise result_error(results[0], "reading from the source")
    source.exec_(b"ROLLBACK")
    return CopyResult(_command_rows(results[0]), total + size)


def _get(source: PGconn, batch: list[bytes]) -> int:
    """Add the next row to the batch; its size, or a negative number at the end."""
    try:
        received, data = source.get_copy_data(0)
    except PsycopgError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConnectionLost(f"reading from the source: {reason}", sqlstate=None) from None
    if received >= 0:
        batch.append(bytes(data))
    return received


def _put(target: PGconn, batch: list[bytes]) -> None:
    try:
        target.put_copy_data(b"".join(batch))
    except PsycopgError:
        raise _TargetSpoke from None


def _target_error(target: PGconn) -> MillraceError:
    """Why the target stopped listening: its error message is waiting in the socket."""
    try:
        target.put_copy_end(b"cancelled")
        result = _last_result(target)
    except MillraceError as error:
        return error
    except PsycopgError as error:
        return ConnectionLost(f"writing to the target: {error}".strip(), sqlstate=None)
    return InvariantError(f"the target ended COPY with status {result.status}")


def _last_result(target: PGconn) -> PGresult:
    results = drain(target)
    if not results:
        raise ConnectionLost("writing to the target: the connection broke", sqlstate=None)
    result = results[0]
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise result_error(result, "writing to the target")
    return result


def _command_rows(result: PGresult) -> int:
    status = result.command_status or b""
    if not status.startswith(b"COPY "):
        raise FormatError(f"expected COPY n as the command's status, not {status!r}")
    return int(status[5:])


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", len(body) + 4) + body


@contextmanager
def _socket_of(connection: PGconn) -> Iterator[socket.socket]:
    """The connection's socket, blocking as long as we use it; libpq wants it non-blocking."""
    try:
        borrowed = socket.socket(fileno=os.dup(connection.socket))
    except (PsycopgError, OSError) as error:
        raise ConnectionLost(f"the connection broke: {error}".strip(), sqlstate=None) from None
    try:
        borrowed.setblocking(True)
        yield borrowed
    finally:
        borrowed.setblocking(False)
        borrowed.close()


def _python_encoding(connection: PGconn) -> str:
    """Statements are sent in the session's client encoding."""
    return python_encoding((connection.parameter_status(b"client_encoding") or b"UTF8").decode())
