"""Text search types as PostgreSQL prints them.

Invariant: a query is printed with exactly the parentheses the server would set.

    tsvector = lexemes:4 (lexeme '\\0' positions:2 (weight and position):2 *)*
    tsquery  = items:4 (1 weights:1 is_prefix:1 lexeme '\\0' | 2 operator:1 (distance:2)?)*
               an operator comes before its operands, the right one before the left one

Facts: tsvector.c, tsvectorsend(), tsvectorout(); tsquery.c, tsquerysend(), infix().
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

# A position takes 14 bits, above it is its weight; D is not printed.
_POSITION_BITS: Final = 14
_WEIGHTS = ("", "C", "B", "A")

_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
# Of operators: the larger binds tighter. A lexeme never needs parentheses.
_PRIORITY = {_OR: 1, _AND: 2, _PHRASE: 3, _NOT: 4}
_LEXEME_PRIORITY = 5


def render_tsvector(data: bytes, encoding: str) -> str:
    (count,) = struct.unpack_from(">i", data)
    at = 4
    parts = []
    for _ in range(count):
        lexeme, at = _lexeme(data, at, encoding)
        (positions,) = struct.unpack_from(">H", data, at)
        words = struct.unpack_from(f">{positions}H", data, at + 2)
        at += 2 + 2 * positions
        places = ",".join(render_place(word) for word in words)
        parts.append(f"{lexeme}:{places}" if places else lexeme)
    _check_end(data, at)
    return " ".join(parts)


@dataclass(frozen=True)
class Term:
    """A part of a query, as text, and its outermost operator."""

    text: str
    operator: int = 0

    def inside(self, parent: int, *, is_right: bool) -> str:
        """With parentheses if it needs them as an operand of `parent`."""
        priority = _PRIORITY.get(self.operator, _LEXEME_PRIORITY)
        is_loose = priority < _PRIORITY[parent]
        # `a <-> (b <-> c)` is not `(a <-> b) <-> c`.
        is_nested_phrase = is_right and parent == self.operator == _PHRASE
        return f"( {self.text} )" if is_loose or is_nested_phrase else self.text


def render_tsquery(data: bytes, encoding: str) -> str:
    (count,) = struct.unpack_from(">i", data)
    at = 4
    items: list[Term | tuple[int, int]] = []
    for _ in range(count):
        if data[at] == 1:
            weights, is_prefix = struct.unpack_from(">B?", data, at + 1)
            lexeme, at = _lexeme(data, at + 3, encoding)
            items.append(Term(lexeme + render_restriction(weights, is_prefix)))
        else:
            operator, distance = data[at + 1], 0
            at += 2
            if operator == _PHRASE:
                (distance,) = struct.unpack_from(">H", data, at)
                at += 2
            items.append((operator, distance))
    _check_end(data, at)
    return render_infix(items)


def render_infix(items: list[Term | tuple[int, int]]) -> str:
    """Read backwards, operands come before their operator."""
    stack: list[Term] = []
    for item in reversed(items):
        if isinstance(item, Term):
            stack.append(item)
            continue
        operator, distance = item
        right = stack.pop()
        if operator == _NOT:
            stack.append(Term("!" + right.inside(_NOT, is_right=False), _NOT))
            continue
        left = stack.pop()
        sign = {_AND: "&", _OR: "|"}.get(operator) or ("<->" if distance == 1 else f"<{distance}>")
        parts = (left.inside(operator, is_right=False), right.inside(operator, is_right=True))
        stack.append(Term(f" {sign} ".join(parts), operator))
    if len(stack) > 1:
        raise ValueError("operands without an operator")
    return stack[0].text if stack else ""


def render_restriction(weights: int, is_prefix: bool) -> str:
    letters = "*" if is_prefix else ""
    letters += "".join(
        letter for bit, letter in ((8, "A"), (4, "B"), (2, "C"), (1, "D")) if weights & bit
    )
    return ":" + letters if letters else ""


def _lexeme(data: bytes, at: int, encoding: str) -> tuple[str, int]:
    """(quoted, where it ends)."""
    end = data.index(b"\0", at)
    text = data[at:end].decode(encoding)
    return quote_lexeme(text), end + 1


def quote_lexeme(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def render_place(word: int) -> str:
    return f"{word & (1 << _POSITION_BITS) - 1}{_WEIGHTS[word >> _POSITION_BITS]}"


def _check_end(data: bytes, at: int) -> None:
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")
