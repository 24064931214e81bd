"""The loops that put the values of a column behind what stands before them, for many rows.

Invariant: `count_*` adds to each row's size exactly the bytes that `put_*` writes for it. Rows may
lie anywhere in the output: each has a cursor, which moves with what is written.

Texts are bare, or in quotes. In quotes some bytes take two: `first` and `second` say which, where
`first` is not 0.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from millrace.postgres.kernel import kernel

Bytes = NDArray[np.uint8]

BARE, QUOTED, BITS, WORD = range(4)

_NULL_TEXT: Final = np.frombuffer(b"null", np.uint8)
_UNCHANGED_TEXT: Final = np.frombuffer(b"unchanged-toast-datum", np.uint8)
_TRUE: Final = np.frombuffer(b"true", np.uint8)
_FALSE: Final = np.frombuffer(b"false", np.uint8)


@kernel
def put(out: Any, at: Any, text: Any) -> Any:
    """All of a text; where it ends."""
    for i in range(len(text)):
        out[at + i] = text[i]
    return at + len(text)


@kernel
def count_literals(
    label: Any, mode: Any, skip_null: Any, first: Any, data: Any, at: Any, size: Any, totals: Any
) -> None:
    for row in range(len(size)):
        length = size[row]
        if length == -1:
            if not skip_null:
                totals[row] += len(label) + 4
            continue
        if length == -2:
            totals[row] += len(label) + 21
        elif mode == 0:
            totals[row] += len(label) + length
        elif mode == 3:
            totals[row] += len(label) + (4 if data[at[row]] == 116 else 5)
        elif mode == 2:
            totals[row] += len(label) + length + 3
        else:
            twice = 0
            begin = at[row]
            for i in range(begin, begin + length):
                twice += first[data[i]] != 0
            totals[row] += len(label) + length + 2 + twice


@kernel
def put_literals(
    label: Any,
    mode: Any,
    skip_null: Any,
    first: Any,
    second: Any,
    data: Any,
    at: Any,
    size: Any,
    out: Any,
    cursor: Any,
) -> None:
    for row in range(len(size)):
        length = size[row]
        if length == -1 and skip_null:
            continue
        to = put(out, cursor[row], label)
        if length == -1:
            cursor[row] = put(out, to, _NULL_TEXT)
            continue
        if length == -2:
            cursor[row] = put(out, to, _UNCHANGED_TEXT)
            continue
        begin = at[row]
        if mode == 3:
            cursor[row] = put(out, to, _TRUE) if data[begin] == 116 else put(out, to, _FALSE)
            continue
        if mode == 0:
            for i in range(length):
                out[to + i] = data[begin + i]
            cursor[row] = to + length
            continue
        if mode == 2:
            out[to] = 66
            to += 1
        out[to] = 39
        to += 1
        for i in range(begin, begin + length):
            byte = data[i]
            if first[byte]:
                out[to] = first[byte]
                out[to + 1] = second[byte]
                to += 2
            else:
                out[to] = byte
                to += 1
        out[to] = 39
        cursor[row] = to + 1


@kernel
def count_fields(size: Any, totals: Any) -> None:
    """Values in pgoutput's messages."""
    for row in range(len(size)):
        totals[row] += 1 if size[row] < 0 else 5 + size[row]


@kernel
def put_fields(data: Any, at: Any, size: Any, out: Any, cursor: Any) -> None:
    for row in range(len(size)):
        to = cursor[row]
        length = size[row]
        if length < 0:
            # n or u
            out[to] = 110 if length == -1 else 117
            cursor[row] = to + 1
            continue
        out[to] = 116
        out[to + 1] = length >> 24
        out[to + 2] = length >> 16 & 255
        out[to + 3] = length >> 8 & 255
        out[to + 4] = length & 255
        to += 5
        begin = at[row]
        for i in range(length):
            out[to + i] = data[begin + i]
        cursor[row] = to + length


@kernel
def put_constant(text: Any, out: Any, cursor: Any) -> None:
    """The same text in each row."""
    for row in range(len(cursor)):
        cursor[row] = put(out, cursor[row], text)


@kernel
def _put_hexadecimal(out: Any, at: Any, number: Any) -> Any:
    digits = 1
    rest = number >> np.uint64(4)
    while rest:
        digits += 1
        rest >>= np.uint64(4)
    for i in range(at + digits - 1, at - 1, -1):
        digit = np.int64(number & np.uint64(15))
        out[i] = 48 + digit if digit < 10 else 55 + digit
        number >>= np.uint64(4)
    return at + digits


@kernel
def _put_decimal(out: Any, at: Any, number: Any) -> Any:
    digits = 1
    rest = number // 10
    while rest:
        digits += 1
        rest //= 10
    for i in range(at + digits - 1, at - 1, -1):
        out[i] = 48 + number % 10
        number //= 10
    return at + digits


@kernel
def put_positions(lsn: Any, xid: Any, out: Any, cursor: Any) -> None:
    """`lsn TAB xid TAB`."""
    for row in range(len(cursor)):
        to = _put_hexadecimal(out, cursor[row], lsn[row] >> np.uint64(32))
        out[to] = 47
        to = _put_hexadecimal(out, to + 1, lsn[row] & np.uint64(0xFFFFFFFF))
        out[to] = 9
        to = _put_decimal(out, to + 1, xid[row])
        out[to] = 9
        cursor[row] = to + 1


@kernel
def put_decimals(number: Any, out: Any, cursor: Any) -> None:
    for row in range(len(cursor)):
        cursor[row] = _put_decimal(out, cursor[row], number[row])


@kernel
def count_positions(lsn: Any, xid: Any, totals: Any) -> None:
    scratch = np.empty(64, np.uint8)
    for row in range(len(totals)):
        size = _put_hexadecimal(scratch, 0, lsn[row] >> np.uint64(32))
        size = _put_hexadecimal(scratch, size, lsn[row] & np.uint64(0xFFFFFFFF))
        totals[row] += _put_decimal(scratch, size, xid[row]) + 3


@kernel
def count_decimals(number: Any, totals: Any) -> None:
    scratch = np.empty(32, np.uint8)
    for row in range(len(totals)):
        totals[row] += _put_decimal(scratch, 0, number[row])


@kernel
def put_bytes(table: Any, out: Any, cursor: Any) -> None:
    """A row of a table of bytes in each row."""
    for row in range(len(cursor)):
        cursor[row] = put(out, cursor[row], table[row])
