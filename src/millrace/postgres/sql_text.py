"""SQL text, cut and classified by PostgreSQL's own grammar.

Invariant: the pieces of a script, put together, are the script, byte for byte; whatever is quoted
in a statement may hold semicolons and line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# A node of the grammar's own tree, as protobuf has it; its stubs are not valid Python.
AstNode = Any

# A line for psql itself, which pg_dump writes around a script.
_PSQL_COMMAND = re.compile(rb"^\\[^\n]*", re.M)


@dataclass(frozen=True)
class Statement:
    """A statement, with the comments before it."""

    text: bytes
    # Up to its semicolon.
    length: int
    # Where it begins in the script; places in the tree are counted from the script's begin.
    offset: int
    tree: AstNode


def cut_statements(script: bytes) -> Iterator[Statement]:
    """The statements in order; what follows the last one, such as comments, is part of it."""
    import postgast  # a tenth of a second, which most commands need not spend

    found = postgast.parse(_parseable(script)).stmts
    begin = 0
    for number, one in enumerate(found, 1):
        # The last one may lack its semicolon, and has no length then.
        last = one.stmt_location + one.stmt_len if one.stmt_len else len(script)
        end = len(script) if number == len(found) else last + 1
        yield Statement(script[begin:end], last - begin, begin, one.stmt)
        begin = end


def is_constant(expression: str) -> bool:
    """Whether an expression is a literal, with or without casts and a sign."""
    import postgast

    (statement,) = postgast.parse(f"SELECT {expression}").stmts
    (target,) = statement.stmt.select_stmt.target_list
    node = target.res_target.val
    while True:
        if node.HasField("type_cast"):
            node = node.type_cast.arg
        elif node.HasField("a_expr") and not node.a_expr.HasField("lexpr"):
            node = node.a_expr.rexpr
        else:
            return bool(node.HasField("a_const"))


def find_parameters(statement: str) -> list[tuple[str, int | None]]:
    """The text in pieces; a piece that is a parameter has its number."""
    import postgast

    data = statement.encode()
    pieces: list[tuple[str, int | None]] = []
    done = 0
    for token in postgast.scan(statement).tokens:
        text = data[token.start : token.end].decode()
        if text.startswith("$") and text[1:].isdigit():
            pieces += [(data[done : token.start].decode(), None), (text, int(text[1:]))]
            done = token.end
    return [*pieces, (data[done:].decode(), None)]


def _parseable(script: bytes) -> str:
    """As the parser takes it, each byte in its place: without lines for psql, and with a
    question mark for each byte that is not UTF-8."""
    blank = _PSQL_COMMAND.sub(lambda line: b" " * len(line[0]), script)
    text = blank.decode(errors="surrogateescape")
    return text.encode(errors="replace").decode() if not text.isascii() else text
