"""Which objects a clone leaves out: the filter file, read.

Invariant: whatever comments, order and spelling a file has, the same entries give the same
rules; what is not understood is refused with its line.

Facts: pgcopydb's manual, "Filtering", and its ini.h: an entry is a line, comments are lines
that begin with `;`; here `#` begins one, too (a name that does must be quoted). Unquoted names
fold as in SplitIdentifierString() (varlena.c): anything but a dot, a quote or a blank belongs to
the name, and A-Z become lower case. Where pgcopydb passes over what it does not understand
(unknown or repeated sections, entries before the first one), this module refuses; its last line
needs no newline, and an entry is never lost to the order of sections.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.config.file import read_given
from millrace.errors import ConfigError

# How many names an entry of a section has.
SECTIONS = {
    "include-only-schema": 1,
    "exclude-schema": 1,
    "include-only-table": 2,
    "exclude-table": 2,
    "exclude-table-data": 2,
    "exclude-index": 2,
    "exclude-view": 2,
    "include-only-extension": 1,
    "exclude-extension": 1,
    "exclude-kind": 1,
    "table-where": 2,
    "exclude-column": 3,
    "hash-column": 3,
}
# Not for files: digests have a key, which only a consolidation has.
_NOT_IN_FILES = frozenset(("hash-column",))
_ONE_OF = (
    ("include-only-schema", "exclude-schema"),
    ("include-only-table", "exclude-table"),
    ("include-only-extension", "exclude-extension"),
)
_NOT_OF_ROWS = frozenset(("exclude-index", "exclude-view", "exclude-kind"))
# What [exclude-kind] can name: kinds of which no table needs any. With foreign tables go their
# servers, wrappers and user mappings.
KINDS = (
    "trigger",
    "event trigger",
    "policy",
    "publication",
    "subscription",
    "foreign table",
    "security label",
)
_SHAPES = {1: "a name", 2: "schema.name", 3: "schema.table.column"}
_CLOSING = {"/": "/", "[": "]", "{": "}", "(": ")", "<": ">"} | {c: c for c in "\"'|#$"}
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')
_UNQUOTED = re.compile(r'[^\s."~=]+')
_FOLD = {ord(upper): upper.lower() for upper in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


@dataclass(frozen=True, order=True)
class NamePart:
    """One name of an entry as the catalog has it, or a regular expression over names."""

    text: str
    is_regex: bool = False

    def as_value(self) -> str | dict[str, str]:
        return {"~": self.text} if self.is_regex else self.text


@dataclass(frozen=True, order=True)
class Rule:
    """An entry of a section: a name, schema.name or schema.table.column."""

    section: str
    parts: tuple[NamePart, ...]
    # What a row must satisfy, in [table-where]; which key, in [hash-column].
    predicate: str = ""
    # Its line in the file, for messages only.
    line: int = field(default=0, compare=False)

    @property
    def is_exact(self) -> bool:
        return not any(part.is_regex for part in self.parts)

    @property
    def label(self) -> str:
        return ".".join(f"~/{p.text}/" if p.is_regex else p.text for p in self.parts)

    @property
    def origin(self) -> str:
        return f"[{self.section}], line {self.line}"


@dataclass(frozen=True)
class FilterRules:
    """A filter file, read."""

    rules: tuple[Rule, ...] = ()
    # The file's name, for messages only.
    name: str = field(default="", compare=False)

    @property
    def is_empty(self) -> bool:
        return not self.rules

    @property
    def keeps_all_rows(self) -> bool:
        """Whether every table is there with all its rows and columns."""
        return all(rule.section in _NOT_OF_ROWS for rule in self.rules)

    def of(self, section: str) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.section == section)

    def patterns(self) -> list[str]:
        """All regular expressions, each once."""
        return sorted({p.text for rule in self.rules for p in rule.parts if p.is_regex})

    def as_json(self) -> str:
        """The rules in one form, whatever comments, order and spelling the file has."""
        sections: dict[str, list[object]] = {}
        for rule in sorted(self.rules):
            entry: list[object] = [part.as_value() for part in rule.parts]
            if rule.predicate:
                entry.append(rule.predicate)
            sections.setdefault(rule.section, []).append(entry)
        return json.dumps(sections, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> FilterRules:
        """What `as_json` wrote; empty text for no rules."""
        return cls(
            tuple(
                _rule_of(section, entry)
                for section, entries in (json.loads(text) if text else {}).items()
                for entry in entries
            )
        )


def _rule_of(section: str, entry: list[Any]) -> Rule:
    parts, rest = entry[: SECTIONS[section]], entry[SECTIONS[section] :]
    return Rule(
        section,
        tuple(
            NamePart(part["~"], is_regex=True) if isinstance(part, dict) else NamePart(part)
            for part in parts
        ),
        *rest,
    )


def read_filters(path: Path) -> FilterRules:
    """The rules of a file."""
    return parse_filters(read_given(path, "filters"), name=str(path))


def parse_filters(text: str, *, name: str) -> FilterRules:
    """The rules of a file's text; `name` is for messages."""
    section = ""
    opened: dict[str, int] = {}
    rules: dict[Rule, Rule] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith((";", "#")):
            continue
        if line.startswith("["):
            section = _parse_section(line, opened, name, number)
            continue
        if not section:
            raise rule_error(
                name,
                number,
                "an entry before the first section",
                "begin with a line like [exclude-table]",
            )
        rule = _parse_entry(section, line, name, number)
        rules.setdefault(rule, rule)
    _check_combination(rules, name)
    return FilterRules(tuple(sorted(rules.values())), name)


def parse_names(text: str) -> tuple[str, ...]:
    """Names as SQL writes them, joined by dots, as the catalog has them; ValueError if it is
    something else."""
    parts, rest = _parse_parts(text, may_match=False)
    if rest:
        raise ValueError(f"after the name there is more: {rest}")
    return tuple(part.text for part in parts)


def rule_error(name: str, line: int, message: str, hint: str) -> ConfigError:
    """A mistake in a line of the file."""
    where = f"{name}, line {line}" if line else name
    return ConfigError(f"{where}: {message}", hint=hint, file=name, line=line)


def _parse_section(line: str, opened: dict[str, int], name: str, number: int) -> str:
    match = re.fullmatch(r"\[([^\]]*)\]", line)
    known = [section for section in SECTIONS if section not in _NOT_IN_FILES]
    if not match or match[1] not in known:
        raise rule_error(
            name,
            number,
            f"there is no section {line}",
            f"the sections are {', '.join(f'[{one}]' for one in known)}",
        )
    section = match[1]
    if section in opened:
        raise rule_error(
            name,
            number,
            f"a second section [{section}], the first is in line {opened[section]}",
            "put all entries into one; pgcopydb reads only the first",
        )
    opened[section] = number
    return section


def _parse_entry(section: str, line: str, name: str, number: int) -> Rule:
    wanted = SECTIONS[section]
    may_match = section not in ("table-where", "exclude-column", "exclude-kind")
    try:
        parts, rest = _parse_parts(line, may_match=may_match)
        if len(parts) != wanted:
            raise ValueError(f"{_SHAPES[wanted]} is expected in [{section}], not {line}")
        rest = rest.strip()
        if section == "table-where":
            predicate = rest.removeprefix("=").strip()
            if not rest.startswith("=") or not predicate:
                raise ValueError("schema.table = predicate is expected in [table-where]")
            return Rule(section, tuple(parts), predicate, number)
        if section == "exclude-kind" and parts[0].text not in KINDS:
            raise ValueError(f"{line} is none of: {', '.join(KINDS)}")
        # A key without a value has been written with an equals sign, too.
        if rest not in ("", "="):
            raise ValueError(f"after the name there is more: {rest}")
    except ValueError as error:
        raise rule_error(
            name,
            number,
            str(error),
            "one entry on a line, quoted as in SQL if it has capitals, blanks or dots;"
            " comments are lines that begin with ;",
        ) from error
    return Rule(section, tuple(parts), line=number)


def _parse_parts(line: str, *, may_match: bool) -> tuple[list[NamePart], str]:
    """The names at the beginning of a line, and what follows them."""
    parts = []
    at = 0
    while True:
        part, at = _parse_part(line, at)
        if part.is_regex and not may_match:
            raise ValueError("a plain name is expected here, not a regular expression")
        parts.append(part)
        if line[at : at + 1] != ".":
            return parts, line[at:]
        at += 1


def _parse_part(line: str, at: int) -> tuple[NamePart, int]:
    if line.startswith("~", at):
        return _parse_regex(line, at)
    if quoted := _QUOTED.match(line, at):
        if not quoted[1]:
            raise ValueError("a name is empty")
        return NamePart(quoted[1].replace('""', '"')), quoted.end()
    if unquoted := _UNQUOTED.match(line, at):
        return NamePart(unquoted[0].translate(_FOLD)), unquoted.end()
    if line.startswith('"', at):
        raise ValueError("a quoted name does not end")
    raise ValueError("a name is missing")


def _parse_regex(line: str, at: int) -> tuple[NamePart, int]:
    """One or more `~/.../`, put together."""
    pattern = ""
    while line.startswith("~", at):
        opening = line[at + 1 : at + 2]
        closing = _CLOSING.get(opening)
        if closing is None:
            raise ValueError(f"a regular expression is written ~/.../, not ~{opening}")
        end = line.find(closing, at + 2)
        if end < 0:
            raise ValueError(f"the regular expression has no closing {closing}")
        pattern += line[at + 2 : end]
        at = end + 1
    if not pattern:
        raise ValueError("a regular expression is empty")
    return NamePart(pattern, is_regex=True), at


def _check_combination(rules: Collection[Rule], name: str) -> None:
    first: dict[str, Rule] = {}
    for rule in sorted(rules, key=lambda r: r.line):
        first.setdefault(rule.section, rule)
    for one, other in _ONE_OF:
        if one in first and other in first:
            early, late = sorted((first[one], first[other]), key=lambda r: r.line)
            raise rule_error(
                name,
                late.line,
                f"[{late.section}] can't be combined with [{early.section}] (line {early.line})",
                "use one of the two sections",
            )
    seen: dict[tuple[NamePart, ...], Rule] = {}
    for rule in rules:
        if rule.predicate and (before := seen.setdefault(rule.parts, rule)) != rule:
            raise rule_error(
                name,
                rule.line,
                f"{rule.label} is in [table-where] already, in line {before.line}",
                "join the predicates with AND",
            )
