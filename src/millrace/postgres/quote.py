"""Identifiers and literals as SQL text, for statements that take no parameters.

Invariant: every name and value that enters a statement as text went through here.
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace.relation import Column


def ident(name: str) -> str:
    """A quoted identifier; always quoted, so no keyword list is needed."""
    return '"' + name.replace('"', '""') + '"'


def qualified(schema: str, name: str) -> str:
    """`"schema"."name"`."""
    return f"{ident(schema)}.{ident(name)}"


def columns(names: list[str] | tuple[str, ...]) -> str:
    """A comma-separated list of identifiers."""
    return ", ".join(map(ident, names))


def selected(columns: Iterable[Column]) -> str:
    """The same for a SELECT of the source, with what is computed in the place of a column."""
    return ", ".join(
        f"{one.expression} AS {ident(one.name)}" if one.expression else ident(one.name)
        for one in columns
    )


def literal(value: str) -> str:
    """A string literal that reads the same whatever standard_conforming_strings says."""
    quoted = "'" + value.replace("'", "''") + "'"
    return " E" + quoted.replace("\\", "\\\\") if "\\" in value else quoted
