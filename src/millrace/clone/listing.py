"""What the source holds and what of it a clone would copy: for `millrace list`.

Invariant: the filters mean here what they mean to a clone, by the same decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from millrace.clone.plan import Plan, plan_clone
from millrace.clone.source import read_catalog
from millrace.compare.filtered import filter_description
from millrace.errors import ConfigError
from millrace.filter.apply import filter_catalog, read_decision
from millrace.filter.decide import Decision, Key
from millrace.filter.rules import FilterRules
from millrace.postgres.catalog import inventory
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.catalog.describe import Description, read_description
from millrace.postgres.wire.connect import server_encoding, translated
from millrace.relation import Extension, Index, Part, SourceCatalog, Table
from millrace.relation import Sequence as SourceSequence
from millrace.split.plan import SplitSettings, plan_table_parts
from millrace.split.sample import sample_tables

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class TableChoice:
    """Which tables are asked for, by name; "" is any."""

    schema: str = ""
    table: str = ""

    def matches(self, schema: str, table: str) -> bool:
        return self.schema in ("", schema) and self.table in ("", table)

    def refuse_unknown(self, found: Sequence[object]) -> None:
        """A table that is asked for must be there."""
        if self.table and not found:
            raise ConfigError(
                f"there is no table {'.'.join(filter(None, (self.schema, self.table)))},"
                " or --filters leaves it out",
                hint="names are case-sensitive and written without quotes",
            )


@dataclass(frozen=True)
class ListedExclusion:
    """An object that is left out, or kept all the same, and why."""

    catalog_oid: int
    oid: int
    object: str
    reason: str


@dataclass(frozen=True)
class ListedSchema:
    """All that the source has and a clone would make."""

    source: Mapping[str, object]
    plan: Plan
    description: Description
    # How many objects of each kind there are before the filters.
    found: Mapping[str, int]
    decision: Decision

    def counts(self) -> list[dict[str, Any]]:
        """For each kind, how many objects are copied and how many are left out."""
        kept = Counter(kind for kind, _ in self.description.objects)
        return [
            {"kind": kind, "objects": kept[kind], "left_out": number - kept[kind]}
            for kind, number in sorted(self.found.items())
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        source = self.plan.catalog
        return {
            "setup": dict(self.source),
            "schemas": [{"oid": oid, "name": name} for oid, name in source.schemas.items()],
            "tables": [
                {**asdict(table), "parts": [asdict(part) for part in self.plan.parts[table.oid]]}
                for table in source.tables
            ],
            "partitioned_tables": [_relation(*each) for each in source.partitioned_tables],
            "materialized_views": [_relation(*each) for each in source.materialized_views],
            "indexes": [asdict(index) for index in source.indexes],
            "foreign_keys": [asdict(key) for key in source.foreign_keys],
            "sequences": [asdict(sequence) for sequence in source.sequences],
            "extensions": [asdict(extension) for extension in source.extensions],
            "large_objects": {
                "count": sum(each.count for each in source.large_object_ranges),
                "bytes": source.large_object_bytes,
            },
            "objects": [
                {
                    "kind": one.kind,
                    "name": one.name,
                    "inside": list(one.parent) if one.parent else None,
                    "properties": dict(one.properties),
                }
                for _, one in sorted(self.description.objects.items())
            ],
            "left_out": [asdict(each) for each in _left(self.decision, self.decision.excluded)],
            "kept": [asdict(each) for each in _left(self.decision, self.decision.kept)],
            "data_skipped": [
                asdict(each) for each in _left(self.decision, self.decision.data_skipped)
            ],
            "warnings": list(self.decision.warnings),
        }


def list_tables(
    connection: Connection, rules: FilterRules, named: TableChoice | None = None
) -> list[Table]:
    """Tables with rows, the largest first."""
    named = named or TableChoice()
    with translated("reading the source's catalog"):
        whole = SourceCatalog(tables=tuple(catalog.read_tables(connection)))
    kept = _filtered(connection, whole, rules).tables
    found = [table for table in kept if named.matches(table.schema, table.name)]
    named.refuse_unknown(found)
    return sorted(found, key=lambda table: (-table.total_bytes, table.label))


def list_skipped(connection: Connection, rules: FilterRules, kind: str) -> list[ListedExclusion]:
    """What the rules leave out of one kind, with the reasons."""
    decision = read_decision(connection, rules)
    return [one for one in _left(decision, decision.excluded) if one.object.startswith(f"{kind} ")]


def list_parts(
    connection: Connection, rules: FilterRules, named: TableChoice, split: SplitSettings
) -> list[tuple[Table, list[Part]]]:
    """Each table with the parts it would be copied in."""
    tables = list_tables(connection, rules, named)
    samples = sample_tables(connection, tables, split)
    return [(t, plan_table_parts(t, samples.get(t.oid, ()), split)) for t in tables]


def list_indexes(connection: Connection, rules: FilterRules, named: TableChoice) -> list[Index]:
    """Indexes that a clone builds, the largest first."""
    with translated("reading the source's catalog"):
        whole = SourceCatalog(indexes=tuple(catalog.read_indexes(connection)))
    kept = _filtered(connection, whole, rules).indexes
    found = [index for index in kept if named.matches(index.schema, index.table)]
    return sorted(found, key=lambda index: (-index.bytes, index.schema, index.name))


def list_sequences(
    connection: Connection, rules: FilterRules
) -> list[tuple[SourceSequence, str | None]]:
    """Sequences in the order of their names, each with the column it belongs to."""
    with translated("reading the source's catalog"):
        whole = SourceCatalog(sequences=tuple(catalog.read_sequences(connection)))
        owners = inventory.read_sequence_owners(connection)
    kept = _filtered(connection, whole, rules).sequences
    return [(s, owners.get(s.oid)) for s in sorted(kept, key=lambda s: (s.schema, s.name))]


def list_extensions(connection: Connection) -> list[Extension]:
    """Extensions in the order of their names."""
    with translated("reading the source's catalog"):
        return sorted(catalog.read_extensions(connection), key=lambda e: e.name)


def list_depends(connection: Connection, rules: FilterRules) -> list[ListedExclusion]:
    """What no rule names and is left out all the same, since it depends on what one does."""
    decision = read_decision(connection, rules)
    return _left(decision, decision.dependents)


def list_schema(connection: Connection, rules: FilterRules, split: SplitSettings) -> ListedSchema:
    """All that a clone would make; `connection` must be in one transaction."""
    decision = read_decision(connection, rules)
    found = read_catalog(connection, decision, rules)
    samples = sample_tables(connection, found.tables, split)
    with translated("reading the source's catalog"):
        description = read_description(connection)
    source = {
        "server_version": connection.info.server_version,
        "encoding": server_encoding(connection),
        "database": connection.info.dbname,
        "filters": None if rules.is_empty else rules.name,
    }
    return ListedSchema(
        source,
        plan_clone(found, samples, split),
        filter_description(description, decision),
        Counter(kind for kind, _ in description.objects),
        decision,
    )


def _filtered(connection: Connection, whole: SourceCatalog, rules: FilterRules) -> SourceCatalog:
    return filter_catalog(whole, read_decision(connection, rules), rules)


def _left(decision: Decision, reasons: Mapping[Key, str]) -> list[ListedExclusion]:
    """In the order of their names; what has no name is a part of something that has one."""
    found = [
        ListedExclusion(*key, decision.labels[key], reason)
        for key, reason in reasons.items()
        if key in decision.labels
    ]
    return sorted(found, key=lambda left: left.object)


def _relation(oid: int, schema: str, name: str) -> dict[str, Any]:
    return {"oid": oid, "schema": schema, "name": name}
