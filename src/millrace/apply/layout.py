"""Relations of one name as one table: its columns in order, and the key that identifies rows.

Invariant: relations share a layout only if a row of any of them can be distinguished from the rows
of all the others by the layout's key; so their changes can be folded together.

Partitions of a root have the same columns, perhaps in another order, but each has a replica
identity of its own. They go together if that is a key of the whole root. The old rows that a
partition with REPLICA IDENTITY FULL sends hold such a key, too. Others stay apart: two partitions
may have rows with the same key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millrace.postgres.pgoutput.messages import RelationVersion

# (name, type) of each.
Columns = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Layout:
    """Columns of several relations in one order."""

    # As the target sees it: with the OID of the root, if it is one's.
    relation: RelationVersion
    # Of each relation by OID, where it has the columns of `relation`; None for the same places.
    places: Mapping[int, NDArray[np.int64] | None]

    @classmethod
    def of(cls, relations: Sequence[RelationVersion]) -> Layout:
        """That of the first one, for all."""
        first = relations[0]
        return cls(_as_root(first), {one.oid: _places(first, one) for one in relations})


def plan_layouts(relations: Sequence[RelationVersion]) -> list[Layout]:
    """As few as possible; `relations` have one name."""
    keyed: dict[tuple[Columns, frozenset[str]], list[RelationVersion]] = {}
    whole: dict[Columns, list[RelationVersion]] = {}
    alone: list[list[RelationVersion]] = []
    for relation in relations:
        columns = frozenset((column.name, column.type_oid) for column in relation.columns)
        key = _key(relation)
        if relation.partition is None:
            alone.append([relation])
        elif key is None:
            whole.setdefault(columns, []).append(relation)
        elif any(one <= key for one in relation.partition.keys):
            keyed.setdefault((columns, key), []).append(relation)
        else:
            alone.append([relation])
    for columns, some in whole.items():
        # Rows that only come new tell least.
        some.sort(key=lambda relation: relation.replica_identity != "f")
        home = next((group for of, group in keyed.items() if of[0] == columns), None)
        if home is None:
            alone.append(some)
        else:
            home += some
    return [Layout.of(group) for group in (*keyed.values(), *alone)]


def _key(relation: RelationVersion) -> frozenset[str] | None:
    """None if old rows come whole, or never."""
    if relation.replica_identity == "f":
        return None
    return frozenset(column.name for column in relation.columns if column.is_key) or None


def _as_root(relation: RelationVersion) -> RelationVersion:
    if relation.partition is None:
        return relation
    return replace(relation, oid=relation.partition.root_oid, partition=None)


def _places(first: RelationVersion, other: RelationVersion) -> NDArray[np.int64] | None:
    there = {column.name: at for at, column in enumerate(other.columns)}
    places = [there[column.name] for column in first.columns]
    return None if places == sorted(places) else np.array(places, np.int64)
