"""Frames of logical replication: found in any buffer, refused when they are damaged."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.stream.changes import RELATION, Transaction, join

from millrace.errors import ConfigError, FormatError
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.pgoutput import messages as pgoutput
from millrace.postgres.pgoutput.messages import (
    UNCHANGED,
    Begin,
    Commit,
    Partition,
    RelationColumn,
    RelationVersion,
    Truncate,
    encode_frame,
    encode_keepalive,
    scan,
    whole_frames,
)

# Recorded from PostgreSQL 16 with proto_version 1: `CREATE TABLE r (id int PRIMARY KEY, t text)`,
# `INSERT INTO r VALUES (1, 'one'), (2, NULL)`, `UPDATE r SET id = 3 WHERE id = 1`,
# `DELETE FROM r WHERE id = 2`, `TRUNCATE r`; printed by pg_logical_slot_peek_binary_changes.
RECORDED = {
    "begin": "420000000001873420000303577de7a0b5000002dd",
    "relation": "52000040017075626c69630072006400020169640000000017ffffffff00740000000019ffffffff",
    "insert": "49000040014e000274000000013174000000036f6e65",
    "update": "55000040014b00027400000001316e4e000274000000013374000000036f6e65",
    "delete": "44000040014b00027400000001326e",
    "truncate": "54000000010000004001",
    "commit": "430000000000018734200000000001873450000303577de7a0b5",
}


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def test_recorded_messages_are_decoded() -> None:
    raw = {name: bytes.fromhex(text) for name, text in RECORDED.items()}
    assert pgoutput.decode_begin(raw["begin"]) == Begin(0x1873420, 848099239502005, 733)
    assert pgoutput.decode_relation(raw["relation"]) == RelationVersion(
        16385,
        "public",
        "r",
        "d",
        (RelationColumn("id", 23, -1, True), RelationColumn("t", 25, -1, False)),
    )
    assert pgoutput.decode_truncate(raw["truncate"]) == Truncate((16385,), False, False)
    commit = pgoutput.decode_commit(raw["commit"])
    assert commit == Commit(0x1873420, 0x1873450, 848099239502005)


def test_encoders_write_what_the_server_writes() -> None:
    raw = {name: bytes.fromhex(text) for name, text in RECORDED.items()}
    relation = pgoutput.decode_relation(raw["relation"])
    oid = relation.oid
    assert pgoutput.encode_relation(relation) == raw["relation"]
    assert pgoutput.encode_begin(pgoutput.decode_begin(raw["begin"])) == raw["begin"]
    assert pgoutput.encode_commit(pgoutput.decode_commit(raw["commit"])) == raw["commit"]
    assert pgoutput.encode_truncate(Truncate((oid,), False, False)) == raw["truncate"]
    assert pgoutput.encode_insert(oid, [b"1", b"one"]) == raw["insert"]
    assert pgoutput.encode_update(oid, [b"3", b"one"], [b"1", None]) == raw["update"]
    assert pgoutput.encode_delete(oid, [b"2", None]) == raw["delete"]


def test_a_value_that_was_not_sent_is_encoded_as_such() -> None:
    assert pgoutput.encode_update(1, [b"1", UNCHANGED])[-1:] == b"u"


def test_names_are_decoded_in_the_given_encoding() -> None:
    relation = RelationVersion(1, "ä", "ö", "f", (RelationColumn("ü", 0, -1, True),))
    raw = pgoutput.encode_relation(relation, "latin-1")
    assert pgoutput.decode_relation(raw, "latin-1") == relation
    with pytest.raises(FormatError, match="a name in utf-8"):
        pgoutput.decode_relation(raw)


@pytest.mark.parametrize(
    "partition",
    [
        Partition("s", "leaf", 7),
        Partition("ä", "leaf", 2**32 - 1, (frozenset({"a", "b"}), frozenset({"ü"})), ""),
        Partition("s", "leaf", 7, (), "(a = 'ö')", is_rehashed=True),
    ],
)
def test_what_a_partition_is_itself_stands_behind_its_columns(partition: Partition) -> None:
    relation = RelationVersion(
        1, "s", "root", "d", (RelationColumn("a", 0, -1, True),), partition=partition
    )
    for encoding in ("utf-8", "latin-1"):
        raw = pgoutput.encode_relation(relation, encoding)
        assert pgoutput.decode_relation(raw, encoding) == relation
        for size in range(
            len(pgoutput.encode_relation(replace(relation, partition=None))) + 1, len(raw)
        ):
            with pytest.raises(FormatError):
                pgoutput.decode_relation(raw[:size], encoding)


def test_scan_finds_every_message_and_the_last_keepalive() -> None:
    data = (
        encode_keepalive(1, reply_requested=True)
        + Transaction(1, rows=2, relation=1).frames()
        + encode_keepalive(77, reply_requested=False)
    )
    found = scan(_array(data), len(data))
    assert bytes(found.kind) == b"BRIIC"
    assert list(found.relation) == [0, RELATION.oid, RELATION.oid, RELATION.oid, 0]
    assert list(found.lsn) == [100, 101, 102, 102, 150]
    assert (found.consumed, found.wal_end, found.reply_requested) == (len(data), 77, False)
    for kind, offset in zip(found.kind, found.offset, strict=True):
        assert data[offset] == kind


def test_scan_leaves_a_cut_frame_for_the_next_buffer() -> None:
    data = join(Transaction(n, rows=3) for n in range(1, 4))
    whole = scan(_array(data), len(data))
    ends = [0, *(int(o + n) for o, n in zip(whole.offset, whole.length, strict=True))]
    for size in range(len(data) + 1):
        found = scan(_array(data), size)
        assert found.consumed == max(end for end in ends if end <= size)
        assert len(found) == ends.index(found.consumed)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"x", "a CopyData message at offset 0"),
        (b"d\0\0\0\4", "the length of a CopyData message at offset 1"),
        (b"d\xff\xff\xff\xff", "the length of a CopyData message at offset 1"),
        (b"d\0\0\0\6z", "XLogData or a keepalive at offset 5"),
        (b"d\0\0\0\6w", "an XLogData message with contents"),
        (b"d\0\0\0\6k", "a keepalive of 18 bytes"),
        (encode_frame(b"?", 1), "a message of pgoutput at offset 30"),
        (encode_frame(b"I\0", 1), "the OID of a relation"),
    ],
)
def test_scan_names_what_it_expected_and_where(data: bytes, expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        scan(_array(data), len(data))


def test_scan_stops_at_the_end_of_the_stream_when_told_to() -> None:
    data = Transaction(1).frames()
    found = scan(_array(data + b"c\0\0\0\4"), len(data) + 5, stop_at_other=True)
    assert found.is_over
    assert found.consumed == len(data)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_scan_of_garbage_is_an_error_or_nothing(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        assert scan(_array(data), len(data)).consumed <= len(data)


@settings(deadline=None)  # the first call compiles
@given(st.data())
def test_scan_of_a_damaged_stream_never_leaves_the_buffer(data: st.DataObject) -> None:
    stream = bytearray(join(Transaction(n, rows=2, relation=n) for n in range(1, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.integers(0, len(stream)))
    try:
        found = scan(_array(bytes(stream)), size)
    except FormatError:
        return
    assert found.consumed <= size
    for offset, length in zip(found.offset, found.length, strict=True):
        assert length > 0
        assert offset + length <= size


@given(st.sampled_from(sorted(RECORDED)), st.data())
def test_decoders_refuse_damaged_messages(name: str, data: st.DataObject) -> None:
    raw = bytearray(bytes.fromhex(RECORDED[name]))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    for decode in (
        pgoutput.decode_begin,
        pgoutput.decode_commit,
        pgoutput.decode_relation,
        pgoutput.decode_truncate,
    ):
        with contextlib.suppress(FormatError):
            decode(bytes(raw))


def test_whole_frames_are_never_split() -> None:
    frames = [encode_frame(b"O" + bytes(n), 1) for n in (10, 500, 20)]
    buffer = _array(b"".join(frames))
    sizes = [len(frame) for frame in frames]
    assert whole_frames(buffer, sizes[0]) == sizes[0]
    assert whole_frames(buffer, sizes[0] + 1) == sizes[0]
    assert whole_frames(buffer, 1) == sizes[0]
    assert whole_frames(buffer, len(buffer)) == len(buffer)


def test_scan_is_fast() -> None:
    """It is compiled: a step of Python for each message would be far below this."""
    data = Transaction(1, rows=100_000, row_bytes=100).frames()
    buffer = _array(data)
    scan(buffer, len(data))
    fastest = 1e9
    for _ in range(5):
        begun = time.thread_time()  # whatever else the machine does
        scan(buffer, len(data))
        fastest = min(fastest, time.thread_time() - begun)
    assert len(data) / fastest > 100e6


@given(st.integers(0, 2**64 - 1))
def test_an_lsn_survives_being_printed(lsn: int) -> None:
    assert parse_lsn(render_lsn(lsn)) == lsn


def test_lsn_of_people() -> None:
    assert parse_lsn("16/B374D848") == 0x16B374D848
    assert render_lsn(0x16B374D848) == "16/B374D848"
    for text in ("", "16", "16/", "g/1", "123456789/1", "16/B374D848 x"):
        with pytest.raises(ConfigError):
            parse_lsn(text)
