"""What is different between tube.toml and the database, and the steps that make it equal.

Invariant: the same file and the same state give the same steps, and a state that is as the file
says gives none. Tubes that the file does not name stay as they are: dropping one drops its pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millrace.postgres.quote import qualified
from millrace.tube.config import TubeEntry

_ENSURE: Final = "SELECT tube_ensure_exists(%s, %s, %s)"
_ATTACH: Final = "SELECT tube_table_attach(%s, %s::regclass, %s, %s, %s, %s)"
_DETACH: Final = "SELECT tube_table_ensure_detached(%s, %s::regclass)"


@dataclass(frozen=True)
class Attachment:
    """How a table is attached, or is to be."""

    schema: str
    name: str
    key: tuple[str, ...]
    shard: int
    routing: str
    predicate: str

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def words(self) -> str:
        parts = [f"key {', '.join(self.key)}"]
        parts.append(f"routing {self.routing}" if self.routing else f"shard {self.shard}")
        if self.routing and self.shard:
            parts.append(f"shard {self.shard} without it")
        if self.predicate:
            parts.append(f"predicate {self.predicate}")
        return ", ".join(parts)


@dataclass(frozen=True)
class TubeState:
    """A tube as the database has it; tables by their label."""

    name: str
    partitions: int
    predicate: str
    tables: Mapping[str, Attachment]


@dataclass(frozen=True)
class Call:
    """A function of tubes, and its arguments."""

    statement: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Step:
    """Something to change, in one transaction."""

    tube: str
    # schema.name, or "" if it is about the tube itself.
    table: str
    # create, change, attach, detach
    action: str
    words: str
    calls: tuple[Call, ...]
    # Tables with rows that would not be delivered, or not under their key, until they are touched.
    backfill: tuple[str, ...] = ()

    def as_value(self) -> dict[str, Any]:
        return {
            "tube": self.tube,
            "table": self.table or None,
            "action": self.action,
            "words": self.words,
            "backfill": list(self.backfill),
        }


def plan_steps(
    entry: TubeEntry, wanted: Mapping[str, Attachment], state: TubeState | None
) -> list[Step]:
    """In an order that works: a predicate of the tube has to compile for all its tables, so those
    that go, go first."""
    before = {} if state is None else state.tables
    return [
        *(_detach(entry.name, before[label]) for label in sorted(before.keys() - wanted.keys())),
        *_change_tube(entry, state, tuple(sorted(before.keys() & wanted.keys()))),
        *(
            step
            for label in sorted(wanted)
            for step in _attach(entry.name, wanted[label], before.get(label))
        ),
    ]


def _change_tube(
    entry: TubeEntry, state: TubeState | None, tables: tuple[str, ...]
) -> Iterator[Step]:
    call = Call(_ENSURE, (entry.name, entry.partitions, entry.predicate))
    if state is None:
        words = f"create it, with {_count(entry.partitions, 'partition')}"
        words += f", predicate {entry.predicate}" if entry.predicate else ""
        yield Step(entry.name, "", "create", words, (call,))
        return
    changes: list[str] = []
    backfill: tuple[str, ...] = ()
    if state.partitions != entry.partitions:
        changes.append(f"partitions from {state.partitions} to {entry.partitions}")
    if state.predicate != entry.predicate:
        changes.append(_change("predicate", state.predicate, entry.predicate))
        backfill = tables
    if changes:
        yield Step(entry.name, "", "change", f"change {', '.join(changes)}", (call,), backfill)


def _attach(tube: str, wanted: Attachment, before: Attachment | None) -> Iterator[Step]:
    table = qualified(wanted.schema, wanted.name)
    values = (tube, table, wanted.shard, list(wanted.key), wanted.routing, wanted.predicate)
    call = Call(_ATTACH, values)
    if before is None:
        words = f"attach it: {wanted.words}"
        yield Step(tube, wanted.label, "attach", words, (call,), (wanted.label,))
        return
    if before == wanted:
        return
    changes = []
    if before.routing != wanted.routing:
        changes.append(_change("routing", before.routing, wanted.routing))
    if before.shard != wanted.shard:
        changes.append(f"shard from {before.shard} to {wanted.shard}")
    if before.predicate != wanted.predicate:
        changes.append(_change("predicate", before.predicate, wanted.predicate))
    calls: tuple[Call, ...] = (call,)
    if before.key != wanted.key:
        # Pods with the old key would be looked up by the new one.
        changes.append(
            f"key from {', '.join(before.key)} to {', '.join(wanted.key)}; what waits in the tube"
            " with the old key is not delivered"
        )
        calls = (Call(_DETACH, (tube, table)), call)
    words = f"change {', '.join(changes)}"
    yield Step(tube, wanted.label, "change", words, calls, (wanted.label,))


def _detach(tube: str, before: Attachment) -> Step:
    return Step(
        tube,
        before.label,
        "detach",
        "detach it: what is touched is not recorded any more, and what waits in the tube is not"
        " delivered",
        (Call(_DETACH, (tube, qualified(before.schema, before.name))),),
    )


def _change(what: str, before: str, after: str) -> str:
    return f"{what} from {before or 'none'} to {after or 'none'}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
