"""Which rows partitions of another server hold, as far as that can be said here."""

from __future__ import annotations

import pytest

from millrace.apply.truncate import covering_condition


def _hash(modulus: int, remainder: int, values: str = "id") -> str:
    return f"satisfies_hash_partition('16385'::oid, {modulus}, {remainder}, {values})"


def test_bounds_of_ranges_and_lists_are_joined() -> None:
    conditions = ["((a IS NOT NULL) AND (a < 5))", "(NOT (a = 'x)'::text))"]
    assert covering_condition(conditions) == f"({conditions[0]}) OR ({conditions[1]})"


def test_a_partition_without_bounds_holds_everything() -> None:
    assert covering_condition([""]) == "(true)"


@pytest.mark.parametrize(
    "conditions",
    [
        [_hash(2, 0)],
        [_hash(2, 0), _hash(4, 1)],
        [_hash(2, 0), "(a > 1)"],
        [f"((a > 1) AND {_hash(2, 0)})", f"((a > 2) AND {_hash(2, 1)})"],
    ],
)
def test_some_of_the_hash_partitions_are_unknown(conditions: list[str]) -> None:
    assert covering_condition(conditions) is None


def test_all_hash_partitions_are_their_parent() -> None:
    tricky = "lower((t || ')'::text)), \"(\""
    assert covering_condition([_hash(2, 0), _hash(4, 1), _hash(4, 3)]) == "(true)"
    assert covering_condition([_hash(3, n, tricky) for n in range(3)]) == "(true)"
    below = [f"((a > 1) AND {_hash(2, n, tricky)} AND (b = 1))" for n in range(2)]
    assert covering_condition([*below, "(a < 1)"]) == (
        "(((a > 1) AND true AND (b = 1))) OR ((a < 1))"
    )
    two_levels = [f"({_hash(2, 0)} AND {_hash(2, n, 't')})" for n in range(2)]
    assert covering_condition([*two_levels, _hash(2, 1)]) == "(true)"
    assert covering_condition([*two_levels, _hash(4, 1)]) is None
