"""Folding: the net changes do to a table what the changes one by one do."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.apply.fold import Lines, NetChanges, fold
from millrace.errors import FormatError
from millrace.postgres.pgoutput.messages import (
    UNCHANGED,
    Value,
    encode_delete,
    encode_frame,
    encode_insert,
    encode_update,
    scan,
)
from millrace.postgres.pgoutput.tuples import Rows, Values, locate
from millrace.postgres.wire.copy_format import encode_binary, encode_text

KEY = np.array([0], np.int64)
BOTH = np.array([0, 1], np.int64)

Row = tuple[bytes, bytes | None]


def rows_of(messages: list[bytes], columns: int = 2) -> Rows:
    data = b"".join(encode_frame(message, lsn) for lsn, message in enumerate(messages, 1))
    buffer = np.frombuffer(data, np.uint8)
    found = scan(buffer, len(buffer))
    return locate(buffer, found.kind, found.offset, found.length, found.lsn, columns)


def read(net: NetChanges, values: Values) -> list[tuple[Value, ...]]:
    def one(at: int, size: int) -> Value:
        if size < 0:
            return None if size == -1 else UNCHANGED
        return net.buffer[at : at + size].tobytes()

    return [
        tuple(one(int(a), int(s)) for a, s in zip(at, size, strict=True))
        for at, size in zip(values.at, values.size, strict=True)
    ]


class Table:
    """A table by key, changed one by one, which also writes down the messages."""

    def __init__(self, rows: dict[bytes, bytes | None]) -> None:
        self.rows = dict(rows)
        self.messages: list[bytes] = []

    def insert(self, key: bytes, value: bytes | None) -> None:
        if key not in self.rows:
            self.rows[key] = value
            self.messages.append(encode_insert(1, [key, value]))

    def update(self, key: bytes, to: bytes, value: Value) -> None:
        if key not in self.rows or (to != key and to in self.rows):
            return
        old = self.rows.pop(key)
        self.rows[to] = old if value is UNCHANGED else value  # type: ignore[assignment]
        before = None if to == key else [key, None]
        self.messages.append(encode_update(1, [to, value], before))

    def delete(self, key: bytes) -> None:
        if key in self.rows:
            del self.rows[key]
            self.messages.append(encode_delete(1, [key, None]))


keys = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
values = st.one_of(st.none(), st.binary(max_size=3))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), keys, values),
        st.tuples(st.just("update"), keys, keys, st.one_of(values, st.just(UNCHANGED))),
        st.tuples(st.just("delete"), keys),
    ),
    max_size=40,
)


@given(st.dictionaries(keys, values, max_size=4), operations)
def test_net_changes_do_what_the_changes_do(
    before: dict[bytes, bytes | None], todo: list[tuple[object, ...]]
) -> None:
    table = Table(before)
    for name, *arguments in todo:
        getattr(table, str(name))(*arguments)
    net = fold(rows_of(table.messages), KEY, is_multiset=False)
    result = dict(before)
    gone = [key for (key,) in read(net, net.deleted.before)]
    for key in gone:
        del result[key]  # type: ignore[arg-type]
    changed = []
    pairs = zip(read(net, net.updated.before), read(net, net.updated.after), strict=True)
    for (key,), (to, value) in pairs:
        old = result.pop(key)  # type: ignore[arg-type]
        changed.append((to, old if value is UNCHANGED else value))
    assert all(to not in result for to, _ in changed)
    result.update(changed)  # type: ignore[arg-type]
    for key, value in read(net, net.inserted.after):
        assert key not in result
        result[key] = value  # type: ignore[assignment, index]
    assert result == table.rows


@given(
    st.lists(st.tuples(keys, values), max_size=6),
    st.lists(st.tuples(st.sampled_from("IUD"), st.integers(0, 9), keys, values), max_size=30),
)
def test_without_a_key_equal_rows_are_counted(
    before: list[Row], todo: list[tuple[str, int, bytes, bytes | None]]
) -> None:
    rows = list(before)
    messages = []
    for kind, which, key, value in todo:
        new = (key, value)
        if kind == "I":
            rows.append(new)
            messages.append(encode_insert(1, new))
            continue
        if not rows:
            continue
        old = rows.pop(which % len(rows))
        if kind == "U":
            rows.append(new)
            messages.append(encode_update(1, new, old, old_is_key=False))
        else:
            messages.append(encode_delete(1, old, old_is_key=False))
    net = fold(rows_of(messages), BOTH, is_multiset=True)
    result = Counter[tuple[Value, ...]](before)
    for lines in (net.deleted, net.updated):
        result.subtract(read(net, lines.before))
        assert min(result.values(), default=0) >= 0
    for lines in (net.updated, net.inserted):
        result.update(read(net, lines.after))
    assert +result == Counter(rows)


def test_many_updates_of_one_row_are_one_update() -> None:
    messages = [encode_update(1, [b"k", str(n).encode()]) for n in range(1000)]
    net = fold(rows_of(messages), KEY, is_multiset=False)
    assert len(net) == 1
    assert read(net, net.updated.after) == [(b"k", b"999")]
    assert net.updated.lsn.tolist() == [1]


def test_update_without_a_key_is_an_error() -> None:
    none = np.zeros(0, np.int64)
    with pytest.raises(FormatError, match="without a key"):
        fold(rows_of([encode_update(1, [b"k", b"v"])]), none, is_multiset=False)
    with pytest.raises(FormatError, match="without a key"):
        fold(rows_of([encode_update(1, [b"k", b"v"])]), BOTH, is_multiset=True)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_garbage_is_a_format_error(garbage: bytes, columns: int) -> None:
    message = b"U" + bytes(4) + garbage
    data = np.frombuffer(encode_frame(message, 1), np.uint8)
    found = scan(data, len(data))
    try:
        rows = locate(data, found.kind, found.offset, found.length, found.lsn, columns)
    except FormatError:
        return
    assert rows.new.at.shape == (1, columns)


def test_copy_formats() -> None:
    rows = rows_of(
        [encode_insert(1, [b"a\tb\\c\nd\re\x08\x0b\x0c", None]), encode_insert(1, [b"", b"x"])]
    )
    assert encode_text(rows.buffer, rows.new).tobytes() == (
        b"a\\tb\\\\c\\nd\\re\\b\\v\\f\t\\N\n\tx\n"
    )
    numbered = encode_text(rows.buffer, rows.new, numbered=True).tobytes()
    assert numbered.splitlines()[1] == b"1\t\tx"
    binary = encode_binary(rows.buffer, rows.new.take(np.array([1])), numbered=True).tobytes()
    assert binary == (
        b"PGCOPY\n\xff\r\n\0" + bytes(8) + b"\0\x03" + b"\0\0\0\x04\0\0\0\0"
        b"\0\0\0\0" + b"\0\0\0\x01x" + b"\xff\xff"
    )


def test_lines_can_be_chosen() -> None:
    net = fold(
        rows_of([encode_insert(1, [b"a", b"1"]), encode_insert(1, [b"b", b"2"])]),
        KEY,
        is_multiset=False,
    )
    chosen: Lines = net.inserted.take(np.array([1]))
    assert read(net, chosen.after) == [(b"b", b"2")]
