"""One sink, held against the tables that are delivered to it.

Invariant: an id is reported only if it differed in each of several looks, between which no pod held
it; so what is merely under way is no difference. A sink's documents are read once, in pages, and so
are the keys of the tables: memory holds one page.

Two passes. Everything that the sink holds is enriched and compared: what has no row is surplus, and
what has other values is different. Then every key of the tables that the sink does not hold is
enriched: what has a row is missing. A row outside the predicates may have a document, from when it
matched; if it has, it must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from millrace.errors import ConfigError
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import translated
from millrace.sink.protocol import ComparableSink, Difference
from millrace.tube.delivery.enrich import enrich
from millrace.tube.delivery.epoch import draw_version, raise_epoch, settle_epoch
from millrace.tube.delivery.outlet import Outlet, open_outlet
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.tube import Connection, Tube, TubeTable, open_reader, read_tube
from millrace.tube.verify.keys import iter_keys
from millrace.tube.verify.waiting import find_waiting, has_waiting

# Looks at an id before it is a difference, and the pause between them, in which it is delivered.
LOOKS = 3
PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class VerifyTask:
    """A sink and the tables that are delivered to it; it travels to where the work is done."""

    delivery: Delivery
    sink: str
    # As schema.name.
    tables: tuple[str, ...]
    is_dry_run: bool = False
    page_ids: int = 10_000
    # Keys that are shown of each kind of difference.
    samples: int = 10


@dataclass
class SinkFindings:
    """What was found in one sink."""

    tables: tuple[str, ...]
    # Documents that the sink holds, and keys of the tables.
    documents: int = 0
    keys: int = 0
    missing: int = 0
    surplus: int = 0
    different: int = 0
    # Ids that are in undelivered pods: no difference.
    waiting: int = 0
    touched: int = 0
    # The sink holds versions that the source has not drawn yet: the source was restored.
    is_ahead: bool = False
    samples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def differences(self) -> int:
        return self.missing + self.surplus + self.different


def verify_sink(task: VerifyTask, attempt: int) -> SinkFindings:
    """The body of the task."""
    delivery = task.delivery
    with open_reader(delivery.source, delivery.tube) as source, ExitStack() as opened:
        settle_epoch(source, delivery.schema)
        with translated("reading the tube"):
            tube = read_tube(source, delivery.schema, delivery.tube)
        tables = [table for table in tube.tables if table.label in task.tables]
        outlets = [opened.enter_context(_opened(source, tube, table, delivery)) for table in tables]
        return _Verification(task, source, tube, outlets).run() if outlets else SinkFindings(())


@contextmanager
def _opened(
    source: Connection, tube: Tube, table: TubeTable, delivery: Delivery
) -> Iterator[_Side]:
    outlet = open_outlet(source, tube, table, delivery.require_table(table.label))
    try:
        yield _Side(table, outlet, require_comparable(outlet.sink, delivery, table))
    finally:
        outlet.close()


def require_comparable(sink: object, delivery: Delivery, table: TubeTable) -> ComparableSink:
    if isinstance(sink, ComparableSink):
        return sink
    kind = delivery.require_table(table.label).sink.partition(":")[0]
    raise ConfigError(
        f"the sink {kind} can't list what it holds, so it can't be verified",
        hint="deliver to a new place and backfill instead: `millrace tube backfill"
        f" {delivery.tube} {table.label}`",
    )


@dataclass(frozen=True)
class _Side:
    """A table and where it goes."""

    table: TubeTable
    outlet: Outlet
    sink: ComparableSink


@dataclass(frozen=True)
class _Found:
    kind: Difference
    side: _Side


class _Verification:
    def __init__(
        self, task: VerifyTask, source: Connection, tube: Tube, sides: list[_Side]
    ) -> None:
        self._task, self._source, self._tube, self._sides = task, source, tube, sides
        self._found = SinkFindings(tuple(side.table.label for side in sides))

    def run(self) -> SinkFindings:
        self._check_versions()
        for page in self._sides[0].sink.iter_held(self._task.page_ids):
            self._found.documents += len(page)
            self._report(self._confirm(self._look(page)))
        for side in self._sides:
            for page in iter_keys(self._source, self._tube, side.table, self._task.page_ids):
                self._found.keys += len(page)
                if side.outlet.fan_out is not None:
                    self._check_children(side, page)
                else:
                    unheld = set(page) - self._held(side, page)
                    self._report(self._confirm(self._look(unheld)))
        return self._found

    def _check_versions(self) -> None:
        """What the source writes next must be newer than everything that is there."""
        newest = self._sides[0].sink.newest_version()
        if newest is None or newest <= draw_version(self._source, self._tube.schema):
            return
        self._found.is_ahead = True
        if not self._task.is_dry_run:
            # Otherwise the sink would drop what is delivered to mend it.
            raise_epoch(self._source, self._tube.schema)

    def _look(self, ids: Iterable[str]) -> dict[str, _Found]:
        """Which of these ids the sink does not hold as the tables say."""
        wanted = dict.fromkeys(ids, 0)
        if not wanted:
            return {}
        good: set[str] = set()
        found: dict[str, _Found] = {}
        for side in self._sides:
            batch = enrich(side.outlet.enrichment, side.outlet.table, (0, 0), wanted)
            unequal = side.sink.find_unequal(batch)
            for id_, is_deleted in zip(
                batch.ids.to_pylist(), batch.is_deleted.to_pylist(), strict=True
            ):
                if id_ not in unequal:
                    if not is_deleted:
                        good.add(id_)
                # A table that has the row knows better than one that has none.
                elif id_ not in found or found[id_].kind is Difference.SURPLUS:
                    found[id_] = _Found(unequal[id_], side)
        return {id_: one for id_, one in found.items() if id_ not in good}

    def _held(self, side: _Side, ids: list[str]) -> set[str]:
        """Those that the sink has a document of: they would be surplus if they had no row."""
        if not ids:
            return set()
        empty = enrich(_NoRows(side.outlet), side.outlet.table, (0, 0), dict.fromkeys(ids, 0))
        return set(side.sink.find_unequal(empty))

    def _confirm(self, found: dict[str, _Found]) -> dict[str, _Found]:
        """Without what is in the tube, or is only seen now and then."""
        for look in range(LOOKS):
            if not found:
                break
            waiting = self._waiting(found)
            self._found.waiting += len(waiting)
            found = {id_: one for id_, one in found.items() if id_ not in waiting}
            if found and look < LOOKS - 1:
                time.sleep(PAUSE_SECONDS)
                found = self._look(found)
        return found

    def _waiting(self, ids: Iterable[str]) -> set[str]:
        tables = [side.table for side in self._sides]
        # A pod of a child does not say which parents it is about.
        if any(
            side.outlet.fan_out is not None and has_waiting(self._source, self._tube, side.table)
            for side in self._sides
        ):
            return set(ids)
        return find_waiting(self._source, self._tube, tables, list(ids))

    def _check_children(self, side: _Side, children: list[str]) -> None:
        """What is wrong with parents is mended by touching their children."""
        assert side.outlet.fan_out is not None
        pairs = side.outlet.fan_out.pairs(children)
        found = self._confirm(self._look({parent for _, parent in pairs}))
        found = {id_: one for id_, one in found.items() if one.kind is not Difference.SURPLUS}
        self._count(found)
        self._touch(side.table, [child for child, parent in pairs if parent in found])

    def _report(self, found: dict[str, _Found]) -> None:
        kept = found
        if any(side.outlet.fan_out is not None for side in self._sides):
            # Parents that have a row are looked at by their children.
            kept = {id_: one for id_, one in found.items() if one.kind is Difference.SURPLUS}
        self._count(kept)
        for side in self._sides:
            if side.outlet.fan_out is None:
                self._touch(side.table, [id_ for id_, one in kept.items() if one.side is side])

    def _count(self, found: dict[str, _Found]) -> None:
        for id_, one in found.items():
            setattr(self._found, one.kind, getattr(self._found, one.kind) + 1)
            samples = self._found.samples.setdefault(one.kind, [])
            if len(samples) < self._task.samples:
                samples.append(f"{one.side.table.label} {id_}")

    def _touch(self, table: TubeTable, keys: list[str]) -> None:
        if not keys or self._task.is_dry_run:
            return
        with translated("touching what differs"):
            self._source.execute(
                f"SELECT {ident(self._tube.schema)}.tube_touch(%s, %s::regclass, %s)".encode(),
                (self._tube.name, f"{ident(table.schema)}.{ident(table.name)}", keys),
            )
        self._found.touched += len(keys)


class _NoRows:
    """An enrichment that finds nothing, with the columns of another."""

    def __init__(self, outlet: Outlet) -> None:
        self.schema: pa.Schema = outlet.enrichment.schema
        self.key: tuple[str, ...] = outlet.enrichment.key

    def read(self, keys: object) -> pa.Table:
        return self.schema.empty_table()
