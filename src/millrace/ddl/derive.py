"""Statements derived from descriptions, where there is no text to replay.

Invariant: nothing is guessed: a statement is given only for a difference that it removes exactly,
and all differences are given or none. They are in the source's names.

A table made from a query is created by its columns, because its rows come with the stream. What was
dropped is dropped by its identity, because a statement may name several objects of which some are
left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from millrace.ddl.describe import Description, columns, iter_differences
from millrace.ddl.entry import CapturedObject
from millrace.postgres.quote import ident, literal

# What a kind is called in DROP.
_WORDS: Final = {
    "statistics object": "STATISTICS",
    "composite type": "TYPE",
    "table column": "TABLE",
}
_DROPPED_ALONE: Final = ("trigger", "rule", "operator class", "operator family")


def create_table(identity: str, description: Description, columns_out: Collection[str] = ()) -> str:
    """CREATE TABLE with its columns and constraints."""
    kept = [one for name, one in columns(description).items() if name not in columns_out]
    parts = [_column(one) for one in kept]
    if not columns_out:
        found = description.get("constraints") or {}
        parts += [f"CONSTRAINT {ident(name)} {text}" for name, text in sorted(found.items())]
    return f"CREATE TABLE {identity} ({', '.join(parts)})"


def drop(objects: Sequence[CapturedObject], *, cascades: bool) -> list[str]:
    """DROP of each kind, all of a kind at once: they may depend on each other."""
    behaviour = " CASCADE" if cascades else ""
    found = []
    for kind, group in groupby(sorted(objects, key=lambda one: one.type), lambda one: one.type):
        word = _WORDS.get(kind, kind.upper())
        names = [one.identity for one in group]
        if kind in _DROPPED_ALONE:
            found += [f"DROP {word} IF EXISTS {name}{behaviour}" for name in names]
        else:
            found.append(f"DROP {word} IF EXISTS {', '.join(names)}{behaviour}")
    return found


def alter_table(identity: str, before: Description, after: Description) -> list[str]:
    """What makes the one of the other; empty if that can't be said exactly."""
    if before.get("kind") != after.get("kind"):
        return []
    actions = [*_column_actions(before, after), *_constraint_actions(before, after)]
    if not actions or any(
        before.get(key) != after.get(key) for key in ("parents", "bound", "partition_key")
    ):
        return []
    return [f"ALTER TABLE {identity} {', '.join(actions)}"]


def alter_enum(identity: str, before: Description, after: Description) -> list[str]:
    """ALTER TYPE ... ADD VALUE for each new label."""
    old, new = list(before.get("labels") or ()), list(after.get("labels") or ())
    if [label for label in new if label in old] != old:
        return []
    found = []
    for at, label in enumerate(new):
        if label not in old:
            where = f" AFTER {literal(new[at - 1])}" if at else f" BEFORE {literal(old[0])}"
            found.append(f"ALTER TYPE {identity} ADD VALUE {literal(label)}{where if old else ''}")
    return found


def derive(identity: str, before: Description | None, after: Description) -> list[str]:
    """Statements that make of the target's object what it is on the source."""
    kind = after.get("kind")
    if before is None:
        if kind in ("r",) and not after.get("parents"):
            return [create_table(identity, after)]
        if kind == "enum":
            labels = ", ".join(map(literal, after.get("labels") or ()))
            return [f"CREATE TYPE {identity} AS ENUM ({labels})"]
        if kind == "i":
            return [str(after["definition"])]
        return []
    if not any(iter_differences(after, before)):
        return []
    if kind in ("r", "p"):
        return alter_table(identity, before, after)
    return alter_enum(identity, before, after) if kind == "enum" else []


def _column(one: Any) -> str:
    text = f"{ident(one['name'])} {one['type']}"
    if one.get("collation"):
        text += f" COLLATE {ident(one['collation'])}"
    if one.get("generated"):
        kind = "STORED" if one["generated"] == "s" else "VIRTUAL"
        text += f" GENERATED ALWAYS AS ({one['default']}) {kind}"
    elif one.get("identity"):
        text += f" GENERATED {'ALWAYS' if one['identity'] == 'a' else 'BY DEFAULT'} AS IDENTITY"
    elif one.get("default") is not None:
        text += f" DEFAULT {one['default']}"
    return text + (" NOT NULL" if one.get("not_null") else "")


def _column_actions(before: Description, after: Description) -> Iterator[str]:
    old, new = columns(before), columns(after)
    for name in old.keys() - new.keys():
        yield f"DROP COLUMN {ident(name)}"
    for name, one in new.items():
        if name not in old:
            yield f"ADD COLUMN {_column(one)}"
            continue
        was, alter = old[name], f"ALTER COLUMN {ident(name)}"
        if was.get("type") != one.get("type"):
            yield f"{alter} TYPE {one['type']} USING {ident(name)}::{one['type']}"
        if was.get("not_null") != one.get("not_null"):
            yield f"{alter} {'SET' if one.get('not_null') else 'DROP'} NOT NULL"
        if was.get("default") != one.get("default") and not one.get("generated"):
            value = one.get("default")
            yield f"{alter} DROP DEFAULT" if value is None else f"{alter} SET DEFAULT {value}"


def _constraint_actions(before: Description, after: Description) -> Iterator[str]:
    old, new = before.get("constraints") or {}, after.get("constraints") or {}
    for name in old.keys() - new.keys():
        yield f"DROP CONSTRAINT {ident(name)}"
    for name in new.keys() - old.keys():
        yield f"ADD CONSTRAINT {ident(name)} {new[name]}"
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            yield f"DROP CONSTRAINT {ident(name)}"
            yield f"ADD CONSTRAINT {ident(name)} {new[name]}"
