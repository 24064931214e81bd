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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg import Error as PsycopgError
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from millrace.errors import ConnectionLost, FormatError, InvariantError, MillraceError
from millrace.postgres.connect import error_for
from millrace.postgres.libpq import drain, result_error

# Large enough that the system calls do not show, small enough for any socket buffer.
CHUNK_BYTES = 256 * 1024
# The longest possible end of the stream is 170 bytes; see _Ending.
HOLD = 256
# How much of the received tail is searched for an error message.
ERROR_WINDOW_BYTES = 8 * 1024

_ERROR = re.compile(
    rb"E[\0-\xff]{4}S[^\0]*\0V(ERROR|FATAL|PANIC)\0C([0-9A-Z]{5})\0M([^\0]*)\0([\0-\xff]*)"
)
# CopyDone and the command's tag, the last before ReadyForQuery.
_COPY_DONE = re.compile(rb"c\0\0\0\x04C\0\0\0[\0-\xff]COPY (\d+)\0\Z")
_CONTEXT = re.compile(rb"\0W([^\0]*)\0")


@dataclass(frozen=True)
class Copied:
    """What one COPY moved."""

    rows: int
    bytes: int


def relay(source: PGconn, target: PGconn, copy_out: str, copy_in: str) -> Copied:
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
    try:
        sent = (_relay_raw if raw else _relay_libpq)(source, target, copy_out.encode(encoding))
    except _TargetSpoke:
        raise _target_error(target) from None
    target.put_copy_end()
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
        self._after = _message(b"Z", b"T") + between + self.last

    def parse(self, tail: bytes) -> tuple[int, int] | None:
        """(length of the ending, rows copied), or None if the COPY failed."""
        if not tail.endswith(self._after):
            return None
        match = _COPY_DONE.search(tail, 0, len(tail) - len(self._after))
        return (len(tail) - match.start(), int(match[1])) if match else None


def _relay_raw(source: PGconn, target: PGconn, copy_out: bytes) -> Copied:
    ending = _Ending()
    with _socket_of(source) as incoming, _socket_of(target) as outgoing:
        incoming.sendall(
            _message(b"Q", copy_out + b"\0") + _message(b"Q", ending.query.encode() + b"\0")
        )
        buffer = bytearray(HOLD + CHUNK_BYTES)
        view = memoryview(buffer)
        held = _read_prelude(incoming, buffer, ending)
        listening = select.poll()
        listening.register(outgoing, select.POLLIN | select.POLLHUP | select.POLLERR)
        last, last_size, total, recent = ending.last, len(ending.last), 0, b""
        while buffer[held - last_size : held] != last:
            try:
                received = incoming.recv_into(view[held:])
            except OSError as error:
                raise _source_lost(recent + buffer[:held], str(error)) from None
            if not received:
                raise _source_lost(recent + buffer[:held], "the source closed the connection")
            end = held + received
            ready = end - HOLD
            if ready > 0:
                if listening.poll(0):
                    raise _TargetSpoke
                try:
                    outgoing.sendall(view[:ready])
                except OSError:
                    raise _TargetSpoke from None
                total += ready
                recent = (recent + view[max(0, ready - ERROR_WINDOW_BYTES) : ready])[
                    -ERROR_WINDOW_BYTES:
                ]
                buffer[:HOLD] = buffer[ready:end]
                end = HOLD
            held = end
        tail = bytes(buffer[:held])
        parsed = ending.parse(tail)
        if parsed is None:
            raise _source_error(bytes(recent) + tail)
        ending_size, rows = parsed
        try:
            outgoing.sendall(tail[: held - ending_size])
        except OSError:
            raise _TargetSpoke from None
        return Copied(rows, total + held - ending_size)


def _read_prelude(incoming: socket.socket, buffer: bytearray, ending: _Ending) -> int:
    """Read up to and including CopyOutResponse; what follows it is moved to the front."""
    size = 0
    view = memoryview(buffer)
    while True:
        try:
            received = incoming.recv_into(view[size:])
        except OSError as error:
            raise _source_lost(buffer[:size], str(error)) from None
        if not received:
            raise _source_lost(buffer[:size], "the source closed the connection")
        size += received
        at = 0
        while size - at >= 5:
            kind, length = struct.unpack_from(">cI", buffer, at)
            if kind == b"H":
                if size - at < 1 + length:
                    break
                rest = bytes(buffer[at + 1 + length : size])
                buffer[: len(rest)] = rest
                return len(rest)
            if size - at < 1 + length:
                break
            at += 1 + length
        if buffer[:size].endswith(ending.last):
            raise _source_error(bytes(buffer[:size]))


def _relay_libpq(source: PGconn, target: PGconn, copy_out: bytes) -> Copied:
    started = source.exec_(copy_out)
    if started.status != pq.ExecStatus.COPY_OUT:
        error = result_error(started, "starting COPY on the source")
        source.exec_(b"ROLLBACK")
        raise error
    total, size, batch = 0, 0, []
    while True:
        received, data = source.get_copy_data(0)
        if received < 0:
            break
        batch.append(bytes(data))
        size += received
        if size >= CHUNK_BYTES:
            _put(target, batch)
            total, size, batch = total + size, 0, []
    if batch:
        _put(target, batch)
    results = drain(source)
    if not results:
        raise ConnectionLost("reading from the source: the connection broke", sqlstate=None)
    if received == -2 or results[0].status != pq.ExecStatus.COMMAND_OK:
        raise result_error(results[0], "reading from the source")
    source.exec_(b"ROLLBACK")
    return Copied(_command_rows(results[0]), total + size)


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


def _source_error(tail: bytes) -> MillraceError:
    found = None
    for found in _ERROR.finditer(tail):
        if found[2] != b"25P02":  # what a transaction says after its real error
            break
    if found is None:
        return FormatError("the source ended COPY in a way that is not in the protocol")
    context = _CONTEXT.search(found[4])
    return error_for(
        found[2].decode(),
        found[3].decode(errors="replace"),
        "reading from the source",
        where=context[1].decode(errors="replace") if context else None,
    )


def _source_lost(tail: bytes | bytearray, reason: str) -> MillraceError:
    if _ERROR.search(tail):
        return _source_error(bytes(tail))
    return ConnectionLost(f"reading from the source: {reason}", sqlstate=None)


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


_ENCODINGS = {"UTF8": "utf-8", "SQL_ASCII": "utf-8", "LATIN1": "latin-1"}


def _python_encoding(connection: PGconn) -> str:
    """Statements are sent in the session's client encoding."""
    name = (connection.parameter_status(b"client_encoding") or b"UTF8").decode()
    if name in _ENCODINGS:
        return _ENCODINGS[name]
    from psycopg._encodings import pg2pyenc

    return pg2pyenc(name.encode())
