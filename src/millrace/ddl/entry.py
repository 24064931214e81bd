"""A captured command, as its row in the stream says it.

Invariant: nothing here asks a server, and what the row does not say is empty: a row of an older
capture, or of Connemara's, is an entry like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from millrace.apply.structure import Place, WatchedRow
from millrace.postgres.quote import qualified

# Of a command that the event trigger could not write down.
LOST: Final = "lost"
_DROP: Final = "sql_drop"
# pg_event_trigger_table_rewrite_reason(): a column got values by its default.
_BY_DEFAULT: Final = 2


@dataclass(frozen=True)
class CapturedObject:
    """An object of a command."""

    tag: str
    # As pg_identify_object() names kinds.
    type: str
    schema: str
    # With schema, quoted where it must be.
    identity: str
    names: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    # What has become of it; None for a kind that has no description, or one that is gone.
    description: Mapping[str, Any] | None = None
    # Of a drop: named by the command, and not only dragged along.
    is_asked: bool = True

    @property
    def table(self) -> tuple[str, str] | None:
        """The table it is, or is part of."""
        if self.type in ("table", "table column", "table constraint", "default value"):
            return (self.names[0], self.names[1]) if len(self.names) > 1 else None
        return None

    @property
    def relation(self) -> str:
        """Of a table or a column of it: the table, quoted."""
        return qualified(*self.names[:2]) if self.is_table else self.identity

    @property
    def is_table(self) -> bool:
        return self.type in ("table", "table column")


@dataclass(frozen=True)
class TableFacts:
    """What is known of a table besides its description."""

    schema: str
    name: str
    oid: int
    # It had no block on the source when the command ended.
    is_empty: bool


@dataclass(frozen=True)
class Publishing:
    """What the event trigger did to a publication of a slot."""

    slot: str
    schema: str
    name: str
    # ADD or DROP.
    how: str
    # To the publication of updates and deletes.
    is_whole: bool
    error: str = ""


@dataclass(frozen=True)
class Entry:
    """One command."""

    place: Place
    event: str
    tag: str
    # What the client sent, and from where in it the command was called.
    query: str = ""
    context: str = ""
    statement_at: str = ""
    role: str = ""
    search_path: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    objects: tuple[CapturedObject, ...] = ()
    tables: tuple[TableFacts, ...] = ()
    # Tables that were written anew because of a default, by schema and name.
    refilled: frozenset[tuple[str, str]] = frozenset()
    published: tuple[Publishing, ...] = ()
    # Slots that don't get the rows which the command itself has written.
    late: frozenset[str] = frozenset()
    # Where the source has its extensions.
    extensions: Mapping[str, str] = field(default_factory=dict)
    # Of the SQL functions that the command may have been called from.
    bodies: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_lost(self) -> bool:
        return self.event == LOST

    @property
    def is_drop(self) -> bool:
        return self.event == _DROP

    @property
    def asked(self) -> tuple[CapturedObject, ...]:
        return tuple(one for one in self.objects if one.is_asked)

    @property
    def main(self) -> CapturedObject | None:
        """The object that the command is about: it also names sequences and indexes that came
        with a table."""
        same = [one for one in self.objects if one.tag == self.tag]
        return next(iter(same or self.objects), None)

    def why_copied(self, slot: str, table: tuple[str, str]) -> str:
        """Why rows of a table can't all come with the stream of a slot; empty if they do."""
        if slot in self.late:
            return "its rows were written before it could be published"
        for one in self.published:
            if (one.slot, one.schema, one.name, one.how) == (slot, *table, "ADD") and one.error:
                return f"it could not be published in time: {one.error}"
        return ""

    def gains_identity(self, slot: str, table: tuple[str, str]) -> bool:
        """Whether updates and deletes of a table that was there before are sent from here on."""
        return not self.tag.startswith(("CREATE TABLE", "SELECT")) and any(
            (one.slot, one.schema, one.name, one.how) == (slot, *table, "ADD") and one.is_whole
            for one in self.published
        )

    def facts_of(self, table: tuple[str, str]) -> TableFacts | None:
        return next((one for one in self.tables if (one.schema, one.name) == table), None)


def read_entry(row: WatchedRow, place: Place) -> Entry:
    """The entry that a row is."""

    def text(column: str) -> str:
        return row.text(column, place.encoding) or ""

    def value(column: str) -> Any:
        found = text(column)
        return json.loads(found) if found else None

    facts = value("facts") or {}
    return Entry(
        place,
        text("event"),
        text("command_tag"),
        text("current_query"),
        text("context"),
        text("statement_at"),
        text("role"),
        tuple(value("search_path") or ()),
        value("settings") or {},
        tuple(map(_object, value("objects") or ())),
        tuple(
            TableFacts(one["schema"], one["name"], one["oid"], one["is_empty"])
            for one in facts.get("tables") or ()
        ),
        frozenset(
            (one["schema"], one["name"])
            for one in facts.get("rewritten") or ()
            if one["reason"] & _BY_DEFAULT
        ),
        tuple(Publishing(**one) for one in facts.get("published") or ()),
        frozenset(facts.get("late") or ()),
        facts.get("extensions") or {},
        tuple(facts.get("bodies") or ()),
        text("error"),
    )


def _object(value: Mapping[str, Any]) -> CapturedObject:
    return CapturedObject(
        value["tag"],
        value["type"],
        value.get("schema") or "",
        value["identity"],
        tuple(value.get("names") or ()),
        tuple(value.get("args") or ()),
        value.get("description"),
        value.get("is_asked", True),
    )
