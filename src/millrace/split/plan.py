"""Where to split a table into parts of about equal bytes.

Invariant: the parts of a table cover every possible row exactly once: the first
has no lower bound, the last no upper bound, each other one starts where the one
before it ends, and rows with a NULL key belong to the first part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from millrace.postgres.quote import ident
from millrace.relation import Part, Table

# Whole blocks are sampled; with this many, a cut is within about two percent of its place.
SAMPLE_ROWS = 30_000
MIN_SAMPLE_BLOCKS = 1500
BLOCK_BYTES = 8192


@dataclass(frozen=True)
class SampledRow:
    """One sampled row: its key (or block number) and its bytes, with TOAST."""

    key: int
    weight: int


@dataclass(frozen=True)
class SplitSettings:
    """What the user asked for."""

    # A table with more bytes than this is split; 0 never splits.
    larger_than_bytes: int = 0
    max_parts: int = 0
    by_ctid: bool = True


def plan_part_count(table: Table, settings: SplitSettings) -> int:
    """How many parts a table gets: its bytes, TOAST included, over the threshold."""
    if not settings.larger_than_bytes or table.total_bytes <= settings.larger_than_bytes:
        return 1
    if table.extension_condition is not None:
        return 1
    if table.split_key is None and not (settings.by_ctid and table.access_method == "heap"):
        return 1
    count = -(-table.total_bytes // settings.larger_than_bytes)
    if table.split_key is None:
        count = min(count, max(1, table.heap_bytes // BLOCK_BYTES))
    return min(count, settings.max_parts) if settings.max_parts else count


def plan_sample_percent(table: Table) -> float:
    """The share of blocks to sample."""
    blocks = max(1, table.heap_bytes // BLOCK_BYTES)
    rows_per_block = max(1.0, table.estimated_rows / blocks) if table.estimated_rows else 100.0
    wanted = max(MIN_SAMPLE_BLOCKS, SAMPLE_ROWS / rows_per_block)
    return min(100.0, 100.0 * wanted / blocks)


def plan_cuts(samples: Sequence[SampledRow], count: int) -> list[int]:
    """Up to `count - 1` rising keys that cut the samples into pieces of equal weight."""
    ordered = sorted(samples, key=lambda sample: sample.key)
    whole = sum(sample.weight for sample in ordered)
    cuts: list[int] = []
    passed = 0
    for before, sample in pairwise(ordered):
        passed += before.weight
        due = whole * (len(cuts) + 1) / count
        if len(cuts) < count - 1 and passed >= due and sample.key > (cuts or [before.key])[-1]:
            cuts.append(sample.key)
    return cuts


def plan_parts(table: Table, cuts: Sequence[int], samples: Sequence[SampledRow] = ()) -> list[Part]:
    """The parts of a table, given the keys (or block numbers) at which it is cut."""
    if not cuts:
        return [_part(table, 1, 1, "", "whole table", 1.0)]
    total = len(cuts) + 1
    edges: list[int | None] = [None, *cuts, None]
    shares = _shares(cuts, samples)
    parts = []
    for number, (low, high) in enumerate(pairwise(edges), start=1):
        bounds = " and ".join(_bounds(table, low, high))
        condition = " AND ".join(_conditions(table, low, high))
        if number == 1 and table.split_key and table.split_key.nullable:
            column = ident(table.split_key.column)
            condition = f"({condition} OR {column} IS NULL)"
            bounds += f" or {table.split_key.column} is null"
        parts.append(_part(table, number, total, condition, bounds, shares[number - 1]))
    return parts


def _part(table: Table, number: int, total: int, condition: str, bounds: str, share: float) -> Part:
    return Part(
        table_oid=table.oid,
        number=number,
        total=total,
        condition=condition,
        bounds=bounds,
        estimated_rows=round(table.estimated_rows * share),
        estimated_bytes=round(table.total_bytes * share),
    )


def _shares(cuts: Sequence[int], samples: Sequence[SampledRow]) -> list[float]:
    """The share of the table's bytes in each part, as the samples show."""
    pieces = [0] * (len(cuts) + 1)
    at = 0
    for sample in sorted(samples, key=lambda sample: sample.key):
        while at < len(cuts) and sample.key >= cuts[at]:
            at += 1
        pieces[at] += sample.weight
    whole = sum(pieces)
    return [piece / whole for piece in pieces] if whole else [1 / len(pieces)] * len(pieces)


def _conditions(table: Table, low: int | None, high: int | None) -> list[str]:
    """Bounds as SQL; quoted, so that the type's lowest value is not read as minus a number."""
    if table.split_key:
        column = ident(table.split_key.column)
        return _both(column, low, high, lambda value: f"'{value}'")
    return _both("ctid", low, high, lambda value: f"'({value},0)'::tid")


def _bounds(table: Table, low: int | None, high: int | None) -> list[str]:
    if table.split_key:
        return _both(table.split_key.column, low, high, str)
    return _both("ctid", low, high, lambda value: f"({value},0)")


def _both(name: str, low: int | None, high: int | None, render: Callable[[int], str]) -> list[str]:
    lower = [] if low is None else [f"{name} >= {render(low)}"]
    upper = [] if high is None else [f"{name} < {render(high)}"]
    return lower + upper


def plan_table_parts(
    table: Table, samples: Sequence[SampledRow], split: SplitSettings
) -> list[Part]:
    """A table's parts; one if there is no need, or no way, to split it."""
    count = plan_part_count(table, split)
    cuts = plan_cuts(samples, count) if count > 1 else []
    return plan_parts(table, cuts, samples)
