"""Messages of `pg_logical_emit_message`, as they are spooled.

Invariant: nothing in the spool is outside of transactions, so a message that is becomes one of its
own, at its place among the commits. A transaction that only moved a position of ours is left
out, wherever the frames were cut: spooled, it would be applied, and move the next position, without
end where two databases follow each other.

A transaction made here has no number. It ends where the message's record ends: a server asked to
continue there does not send the message again, and sends a transaction whose commit record begins
there. The WAL does not say when the message was written, so its time is that of its arrival.

Facts: decode.c, logicalmsg_decode(): a message that is not transactional is sent when its record is
read, unless the record begins before the position asked for, and its position is the record's end;
pgoutput.c, pgoutput_send_begin(): a
transaction of a session with an origin has an Origin message behind its Begin.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.postgres.pgoutput.messages import (
    FRAME_HEADER_BYTES,
    MICROSECONDS_1970_TO_2000,
    NO_XID,
    Begin,
    Commit,
    Messages,
    encode_begin,
    encode_commit,
    encode_frame,
    scan,
)

# From where to where in a buffer, and what is put there instead.
Edit = tuple[int, int, bytes]

_BEGIN, _COMMIT, _ORIGIN, _MESSAGE = b"BCOM"
# Behind the kind: flags, the end of the record, the prefix, the length of the content.
_FLAGS_AT, _LSN_AT, _PREFIX_AT, _LEAST_BYTES = 1, 2, 10, 15
# What apply emits; see millrace.apply.position.
_OWN_PREFIX = np.frombuffer(b"millrace\0", np.uint8)


class OwnTransactions:
    """Leaves out the transactions that only moved a position of ours, on one connection."""

    def __init__(self) -> None:
        # The beginning of a transaction that may be one of them.
        self._held = b""

    def leave_out(self, frames: memoryview, messages: Messages) -> tuple[memoryview, Messages]:
        if self._held:
            frames, messages = _rescanned(self._held + bytes(frames))
            self._held = b""
        if not len(messages):
            return frames, messages
        is_own = _is_own(frames, messages)
        # What such a transaction consists of, between Begin and Commit.
        is_filler = is_own | (messages.kind == _ORIGIN)
        if is_own.any():
            around = (_around(messages, is_filler, at) for at in np.flatnonzero(is_own).tolist())
            edits = [edit for edit in around if edit is not None]
            if edits:
                frames, messages = edited(frames, edits)
                is_filler = _is_own(frames, messages) | (messages.kind == _ORIGIN)
        return self._hold(frames, messages, is_filler)

    def _hold(
        self, frames: memoryview, messages: Messages, is_filler: NDArray[np.bool_]
    ) -> tuple[memoryview, Messages]:
        """Keep back the end, if more must be known to decide."""
        last = len(messages) - 1
        while last >= 0 and is_filler[last]:
            last -= 1
        if last < 0 or messages.kind[last] != _BEGIN:
            return frames, messages
        start = int(messages.offset[last]) - FRAME_HEADER_BYTES
        self._held = bytes(frames[start:])
        return frames[:start], messages.slice(0, last, start)


def enclose_messages(frames: memoryview, messages: Messages) -> list[Edit]:
    """Edits that put a transaction around each message that has none."""
    places = np.flatnonzero(messages.kind == _MESSAGE)
    if not len(places):
        return []
    flags = np.frombuffer(frames, np.uint8)[messages.offset[places] + _FLAGS_AT]
    edits: list[Edit] = []
    for at in places[flags & 1 == 0].tolist():
        begin = int(messages.offset[at])
        start, end = begin - FRAME_HEADER_BYTES, begin + int(messages.length[at])
        edits.append((start, end, _enclosed(bytes(frames[start:end]))))
    return edits


def edited(frames: memoryview, edits: list[Edit]) -> tuple[memoryview, Messages]:
    """The frames with something else in some places, which are in order."""
    parts: list[bytes | memoryview] = []
    done = 0
    for begin, end, frame in edits:
        parts += [frames[done:begin], frame]
        done = end
    parts.append(frames[done:])
    return _rescanned(b"".join(parts))


def _rescanned(data: bytes) -> tuple[memoryview, Messages]:
    return memoryview(data), scan(np.frombuffer(data, np.uint8), len(data))


def _is_own(frames: memoryview, messages: Messages) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = messages.kind == _MESSAGE
    places = np.flatnonzero(found)
    if not len(places):
        return found
    short = places[messages.length[places] < _LEAST_BYTES]
    if len(short):
        raise FormatError(
            f"replication stream: expected {_LEAST_BYTES} bytes of message M at offset "
            f"{messages.offset[short[0]]}, found {messages.length[short[0]]}"
        )
    buffer = np.frombuffer(frames, np.uint8)
    within = messages.offset[places][:, None] + np.arange(len(_OWN_PREFIX)) + _PREFIX_AT
    # A shorter message has the zero byte of its prefix earlier, so it is not equal.
    prefixes = buffer[np.minimum(within, len(buffer) - 1)]
    found[places] = (prefixes == _OWN_PREFIX).all(axis=1)
    return found


def _around(messages: Messages, is_filler: NDArray[np.bool_], at: int) -> Edit | None:
    """The transaction of a message of ours, if all of it is here and nothing else is in it."""
    first, last = at, at
    while first > 0 and is_filler[first]:
        first -= 1
    while last < len(messages) - 1 and is_filler[last]:
        last += 1
    if messages.kind[first] != _BEGIN or messages.kind[last] != _COMMIT:
        return None
    start = int(messages.offset[first]) - FRAME_HEADER_BYTES
    return start, int(messages.offset[last] + messages.length[last]), b""


def _enclosed(frame: bytes) -> bytes:
    """A message in a transaction of its own."""
    place = FRAME_HEADER_BYTES + _LSN_AT
    lsn = int.from_bytes(frame[place : place + 8], "big")
    now = int(time.time() * 1e6) - MICROSECONDS_1970_TO_2000
    # Its commit is within the record, where no other transaction's can begin.
    begin = encode_begin(Begin(lsn - 1, now, NO_XID))
    commit = encode_commit(Commit(lsn - 1, lsn, now))
    return encode_frame(begin, lsn - 1) + frame + encode_frame(commit, lsn)
