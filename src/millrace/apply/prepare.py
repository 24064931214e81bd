"""Changes made ready for the target: every byte to be sent, nothing left to compute.

Invariant: what is prepared depends on the changes and on the tables' definitions alone, so it can
be made on another thread while the target is busy with what came before.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray

from millrace.apply.fold import Lines, fold
from millrace.apply.sections import Section, TableRows, TruncatedTables
from millrace.apply.shape import require_shape
from millrace.apply.statement import TablePlan, plan_table
from millrace.apply.structure import WatchedRow
from millrace.apply.target_table import (
    TargetTable,
    read_root,
    read_target_table,
    read_type_names,
)
from millrace.errors import ApplyError, InvariantError, ServerError
from millrace.filter.exclusions import Exclusions
from millrace.lsn import render_lsn
from millrace.name import Naming
from millrace.postgres.catalog.relations import FIRST_UNPINNED_OID
from millrace.postgres.catalog.schemas import DDL_TABLE
from millrace.postgres.pgoutput.messages import (
    Bytes,
    LogicalMessage,
    Partition,
    RelationVersion,
)
from millrace.postgres.pgoutput.tuples import INSERT, Values, beside
from millrace.postgres.wire.connect import translated
from millrace.postgres.wire.copy_format import encode_binary, encode_text

Connection = psycopg.Connection[tuple[Any, ...]]

_LOCK_TIMEOUT = "55P03"
_LOCK_HINT = (
    "a session holds a lock on the target's system catalogs: SELECT * FROM pg_locks shows which;"
    " run the same command again when it has ended"
)


@dataclass(frozen=True)
class StagedRows:
    """Rows as COPY wants them."""

    data: Bytes
    # The LSN of the first change of each row.
    lsn: NDArray[np.uint64]
    # For updates: the columns whose values were not sent, and whether keys change.
    unchanged: frozenset[int] = frozenset()
    is_key_changed: bool = False

    def __len__(self) -> int:
        return len(self.lsn)


@dataclass(frozen=True)
class TableWork:
    """What is to be done to one table, in this order."""

    plan: TablePlan
    # Row messages this is the net effect of.
    changes: int
    deletes: StagedRows | None
    updates: tuple[StagedRows, ...]
    inserts: StagedRows | None
    # Where `inserts` has no row numbers, for the table itself and not for a stage.
    is_direct: bool


@dataclass(frozen=True)
class TruncatedPartitions:
    """Partitions of the source below one root, and what the target has for the root."""

    table: TargetTable
    partitions: tuple[Partition, ...]
    naming: Naming

    @property
    def label(self) -> str:
        return f"{self.table.schema}.{self.table.name}"


@dataclass(frozen=True)
class TruncateWork:
    """One TRUNCATE."""

    tables: tuple[TargetTable, ...]
    partitions: tuple[TruncatedPartitions, ...]
    restart_identity: bool
    lsn: int
    # False if some of its tables are another worker's, or are being copied again.
    is_whole: bool = True


Work = TableWork | TruncateWork | LogicalMessage


@dataclass(frozen=True)
class Share:
    """The tables of one of several workers: those whose name on the target falls to it; or a single
    one."""

    number: int = 0
    total: int = 1
    # Schema and name of the only table, on the source.
    only: tuple[str, str] | None = None
    naming: Naming = field(default_factory=Naming)

    def has_name(self, schema: str, name: str) -> bool:
        """Whether a table of the source is one of them."""
        if self.only is not None:
            return (schema, name) == self.only
        label = self.naming.target(schema, name).label
        return zlib.crc32(label.encode()) % self.total == self.number


class Preparer:
    """Turns sections into work; remembers tables of the target."""

    def __init__(
        self,
        connection: Connection,
        left: Exclusions,
        share: Share,
        naming: Naming,
        *,
        staged_inserts: bool,
        is_strict: bool = False,
        finds_roots: bool = False,
        leaves_out: Callable[[str, str], bool] | None = None,
    ) -> None:
        """`is_strict`: tables of both sides must have the same shape. `finds_roots`: partitions
        come under their own names, and what is said of their root is said of them. `leaves_out`:
        more than `left` does, of tables that came later."""
        self._connection = connection
        self._left = left
        self._share = share
        self._naming = naming
        self._staged_inserts = staged_inserts
        self._is_strict = is_strict
        self._plans: dict[tuple[RelationVersion, bool], TablePlan | None] = {}
        self._type_names: dict[int, str] = {}
        self._finds_roots = finds_roots
        self._leaves_out = leaves_out or (lambda schema, name: False)
        self._families: dict[tuple[str, str], tuple[str, str]] = {}
        # Tables whose changes are left out of the batch that is being prepared.
        self.skipped: frozenset[tuple[str, str]] = frozenset()

    def prepare(self, section: Section) -> Work | None:
        """None for a table that is left out, or another worker's."""
        if isinstance(section, LogicalMessage):
            return section
        if isinstance(section, WatchedRow):
            raise InvariantError(f"{section.label}: a change of structure within other changes")
        if isinstance(section, TruncatedTables):
            return self._truncate_work(section)
        if not self._has(section.relation):
            return None
        plan = self._plan(section.relation, section.is_binary)
        return None if plan is None else self._table_work(plan, section)

    def has_table(self, relation: RelationVersion) -> bool:
        """Whether the target has the table, or need not have it."""
        if not self._has(relation) or self._is_left_out(relation):
            return True
        name = self._naming.target(relation.schema, relation.name)
        with translated(f"looking up {name.label} on the target"):
            return read_target_table(self._connection, *name) is not None

    def _has(self, relation: RelationVersion) -> bool:
        if (relation.schema, relation.name) == DDL_TABLE:
            return False
        family = self._family(relation)
        return family not in self.skipped and self._share.has_name(*family)

    def _family(self, relation: RelationVersion) -> tuple[str, str]:
        """The table, or the root that the target has above it, by its name on the source."""
        name = relation.schema, relation.name
        if not self._finds_roots or relation.partition is not None:
            return name
        if name not in self._families:
            with translated(f"looking up {'.'.join(name)} on the target"):
                root = read_root(self._connection, *self._naming.target(*name))
            own = None if root is None else self._naming.source(*root)
            self._families[name] = name if own is None else (own.schema, own.name)
        return self._families[name]

    def _truncate_work(self, section: TruncatedTables) -> TruncateWork | None:
        own = [relation for relation in section.relations if self._has(relation)]
        tables = [self._table(relation) for relation in own if relation.partition is None]
        kept = tuple(table for table in tables if table is not None)
        partitions = tuple(self._truncated_partitions(own))
        if not kept and not partitions:
            return None
        is_whole = len(own) == len(section.relations)
        return TruncateWork(kept, partitions, section.restart_identity, section.lsn, is_whole)

    def _truncated_partitions(
        self, relations: list[RelationVersion]
    ) -> Iterator[TruncatedPartitions]:
        """Which tables of the target they are is found out when it is done: looking at the bounds
        of a partition waits for whoever has just truncated it."""
        roots: dict[tuple[str, str], list[RelationVersion]] = {}
        for relation in relations:
            if relation.partition is not None:
                roots.setdefault((relation.schema, relation.name), []).append(relation)
        for group in roots.values():
            table = self._table(group[0])
            if table is not None:
                partitions = tuple(r.partition for r in group if r.partition)
                yield TruncatedPartitions(table, partitions, self._naming)

    def _plan(self, relation: RelationVersion, is_binary: bool) -> TablePlan | None:
        known = (relation, is_binary)
        if known not in self._plans:
            self._plans[known] = self._new_plan(relation, is_binary)
        return self._plans[known]

    def _new_plan(self, relation: RelationVersion, is_binary: bool) -> TablePlan | None:
        table = self._table(relation)
        if table is None:
            return None
        name = self._family(relation)
        if self._is_strict:
            excluded = self._left.columns.get(name, frozenset())
            require_shape(self._connection, relation, table, self._naming, excluded)
        return plan_table(
            relation,
            table,
            is_binary=is_binary,
            type_names=self._names_of(relation),
            excluded=self._left.columns.get(name, frozenset()),
            where=self._left.where.get(name, ""),
            number=len(self._plans) + 1,
        )

    def _is_left_out(self, relation: RelationVersion) -> bool:
        family = self._family(relation)
        return family in self._left.tables or self._leaves_out(*family)

    def _table(self, relation: RelationVersion) -> TargetTable | None:
        if self._is_left_out(relation):
            return None
        label = f"{relation.schema}.{relation.name}"
        try:
            with translated(f"looking up {label} on the target"):
                table = read_target_table(
                    self._connection, *self._naming.target(relation.schema, relation.name)
                )
        except ServerError as error:
            if error.facts.get("sqlstate") == _LOCK_TIMEOUT:
                error.hint = _LOCK_HINT
            raise
        if table is None:
            raise ApplyError(
                f"{label}: the target has no such table",
                hint="create it there, or leave it out with --filters",
                table=label,
            )
        return table

    def _names_of(self, relation: RelationVersion) -> dict[int, str]:
        wanted = [c.type_oid for c in relation.columns if 0 < c.type_oid < FIRST_UNPINNED_OID]
        if any(oid not in self._type_names for oid in wanted):
            with translated("reading the target's types"):
                self._type_names |= read_type_names(self._connection, wanted)
        return self._type_names

    def _table_work(self, plan: TablePlan, section: TableRows) -> TableWork:
        if not plan.key and not np.all(section.rows.kind == INSERT):
            raise _not_told_apart(plan, section)
        places = np.array([column.place for column in plan.columns], np.int64)
        key = np.array([column.place for column in plan.key], np.int64)
        net = fold(section.rows, places if plan.comes_whole else key, is_multiset=plan.comes_whole)
        if plan.comes_whole and not plan.is_multiset:
            net = net.known_by(key, places)
        if plan.where and plan.is_multiset:
            net = net.without_updates()
        is_direct = plan.can_insert_directly and not self._staged_inserts
        stage = _Encoder(net.buffer, plan.is_binary, numbered=True)
        insert = _Encoder(net.buffer, plan.is_binary, numbered=not is_direct)
        inserted = _columns(net.inserted.after, places)
        return TableWork(
            plan,
            len(section.rows),
            stage.encode(net.deleted.before, net.deleted.lsn),
            tuple(_updates(stage, net.updated, net.is_key_changed, places)),
            insert.encode(inserted, net.inserted.lsn),
            is_direct,
        )


def _not_told_apart(plan: TablePlan, section: TableRows) -> ApplyError:
    rows = section.rows
    return ApplyError(
        f"{plan.label}: an update or delete has no key that identifies its row",
        hint=f"on the source: ALTER TABLE {plan.source_name} REPLICA IDENTITY FULL; then copy the "
        "table again: `millrace stream resync`",
        table=plan.label,
        lsn=render_lsn(int(rows.lsn[np.flatnonzero(rows.kind != INSERT)[0]])),
    )


@dataclass(frozen=True)
class _Encoder:
    buffer: Bytes
    is_binary: bool
    numbered: bool

    def encode(self, values: Values, lsn: NDArray[np.uint64]) -> StagedRows | None:
        if not len(values):
            return None
        encode = encode_binary if self.is_binary else encode_text
        return StagedRows(encode(self.buffer, values, numbered=self.numbered), lsn)


def _columns(values: Values, places: NDArray[np.int64]) -> Values:
    if len(places) == values.at.shape[1]:
        return values  # all of them: they are in the relation's order
    return values.columns(places)


def _updates(
    encoder: _Encoder,
    lines: Lines,
    is_key_changed: NDArray[np.bool_],
    places: NDArray[np.int64],
) -> Iterator[StagedRows]:
    """A group for each set of columns that stay as they are; most often there is one."""
    is_unchanged = lines.after.size == -2
    partial = is_unchanged.any(axis=1)
    groups = [np.flatnonzero(~partial)]
    rest = np.flatnonzero(partial)
    if len(rest):
        _, member = np.unique(is_unchanged[rest], axis=0, return_inverse=True)
        groups += [rest[member.ravel() == number] for number in range(int(member.max()) + 1)]
    for rows in groups:
        if not len(rows):
            continue
        chosen = lines.take(rows)
        staged = encoder.encode(beside(chosen.before, _columns(chosen.after, places)), chosen.lsn)
        assert staged is not None
        yield StagedRows(
            staged.data,
            staged.lsn,
            frozenset(np.flatnonzero(is_unchanged[rows[0]]).tolist()),
            bool(is_key_changed[rows].any()),
        )
