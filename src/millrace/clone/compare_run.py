"""`compare data` and `compare schema` from beginning to end.

Invariant: equal is said only of tables whose every part was summed on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from millrace.clone.compare import (
    SPLIT,
    Compared,
    ComparePart,
    CompareTask,
    Name,
    compare_parts,
    extra_tables,
    merge_parts,
    plan_compare,
)
from millrace.clone.compare_filter import (
    LeftOut,
    filter_description,
    left_out,
    uncopied_columns,
    without,
)
from millrace.clone.compare_rows import RowsTask, compare_rows
from millrace.clone.compare_schema import SchemaComparison, compare_descriptions
from millrace.clone.decision import PG_CLASS_OID, PG_NAMESPACE_OID, Decision
from millrace.clone.engine import Engine
from millrace.clone.filter import FilterRules
from millrace.clone.filtering import filter_tables, read_decision
from millrace.clone.source import sample_tables
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError
from millrace.postgres import catalog
from millrace.postgres.compared import (
    ComparedRelation,
    read_compared_relations,
    read_computed_columns,
    read_partition_oids,
)
from millrace.postgres.connect import connect, resolve, server_encoding, translated
from millrace.postgres.describe import Connection, Description, read_description
from millrace.relation import Table
from millrace.snapshot.export import open_snapshot

A = TypeVar("A")
R = TypeVar("R")

# Small tables share a task.
PACK_BYTES = 32 * 1024 * 1024
PACK_PARTS = 200
MOST_ROWS = 100


@dataclass(frozen=True)
class CompareSettings:
    """Flags of `millrace compare data`."""

    source: Dsn
    target: Dsn
    jobs: int = 4
    snapshot: str | None = None
    # Name the rows that differ, up to so many for each table.
    rows: bool = False
    most_rows: int = MOST_ROWS
    # Only these, as `schema.name`; a partitioned table stands for its partitions.
    tables: tuple[str, ...] = ()
    # Those of the clone: what they leave out is not compared.
    filters: FilterRules = field(default_factory=FilterRules)


def compare_data(settings: CompareSettings, engine: Engine) -> list[Compared]:
    """Every table of either side, under one snapshot of the source."""
    source, target = resolve(settings.source), resolve(settings.target)
    with open_snapshot(source, settings.snapshot) as snapshot:
        with translated("reading the target's catalog"), connect(target, "compare") as connection:
            encoding = server_encoding(connection)
            there = _by_name(read_compared_relations(connection))
            wanted_there = read_partition_oids(connection, list(settings.tables))
        with translated("reading the source's catalog"):
            same = encoding == server_encoding(snapshot.connection)
            here = _by_name(read_compared_relations(snapshot.connection))
            tables = catalog.read_tables(snapshot.connection, same_encoding=same)
            if not settings.filters.is_empty:
                decision = read_decision(snapshot.connection, settings.filters)
                out = _left_out(snapshot.connection, decision, here, tables)
                here, there = out.apply(here), out.apply(there)
                tables = list(filter_tables(tables, decision, settings.filters))
            if settings.tables:
                tables = _chosen(snapshot.connection, tables, settings.tables)
        extra = extra_tables(here, there)
        if settings.tables:
            extra = [one for one in extra if there[one.schema, one.name].oid in wanted_there]
            _refuse_unknown(settings.tables, here, there)
        samples = sample_tables(snapshot.connection, tables, SPLIT)
        parts, problems = plan_compare(
            tables, samples, here, there, filtered=not settings.filters.is_empty
        )
        pattern = CompareTask(source, target, snapshot.id, same, ())
        compared = _sum_parts(parts, pattern, engine, settings)
        return merge_parts([*compared, *problems, *extra], settings.most_rows)


def compare_schema(
    source: Dsn,
    target: Dsn,
    leave_out: frozenset[str] = frozenset(),
    filters: FilterRules | None = None,
) -> SchemaComparison:
    """Both catalogs, read at once, and what differs but in the properties to leave out."""
    rules = filters or FilterRules()
    with ThreadPoolExecutor(2) as threads:
        ours, theirs = threads.map(_describe, (source, target), (rules, FilterRules()))
    (here, decision), (there, _) = ours, theirs
    there = without(there, left_out(here, decision))
    return compare_descriptions(filter_description(here, decision), there, leave_out)


def _describe(dsn: Dsn, rules: FilterRules) -> tuple[Description, Decision]:
    what = f"reading the catalog of {dsn}"
    with connect(dsn, "compare", quote_all_identifiers="off") as connection, translated(what):
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        return read_description(connection), read_decision(connection, rules)


def _left_out(
    connection: Connection,
    decision: Decision,
    here: Mapping[Name, ComparedRelation],
    tables: Sequence[Table],
) -> LeftOut:
    """What the decision says of the source's relations, in names, so that it fits the target."""
    schemas = catalog.read_schemas(connection)
    return LeftOut(
        {name for oid, name in schemas.items() if (PG_NAMESPACE_OID, oid) in decision.excluded},
        {name for name, one in here.items() if (PG_CLASS_OID, one.oid) in decision.excluded},
        uncopied_columns(tables, decision, read_computed_columns(connection)),
    )


def _by_name(relations: Sequence[ComparedRelation]) -> dict[Name, ComparedRelation]:
    return {(relation.schema, relation.name): relation for relation in relations}


def _chosen(connection: Connection, tables: list[Table], labels: Sequence[str]) -> list[Table]:
    oids = read_partition_oids(connection, list(labels))
    roots = {table.load_via for table in tables if table.oid in oids and table.load_via}
    # A partition that is compared through its root brings the whole tree.
    return [t for t in tables if t.oid in oids or (t.load_via and t.load_via in roots)]


def _refuse_unknown(
    labels: Sequence[str],
    here: dict[Name, ComparedRelation],
    there: dict[Name, ComparedRelation],
) -> None:
    known = {relation.label for side in (here, there) for relation in side.values()}
    unknown = [label for label in labels if label not in known]
    if unknown:
        raise ConfigError(
            f"there is no table {', '.join(unknown)} on either side, or --filters leaves it out",
            hint="write schema.name; names are taken as they are: no quotes, case matters",
        )


def _sum_parts(
    parts: list[ComparePart], pattern: CompareTask, engine: Engine, settings: CompareSettings
) -> list[Compared]:
    tasks = [replace(pattern, parts=pack) for pack in _packs(parts)]
    names = [f"compare {task.parts[0].label}" for task in tasks]
    summed = _call_all(engine, compare_parts, tasks, names, settings.jobs)
    compared = [one for pack in summed for one in pack]
    planned = [part for task in tasks for part in task.parts]
    if not settings.rows:
        return compared
    differing = [
        at for at, one in enumerate(compared) if not one.is_equal and one.source and one.target
    ]
    rows_tasks = [
        RowsTask(replace(pattern, parts=(planned[at],)), compared[at], settings.most_rows)
        for at in differing
    ]
    names = [f"compare rows of {task.compared.label}" for task in rows_tasks]
    named = _call_all(engine, compare_rows, rows_tasks, names, settings.jobs)
    for at, one in zip(differing, named, strict=True):
        compared[at] = one
    return compared


def _call_all(
    engine: Engine,
    body: Callable[[A, int], R],
    arguments: Sequence[A],
    names: Sequence[str],
    jobs: int,
) -> list[R]:
    with ThreadPoolExecutor(jobs) as threads:
        return list(threads.map(partial(engine.call, body), arguments, names))


def _packs(parts: list[ComparePart]) -> list[tuple[ComparePart, ...]]:
    packs: list[tuple[ComparePart, ...]] = []
    pending: list[ComparePart] = []
    size = 0
    for part in parts:
        pending.append(part)
        size += part.estimated_bytes
        if size >= PACK_BYTES or len(pending) >= PACK_PARTS:
            packs.append(tuple(pending))
            pending, size = [], 0
    return [*packs, tuple(pending)] if pending else packs
