"""Runs of hashed rows, merged; the plan of a comparison."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from millrace.compare.rows import HashedRow, merge_rows
from millrace.compare.task import RowDifference, Sum, TableComparison, merge_parts, plan_compare
from millrace.postgres.catalog.compared import ComparedRelation
from millrace.relation import Column, Table


def run(*rows: tuple[int, int], count: int = 1) -> list[HashedRow]:
    return [HashedRow(key, row, count, (str(key),)) for key, row in sorted(rows)]


def test_rows_are_missing_extra_or_different() -> None:
    found = list(merge_rows(run((1, 10), (2, 20), (4, 40)), run((2, 20), (3, 30), (4, 41))))
    assert found == [
        RowDifference(("1",), "missing on target"),
        RowDifference(("3",), "extra on target"),
        RowDifference(("4",), "different"),
    ]


def test_a_key_that_is_twice_on_the_target_is_extra_once() -> None:
    assert list(merge_rows(run((1, 10)), run((1, 10), count=3))) == [
        RowDifference(("1",), "extra on target", 2)
    ]
    assert list(merge_rows(run((1, 10)), run((1, 11), (1, 12)))) == [
        RowDifference(("1",), "different"),
        RowDifference(("1",), "extra on target"),
    ]


rows_of_a_side = st.dictionaries(
    st.tuples(st.integers(-3, 3), st.integers(0, 2)), st.integers(1, 3), max_size=12
)


@given(rows_of_a_side, rows_of_a_side)
def test_differences_account_for_every_row(
    source: dict[tuple[int, int], int], target: dict[tuple[int, int], int]
) -> None:
    left, right = (
        [HashedRow(k, r, side[k, r], (str(k),)) for k, r in sorted(side)]
        for side in (source, target)
    )
    counts: Counter[str] = Counter()
    for one in merge_rows(left, right):
        counts[one.kind] += one.count
    missing = (Counter(source) - Counter(target)).total()
    extra = (Counter(target) - Counter(source)).total()
    assert counts["missing on target"] + counts["different"] == missing
    assert counts["extra on target"] + counts["different"] == extra


def test_parts_of_a_table_are_added_and_rows_stay_few() -> None:
    rows = tuple(RowDifference((str(n),), "different") for n in range(3))
    equal = TableComparison("s.t", Sum(5, "7"), Sum(5, "7"), schema="s", name="t")
    differs = TableComparison(
        "s.t", Sum(1, "1"), Sum(1, "2"), None, "", "s", "t", ("id",), rows, True
    )
    (one,) = merge_parts([equal, differs], 3)
    assert (one.source, one.target, one.is_equal) == (Sum(6, "8"), Sum(6, "9"), False)
    assert (one.rows, one.rows_complete) == (rows, True)
    (one,) = merge_parts([differs, differs], 3)
    assert (len(one.rows), one.rows_complete) == (3, False)


def test_names_with_dots_are_not_confused() -> None:
    dotted = [
        TableComparison("a.b.c", Sum(1, "1"), Sum(1, "1"), schema="a.b", name="c"),
        TableComparison("a.b.c", Sum(1, "1"), Sum(1, "2"), schema="a", name="b.c"),
    ]
    assert [one.is_equal for one in merge_parts(dotted)] == [True, False]


def relation(*columns: tuple[str, str], kind: str = "r") -> ComparedRelation:
    return ComparedRelation(1, "s", "t", kind, columns, ())


def test_only_tables_with_the_same_columns_are_compared_by_rows() -> None:
    table = Table(1, "s", "t", (Column("a", "int"),), 0, 0, 0)
    source = {("s", "t"): relation(("a", "integer"), ("b", "bytea"))}
    same = {("s", "t"): relation(("b", "bytea"), ("a", "bigint"), kind="p")}
    (part,), problems = plan_compare([table], {}, source, same)
    assert (part.expressions, problems) == (('"a"', 'sha256("b")'), [])
    assert (part.source_tree, part.target_tree) == (False, True)
    for target, problem in (
        ({}, "missing on target"),
        (
            {("s", "t"): relation(("a", "integer"), ("c", "integer"))},
            "columns missing on target: b; columns extra on target: c",
        ),
    ):
        parts, (found,) = plan_compare([table], {}, source, target)
        assert (parts, found.problem, found.is_equal) == ([], problem, False)
