"""Rows of COPY, text or binary, made of values that lie in a buffer.

Invariant: the bytes of a value are passed on as they are in the binary format, and with
COPY's escapes, nothing else, in the text format.

Binary:  a signature of 11 bytes, flags:4, extension:4, for each row columns:2 (length:4 value)*,
         length -1 is NULL, and -1:2 at the end.
Text:    values separated by a tab, rows ended by a newline, NULL is \\N.

Facts: PostgreSQL documentation, COPY, "File Formats".
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millrace.postgres.kernel import kernel
from millrace.postgres.pgoutput.messages import Bytes
from millrace.postgres.pgoutput.tuples import Values

_SIGNATURE: Final = np.frombuffer(b"PGCOPY\n\xff\r\n\0" + bytes(8), np.uint8)
_TRAILER: Final = np.frombuffer(b"\xff\xff", np.uint8)


def encode_binary(buffer: Bytes, values: Values, *, numbered: bool = False) -> Bytes:
    """A whole COPY BINARY stream; `numbered` puts the row's number, an int4, before its values."""
    size = _binary_size(values.size, numbered)
    out = np.empty(len(_SIGNATURE) + size + len(_TRAILER), np.uint8)
    out[: len(_SIGNATURE)] = _SIGNATURE
    out[len(out) - len(_TRAILER) :] = _TRAILER
    _encode_binary(buffer, values.at, values.size, numbered, out, len(_SIGNATURE))
    return out


def encode_text(buffer: Bytes, values: Values, *, numbered: bool = False) -> Bytes:
    """A whole COPY TEXT stream."""
    out = np.empty(_text_size(buffer, values.at, values.size, numbered), np.uint8)
    _encode_text(buffer, values.at, values.size, numbered, out)
    return out


@kernel
def _binary_size(sizes: Any, numbered: bool) -> Any:
    rows, columns = sizes.shape
    total = rows * (2 + 4 * columns + (8 if numbered else 0))
    for row in range(rows):
        for column in range(columns):
            if sizes[row, column] > 0:
                total += sizes[row, column]
    return total


@kernel
def _put32(out: Any, at: Any, value: Any) -> Any:
    out[at] = (value >> 24) & 255
    out[at + 1] = (value >> 16) & 255
    out[at + 2] = (value >> 8) & 255
    out[at + 3] = value & 255
    return at + 4


@kernel
def _put_bytes(out: Any, at: Any, buffer: Any, start: Any, size: Any) -> Any:
    # Slices call memcpy, which only pays for itself on longer values.
    if size > 32:
        out[at : at + size] = buffer[start : start + size]
    else:
        for i in range(size):
            out[at + i] = buffer[start + i]
    return at + size


@kernel
def _encode_binary(
    buffer: Any, positions: Any, sizes: Any, numbered: bool, out: Any, at: int
) -> None:
    rows, columns = sizes.shape
    fields = columns + (1 if numbered else 0)
    for row in range(rows):
        out[at] = fields >> 8
        out[at + 1] = fields & 255
        at += 2
        if numbered:
            at = _put32(out, _put32(out, at, 4), row)
        for column in range(columns):
            size = np.int64(sizes[row, column])
            at = _put32(out, at, size if size >= 0 else -1)
            if size > 0:
                at = _put_bytes(out, at, buffer, np.int64(positions[row, column]), size)


@kernel
def _escape(byte: int) -> int:
    """The letter that means this byte behind a backslash, or 0."""
    if byte > 92:
        return 0
    if byte == 92:
        return 92
    if byte > 13 or byte < 8:
        return 0
    if byte == 9:
        return 116
    if byte == 10:
        return 110
    if byte == 13:
        return 114
    if byte == 8:
        return 98
    if byte == 12:
        return 102
    return 118


@kernel
def _digits(number: int) -> int:
    digits = 1
    while number > 9:
        number //= 10
        digits += 1
    return digits


@kernel
def _text_size(buffer: Any, positions: Any, sizes: Any, numbered: bool) -> Any:
    rows, columns = sizes.shape
    # A newline or a tab behind each value; a row without columns is a newline.
    total = rows * max(1, columns)
    for row in range(rows):
        if numbered:
            total += _digits(row) + (1 if columns else 0)
        for column in range(columns):
            size = sizes[row, column]
            if size < 0:
                total += 2
                continue
            start = positions[row, column]
            total += size
            for i in range(start, start + size):
                if _escape(buffer[i]):
                    total += 1
    return total


@kernel
def _encode_text(buffer: Any, positions: Any, sizes: Any, numbered: bool, out: Any) -> None:
    rows, columns = sizes.shape
    at = 0
    for row in range(rows):
        if numbered:
            digits = _digits(row)
            rest = row
            for i in range(digits - 1, -1, -1):
                out[at + i] = 48 + rest % 10
                rest //= 10
            at += digits
            if columns:
                out[at] = 9
                at += 1
        for column in range(columns):
            if column:
                out[at] = 9
                at += 1
            size = sizes[row, column]
            if size < 0:
                out[at] = 92
                out[at + 1] = 78
                at += 2
                continue
            start = positions[row, column]
            for i in range(start, start + size):
                letter = _escape(buffer[i])
                if letter:
                    out[at] = 92
                    out[at + 1] = letter
                    at += 2
                else:
                    out[at] = buffer[i]
                    at += 1
        out[at] = 10
        at += 1
