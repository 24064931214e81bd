"""tube.toml: several tubes, their tables, and how these are delivered.

Invariant: a file is taken whole or not at all. Every problem of it is in one error, and a key that
is not known is one. What is not written has the default that the command line has.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from millrace.clone.problem import Problem, render_problems
from millrace.config.dsn import Dsn
from millrace.config.file import read_given
from millrace.errors import ConfigError
from millrace.filter.rules import parse_names
from millrace.sink.registry import find_sinks
from millrace.tube.delivery.plan import Delivery, DeliveryLimits, TableDelivery

_FILE: Final = ("source", "schema", "limits", "tubes")
_TUBE: Final = ("partitions", "workers", "predicate", "sink", "limits", "tables")
_TABLE: Final = ("key", "shard", "routing", "predicate", "enrich", "fan_out", "sink")
_KINDS: Final = {str: "a string", int: "a number", float: "a number of seconds", dict: "a table"}
_MOST_PARTITIONS: Final = 100


@dataclass(frozen=True)
class TableEntry:
    """A table of a tube as the file has it."""

    schema: str
    name: str
    # Without it the column id, or the primary key.
    key: tuple[str, ...] | None
    # Without it and without routing, the number at the end of the schema's name.
    shard: int | None
    routing: str
    predicate: str
    # Without it, `tube run` can't serve the tube.
    delivery: TableDelivery | None

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True)
class TubeEntry:
    """A tube as the file has it."""

    name: str
    partitions: int
    workers: int
    predicate: str
    limits: DeliveryLimits
    tables: tuple[TableEntry, ...]

    @property
    def place(self) -> str:
        return f"tube {self.name}"


@dataclass(frozen=True)
class TubeFile:
    """All of it."""

    path: Path
    source: Dsn | None
    schema: str
    tubes: tuple[TubeEntry, ...]


def read_tube_file(path: Path) -> TubeFile:
    """The file, if nothing is wrong with it."""
    text = read_given(path, "config")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}", hint="see https://toml.io", file=str(path)
        ) from error
    problems: list[Problem] = []
    found = _read_file(path, _Section("the file", values, _FILE, problems))
    raise_file_problems(path, problems)
    return found


def plan_deliveries(
    file: TubeFile, source: Dsn, schema: str, *, until_empty: bool
) -> list[tuple[Delivery, int]]:
    """What `tube run` has to do, with the number of workers for each tube."""
    raise_file_problems(
        file.path,
        [
            Problem(
                tube.place,
                f"{table.label} has no enrich, so nothing says how it is delivered",
                "give it an enrich and a sink",
            )
            for tube in file.tubes
            for table in tube.tables
            if table.delivery is None
        ],
    )
    return [
        (
            Delivery(
                source,
                schema,
                tube.name,
                {table.label: table.delivery for table in tube.tables if table.delivery},
                until_empty=until_empty,
                limits=tube.limits,
            ),
            tube.workers,
        )
        for tube in file.tubes
    ]


def raise_file_problems(path: Path, problems: list[Problem]) -> None:
    """ConfigError with every problem, if there is any."""
    if not problems:
        return
    count, lines = render_problems(problems)
    raise ConfigError(
        f"{path} has {count}:\n{lines}",
        hint="fix the file, then run the same command again",
        file=str(path),
        problems=[asdict(problem) for problem in problems],
    )


class _Section:
    """A table of the file; what is wrong in it is noted, and read as if it were not there."""

    def __init__(
        self, place: str, values: Mapping[str, Any], known: Collection[str], problems: list[Problem]
    ) -> None:
        self.place = place
        self._values = values
        self._problems = problems
        for key in values:
            if key not in known:
                near = get_close_matches(key, known, 1, 0.5)
                all_of_them = f"known are: {', '.join(known)}"
                self.note(f"unknown key {key}", f"write {near[0]}" if near else all_of_them)

    def note(self, what: str, fix: str) -> None:
        self._problems.append(Problem(self.place, what, fix))

    def get(self, key: str, kind: type, default: Any) -> Any:
        value: Any = self._values.get(key, default)
        if isinstance(value, kind) and not isinstance(value, bool):
            return str(value).strip() if kind is str else value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if key in self._values:
            self.note(f"{key} is not {_KINDS[kind]}", f"write {_KINDS[kind]}, or leave {key} out")
        return default

    def number(self, key: str, default: int, most: int | None = None) -> int:
        value: int = self.get(key, int, default)
        if value < 1 or (most is not None and value > most):
            limits = "at least 1" if most is None else f"from 1 to {most}"
            self.note(f"{key} is {value}", f"write a number {limits}")
            return default
        return value

    def names(self, key: str) -> tuple[str, ...] | None:
        """One column, or a list of them."""
        value = self._values.get(key)
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list) and names and all(isinstance(n, str) and n for n in names):
            return tuple(names)
        if key in self._values:
            self.note(f"{key} is not a list of columns", f'write {key} = ["id"], or leave it out')
        return None

    def part(self, key: str, known: Collection[str], place: str = "") -> _Section:
        return _Section(place or f"{self.place}: {key}", self._table(key), known, self._problems)

    def parts(self, key: str, known: Collection[str], title: str) -> Iterator[tuple[str, _Section]]:
        """Each of the tables below a key, by its name."""
        names = self._table(key)
        whole = _Section(self.place, names, names, self._problems)
        for name in names:
            yield name, whole.part(name, known, title.format(name))

    def _table(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(key, dict, {})
        return found


def _read_file(path: Path, section: _Section) -> TubeFile:
    source, text = None, section.get("source", str, "")
    if text:
        try:
            source = Dsn.parse(text, what="source")
        except ConfigError as error:
            section.note(error.message, error.hint)
    limits = _read_limits(section, DeliveryLimits())
    tubes = tuple(
        _read_tube(name, part, limits) for name, part in section.parts("tubes", _TUBE, "tube {}")
    )
    if not tubes:
        section.note("it has no tubes", "write [tubes.NAME]")
    return TubeFile(path, source, section.get("schema", str, ""), tubes)


def _read_limits(section: _Section, default: DeliveryLimits) -> DeliveryLimits:
    names = [one.name for one in fields(DeliveryLimits)]
    part = section.part("limits", names)
    values: dict[str, Any] = {}
    for name in names:
        before = getattr(default, name)
        if isinstance(before, int):
            values[name] = part.number(name, before)
            continue
        values[name] = part.get(name, float, before)
        if values[name] < 0:
            part.note(f"{name} is negative", "write a number of seconds")
            values[name] = before
    return replace(default, **values)


def _read_tube(name: str, section: _Section, limits: DeliveryLimits) -> TubeEntry:
    partitions = section.number("partitions", 1, _MOST_PARTITIONS)
    workers = section.number("workers", 1)
    if workers > partitions:
        section.note(
            f"{workers} workers are more than its {partitions} partitions, and a worker serves"
            " whole partitions",
            f"write workers = {partitions}, or partitions = {workers}",
        )
    sink = section.get("sink", str, "")
    tables = [
        _read_table(text, part, sink)
        for text, part in section.parts("tables", _TABLE, f"tube {name}, table {{}}")
    ]
    labels = [table.label for table in tables if table is not None]
    for label in sorted({one for one in labels if labels.count(one) > 1}):
        section.note(f"{label} is there twice", "write each table once")
    return TubeEntry(
        name,
        partitions,
        workers,
        section.get("predicate", str, ""),
        _read_limits(section, limits),
        tuple(table for table in tables if table is not None),
    )


def _read_table(text: str, section: _Section, sink: str) -> TableEntry | None:
    name = _read_name(text, section)
    found = TableEntry(
        *(name or ("", text)),
        key=section.names("key"),
        shard=section.get("shard", int, None),
        routing=section.get("routing", str, ""),
        predicate=section.get("predicate", str, ""),
        delivery=_read_delivery(section, sink),
    )
    return None if name is None else found


def _read_name(text: str, section: _Section) -> tuple[str, str] | None:
    try:
        schema, name = parse_names(text)
    except ValueError:
        section.note(
            "its name is not schema.name",
            'write [tubes.TUBE.tables."public.article"], with the names quoted as in SQL',
        )
        return None
    return schema, name


def _read_delivery(section: _Section, sink: str) -> TableDelivery | None:
    enrich, fan_out = section.get("enrich", str, ""), section.get("fan_out", str, "")
    sink = section.get("sink", str, "") or sink
    kind = sink.partition(":")[0]
    if sink and kind not in find_sinks():
        section.note(f"there is no sink {kind}", f"known are: {', '.join(sorted(find_sinks()))}")
    if enrich and sink:
        return TableDelivery(enrich, sink, fan_out)
    if enrich:
        section.note("it has an enrich and no sink", "give it a sink, or give its tube one")
    elif fan_out:
        section.note("it has a fan_out and no enrich", "give it an enrich")
    return None
