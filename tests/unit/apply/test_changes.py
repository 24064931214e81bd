"""Frames into change batches."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.stream.changes import RELATION, Transaction, append, join, relation_version

from millrace.change import SCHEMA
from millrace.errors import FormatError, WorkDirError
from millrace.postgres.pgoutput.messages import (
    UNCHANGED,
    Begin,
    Commit,
    RelationColumn,
    RelationVersion,
    Truncate,
    Value,
    encode_begin,
    encode_commit,
    encode_delete,
    encode_frame,
    encode_insert,
    encode_relation,
    encode_truncate,
    encode_update,
)
from millrace.spool.change_batch import iter_changes
from millrace.spool.reader import SpoolReader, prune
from millrace.spool.selection import open_change_spool, parse_tables
from millrace.spool.writer import SpoolWriter

OTHER = RelationVersion(
    20000,
    "Other Schema",
    "full",
    "f",
    (RelationColumn("a", 25, -1, True), RelationColumn("b", 23, -1, True)),
)


def transaction(number: int, *messages: bytes) -> bytes:
    """Frames of transaction `number`, which ends at 100 * number + 50."""
    lsn = 100 * number
    parts = [encode_begin(Begin(lsn + 40, number, number)), *messages]
    frames = [encode_frame(message, lsn + at) for at, message in enumerate(parts)]
    return b"".join(frames) + encode_frame(
        encode_commit(Commit(lsn + 40, lsn + 50, number)), lsn + 50
    )


def write(directory: Path, *transactions: bytes) -> None:
    with SpoolWriter(directory) as writer:
        assert append(writer, b"".join(transactions)) == b""
        writer.sync()


def read(directory: Path, encoding: str = "utf-8", **more: Any) -> list[dict[str, Any]]:
    reader = SpoolReader(directory, encoding)
    range_ = reader.plan(0, 1 << 40)
    assert range_ is not None
    rows: list[dict[str, Any]] = []
    for batch in iter_changes(reader, range_, encoding, **more):
        batch.validate(full=True)
        assert batch.schema.equals(SCHEMA)
        rows += batch.to_pylist()
    return rows


def test_each_operation_has_its_columns(tmp_path: Path) -> None:
    oid = RELATION.oid
    write(
        tmp_path,
        transaction(
            1,
            encode_relation(RELATION),
            encode_insert(oid, [b"1", "é".encode()]),
            encode_insert(oid, [b"2", None]),
            encode_update(oid, [b"1", b""]),
            encode_update(oid, [b"3", UNCHANGED], [b"1", None]),
            encode_delete(oid, [b"3", None]),
        ),
        transaction(
            2,
            encode_relation(OTHER),
            encode_update(OTHER.oid, [b"x", b"2"], [None, b"1"], old_is_key=False),
            encode_truncate(Truncate((OTHER.oid, oid), cascade=False, restart_identity=True)),
            encode_insert(oid, [b"9", b"z"]),
        ),
    )
    rows = read(tmp_path)
    assert [(r["operation"], r["old"], r["new"], r["unchanged"], r["options"]) for r in rows] == [
        ("insert", None, [("id", "1"), ("value", "é")], [], None),
        ("insert", None, [("id", "2"), ("value", None)], [], None),
        ("update", None, [("id", "1"), ("value", "")], [], None),
        ("update", [("id", "1")], [("id", "3")], ["value"], None),
        ("delete", [("id", "3")], None, [], None),
        ("update", [("a", None), ("b", "1")], [("a", "x"), ("b", "2")], [], None),
        ("truncate", None, None, [], ["restart_identity"]),
        ("truncate", None, None, [], ["restart_identity"]),
        ("insert", None, [("id", "9"), ("value", "z")], [], None),
    ]
    assert [(r["xid"], r["commit_lsn"], r["end_lsn"], r["position"]) for r in rows] == [
        *((1, 140, 150, n) for n in range(5)),
        *((2, 240, 250, n) for n in range(4)),
    ]
    assert [r["table"] for r in rows] == [*["t"] * 5, "full", "full", "t", "t"]
    assert rows[5]["schema"] == "Other Schema"
    assert [rows[0]["key"], rows[5]["key"]] == [["id"], ["a", "b"]]
    assert [rows[0]["replica_identity"], rows[5]["replica_identity"]] == ["default", "full"]
    assert rows[0]["committed_at"].isoformat() == "2000-01-01T00:00:00.000001+00:00"


@pytest.mark.parametrize("chunk_bytes", [1, 100, 700, 1 << 20])
def test_the_same_changes_come_out_of_any_chunks(tmp_path: Path, chunk_bytes: int) -> None:
    write(
        tmp_path,
        join(
            [
                Transaction(1, rows=3, relation=0),
                Transaction(2, rows=40),
                Transaction(3, rows=0),
                Transaction(4, rows=2, relation=1),
                Transaction(5, rows=1, relation=1),
                Transaction(6, rows=30, relation=0),
            ]
        ),
    )
    rows = read(tmp_path, chunk_bytes=chunk_bytes)
    found = [(r["xid"], r["position"], r["end_lsn"], r["new"][0], r["new"][1][0]) for r in rows]
    expected = [
        (number, row, 100 * number + 50, ("id", str(row)), f"value_{version}")
        for number, count, version in [(1, 3, 0), (2, 40, 0), (4, 2, 1), (5, 1, 1), (6, 30, 0)]
        for row in range(count)
    ]
    assert found == expected


def test_a_relation_is_used_as_it_was_at_its_row(tmp_path: Path) -> None:
    first, second = relation_version(1), relation_version(2)
    row: list[Value] = [b"1", b"x"]
    write(
        tmp_path,
        transaction(
            1,
            encode_relation(first),
            encode_insert(first.oid, row),
            encode_relation(second),
            encode_insert(first.oid, row),
            encode_relation(first),
            encode_insert(first.oid, row),
        ),
    )
    assert [r["new"][1][0] for r in read(tmp_path)] == ["value_1", "value_2", "value_1"]


def test_tables_that_are_not_asked_for_are_left_out_but_counted(tmp_path: Path) -> None:
    write(
        tmp_path,
        transaction(
            1,
            encode_relation(RELATION),
            encode_relation(OTHER),
            encode_insert(RELATION.oid, [b"1", b"x"]),
            encode_insert(OTHER.oid, [b"1", b"2"]),
            encode_truncate(Truncate((RELATION.oid, OTHER.oid), True, False)),
        ),
    )
    rows = read(tmp_path, tables=parse_tables('"Other Schema".full, public.nothing'))
    assert [(r["table"], r["position"]) for r in rows] == [("full", 1), ("full", 3)]
    assert read(tmp_path, tables=parse_tables("public.nothing")) == []


def as_binary(message: bytes, row: Sequence[bytes], start: int) -> bytes:
    data, at = bytearray(message), start
    for value in row:
        assert data[at : at + 1] == b"t"
        data[at : at + 1] = b"b"
        at += 5 + len(value)
    return bytes(data)


def test_binary_values_become_text(tmp_path: Path) -> None:
    names = [("a", 23), ("b", 25), ("c", 16), ("d", 1114), ("e", 1009)]
    relation = RelationVersion(
        30000, "public", "b", "d", tuple(RelationColumn(n, t, -1, n == "a") for n, t in names)
    )
    array = struct.pack(">iiIiii", 1, 0, 25, 1, 1, 1) + b","
    row = [struct.pack(">i", -5), "ü".encode(), b"\1", struct.pack(">q", 1_500_000), array]
    insert = as_binary(encode_insert(relation.oid, row), row, 8)
    text = encode_insert(relation.oid, [b"6", b"", b"f", b"infinity", None])
    write(tmp_path, transaction(1, encode_relation(relation), insert, text, insert))
    binary = {"a": "-5", "b": "ü", "c": "t", "d": "2000-01-01 00:00:01.5", "e": '{","}'}
    rows = read(tmp_path)
    assert [dict(r["new"]) for r in rows] == [
        binary,
        {"a": "6", "b": "", "c": "f", "d": "infinity", "e": None},
        binary,
    ]


def test_a_binary_type_that_can_not_be_printed_names_the_column(tmp_path: Path) -> None:
    relation = RelationVersion(30000, "s", "b", "d", (RelationColumn("m", 790, -1, False),))
    insert = as_binary(encode_insert(relation.oid, [b"12345678"]), [b"12345678"], 8)
    write(tmp_path, transaction(1, encode_relation(relation), insert))
    with pytest.raises(FormatError, match=r"s\.b\.m: .* OID 790") as caught:
        read(tmp_path)
    assert "--no-binary" in caught.value.hint


def test_damaged_binary_values_name_the_column(tmp_path: Path) -> None:
    relation = RelationVersion(30000, "s", "b", "d", (RelationColumn("m", 1700, -1, False),))
    insert = as_binary(encode_insert(relation.oid, [b"123"]), [b"123"], 8)
    write(tmp_path, transaction(1, encode_relation(relation), insert))
    with pytest.raises(FormatError, match=r"s\.b\.m: .*numeric"):
        read(tmp_path)


def test_other_encodings_are_decoded_and_other_bytes_refused(tmp_path: Path) -> None:
    value = "Grüße".encode("latin-1")
    write(
        tmp_path,
        transaction(
            1,
            encode_relation(RELATION),
            encode_insert(RELATION.oid, [b"1", value]),
            encode_insert(RELATION.oid, [b"2", None]),
        ),
    )
    assert [r["new"][1][1] for r in read(tmp_path, "latin-1")] == ["Grüße", None]
    with pytest.raises(FormatError, match=r"public\.t\.value: expected text in utf-8"):
        read(tmp_path)


def test_a_row_that_does_not_fit_its_table_is_an_error(tmp_path: Path) -> None:
    write(
        tmp_path,
        transaction(1, encode_relation(RELATION), encode_insert(RELATION.oid, [b"1"])),
    )
    with pytest.raises(FormatError, match=r"public\.t: expected a row of 2 columns"):
        read(tmp_path)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.binary(min_size=1, max_size=3))
def test_damaged_rows_give_an_error_or_a_valid_batch(seed: int, noise: bytes) -> None:
    from millrace.postgres.pgoutput.entries import RowMessages, find_entries

    chance = random.Random(seed)
    message = bytearray(
        encode_update(RELATION.oid, [b"1", b"abc"], [b"2", None])
        + encode_delete(OTHER.oid, [b"x", b"1"], old_is_key=False)
    )
    at = chance.randrange(len(message))
    message[at : at + len(noise)] = noise
    cut = len(encode_update(RELATION.oid, [b"1", b"abc"], [b"2", None]))
    found = find_entries(
        np.frombuffer(bytes(message), np.uint8),
        RowMessages(
            np.frombuffer(b"UD", np.uint8),
            np.array([0, cut]),
            np.array([cut, len(message) - cut]),
            np.array([0, 2]),
            np.array([2, 2]),
            np.array([True, False, True, True]),
        ),
    )
    if isinstance(found, int):
        assert found in (0, 1)
        return
    for entries in (found.new, found.old):
        assert np.all(entries.at + np.maximum(entries.size, 0) <= len(message))


def test_what_was_pruned_or_not_received_is_refused(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path, segment_bytes=2000) as writer:
        for number in range(1, 40):
            relation = 0 if number == 1 else None
            append(writer, Transaction(number, rows=5, relation=relation).frames())
            writer.sync()
        writer.mark_idle(5000)
        writer.sync()
    spool = open_change_spool(tmp_path)
    assert spool.extent().oldest_lsn == 0
    assert prune(tmp_path, 2000) > 0
    extent = spool.extent()
    assert 0 < extent.oldest_lsn <= 2000
    assert (extent.last_end_lsn, extent.complete_lsn) == (3950, 5000)
    with pytest.raises(WorkDirError, match="was pruned and begins after 0/"):
        spool.ranges(0, 3950, 1000)
    ranges = spool.ranges(extent.oldest_lsn, 3950, 1000)
    assert ranges[0].after_lsn == extent.oldest_lsn
    assert [r.after_lsn for r in ranges[1:]] == [r.end_lsn for r in ranges[:-1]]
    assert ranges[-1].end_lsn == 3950
    spool.check_until(5000)
    with pytest.raises(WorkDirError, match="received them up to 0/1388 only"):
        spool.check_until(5001)


def test_lists_of_tables_are_parsed() -> None:
    assert parse_tables('a.b, "C.d"."e""f" ,g.h') == {("a", "b"), ("C.d", 'e"f'), ("g", "h")}
    assert parse_tables("") == frozenset()


def test_a_transaction_without_rows_makes_no_batch(tmp_path: Path) -> None:
    write(tmp_path, Transaction(1, rows=0).frames())
    assert read(tmp_path) == []
    assert isinstance(SCHEMA, pa.Schema)
