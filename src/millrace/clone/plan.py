"""What one clone will do, before it does anything.

Invariant: the same relations, samples and settings give the same plan; resume
depends on it. This module opens nothing and asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from millrace.relation import Index, Part, SourceCatalog, Table
from millrace.split.plan import (
    SampledRow,
    SplitSettings,
    plan_table_parts,
)

# Tables smaller than this share a task, so that Spark's cost per task (about 50 ms) does not show.
SMALL_PART_BYTES = 8 * 1024 * 1024
PACK_BYTES = 32 * 1024 * 1024
# An empty table still costs some round trips on both servers.
PART_OVERHEAD_BYTES = 64 * 1024


@dataclass(frozen=True)
class Pack:
    """Parts that one Spark task copies one after the other."""

    parts: tuple[Part, ...]

    @property
    def estimated_bytes(self) -> int:
        return sum(part.estimated_bytes + PART_OVERHEAD_BYTES for part in self.parts)


@dataclass(frozen=True)
class Plan:
    """The parts of each table, and what hangs on it."""

    catalog: SourceCatalog
    parts: Mapping[int, tuple[Part, ...]]
    indexes: Mapping[int, tuple[Index, ...]]

    @property
    def every_part(self) -> list[Part]:
        return [part for table_parts in self.parts.values() for part in table_parts]

    def shared_tables(self) -> list[Table]:
        """Tables that several tasks fill, so that they must be emptied beforehand."""
        return [t for t in self.catalog.tables if len(self.parts[t.oid]) > 1 or t.load_via]

    def families(self) -> dict[int, tuple[int, ...]]:
        """For each table, the tables that must all be copied before it is whole: itself, and
        where rows go through a partitioned table, all partitions of that."""
        through: dict[int, list[int]] = {}
        for table in self.catalog.tables:
            if table.load_via:
                through.setdefault(table.load_via[0], []).append(table.oid)
        return {
            table.oid: tuple(through[table.load_via[0]]) if table.load_via else (table.oid,)
            for table in self.catalog.tables
        }

    @property
    def tables(self) -> dict[int, Table]:
        return {table.oid: table for table in self.catalog.tables}


def plan_clone(
    catalog: SourceCatalog,
    samples: Mapping[int, Sequence[SampledRow]],
    split: SplitSettings,
    *,
    known: Mapping[int, tuple[Part, ...]] | None = None,
) -> Plan:
    """The plan for all tables; `samples` has an entry for each table to split.

    `known` are parts planned before, by a process whose run is continued: sizes change, and some of
    those parts may be copied already.
    """
    parts = {
        table.oid: (known or {}).get(table.oid)
        or tuple(plan_table_parts(table, samples.get(table.oid, ()), split))
        for table in catalog.tables
    }
    return Plan(catalog, parts, by_table(catalog.indexes))


def by_table(indexes: Iterable[Index]) -> dict[int, tuple[Index, ...]]:
    """The indexes of each table."""
    found: dict[int, tuple[Index, ...]] = {}
    for index in indexes:
        found[index.table_oid] = (*found.get(index.table_oid, ()), index)
    return found


def plan_packs(parts: Iterable[Part], *, jobs: int) -> list[Pack]:
    """Largest first; small parts share packs of limited size, so that all jobs stay busy."""
    ordered = sorted(parts, key=lambda p: (-p.estimated_bytes, p.table_oid, p.number))
    packs = [Pack((part,)) for part in ordered if part.estimated_bytes >= SMALL_PART_BYTES]
    small = [part for part in ordered if part.estimated_bytes < SMALL_PART_BYTES]
    weight = sum(part.estimated_bytes + PART_OVERHEAD_BYTES for part in small)
    # Several packs for each job, so that the last one to finish is not long alone.
    limit = min(PACK_BYTES, max(weight // (jobs * 4), SMALL_PART_BYTES // 4))
    open_parts: list[Part] = []
    open_bytes = 0
    for part in small:
        open_parts.append(part)
        open_bytes += part.estimated_bytes + PART_OVERHEAD_BYTES
        if open_bytes >= limit:
            packs.append(Pack(tuple(open_parts)))
            open_parts, open_bytes = [], 0
    if open_parts:
        packs.append(Pack(tuple(open_parts)))
    return packs
