"""What is replayed of a source, and what is not.

Invariant: the same command and choices give the same decision, which asks no server; what is left
out has a reason that a person can read. What is left out of the base copy is left out here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from millrace.filter.rules import FilterRules, NamePart

if TYPE_CHECKING:  # Numba comes with it, and every command reads its options
    from millrace.ddl.entry import CapturedObject, Entry

# Kinds as pg_identify_object() names them.
_OF_THE_DATABASE: Final = frozenset(
    (
        "access method",
        "cast",
        "event trigger",
        "foreign-data wrapper",
        "language",
        "publication",
        "publication relation",
        "server",
        "subscription",
        "transform",
        "user mapping",
    )
)
_ACTS: Final = frozenset(("trigger", "policy", "foreign table", "foreign table column"))
_VIEWS: Final = frozenset(("view", "view column", "materialized view", "materialized view column"))


# What these say of a table's rows and columns, they say by its name. A table that is renamed would
# show what nobody is to see.
_BY_NAME: Final = ("exclude-table-data", "table-where", "exclude-column", "hash-column")


def why_not_replayed(rules: FilterRules) -> str:
    """Why DDL can't be replayed under these filters; empty if it can."""
    found = next((section for section in _BY_NAME if rules.of(section)), "")
    return f"[{found}] names tables, which DDL may rename" if found else ""


class Verdict(StrEnum):
    """What becomes of a command."""

    REPLAY = "replay"
    LEAVE_OUT = "leave out"
    # Of an extension, which all sources share.
    EXTENSION = "extension"


@dataclass(frozen=True)
class Decision:
    """What becomes of a command, and why."""

    verdict: Verdict
    reason: str = ""


REPLAY: Final = Decision(Verdict.REPLAY)


@dataclass(frozen=True)
class Choices:
    """What a stream takes of its source."""

    filters: FilterRules = field(default_factory=FilterRules)
    # Schemas that are left out by their mapping.
    schemas_out: frozenset[str] = frozenset()
    has_views: bool = True
    # Also those that make nothing unique.
    has_all_indexes: bool = True
    # Objects that act by themselves, or belong to the whole database, such as triggers and casts.
    has_all_kinds: bool = False
    # Those of the target are used by others, too: created and updated there, and never dropped.
    shares_extensions: bool = True

    def decide(self, entry: Entry) -> Decision:
        """What becomes of a command."""
        is_extension = any(one.type == "extension" for one in entry.objects)
        if is_extension and self.shares_extensions:
            return Decision(Verdict.EXTENSION)
        # A command is about one object, with which others come; a drop may name several.
        about = entry.asked if entry.is_drop or entry.main is None else (entry.main,)
        reasons = [self.why_not(one) for one in about]
        if reasons and all(reasons):
            return Decision(Verdict.LEAVE_OUT, reasons[0])
        return REPLAY

    def why_not(self, one: CapturedObject) -> str:
        """Why an object is not on the target; empty if it is to be there."""
        if one.type in _OF_THE_DATABASE and not (one.type == "cast" and self.has_all_kinds):
            return f"a {one.type} belongs to the whole database"
        if one.type in _ACTS and not self.has_all_kinds:
            return f"a {one.type} is not replayed"
        if one.type in _VIEWS and not self.has_views:
            return "views are left out"
        schema = one.schema or (one.names[0] if one.type == "schema" and one.names else "")
        if schema and self._leaves_out_schema(schema):
            return f"schema {schema} is left out"
        description = one.description or {}
        if (
            one.type == "index"
            and not self.has_all_indexes
            and description.get("is_unique") is False
        ):
            return "only unique indexes are kept"
        if description.get("persistence") == "u":
            return "changes of an unlogged table are not in the WAL"
        if one.type in _VIEWS and self._is_excluded("exclude-view", *one.names[:2]):
            return f"{one.identity} is left out by the filters"
        if one.type == "index" and self._is_excluded("exclude-index", *one.names[:2]):
            return f"{one.identity} is left out by the filters"
        table = one.table or description.get("table")
        if table is not None and self.leaves_out(*table):
            return f"{'.'.join(table)} is left out by the filters"
        return ""

    def leaves_out(self, schema: str, name: str) -> bool:
        """Whether a table is none of the target's."""
        if self._leaves_out_schema(schema) or self._is_excluded("exclude-table", schema, name):
            return True
        only = self.filters.of("include-only-table")
        return bool(only) and not any(_matches(rule.parts, (schema, name)) for rule in only)

    def columns_out(self, schema: str, name: str) -> frozenset[str]:
        """Columns of a table that are left out."""
        return frozenset(
            rule.parts[2].text
            for rule in self.filters.of("exclude-column")
            if _matches(rule.parts[:2], (schema, name))
        )

    def _leaves_out_schema(self, schema: str) -> bool:
        if schema in self.schemas_out or self._is_excluded("exclude-schema", schema):
            return True
        only = self.filters.of("include-only-schema")
        return bool(only) and not any(_matches(rule.parts, (schema,)) for rule in only)

    def _is_excluded(self, section: str, *names: str) -> bool:
        return any(_matches(rule.parts, names) for rule in self.filters.of(section))


def _matches(parts: Sequence[NamePart], names: Sequence[str]) -> bool:
    return len(parts) == len(names) and all(
        re.search(part.text, name) is not None if part.is_regex else part.text == name
        for part, name in zip(parts, names, strict=True)
    )
