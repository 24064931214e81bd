"""Which partitions are folded together, and in whose order of columns."""

from __future__ import annotations

from dataclasses import replace

from millrace.apply.layout import plan_layouts
from millrace.postgres.pgoutput.messages import Partition, RelationColumn, RelationVersion

KEY = (frozenset({"id"}),)


def leaf(oid: int, columns: str, key: str = "id", identity: str = "d") -> RelationVersion:
    return RelationVersion(
        oid,
        "s",
        "root",
        identity,
        tuple(
            RelationColumn(c, 23, -1, c in key.split() or identity == "f") for c in columns.split()
        ),
        Partition("s", f"leaf_{oid}", 1, KEY),
    )


def oids(*relations: RelationVersion) -> list[set[int]]:
    return [set(layout.places) for layout in plan_layouts(relations)]


def test_partitions_of_one_root_have_one_layout() -> None:
    (layout,) = plan_layouts([leaf(2, "id a b"), leaf(3, "b id a"), leaf(4, "id a b")])
    assert layout.relation == replace(leaf(2, "id a b"), oid=1, partition=None)
    assert layout.places[2] is None
    assert layout.places[4] is None
    assert list(layout.places[3]) == [1, 2, 0]  # type: ignore[call-overload]


def test_a_key_is_taken_from_a_partition_that_has_one() -> None:
    (layout,) = plan_layouts([leaf(2, "id a", identity="f"), leaf(3, "a id"), leaf(4, "id a", "")])
    assert layout.relation.replica_identity == "d"
    assert [c.name for c in layout.relation.columns if c.is_key] == ["id"]
    (layout,) = plan_layouts([leaf(2, "id a", ""), leaf(3, "id a", identity="f")])
    assert layout.relation.replica_identity == "f"


def test_partitions_without_a_key_of_the_root_stay_apart() -> None:
    no_key = [
        replace(one, partition=Partition("s", "x", 1)) for one in (leaf(2, "id"), leaf(3, "id"))
    ]
    assert oids(*no_key) == [{2}, {3}]
    assert oids(leaf(2, "id a"), leaf(3, "id a", "id a"), leaf(4, "id a")) == [{2, 4}, {3}]
    assert oids(leaf(2, "id a"), leaf(3, "id b"), leaf(4, "id b", identity="f")) == [{2}, {3, 4}]


def test_tables_of_one_name_that_are_no_partitions_stay_apart() -> None:
    assert oids(*(replace(leaf(n, "id"), partition=None) for n in (2, 3))) == [{2}, {3}]
