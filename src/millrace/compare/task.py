"""Are both sides equal? Counts and checksums computed inside the servers.

Invariant: a checksum does not depend on the order of rows or columns, and two sides that
hold the same rows give the same one whatever their encodings, collations or settings.
Rows never leave a server.

The checksum of a table is the sum, over its rows, of a 64-bit hash of the row's text: the
one form that every type has and that distinguishes -0 from 0, and NaN from nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from psycopg import Error as PsycopgError
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, MillraceError
from millrace.postgres.catalog.compared import ComparedRelation
from millrace.postgres.quote import ident, qualified, selected
from millrace.postgres.wire.libpq import drain, execute, open_session, result_error
from millrace.relation import Column, Table
from millrace.retry import with_retries
from millrace.snapshot.export import snapshot_sql
from millrace.split.plan import SampledRow, SplitSettings, plan_table_parts

R = TypeVar("R")
Name = tuple[str, str]

# A table larger than this is compared in key ranges, several at once. Only key ranges mean the
# same on both sides.
PART_BYTES = 256 * 1024 * 1024
SPLIT = SplitSettings(larger_than_bytes=PART_BYTES, by_ctid=False)

# Dropped or changed since the catalog was read.
_GONE = ("42P01", "42703")


@dataclass(frozen=True)
class ComparePart:
    """A table, or a key range of one, to be summed on both sides."""

    schema: str
    name: str
    # SQL of each column, as it enters the hash.
    expressions: tuple[str, ...]
    # What identifies rows; () if nothing does.
    key: tuple[str, ...]
    condition: str
    # Whether each side reads the partitions below the table, too.
    source_tree: bool = False
    target_tree: bool = False
    estimated_bytes: int = 0
    # Which rows of the source the target should have: a predicate, or, of a tree whose
    # partitions have different ones, a query of these rows.
    where: str = ""
    query: str = ""
    # Its name on the target; None for the same.
    target: Name | None = None

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    def relations(self) -> tuple[str, str]:
        """The rows of source and target, to be put after FROM."""
        name = qualified(self.schema, self.name)
        source = f"({self.query}) AS kept" if self.query else _only(name, self.source_tree)
        target = qualified(*self.target) if self.target else name
        return (
            source + _where(self.condition, self.where),
            _only(target, self.target_tree) + _where(self.condition),
        )


@dataclass(frozen=True)
class CompareTask:
    """What one Spark task compares."""

    source: Dsn
    target: Dsn
    snapshot: str | None
    same_encoding: bool
    parts: tuple[ComparePart, ...]


@dataclass(frozen=True)
class Sum:
    """One side of one part."""

    rows: int
    checksum: str


@dataclass(frozen=True)
class RowDifference:
    """A row that differs, or several that look the same; of rows without a key, their hash."""

    key: tuple[str, ...]
    # missing on target, extra on target, different
    kind: str
    count: int = 1


@dataclass(frozen=True)
class TableComparison:
    """Both sides of one part, or of one table when its parts are added up."""

    label: str
    source: Sum | None
    target: Sum | None
    error: MillraceError | None = None
    # Why rows were not compared at all: the table, or columns of it, are on one side only.
    problem: str = ""
    schema: str = ""
    name: str = ""
    key: tuple[str, ...] = ()
    rows: tuple[RowDifference, ...] = ()
    # Whether `rows` are all that differ.
    rows_complete: bool = False

    @property
    def is_equal(self) -> bool:
        return not self.problem and self.error is None and self.source == self.target


def plan_compare(
    tables: Sequence[Table],
    samples: Mapping[int, Sequence[SampledRow]],
    source: Mapping[Name, ComparedRelation],
    target: Mapping[Name, ComparedRelation],
    *,
    filtered: bool = False,
) -> tuple[list[ComparePart], list[TableComparison]]:
    """Parts, largest first, and the tables that can't be compared by rows.

    `filtered` says that `tables` may lack some partitions, and others some rows.
    """
    whole = [table for table in tables if not table.load_via]
    roots = [table for table in tables if table.load_via]
    parts: list[ComparePart] = []
    problems: list[TableComparison] = []
    for table in whole:
        name = table.schema, table.name
        problem = _problem(source.get(name), target.get(name))
        if problem:
            problems.append(_with_problem(name, problem))
            continue
        part = _part(source[name], target[name], tree=False)
        # The target may have NULLs where the source can have none.
        key = table.split_key and replace(table.split_key, nullable=True)
        cut = replace(table, split_key=key)
        for planned in plan_table_parts(cut, samples.get(table.oid, ()), SPLIT):
            condition = planned.condition
            if table.extension_condition:
                condition = re.sub(r"(?i)^\s*where\s+", "", table.extension_condition)
            parts.append(
                replace(
                    part,
                    condition=condition,
                    estimated_bytes=planned.estimated_bytes,
                    where=table.where or "",
                    query=_computed_query(source[name], table),
                )
            )
    # The rows of these may be in other partitions on the target: compare the whole.
    for name, size in _sizes(roots).items():
        problem = _problem(source.get(name), target.get(name))
        if problem:
            problems.append(_with_problem(name, problem))
        else:
            part = _part(source[name], target[name], tree=True)
            query = _tree_query(source[name], roots) if filtered else ""
            parts.append(replace(part, estimated_bytes=size, query=query))
    return sorted(parts, key=lambda part: (-part.estimated_bytes, part.label)), problems


def _tree_query(root: ComparedRelation, tables: Sequence[Table]) -> str:
    """The rows of those partitions that are kept; their columns may have any order."""
    return " UNION ALL ".join(
        f"{_selected(root, table)} FROM ONLY {qualified(table.schema, table.name)}"
        f"{_where(table.where)}"
        for table in tables
        if table.load_via and table.load_via[1:] == (root.schema, root.name)
    )


def _computed_query(relation: ComparedRelation, table: Table) -> str:
    """The rows of a table of which some columns are copied as something else; empty for others."""
    if not any(column.expression for column in table.columns):
        return ""
    return f"{_selected(relation, table)}, ctid FROM ONLY {qualified(table.schema, table.name)}"


def _selected(relation: ComparedRelation, table: Table) -> str:
    """The relation's columns as they are copied from the table."""
    copied = {column.name: column for column in table.columns}
    return "SELECT " + selected(
        copied.get(name, Column(name, type_name)) for name, type_name in relation.columns
    )


def _only(name: str, tree: bool) -> str:
    return name if tree else f"ONLY {name}"


def _where(*conditions: str | None) -> str:
    given = [f"({each})" for each in conditions if each]
    return f" WHERE {' AND '.join(given)}" if given else ""


def _sizes(tables: Sequence[Table]) -> dict[Name, int]:
    sizes: dict[Name, int] = {}
    for table in tables:
        assert table.load_via is not None
        name = table.load_via[1], table.load_via[2]
        sizes[name] = sizes.get(name, 0) + table.total_bytes
    return sizes


def _problem(source: ComparedRelation | None, target: ComparedRelation | None) -> str:
    if target is None:
        return "missing on target"
    if source is None:
        return "missing on source"
    names = [{name for name, _ in side.columns} for side in (source, target)]
    missing, extra = sorted(names[0] - names[1]), sorted(names[1] - names[0])
    said = [f"columns missing on target: {', '.join(missing)}"] if missing else []
    said += [f"columns extra on target: {', '.join(extra)}"] if extra else []
    return "; ".join(said)


def _with_problem(name: Name, problem: str) -> TableComparison:
    return TableComparison(
        ".".join(name), None, None, problem=problem, schema=name[0], name=name[1]
    )


def extra_tables(
    source: Mapping[Name, ComparedRelation], target: Mapping[Name, ComparedRelation]
) -> list[TableComparison]:
    """Tables with rows of their own that only the target has."""
    return [
        _with_problem(name, "missing on source")
        for name, relation in sorted(target.items())
        if name not in source and relation.kind == "r" and not relation.of_extension
    ]


def _part(source: ComparedRelation, target: ComparedRelation, *, tree: bool) -> ComparePart:
    types = dict(target.columns)
    return ComparePart(
        source.schema,
        source.name,
        tuple(_expression(name, {type_name, types[name]}) for name, type_name in source.columns),
        source.key,
        "",
        tree,
        tree or target.kind == "p",
        target=(target.schema, target.name),
    )


def _expression(name: str, types: set[str]) -> str:
    """As text a bytea is twice as long, which may be more than the gigabyte a value may have."""
    return f"sha256({ident(name)})" if types == {"bytea"} else ident(name)


def compare_parts(task: CompareTask, attempt: int = 0) -> list[TableComparison]:
    """The task body: sum each part on both sides at once."""
    with Sides(task.source, task.target, task.snapshot) as sides:
        return [sides.retry(partial(_compare, sides, task, part)) for part in task.parts]


def checksum_statement(part: ComparePart, relation: str, *, same_encoding: bool) -> str:
    """Count and checksum of a part on one side, whose rows are those of `relation`."""
    if not part.expressions:
        return f"SELECT count(*), 0 FROM {relation}"
    hashed = hash_sql(part.expressions, same_encoding=same_encoding)
    return f"SELECT count(*), coalesce(sum({hashed}), 0) FROM {relation}"


def hash_sql(expressions: Sequence[str], *, same_encoding: bool) -> str:
    """A 64-bit hash of the row of these expressions."""
    text = f'ROW({", ".join(expressions)})::text COLLATE "C"'
    if same_encoding:
        return f"hashtextextended({text}, 0)"
    return f"('x' || substr(md5(convert_to({text}, 'UTF8')), 1, 16))::bit(64)::int8"


class Sides(AbstractContextManager["Sides"]):
    """A session on each side, opened when needed, closed after any error."""

    def __init__(self, source: Dsn, target: Dsn, snapshot: str | None) -> None:
        self._dsns = source, target
        self._snapshot = snapshot
        self._open: list[PGconn] = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for side in self._open:
            side.finish()
        self._open = []

    def retry(self, work: Callable[[], R]) -> R:
        """Do work that uses these sessions; lost connections are opened again."""
        return with_retries(partial(self._closing_after_errors, work))

    def query(self, source: str, target: str, what: str) -> tuple[PGresult, PGresult]:
        """Run a statement on each side, both at once."""
        sides = self.sessions()
        try:
            for side, statement in zip(sides, (source, target), strict=True):
                side.send_query(statement.encode())
        except PsycopgError as error:
            raise ConnectionLost(f"{what}: the connection broke", sqlstate=None) from error
        results = [drain(side) for side in sides]
        for side_results in results:
            if not side_results:
                raise ConnectionLost(f"{what}: the connection broke", sqlstate=None)
            if side_results[-1].status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
                raise result_error(side_results[-1], what)
        return results[0][-1], results[1][-1]

    def sessions(self) -> list[PGconn]:
        """Source, under the snapshot, and target."""
        if not self._open:
            for dsn in self._dsns:
                self._open.append(open_session(dsn, "compare", "UTF8"))
            execute(self._open[0], snapshot_sql(self._snapshot).rstrip("; "))
        return self._open

    def _closing_after_errors(self, work: Callable[[], R]) -> R:
        try:
            return work()
        except BaseException:
            self.close()
            raise


def _compare(sides: Sides, task: CompareTask, part: ComparePart) -> TableComparison:
    found = TableComparison(
        part.label, None, None, schema=part.schema, name=part.name, key=part.key
    )
    source, target = (
        checksum_statement(part, relation, same_encoding=task.same_encoding)
        for relation in part.relations()
    )
    try:
        results = sides.query(source, target, f"summing {part.label}")
    except MillraceError as error:
        if error.facts.get("sqlstate") in _GONE:
            sides.close()
            return replace(found, error=error)
        raise
    return replace(found, source=_sum(results[0]), target=_sum(results[1]))


def _sum(result: PGresult) -> Sum:
    rows, checksum = (result.get_value(0, column) or b"" for column in range(2))
    return Sum(int(rows), checksum.decode())


def merge_parts(compared: Sequence[TableComparison], most_rows: int = 0) -> list[TableComparison]:
    """One for each table: parts added up."""
    tables: dict[Name, TableComparison] = {}
    for one in compared:
        before = tables.get((one.schema, one.name))
        tables[one.schema, one.name] = one if before is None else _merged(before, one, most_rows)
    return list(tables.values())


def _merged(one: TableComparison, other: TableComparison, most_rows: int) -> TableComparison:
    rows = one.rows + other.rows
    return replace(
        one,
        source=_added(one.source, other.source),
        target=_added(one.target, other.target),
        error=one.error or other.error,
        rows=rows[:most_rows],
        # A part that is equal has no rows to list.
        rows_complete=len(rows) <= most_rows
        and all(part.rows_complete or part.is_equal for part in (one, other)),
    )


def _added(one: Sum | None, other: Sum | None) -> Sum | None:
    if one is None or other is None:
        return None
    return Sum(one.rows + other.rows, str(int(one.checksum) + int(other.checksum)))
