"""Stored jsonb as the server prints it.

Invariant: keys and elements come in the order in which they are stored; a number keeps its scale.

    container = header:4 entry:4 * data
    header    = count in 28 bits, is_scalar 0x10000000, is_object 0x20000000, is_array 0x40000000
    entry     = size, or end if 0x80000000 is set, in 28 bits; type in the 3 bits above

An object has the entries of all keys before those of all values. A number and a container are
aligned to 4 bytes, and the padding counts as theirs.

Facts: jsonb.h; jsonb_util.c, getJsonbOffset(), fillJsonbValue(); json.c, escape_json().
"""

from __future__ import annotations

import re
import struct
from typing import Final

from millrace.wal.row import varlena
from millrace.wal.types.number import render_numeric
from millrace.wal.types.scalar import TEXT_ENCODING

_COUNT: Final = 0x0FFFFFFF
_IS_SCALAR, _IS_OBJECT, _IS_ARRAY = 0x10000000, 0x20000000, 0x40000000
_HAS_END: Final = 0x80000000
_STRING, _NUMERIC, _FALSE, _TRUE, _NULL, _CONTAINER = range(6)
_WORDS: Final = {_FALSE: "false", _TRUE: "true", _NULL: "null"}
_SHORT: Final = {
    "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\",
}  # fmt: skip
_SPECIAL: Final = re.compile(r'[\x00-\x1f"\\]')


def render_jsonb(data: bytes) -> str:
    return _container(data, 0, len(data))


def quote_json(text: str) -> str:
    """A string of JSON; one character for each byte."""
    return '"' + _SPECIAL.sub(_escaped, text) + '"'


def _escaped(match: re.Match[str]) -> str:
    found = match[0]
    return _SHORT.get(found) or f"\\u{ord(found):04x}"


def _container(data: bytes, at: int, end: int) -> str:
    (header,) = struct.unpack_from("<I", data, at)
    count = header & _COUNT
    is_object = bool(header & _IS_OBJECT)
    if not header & (_IS_OBJECT | _IS_ARRAY):
        raise ValueError(f"a container with the header {header:#x}")
    entries = struct.unpack_from(f"<{2 * count if is_object else count}I", data, at + 4)
    values = _values(data, entries, at + 4 + 4 * len(entries), end)
    if is_object:
        pairs = zip(values[:count], values[count:], strict=True)
        return "{" + ", ".join([f"{key}: {value}" for key, value in pairs]) + "}"
    if header & _IS_SCALAR:
        return values[0]
    return "[" + ", ".join(values) + "]"


def _values(data: bytes, entries: tuple[int, ...], base: int, end: int) -> list[str]:
    values = []
    offset = 0
    for entry in entries:
        size = entry & _COUNT
        until = size if entry & _HAS_END else offset + size
        if until < offset or base + until > end:
            raise ValueError(f"a value that ends at {until}")
        values.append(_value(data, entry >> 28 & 7, base, offset, until))
        offset = until
    return values


def _value(data: bytes, kind: int, base: int, first: int, end: int) -> str:
    if kind == _STRING:
        return quote_json(data[base + first : base + end].decode(TEXT_ENCODING))
    if kind in _WORDS:
        return _WORDS[kind]
    at = base + first + -first % 4
    if kind == _CONTAINER:
        return _container(data, at, base + end)
    if kind != _NUMERIC:
        raise ValueError(f"a value of kind {kind}")
    number = varlena.decode(data, at, varlena.measure(data, at))
    if not isinstance(number, bytes):
        raise ValueError("a number that is stored elsewhere")
    return render_numeric(number)
