"""Stored jsonpath as the server prints it.

Invariant: parentheses are set where the server sets them.

    jsonpath = version and 0x80000000 for lax:4 item *
    item     = kind:1, padding to 4 bytes, next:4, and what the kind has; offsets of other items
               are relative to the item's own place, and 0 means none

Facts: jsonpath.h; jsonpath.c, flattenJsonPathParseItem(), jspInitByBuffer(), printJsonPathItem().
"""

from __future__ import annotations

import struct
from typing import Final

from millrace.wal.row import varlena
from millrace.wal.types.jsonb import quote_json
from millrace.wal.types.number import render_numeric
from millrace.wal.types.scalar import TEXT_ENCODING

_VERSION: Final = 1
_LAX: Final = 0x80000000
_LAST: Final = 0xFFFFFFFF
# Deeper nesting than any the server's parser accepts.
_MAX_DEPTH: Final = 10_000

_NULL, _STRING, _NUMERIC, _BOOL = range(4)
_NOT, _IS_UNKNOWN, _PLUS, _MINUS = 6, 7, 19, 20
_ANY_KEY, _INDEX, _ANY, _KEY, _VARIABLE = 22, 23, 24, 25, 28
_FILTER, _EXISTS, _DATETIME, _LIKE_REGEX, _DECIMAL = 29, 30, 37, 42, 46
_BINARY: Final = {
    4: "&&", 5: "||", 8: "==", 9: "!=", 10: "<", 11: ">", 12: "<=", 13: ">=",
    14: "+", 15: "-", 16: "*", 17: "/", 18: "%", 41: "starts with",
}  # fmt: skip
_PLAIN: Final = {
    0: "null", 21: "[*]", 26: "@", 27: "$", 31: ".type()", 32: ".size()", 33: ".abs()",
    34: ".floor()", 35: ".ceiling()", 36: ".double()", 38: ".keyvalue()", 40: "last",
    43: ".bigint()", 44: ".boolean()", 45: ".date()", 47: ".integer()", 48: ".number()",
    49: ".string()",
}  # fmt: skip
# Methods with one argument, or none.
_METHODS: Final = {37: "datetime", 50: "time", 51: "time_tz", 52: "timestamp", 53: "timestamp_tz"}
_PRIORITY: Final = {
    5: 0, 4: 1, **dict.fromkeys((8, 9, 10, 11, 12, 13, 41), 2), 14: 3, 15: 3,
    **dict.fromkeys((16, 17, 18), 4), 19: 5, 20: 5,
}  # fmt: skip
_HIGHEST: Final = 6
_REGEX_FLAGS: Final = ((1, "i"), (2, "s"), (4, "m"), (8, "x"), (16, "q"))


def render_jsonpath(data: bytes) -> str:
    (header,) = struct.unpack_from("<I", data)
    if header & ~_LAX != _VERSION:
        raise ValueError(f"version {header & ~_LAX} of jsonpath")
    text = _Item(data, 4).render(in_key=False, in_brackets=True)
    return text if header & _LAX else "strict " + text


class _Item:
    """The item at a place, with the items behind it."""

    def __init__(self, data: bytes, at: int, depth: int = 0) -> None:
        if depth > _MAX_DEPTH or not 4 <= at < len(data):
            raise ValueError(f"an item at {at}")
        self._data = data
        self._at = at
        self._depth = depth
        self.kind = data[at]
        self._content = at + 1 + -(at + 1) % 4 + 4
        (self._next,) = struct.unpack_from("<i", data, self._content - 4)

    @property
    def priority(self) -> int:
        return _PRIORITY.get(self.kind, _HIGHEST)

    def render(self, *, in_key: bool, in_brackets: bool) -> str:
        text = self._own(in_key, in_brackets)
        if not self._next:
            return text
        return text + self._item(self._next).render(in_key=True, in_brackets=True)

    def _own(self, in_key: bool, in_brackets: bool) -> str:
        kind = self.kind
        dot = "." if in_key else ""
        if kind in _PLAIN:
            return _PLAIN[kind]
        if kind in (_STRING, _KEY, _VARIABLE):
            text = quote_json(self._text(self._content))
            return text if kind == _STRING else f"{dot}{text}" if kind == _KEY else f"${text}"
        if kind == _NUMERIC:
            return f"({self._number()})" if self._next else self._number()
        if kind == _BOOL:
            return "true" if self._data[self._content] else "false"
        if kind in _BINARY:
            return _bracketed(self._binary(), in_brackets)
        if kind in (_PLUS, _MINUS):
            return _bracketed(("+" if kind == _PLUS else "-") + self._operand(0), in_brackets)
        if kind == _LIKE_REGEX:
            return _bracketed(self._like_regex(), in_brackets)
        if kind == _ANY_KEY:
            return dot + "*"
        if kind == _ANY:
            return dot + self._any()
        if kind == _INDEX:
            return self._index()
        return self._with_argument()

    def _with_argument(self) -> str:
        if self.kind == _DECIMAL:
            arguments = [self._inner(offset) for offset in (0, 4) if self._number_at(offset)]
            return f".decimal({','.join(arguments)})"
        argument = self._inner(0) if self._number_at(0) else ""
        if self.kind in _METHODS:
            return f".{_METHODS[self.kind]}({argument})"
        forms = {
            _NOT: "!({})",
            _IS_UNKNOWN: "({}) is unknown",
            _FILTER: "?({})",
            _EXISTS: "exists ({})",
        }
        if self.kind not in forms:
            raise ValueError(f"an item of kind {self.kind}")
        return forms[self.kind].format(argument)

    def _binary(self) -> str:
        return f"{self._operand(0)} {_BINARY[self.kind]} {self._operand(4)}"

    def _like_regex(self) -> str:
        flags = self._number_at(0)
        letters = "".join(letter for bit, letter in _REGEX_FLAGS if flags & bit)
        suffix = f' flag "{letters}"' if letters else ""
        pattern = quote_json(self._text(self._content + 8))
        return f"{self._operand(4)} like_regex {pattern}{suffix}"

    def _any(self) -> str:
        first, last = struct.unpack_from("<II", self._data, self._content)
        if (first, last) == (0, _LAST):
            return "**"
        begin = "last" if first == _LAST else str(first)
        end = "last" if last == _LAST else str(last)
        return f"**{{{begin}}}" if first == last else f"**{{{begin} to {end}}}"

    def _index(self) -> str:
        parts = []
        for number in range(self._number_at(0)):
            begin, end = 4 + 8 * number, 8 + 8 * number
            text = self._inner(begin)
            parts.append(f"{text} to {self._inner(end)}" if self._number_at(end) else text)
        return f"[{','.join(parts)}]"

    def _operand(self, offset: int) -> str:
        """In brackets if it binds no tighter than this item."""
        item = self._item(self._number_at(offset))
        return item.render(in_key=False, in_brackets=item.priority <= self.priority)

    def _inner(self, offset: int) -> str:
        return self._item(self._number_at(offset)).render(in_key=False, in_brackets=False)

    def _item(self, distance: int) -> _Item:
        return _Item(self._data, self._at + distance, self._depth + 1)

    def _number_at(self, offset: int) -> int:
        number: int = struct.unpack_from("<i", self._data, self._content + offset)[0]
        return number

    def _text(self, at: int) -> str:
        (length,) = struct.unpack_from("<i", self._data, at)
        return self._data[at + 4 : at + 4 + length].decode(TEXT_ENCODING)

    def _number(self) -> str:
        size = varlena.measure(self._data, self._content)
        number = varlena.decode(self._data, self._content, size)
        if not isinstance(number, bytes):
            raise ValueError("a number that is stored elsewhere")
        return render_numeric(number)


def _bracketed(text: str, in_brackets: bool) -> str:
    return f"({text})" if in_brackets else text
