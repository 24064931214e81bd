"""Where a stream is to end, found among its messages.

Invariant: a transaction is before the end position if its commit record ends at or before it; what
is not before it is left out whole.
"""

from __future__ import annotations

import numpy as np

from millrace.postgres.pgoutput.messages import FRAME_HEADER_BYTES, NO_XID, Messages

_PAGE_BYTES = 8192
_PAGE_HEADER_BYTES = 40
_BEGIN, _COMMIT = ord("B"), ord("C")
_XID_AT = 17


def before_end(frames: memoryview, messages: Messages, endpos: int) -> tuple[Messages, int | None]:
    """The messages of transactions before the end position; and, if one is beyond it, up to where
    nothing is missing, or 0 if that is known of no more than what was taken."""
    begins = np.flatnonzero(messages.kind == _BEGIN)
    commits = np.flatnonzero(messages.kind == _COMMIT)
    # Positions rise, so most often the last of each kind answers for all.
    if not any(
        _is_after(frames, messages, int(at), endpos) for at in (*begins[-1:], *commits[-1:])
    ):
        return messages, None
    for at in map(int, np.sort(np.concatenate((begins, commits)))):
        if not _is_after(frames, messages, at, endpos):
            continue
        begin, idle_lsn = at, endpos
        if messages.kind[at] == _BEGIN and _is_message(frames, messages, at):
            # Its record may begin before the end position, and would not be sent again from there.
            idle_lsn = 0
        elif messages.kind[at] == _COMMIT:
            commit = int(messages.offset[at]) + 2
            idle_lsn = int.from_bytes(frames[commit : commit + 8], "big")
            earlier = begins[begins < at]
            begin = int(earlier[-1]) if len(earlier) else 0
        end = int(messages.offset[begin]) - FRAME_HEADER_BYTES
        return messages.slice(0, begin, end), idle_lsn
    return messages, None


def is_past(lsn: int, endpos: int) -> bool:
    """Whether a position the server has come to is the end position: at the end of a page the
    next record begins only after the next page's header."""
    return lsn >= endpos or (lsn % _PAGE_BYTES == 0 and endpos - lsn <= _PAGE_HEADER_BYTES)


def _is_message(frames: memoryview, messages: Messages, at: int) -> bool:
    """Whether a Begin is of a transaction that the receiver put around a logical message."""
    place = int(messages.offset[at]) + _XID_AT
    return int.from_bytes(frames[place : place + 4], "big") == NO_XID


def _is_after(frames: memoryview, messages: Messages, at: int, endpos: int) -> bool:
    """Whether a Begin or Commit belongs to a transaction beyond the end position."""
    # Begin: commit_lsn at 1; Commit: end_lsn at 10.
    is_begin = messages.kind[at] == _BEGIN
    place = int(messages.offset[at]) + (1 if is_begin else 10)
    lsn = int.from_bytes(frames[place : place + 8], "big")
    return lsn >= endpos if is_begin else lsn > endpos
