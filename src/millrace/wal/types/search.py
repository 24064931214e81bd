"""Stored text search values as the server prints them.

Invariant: a query is printed with exactly the parentheses the server would set.

    tsvector = lexemes:4 entry:4 * data; entry = has_positions:1 length:11 offset:20 bits, low first
               positions follow their lexeme: count:2 (weight and position):2 *, aligned to 2 bytes
    tsquery  = items:4 item:12 * data
               item = 1 weights:1 is_prefix:1 unused:1 crc:4 (length:12 offset:20 bits)
                    | 2 operator:1 distance:2 left:4 unused:4
               an operator comes before its operands, the right one before the left one

Facts: ts_type.h; tsvector.c, tsvectorout(); tsquery.c, infix().
"""

from __future__ import annotations

import struct
from typing import Final

from millrace.postgres.binary_text.search import (
    Term,
    quote_lexeme,
    render_infix,
    render_place,
    render_restriction,
)
from millrace.wal.types.scalar import TEXT_ENCODING

_ITEM_BYTES: Final = 12
_OPERAND: Final = 1


def render_tsvector(data: bytes) -> str:
    (count,) = struct.unpack_from("<i", data)
    entries = struct.unpack_from(f"<{count}I", data, 4)
    base = 4 + 4 * count
    return " ".join([_lexeme(data, base, entry) for entry in entries])


def _lexeme(data: bytes, base: int, entry: int) -> str:
    length, offset = entry >> 1 & 0x7FF, entry >> 12
    end = offset + length
    text = quote_lexeme(_text(data, base + offset, length))
    if not entry & 1:
        return text
    at = base + end + end % 2
    (count,) = struct.unpack_from("<H", data, at)
    words = struct.unpack_from(f"<{count}H", data, at + 2)
    return f"{text}:{','.join(map(render_place, words))}" if count else text


def render_tsquery(data: bytes) -> str:
    (count,) = struct.unpack_from("<i", data)
    base = 4 + _ITEM_BYTES * count
    items: list[Term | tuple[int, int]] = []
    for at in range(4, base, _ITEM_BYTES):
        if data[at] == _OPERAND:
            weights, is_prefix = struct.unpack_from("<B?", data, at + 1)
            (place,) = struct.unpack_from("<I", data, at + 8)
            lexeme = quote_lexeme(_text(data, base + (place >> 12), place & 0xFFF))
            items.append(Term(lexeme + render_restriction(weights, is_prefix)))
        else:
            operator, distance = struct.unpack_from("<bh", data, at + 1)
            items.append((operator, distance))
    return render_infix(items)


def _text(data: bytes, at: int, length: int) -> str:
    if at + length > len(data):
        raise ValueError("a lexeme behind the end")
    return data[at : at + length].decode(TEXT_ENCODING)
