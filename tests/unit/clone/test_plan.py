"""Plans: nothing is left out, nothing is twice, and the same input gives the same plan."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from millrace.clone.plan import (
    PACK_BYTES,
    PART_OVERHEAD_BYTES,
    SMALL_PART_BYTES,
    plan_clone,
    plan_packs,
)
from millrace.relation import Column, Index, Part, SourceCatalog, SplitKey, Table
from millrace.split.plan import SampledRow, SplitSettings

MIB = 1024 * 1024


def table(oid: int, size: int = 0, **changes: object) -> Table:
    values: dict[str, object] = {
        "oid": oid,
        "schema": "public",
        "name": f"t{oid}",
        "columns": (Column("id", "bigint"),),
        "heap_bytes": size,
        "total_bytes": size,
        "estimated_rows": size // 100,
        "split_key": SplitKey("id", nullable=False),
    }
    return Table(**(values | changes))  # type: ignore[arg-type]


def part(oid: int, number: int, size: int) -> Part:
    return Part(oid, number, 1, "", "", size // 100, size)


def identities(packs: object) -> list[tuple[int, int]]:
    return [(p.table_oid, p.number) for pack in packs for p in pack.parts]  # type: ignore[attr-defined]


SAMPLES = [SampledRow(key, 1) for key in range(100)]
catalogs = st.lists(st.integers(0, 200 * MIB), max_size=30).map(
    lambda sizes: SourceCatalog(tables=tuple(table(n, size) for n, size in enumerate(sizes, 1)))
)


@given(catalogs, st.integers(0, 50 * MIB), st.integers(1, 16), st.randoms())
def test_same_input_gives_the_same_plan_whatever_the_order_of_tables(
    catalog: SourceCatalog, threshold: int, jobs: int, order: random.Random
) -> None:
    samples = {t.oid: SAMPLES for t in catalog.tables}
    split = SplitSettings(threshold, max_parts=20)
    plan = plan_clone(catalog, samples, split)
    assert plan == plan_clone(catalog, samples, split)

    tables, mixed = list(catalog.tables), list(SAMPLES)
    order.shuffle(tables)
    order.shuffle(mixed)
    other = plan_clone(SourceCatalog(tables=tuple(tables)), dict.fromkeys(samples, mixed), split)
    assert (other.parts, plan_packs(other.every_part, jobs=jobs)) == (
        plan.parts,
        plan_packs(plan.every_part, jobs=jobs),
    )


@given(catalogs, st.integers(0, 50 * MIB), st.integers(1, 16))
def test_every_part_is_in_exactly_one_pack(
    catalog: SourceCatalog, threshold: int, jobs: int
) -> None:
    samples = {t.oid: SAMPLES for t in catalog.tables}
    plan = plan_clone(catalog, samples, SplitSettings(threshold))
    wanted = [(p.table_oid, p.number) for parts in plan.parts.values() for p in parts]
    assert set(plan.parts) == {t.oid for t in catalog.tables}
    assert Counter(identities(plan_packs(plan.every_part, jobs=jobs))) == Counter(wanted)


@given(st.lists(st.integers(0, 100 * MIB), max_size=60), st.integers(1, 16))
def test_parts_start_with_the_largest(sizes: list[int], jobs: int) -> None:
    packs = plan_packs([part(n, 1, size) for n, size in enumerate(sizes)], jobs=jobs)
    started = [p.estimated_bytes for pack in packs for p in pack.parts]
    assert started == sorted(sizes, reverse=True)


def test_large_parts_have_packs_of_their_own() -> None:
    packs = plan_packs([part(n, 1, SMALL_PART_BYTES) for n in range(10)], jobs=2)
    assert [len(pack.parts) for pack in packs] == [1] * 10


def test_five_thousand_tiny_tables_share_few_packs() -> None:
    parts = [part(n, 1, (n % 3) * 8192) for n in range(5000)]
    packs = plan_packs(parts, jobs=4)
    assert 4 <= len(packs) <= 40
    assert sorted(identities(packs)) == [(n, 1) for n in range(5000)]
    largest_part = SMALL_PART_BYTES + PART_OVERHEAD_BYTES
    assert all(pack.estimated_bytes < PACK_BYTES + largest_part for pack in packs)


def test_small_tables_keep_all_jobs_busy() -> None:
    parts = [part(n, 1, 4 * MIB) for n in range(64)]
    assert len(plan_packs(parts, jobs=8)) >= 8


def test_no_parts_give_no_packs() -> None:
    assert plan_packs([], jobs=4) == []


def test_table_that_samples_can_not_cut_is_one_part() -> None:
    big = table(1, 100 * MIB)
    plan = plan_clone(SourceCatalog(tables=(big,)), {}, SplitSettings(MIB))
    assert [p.condition for p in plan.parts[1]] == [""]
    assert plan.shared_tables() == []


def test_indexes_hang_on_their_table_in_the_order_of_the_catalog() -> None:
    indexes = tuple(
        Index(oid, table_oid, "public", f"i{oid}", "CREATE INDEX ...", False)
        for oid, table_oid in ((10, 2), (11, 1), (12, 2))
    )
    catalog = SourceCatalog(tables=(table(1), table(2)), indexes=indexes)
    plan = plan_clone(catalog, {}, SplitSettings())
    assert {oid: [i.oid for i in found] for oid, found in plan.indexes.items()} == {
        2: [10, 12],
        1: [11],
    }


def test_tables_that_several_tasks_fill_are_the_split_ones_and_those_loaded_via_their_root() -> (
    None
):
    root = (100, "public", "moods")
    tables = (
        table(1, 100 * MIB),
        table(2, 10),
        table(3, 10, load_via=root),
        table(4, 10, load_via=root),
    )
    plan = plan_clone(SourceCatalog(tables=tables), {1: SAMPLES}, SplitSettings(50 * MIB))
    assert [t.oid for t in plan.shared_tables()] == [1, 3, 4]


def test_table_loaded_via_its_root_is_whole_when_all_partitions_of_the_root_are_copied() -> None:
    moods, days = (100, "public", "moods"), (200, "public", "days")
    tables = (
        table(1),
        table(2, load_via=moods),
        table(3, load_via=days),
        table(4, load_via=moods),
    )
    plan = plan_clone(SourceCatalog(tables=tables), {}, SplitSettings())
    assert plan.families() == {1: (1,), 2: (2, 4), 3: (3,), 4: (2, 4)}
