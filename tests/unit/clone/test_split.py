"""Cuts: every row belongs to exactly one part, and parts weigh about the same."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.relation import Column, Part, SplitKey, Table
from millrace.split.plan import (
    BLOCK_BYTES,
    SampledRow,
    SplitSettings,
    plan_cuts,
    plan_part_count,
    plan_parts,
    plan_sample_percent,
)

MIB = 1024 * 1024
LIMITS = [sign for bits in (16, 32, 64) for sign in (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)]

keys = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-5, 5), st.sampled_from(LIMITS))
samples_of_keys = st.lists(st.builds(SampledRow, keys, st.integers(1, 100_000)), max_size=60)
blocks = st.integers(0, 2**32 - 2)
samples_of_blocks = st.lists(st.builds(SampledRow, blocks, st.integers(1, 100_000)), max_size=60)
counts = st.integers(2, 20)


def table(**changes: object) -> Table:
    values: dict[str, object] = {
        "oid": 1,
        "schema": "public",
        "name": "t",
        "columns": (Column("id", "bigint"),),
        "heap_bytes": 100 * MIB,
        "total_bytes": 100 * MIB,
        "estimated_rows": 1_000_000,
        "split_key": SplitKey("id", nullable=False),
    }
    return Table(**(values | changes))  # type: ignore[arg-type]


_BOUND = re.compile(r"\"odd \"\"name\" (>=|<) '(-?\d+)'")
_CTID_BOUND = re.compile(r"ctid (>=|<) '\((\d+),0\)'::tid")


def holds(condition: str, key: int | None, bound: re.Pattern[str] = _BOUND) -> bool:
    """The condition's value for a key, as SQL has it: a comparison with NULL is not true."""
    with_null = re.fullmatch(r"\((.*) OR \"odd \"\"name\" IS NULL\)", condition)
    if with_null:
        return key is None or holds(with_null[1], key, bound)
    matches = [bound.fullmatch(one) for one in condition.split(" AND ")]
    assert all(matches), condition
    if key is None:
        return False
    return all(key >= int(m[2]) if m[1] == ">=" else key < int(m[2]) for m in matches if m)


def assert_in_one_part(parts: list[Part], key: int | None, bound: re.Pattern[str] = _BOUND) -> None:
    holding = [part.number for part in parts if holds(part.condition, key, bound)]
    assert len(holding) == 1, (key, [part.condition for part in parts])


@given(samples_of_keys, counts)
def test_cuts_rise_strictly_and_are_fewer_than_the_parts_asked_for(
    samples: list[SampledRow], count: int
) -> None:
    cuts = plan_cuts(samples, count)
    assert all(a < b for a, b in itertools.pairwise(cuts))
    assert len(cuts) <= count - 1
    assert set(cuts) <= {sample.key for sample in samples}


@given(samples_of_keys, counts, st.booleans(), st.lists(keys))
def test_every_integer_and_null_is_in_exactly_one_part(
    samples: list[SampledRow], count: int, nullable: bool, others: list[int]
) -> None:
    split = table(split_key=SplitKey('odd "name', nullable))
    parts = plan_parts(split, cuts := plan_cuts(samples, count), samples)
    if not cuts:
        assert [part.condition for part in parts] == [""]
        return
    near_cuts = [cut + step for cut in cuts for step in (-1, 0, 1)]
    for key in [*LIMITS, *near_cuts, *others, *(sample.key for sample in samples)]:
        assert_in_one_part(parts, key)
    if nullable:
        assert_in_one_part(parts, None)


@given(samples_of_blocks, counts, st.lists(blocks))
def test_every_block_is_in_exactly_one_part(
    samples: list[SampledRow], count: int, others: list[int]
) -> None:
    parts = plan_parts(table(split_key=None), cuts := plan_cuts(samples, count), samples)
    if not cuts:
        assert [part.condition for part in parts] == [""]
        return
    for block in [0, 2**32 - 2, *others, *(cut - 1 for cut in cuts), *cuts]:
        assert_in_one_part(parts, block, _CTID_BOUND)


@given(samples_of_keys, counts)
def test_parts_are_numbered_and_each_starts_where_the_one_before_it_ends(
    samples: list[SampledRow], count: int
) -> None:
    cuts = plan_cuts(samples, count)
    parts = plan_parts(table(), cuts, samples)
    assert [part.number for part in parts] == list(range(1, len(cuts) + 2))
    assert {part.total for part in parts} == {len(parts)}
    for cut, lower, upper in zip(cuts, parts, parts[1:], strict=False):
        assert lower.condition.endswith(f"\"id\" < '{cut}'")
        assert upper.condition.startswith(f"\"id\" >= '{cut}'")
        assert lower.bounds.endswith(f"id < {cut}")
        assert upper.bounds.startswith(f"id >= {cut}")
    assert abs(sum(part.estimated_bytes for part in parts) - table().total_bytes) <= len(parts)


def test_rows_with_null_keys_belong_to_the_first_part_alone() -> None:
    parts = plan_parts(table(split_key=SplitKey("id", nullable=True)), [10, 20])
    assert [part.condition for part in parts] == [
        '("id" < \'10\' OR "id" IS NULL)',
        "\"id\" >= '10' AND \"id\" < '20'",
        "\"id\" >= '20'",
    ]
    assert parts[0].bounds == "id < 10 or id is null"


@pytest.mark.parametrize(
    ("name", "all_keys"),
    [
        ("even", list(range(10_000))),
        ("dense at one end", [*range(9_000), *range(10**12, 10**12 + 1_000)]),
        ("growing gaps", [n**3 for n in range(10_000)]),
        ("negative", [-(n**2) for n in range(10_000)]),
    ],
)
def test_skewed_keys_give_parts_of_about_equal_weight(name: str, all_keys: list[int]) -> None:
    samples = [SampledRow(key, 1) for key in all_keys]
    parts = plan_parts(table(), plan_cuts(samples, 8), samples)
    assert len(parts) == 8
    for part in parts:
        assert part.estimated_bytes == pytest.approx(table().total_bytes / 8, rel=0.02)


def test_few_heavy_rows_weigh_as_much_as_many_light_ones() -> None:
    samples = [SampledRow(key, 10_000 if key < 100 else 100) for key in range(10_100)]
    parts = plan_parts(table(), plan_cuts(samples, 4), samples)
    for part in parts:
        assert part.estimated_bytes == pytest.approx(table().total_bytes / 4, rel=0.05)


@given(
    st.lists(st.builds(SampledRow, keys, st.integers(1, 1000)), unique_by=lambda s: s.key), counts
)
def test_no_part_is_heavier_than_its_share_and_the_heaviest_row(
    samples: list[SampledRow], count: int
) -> None:
    cuts = plan_cuts(samples, count)
    weights = [0] * (len(cuts) + 1)
    for sample in samples:
        weights[sum(sample.key >= cut for cut in cuts)] += sample.weight
    heaviest = max((sample.weight for sample in samples), default=0)
    whole = sum(sample.weight for sample in samples)
    assert max(weights) <= whole / count + heaviest


def test_table_is_split_only_above_the_threshold() -> None:
    settings = SplitSettings(larger_than_bytes=100 * MIB)
    assert plan_part_count(table(), settings) == 1
    assert plan_part_count(table(total_bytes=100 * MIB + 1), settings) == 2
    assert plan_part_count(table(total_bytes=1000 * MIB), settings) == 10


def test_threshold_of_zero_never_splits() -> None:
    assert plan_part_count(table(total_bytes=2**50), SplitSettings()) == 1


def test_max_parts_limits_the_count_and_zero_does_not() -> None:
    big = table(total_bytes=1000 * MIB)
    assert plan_part_count(big, SplitSettings(MIB, max_parts=7)) == 7
    assert plan_part_count(big, SplitSettings(MIB, max_parts=0)) == 1000
    assert plan_part_count(big, SplitSettings(MIB, max_parts=1)) == 1


def test_toast_counts_against_the_threshold() -> None:
    toasted = table(heap_bytes=MIB, total_bytes=1000 * MIB)
    assert plan_part_count(toasted, SplitSettings(100 * MIB)) == 10


def test_table_without_a_key_is_cut_by_ctid_if_it_is_a_heap() -> None:
    settings = SplitSettings(10 * MIB)
    assert plan_part_count(table(split_key=None), settings) == 10
    assert plan_part_count(table(split_key=None, access_method="columnar"), settings) == 1
    assert plan_part_count(table(access_method="columnar"), settings) == 10


def test_ctid_split_can_be_turned_off() -> None:
    settings = SplitSettings(10 * MIB, by_ctid=False)
    assert plan_part_count(table(split_key=None), settings) == 1
    assert plan_part_count(table(), settings) == 10


def test_ctid_split_has_no_more_parts_than_blocks() -> None:
    toasted = table(split_key=None, heap_bytes=3 * BLOCK_BYTES, total_bytes=1000 * MIB)
    assert plan_part_count(toasted, SplitSettings(MIB)) == 3


def test_configuration_table_of_an_extension_is_never_split() -> None:
    assert plan_part_count(table(extension_condition="WHERE id > 100"), SplitSettings(MIB)) == 1


@given(st.integers(0, 2**45), st.integers(0, 2**40), st.integers(0, 2**20))
def test_sample_percent_is_one_tablesample_takes(heap: int, rows: int, more: int) -> None:
    percent = plan_sample_percent(
        table(heap_bytes=heap, total_bytes=heap + more, estimated_rows=rows)
    )
    assert 0 < percent <= 100
    assert float(f"{percent:.6f}") > 0, "rendered as the catalog query does"


def test_small_table_is_sampled_whole() -> None:
    assert plan_sample_percent(table(heap_bytes=100 * BLOCK_BYTES)) == 100
