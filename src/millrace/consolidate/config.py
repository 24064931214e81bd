"""What is consolidated: the configuration file, read.

Invariant: of a file that is read every key is known and every value has its type; all that is wrong
with it is reported at once. Nothing here opens a connection, so what only a server can tell, such
as which schemas a source has, is left to `millrace.consolidate.plan`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from millrace.config.dsn import Dsn
from millrace.config.file import read_given
from millrace.ddl.decide import why_not_replayed
from millrace.errors import ConfigError, MillraceError
from millrace.filter.rules import FilterRules, NamePart, Rule, read_filters
from millrace.name import NAME_BYTES

# PostgreSQL documentation, CREATE_REPLICATION_SLOT: what the name of a slot may consist of.
_SLOT: Final = re.compile(r"[a-z0-9_]{1,63}")
_SLOT_PREFIX: Final = "millrace_"
MOST_APPLY_JOBS: Final = 512
MOST_BATCH_SECONDS: Final = 24 * 3600


class Views(StrEnum):
    """What becomes of a source's views."""

    KEEP = "keep"
    DROP = "drop"


class Indexes(StrEnum):
    """Which indexes the target gets."""

    # Primary, unique and exclusion constraints, unique indexes, and those that foreign keys use.
    KEYS = "keys"
    ALL = "all"


class Ddl(StrEnum):
    """What becomes of a source's DDL."""

    # It is captured by event triggers, and runs on the target at its place in the stream.
    REPLAY = "replay"
    # The source halts where a change does not fit any more.
    HALT = "halt"


class Order(StrEnum):
    """In which order changes of a source are applied."""

    # That of its transactions, none of which is torn: one worker.
    COMMIT = "commit"
    # That of each table: several workers have some tables each, and may be at different
    # transactions.
    BY_TABLE = "by-table"


@dataclass(frozen=True)
class SourceConfig:
    """One source: `[source.NAME]`."""

    name: str
    dsn: Dsn
    # What its schemas are called on the target; "" leaves one out.
    schemas: Mapping[str, str] = field(default_factory=dict)
    # The filter file, and the columns that are left out.
    filters: FilterRules = field(default_factory=FilterRules)
    views: Views = Views.KEEP
    indexes: Indexes = Indexes.KEYS
    plugin: str = "pgoutput"
    slot: str = ""
    order: Order = Order.COMMIT
    ddl: Ddl = Ddl.REPLAY

    def target_schema(self, schema: str) -> str:
        """What a schema is called on the target; "" for one that is left out."""
        return self.schemas.get(schema, f"{self.target_schema_prefix}{schema}")

    @property
    def target_schema_prefix(self) -> str:
        return f"{self.name}_"


@dataclass(frozen=True)
class Consolidation:
    """The whole file."""

    target: Dsn
    sources: Mapping[str, SourceConfig]
    apply_jobs: int = 4
    # So much of a source's time is one transaction of the target at the most.
    batch_seconds: int = 30
    # Roles that may read every consolidated table.
    readers: tuple[str, ...] = ()
    # The file with the key of digests; None for one of the work directory's own.
    hash_key: Path | None = None
    path: Path = field(default=Path("sources.toml"), compare=False)

    def workers_of(self, source: SourceConfig) -> int:
        """How many workers a source has that begins now, each with a position of its own."""
        return self.apply_jobs if source.order is Order.BY_TABLE else 1

    def require(self, name: str) -> SourceConfig:
        """A source by its name."""
        found = self.sources.get(name)
        if found is None:
            near = difflib.get_close_matches(name, self.sources, 1)
            raise ConfigError(
                f"{self.path} has no source {name}",
                hint=f"did you mean {near[0]}?" if near else f"it has: {', '.join(self.sources)}",
            )
        return found


def read_config(path: Path) -> Consolidation:
    """The configuration in a file; filter files are found beside it."""
    text = read_given(path, "config")
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return parse_config(found, path)


def parse_config(found: Mapping[str, Any], path: Path) -> Consolidation:
    reader = _Reader(found, "", [])
    target = reader.take("target", _dsn("target"), required=True)
    apply_jobs = reader.take("apply_jobs", _number(1, MOST_APPLY_JOBS), 4)
    readers = reader.take("readers", _strings, ())
    batch_seconds = reader.take("batch_seconds", _number(1, MOST_BATCH_SECONDS), 30)
    hash_key = reader.take("hash_key", lambda value: path.parent / _string(value))
    sources = {
        name: _source(name, reader.inner(f"source.{name}", table), path.parent)
        for name, table in reader.take("source", _tables, {}).items()
    }
    reader.finish()
    problems = reader.problems
    if not sources and not problems:
        problems.append("it has no source: write [source.NAME] with a uri")
    problems += _shared_slots(sources.values())
    if problems:
        raise ConfigError(
            f"{path}: " + "; ".join(problems),
            hint="docs/reference/consolidate.md lists every key",
            problems=problems,
        )
    return Consolidation(target, sources, apply_jobs, batch_seconds, readers, hash_key, path)


def _source(name: str, reader: _Reader, folder: Path) -> SourceConfig:
    if not name or len(name.encode()) > NAME_BYTES:
        reader.problem(f"its name must have 1 to {NAME_BYTES} bytes")
    columns = reader.take("columns", _tables, {})
    of_columns = [
        rule
        for table, choice in columns.items()
        for rule in _column_rules(table, reader.inner(f"columns.{table}", choice))
    ]
    plugin = reader.take("plugin", _string, "pgoutput")
    order = reader.take("order", _choice(Order), Order.COMMIT)
    schemas = reader.take("schemas", _strings_by_name, {})
    given = reader.take("filters", _filters(folder), FilterRules())
    rules = FilterRules((*given.rules, *of_columns), given.name or f"[source.{name}]")
    found = SourceConfig(
        name,
        reader.take("uri", _dsn("uri"), Dsn({}), required=True),
        schemas,
        rules,
        reader.take("views", _choice(Views), Views.KEEP),
        reader.take("indexes", _choice(Indexes), Indexes.KEYS),
        plugin,
        reader.take("slot", _slot, default_slot(name)),
        order,
        _ddl(reader, plugin, order, rules),
    )
    reader.finish()
    return found


def _ddl(reader: _Reader, plugin: str, order: Order, rules: FilterRules) -> Ddl:
    """Replayed where it can be, unless the file says otherwise."""
    why_not = why_not_replayed(rules)
    # Only pgoutput says where a table has which columns, and only one worker is at that place.
    if plugin != "pgoutput" or order is not Order.COMMIT:
        why_not = 'it needs plugin = "pgoutput" and order = "commit"'
    found = reader.take("ddl", _choice(Ddl), Ddl.HALT if why_not else Ddl.REPLAY)
    if found is Ddl.REPLAY and why_not:
        reader.problem(f'ddl = "replay" can\'t be: {why_not}')
    return Ddl(found)


def default_slot(name: str) -> str:
    """What the slot of a source is called: letters, digits and underscores."""
    plain = re.sub(r"[^a-z0-9_]", "_", name.lower())
    return f"{_SLOT_PREFIX}{plain}"[:NAME_BYTES]


def _column_rules(table: str, reader: _Reader) -> Iterable[Rule]:
    schema, dot, name = table.partition(".")
    names = {
        "exclude-column": reader.take("leave_out", _strings, ()),
        "hash-column": reader.take("hash", _strings, ()),
    }
    reader.finish()
    if not (dot and schema and name):
        reader.problem("a table is written as schema.name")
        return
    for column in set(names["exclude-column"]) & set(names["hash-column"]):
        reader.problem(f"column {column} is left out, and hashed")
    for section, columns in names.items():
        for column in columns:
            yield Rule(section, tuple(NamePart(one) for one in (schema, name, column)))


def _shared_slots(sources: Iterable[SourceConfig]) -> list[str]:
    """Two sources that one server could have must not share a slot."""
    taken: dict[tuple[str, str, str], str] = {}
    problems = []
    for one in sources:
        server = (one.dsn.parameters.get("host", ""), one.dsn.parameters.get("port", ""), one.slot)
        other = taken.setdefault(server, one.name)
        if other != one.name:
            problems.append(
                f"sources {other} and {one.name} have the same slot, {one.slot}:"
                f" give one of them slot = ..."
            )
    return problems


class _Reader:
    """A table of the file, taken key by key; what is wrong is collected."""

    def __init__(self, table: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self._table = table
        self._where = where
        self._known: list[str] = []
        self.problems = problems

    def inner(self, where: str, table: Mapping[str, Any]) -> _Reader:
        """A table in this one; its problems are these."""
        inside = f"{self._where}.{where}" if self._where else where
        return _Reader(table, inside, self.problems)

    def problem(self, text: str) -> None:
        self.problems.append(f"[{self._where}] {text}" if self._where else text)

    def take(
        self, key: str, read: Callable[[Any], Any], default: Any = None, *, required: bool = False
    ) -> Any:
        """The value of a key, or its default."""
        self._known.append(key)
        if key not in self._table:
            if required:
                self.problem(f"{key} is missing")
            return default
        try:
            return read(self._table[key])
        except MillraceError as error:
            self.problem(f"{key}: {error.message}")
        except ValueError as error:
            self.problem(f"{key} {error}")
        return default

    def finish(self) -> None:
        """Whatever was not taken is not known."""
        for key in self._table.keys() - set(self._known):
            near = difflib.get_close_matches(key, self._known, 1)
            self.problem(f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else ""))


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _dsn(what: str) -> Callable[[Any], Dsn]:
    return lambda value: Dsn.parse(_string(value), what=what)


def _slot(value: Any) -> str:
    if not _SLOT.fullmatch(_string(value)):
        raise ValueError("may have lower-case letters, digits and underscores, 63 at most")
    return str(value)


def _number(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be a number from {least} to {most}")
        return value

    return read


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError("must be a list of strings")
    return tuple(value)


def _strings_by_name(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ValueError("must be a table of strings")
    return value


def _tables(value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
        raise ValueError("must be a table of tables")
    return value


def _choice(kind: type[StrEnum]) -> Callable[[Any], StrEnum]:
    def read(value: Any) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"must be one of {', '.join(kind)}") from None

    return read


def _filters(folder: Path) -> Callable[[Any], FilterRules]:
    return lambda value: read_filters(folder / _string(value))
