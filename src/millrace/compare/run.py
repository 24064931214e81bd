"""`compare data` and `compare schema` from beginning to end.

Invariant: equal is said only of tables whose every part was summed on both sides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from millrace.compare.filtered import (
    Exclusions,
    filter_description,
    left_out,
    uncopied_columns,
    without,
)
from millrace.compare.renamed import map_settings, without_others
from millrace.compare.rows import RowsTask, compare_rows
from millrace.compare.schema import SchemaComparison, compare_descriptions
from millrace.compare.task import (
    SPLIT,
    ComparePart,
    CompareTask,
    Name,
    TableComparison,
    compare_parts,
    extra_tables,
    merge_parts,
    plan_compare,
)
from millrace.config.dsn import Dsn
from millrace.engine import Engine
from millrace.errors import ConfigError
from millrace.filter.apply import filter_tables, read_decision
from millrace.filter.decide import PG_CLASS_OID, PG_NAMESPACE_OID, Decision
from millrace.filter.rules import FilterRules
from millrace.name import Naming
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.catalog.compared import (
    ComparedRelation,
    read_compared_relations,
    read_computed_columns,
    read_partition_oids,
)
from millrace.postgres.catalog.describe import Connection, Description, read_description
from millrace.postgres.schema_rename import rename_in_sql
from millrace.postgres.wire.connect import connect, resolve, server_encoding, translated
from millrace.relation import Table
from millrace.route import Route, RouteSettings
from millrace.snapshot.export import open_snapshot
from millrace.split.sample import sample_tables

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")

# Small tables share a task.
PACK_BYTES = 32 * 1024 * 1024
PACK_PARTS = 200
MOST_ROWS = 100
# Schemas that a message names.
MOST_NAMES = 10


@dataclass(frozen=True)
class CompareSettings(RouteSettings):
    """Flags of `millrace compare data`."""

    # Its filters and names are those of the clone: what they leave out is not compared.
    route: Route
    jobs: int = 4
    snapshot: str | None = None
    # Name the rows that differ, up to this number for each table.
    rows: bool = False
    most_rows: int = MOST_ROWS
    # Only these, as `schema.name`; a partitioned table includes its partitions.
    tables: tuple[str, ...] = ()


def compare_data(settings: CompareSettings, engine: Engine) -> list[TableComparison]:
    """Every table of either side, under one snapshot of the source."""
    source, target = resolve(settings.source), resolve(settings.target)
    with open_snapshot(source, settings.snapshot) as snapshot:
        with translated("reading the target's catalog"), connect(target, "compare") as connection:
            encoding = server_encoding(connection)
            schemas = set(catalog.read_schemas(snapshot.connection).values())
            there = _by_source_name(read_compared_relations(connection), settings.naming, schemas)
            wanted = [one.label for name, one in there.items() if ".".join(name) in settings.tables]
            wanted_there = read_partition_oids(connection, wanted)
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


def compare_schema(route: Route, leave_out: frozenset[str] = frozenset()) -> SchemaComparison:
    """Both catalogs, read at once, and what differs but in the properties to leave out. Under a
    naming, the target is read under the names of the source."""
    rename = "" if route.naming.is_identity else _rename_sql(route)
    with ThreadPoolExecutor(2) as threads:
        ours, theirs = threads.map(
            _describe, (route.source, route.target), (route.filters, FilterRules()), ("", rename)
        )
    (here, decision), (there, _) = ours, theirs
    here = map_settings(here, route.naming)
    if not route.naming.is_identity:
        there, others = without_others(here, there)
        _tell_others(others)
    there = without(there, left_out(here, decision))
    return compare_descriptions(filter_description(here, decision), there, leave_out)


def _rename_sql(route: Route) -> str:
    with connect(route.source, "compare") as connection, translated("reading the extensions"):
        homes = {one.name: one.schema for one in catalog.read_extensions(connection)}
    return rename_in_sql(route.naming, homes)


def _describe(dsn: Dsn, rules: FilterRules, rename: str) -> tuple[Description, Decision]:
    """In a transaction that changes nothing: a renaming is rolled back at its end."""
    what = f"reading the catalog of {dsn}"
    with (
        connect(dsn, "compare", quote_all_identifiers="off") as connection,
        translated(what),
        connection.transaction(force_rollback=True),
    ):
        mode = "READ WRITE" if rename else "READ ONLY"
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ {mode}".encode())
        if rename:
            connection.execute(rename.encode())
        return read_description(connection), read_decision(connection, rules)


def _left_out(
    connection: Connection,
    decision: Decision,
    here: Mapping[Name, ComparedRelation],
    tables: Sequence[Table],
) -> Exclusions:
    """What the decision says of the source's relations, in names, so that it fits the target."""
    schemas = catalog.read_schemas(connection)
    return Exclusions(
        {name for oid, name in schemas.items() if (PG_NAMESPACE_OID, oid) in decision.excluded},
        {name for name, one in here.items() if (PG_CLASS_OID, one.oid) in decision.excluded},
        uncopied_columns(tables, decision, read_computed_columns(connection)),
    )


def _by_name(relations: Sequence[ComparedRelation]) -> dict[Name, ComparedRelation]:
    return {(relation.schema, relation.name): relation for relation in relations}


def _by_source_name(
    relations: Sequence[ComparedRelation], naming: Naming, schemas: Collection[str]
) -> dict[Name, ComparedRelation]:
    """The target's relations; under a naming, the database is shared with others, and what is in
    a schema that is none of the source's is left out."""
    if naming.is_identity:
        return _by_name(relations)
    named = {naming.source(one.schema, one.name): one for one in relations}
    found: dict[Name, ComparedRelation] = {
        name: one for name, one in named.items() if name is not None and name.schema in schemas
    }
    _tell_others({one.schema for one in relations} - {one.schema for one in found.values()})
    return found


def _tell_others(schemas: Collection[str]) -> None:
    if schemas:
        names = ", ".join(sorted(schemas)[:MOST_NAMES])
        log.info("not compared, because no schema of the source goes there: %s", names)


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
    known = {".".join(name) for side in (here, there) for name in side}
    unknown = [label for label in labels if label not in known]
    if unknown:
        raise ConfigError(
            f"there is no table {', '.join(unknown)} on either side, or --filters leaves it out",
            hint="write schema.name; names are case-sensitive and written without quotes",
        )


def _sum_parts(
    parts: list[ComparePart], pattern: CompareTask, engine: Engine, settings: CompareSettings
) -> list[TableComparison]:
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
