"""Descriptions of schemas, compared without a server."""

from __future__ import annotations

import pytest

from millrace.compare.schema import (
    ACL_PROPERTIES,
    OWNER_PROPERTIES,
    Difference,
    SchemaComparison,
    compare_descriptions,
    spread_array_casts,
)
from millrace.postgres.catalog.describe import (
    DescribedObject,
    Description,
    Key,
    Value,
    render_name,
    unquoted,
)


def described(
    kind: str, name: str, parent: Key | None = None, **properties: Value
) -> DescribedObject:
    return DescribedObject(
        kind, name, parent, {k.replace("_", " "): v for k, v in properties.items()}
    )


def description(*objects: DescribedObject, major: int = 18) -> Description:
    return Description(major, {(one.kind, one.name): one for one in objects})


def compare_one(
    source: DescribedObject, target: DescribedObject, majors: tuple[int, int] = (18, 18)
) -> SchemaComparison:
    return compare_descriptions(
        description(source, major=majors[0]), description(target, major=majors[1])
    )


TABLE = described("table", "s.t", ("schema", "s"), persistence="logged", owner="me", grants=None)
COLUMN = described("column", "s.t.a", ("table", "s.t"), type="integer", position=1)
INDEX = described("index", "s.i", ("constraint", "s.t.u"), valid=True)
CONSTRAINT = described("constraint", "s.t.u", ("table", "s.t"), definition="UNIQUE (a)")
EVERYTHING = TABLE, COLUMN, INDEX, CONSTRAINT


def test_equal_descriptions_have_no_difference_and_are_counted() -> None:
    found = compare_descriptions(description(*EVERYTHING), description(*EVERYTHING))
    assert found.is_equal
    assert found.objects == {"table": 1, "column": 1, "index": 1, "constraint": 1}


@pytest.mark.parametrize("gone", [EVERYTHING, (INDEX, CONSTRAINT), (COLUMN,), (INDEX,)])
def test_what_is_missing_is_told_once_without_what_is_inside(
    gone: tuple[DescribedObject, ...],
) -> None:
    left = description(described("schema", "s"), *EVERYTHING)
    right = description(described("schema", "s"), *(o for o in EVERYTHING if o not in gone))
    top = CONSTRAINT if len(gone) == 2 else gone[0]
    there, back = compare_descriptions(left, right), compare_descriptions(right, left)
    assert there.differences == (Difference(top.kind, top.name, "", "present", "missing"),)
    assert back.differences == (Difference(top.kind, top.name, "", "missing", "present"),)


def test_a_property_that_one_server_does_not_know_is_not_compared() -> None:
    old = described("column", "s.t.a", type="text")
    new = described("column", "s.t.a", type="text", compression="l")
    assert compare_one(old, new, (13, 18)).is_equal


def test_properties_can_be_left_out() -> None:
    other = described("table", "s.t", owner="you", grants=["x:SELECT"], persistence="unlogged")
    left, right = description(TABLE), description(other)
    both = OWNER_PROPERTIES | ACL_PROPERTIES
    assert len(compare_descriptions(left, right).differences) == 3
    (found,) = compare_descriptions(left, right, both).differences
    assert (found.property, found.source, found.target) == ("persistence", "logged", "unlogged")


def test_default_privileges_are_left_out_with_grants() -> None:
    left = description(described("default privileges", "me.s.tables", grants=["x:SELECT"]))
    assert not compare_descriptions(left, description()).is_equal
    assert compare_descriptions(left, description(), ACL_PROPERTIES).is_equal


def test_maintain_counts_only_where_both_servers_have_it() -> None:
    old = described("table", "s.t", grants=["x:SELECT*"])
    new = described("table", "s.t", grants=["x:MAINTAIN", "x:MAINTAIN*", "x:SELECT*"])
    assert compare_one(old, new, (16, 18)).is_equal
    assert not compare_one(old, new, (17, 18)).is_equal


def test_named_not_null_counts_only_where_both_servers_have_it() -> None:
    named = described("not-null constraint", "s.t.a_not_null", definition="NOT NULL a")
    assert compare_descriptions(description(major=17), description(named)).is_equal
    assert not compare_descriptions(description(), description(named)).is_equal


def test_text_of_queries_counts_between_servers_of_one_version_and_is_noted_otherwise() -> None:
    left = described("view", "s.v", definition=" SELECT t.a\n   FROM s.t WHERE (t.a > 1);")
    same = described("view", "s.v", definition=" SELECT a FROM s.t WHERE a > 1;")
    other = described("view", "s.v", definition=" SELECT a FROM s.t WHERE a > 2;")
    assert compare_one(left, same, (15, 18)) == SchemaComparison(objects={"view": 1})
    noted = compare_one(left, other, (15, 18))
    assert noted.is_equal
    assert [note.property for note in noted.notes] == ["definition"]
    assert not compare_one(left, same).is_equal


def test_another_version_of_an_extension_is_a_note() -> None:
    left, right = (described("extension", "x", version=version) for version in ("1.0", "1.1"))
    found = compare_one(left, right)
    assert found.is_equal
    assert found.notes == (Difference("extension", "x", "version", "1.0", "1.1"),)


def test_quotes_around_keywords_count_only_between_servers_of_one_version() -> None:
    left = described("column", "s.t.a", default='"json_scalar"(1)')
    right = described("column", "s.t.a", default="json_scalar(1)")
    assert compare_one(left, right, (16, 17)).is_equal
    assert not compare_one(left, right).is_equal


def test_order_of_columns_is_that_of_the_columns_both_sides_have() -> None:
    def table(*names: str) -> Description:
        columns = [
            described("column", f"s.t.{name}", ("table", "s.t"), position=at)
            for at, name in enumerate(names, start=1)
        ]
        return description(TABLE, *columns)

    dropped = compare_descriptions(table("a", "b", "c"), table("b", "c"))
    assert [one.name for one in dropped.differences] == ["s.t.a"]
    turned = compare_descriptions(table("a", "b"), table("b", "a"))
    assert turned.differences == (
        Difference("table", "s.t", "column order", ["a", "b"], ["b", "a"]),
    )


@pytest.mark.parametrize(
    ("printed", "restored"),
    [
        ("(ARRAY['a'::varchar])::text[]", "ARRAY[('a'::varchar)::text]"),
        ("(ARRAY['a, ]'::x, 'b''('::x])::y(3)[]", "ARRAY[('a, ]'::x)::y(3), ('b''('::x)::y(3)]"),
        ("x = ANY ((ARRAY[f(1, 2)])::t[]) OR 1", "x = ANY (ARRAY[(f(1, 2))::t]) OR 1"),
        ("(ARRAY[1, 2] || 3)", "(ARRAY[1, 2] || 3)"),
        ("(ARRAY[1", "(ARRAY[1"),
        ("('ARRAY[' || 'x')", "('ARRAY[' || 'x')"),
        ("((ARRAY[(ARRAY[a])::t[]])::u[])", "(ARRAY[(ARRAY[(a)::t])::u])"),
    ],
)
def test_array_casts_are_spread_over_the_elements(printed: str, restored: str) -> None:
    assert spread_array_casts(printed) == restored


def test_names_are_quoted_the_same_for_every_server() -> None:
    assert render_name(["s", "select", "A.b", 'q"q']) == 's.select."A.b"."q""q"'
    assert unquoted('"select"."A b"."it""s"') == 'select."A b"."it""s"'
