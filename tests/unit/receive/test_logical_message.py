"""Logical messages on their way into the spool."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.stream.changes import RELATION

from millrace.errors import FormatError
from millrace.postgres.pgoutput.messages import (
    Begin,
    Commit,
    LogicalMessage,
    Messages,
    decode_begin,
    decode_commit,
    decode_message,
    encode_begin,
    encode_commit,
    encode_frame,
    encode_insert,
    encode_keepalive,
    encode_message,
    encode_relation,
    scan,
)
from millrace.receive.logical_message import OwnTransactions, edited, enclose_messages

OWN = encode_message(LogicalMessage("millrace", b"", 1, True))
THEIRS = encode_message(LogicalMessage("millrace.ddl", b"millrace\0", 2, True))
ORIGIN = b"O" + bytes(8) + b"elsewhere\0"
INSERT = encode_relation(RELATION), encode_insert(RELATION.oid, [b"1"] * len(RELATION.columns))


def transaction(number: int, *messages: bytes) -> list[bytes]:
    lsn = 1000 * number
    return [
        encode_frame(encode_begin(Begin(lsn, 0, number)), lsn),
        *(encode_frame(message, lsn + 1) for message in messages),
        encode_frame(encode_commit(Commit(lsn, lsn + 5, 0)), lsn + 5),
    ]


def scanned(data: bytes) -> tuple[memoryview, Messages]:
    return memoryview(data), scan(np.frombuffer(data, np.uint8), len(data))


def test_transactions_that_only_moved_a_position_go_wherever_frames_are_cut() -> None:
    kept = [
        transaction(2, *INSERT),
        transaction(4, ORIGIN, THEIRS),
        transaction(5, ORIGIN, *INSERT, OWN),
        transaction(7, ORIGIN),
        transaction(8, ORIGIN, OWN, THEIRS),
    ]
    dropped = [transaction(1, OWN), transaction(3, ORIGIN, OWN), transaction(6, ORIGIN, OWN, OWN)]
    keepalive = encode_keepalive(5, reply_requested=False)
    order = sorted(kept + dropped)
    frames = [frame for one in order for frame in one]
    frames.insert(2, keepalive)
    expected = b"".join(frame for one in kept for frame in one)
    for cuts in combinations(range(len(frames) + 1), 2):
        own = OwnTransactions()
        found = b""
        for first, end in zip((0, *cuts), (*cuts, len(frames)), strict=True):
            rest, messages = own.leave_out(*scanned(b"".join(frames[first:end])))
            assert messages.consumed == len(rest) or not len(messages)
            found += bytes(rest)
        assert found.replace(keepalive, b"") == expected, cuts


def test_a_message_outside_of_transactions_gets_one_of_its_own() -> None:
    alone = LogicalMessage("x", b"content", 0x1234, False)
    before, after = transaction(1, THEIRS), transaction(9, *INSERT)
    data = b"".join([*before, *[encode_frame(encode_message(alone), 0x1234)] * 2, *after])
    frames, messages = scanned(data)
    rest, found = edited(frames, enclose_messages(frames, messages))
    assert bytes(found.kind) == b"BMC" + b"BMC" * 2 + b"BRIC"
    taken = [
        bytes(rest[offset : offset + length])
        for offset, length in zip(found.offset.tolist(), found.length.tolist(), strict=True)
    ]
    assert decode_begin(taken[3]).commit_lsn == 0x1233
    assert decode_begin(taken[3]).xid == 0
    assert decode_message(taken[4]) == alone
    assert decode_commit(taken[5]).end_lsn == 0x1234


@given(st.binary(max_size=40))
def test_whatever_the_bytes_there_is_a_message_or_an_error(rest: bytes) -> None:
    try:
        found = decode_message(b"M" + rest)
        assert encode_message(found)[10:] == (b"M" + rest)[10:]
    except FormatError:
        pass
    frames, messages = scanned(b"".join(transaction(1, b"M" + rest)))
    if len(rest) < 14:
        with pytest.raises(FormatError, match="expected 15 bytes of message M"):
            OwnTransactions().leave_out(frames, messages)
    else:
        frames, messages = OwnTransactions().leave_out(frames, messages)
        edited(frames, enclose_messages(frames, messages))


def test_prefixes_are_in_the_encoding_of_the_stream() -> None:
    message = LogicalMessage("prefix é", b"\xe9", 7, True)
    assert decode_message(encode_message(message, "latin-1"), "latin-1") == message
    with pytest.raises(FormatError, match="expected a name"):
        decode_message(encode_message(message, "latin-1"))
