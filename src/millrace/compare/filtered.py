"""A comparison with filters: the source as its filtered clone has it.

Invariant: what the filters leave out is compared on neither side; everything else is, with the
properties that a filtered clone gives it. Rows are left out of the source alone: a row that
should not be on the target is a difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from millrace.compare.task import Name
from millrace.filter.decide import Decision
from millrace.postgres.catalog.compared import ComparedRelation
from millrace.postgres.catalog.describe import DescribedObject, Description, Key
from millrace.relation import Table


def filter_description(source: Description, decision: Decision) -> Description:
    """The source without what is left out, and what is kept as the clone makes it."""
    out = left_out(source, decision)
    lost = _lost_identities(source, out)
    kept = {}
    for key, one in source.objects.items():
        if key not in out:
            kept[key] = _as_cloned(one, decision, out, lost)
    return replace(source, objects=kept)


def left_out(source: Description, decision: Decision) -> set[Key]:
    """Names of the objects that are not on the target."""
    out = {key for key, one in source.objects.items() if one.identity in decision.excluded}
    # Columns have no identity; they go with their table.
    return out | {
        key for key, one in source.objects.items() if key[0] == "column" and one.parent in out
    }


def without(target: Description, names: Collection[Key]) -> Description:
    """The target without these objects and all that is inside them."""
    kept = {
        key: one
        for key, one in target.objects.items()
        if not any(name in names for name in _ancestry(target, key))
    }
    return replace(target, objects=kept)


@dataclass(frozen=True)
class Exclusions:
    """What of the relations of either side is not compared, by name."""

    schemas: Collection[str] = ()
    relations: Collection[Name] = ()
    columns: Mapping[Name, Collection[str]] = field(default_factory=dict)

    def apply(self, relations: Mapping[Name, ComparedRelation]) -> dict[Name, ComparedRelation]:
        """The rest; a key that needs a column that is left out is no key."""
        return {
            name: _without_columns(relation, self.columns.get(name, ()))
            for name, relation in relations.items()
            if name[0] not in self.schemas and name not in self.relations
        }


def uncopied_columns(
    tables: Iterable[Table],
    decision: Decision,
    computed: Mapping[int, Mapping[str, Collection[str]]],
) -> dict[Name, set[str]]:
    """By table, the columns whose values the target has from elsewhere: those that are left out,
    and generated ones that are computed from them. A partitioned table that rows go through has
    those of all its partitions.

    `computed` has, by the table's OID, the columns that each generated column reads.
    """
    found: dict[Name, set[str]] = defaultdict(set)
    for table in tables:
        out = decision.columns.get(table.oid, frozenset())
        generated = computed.get(table.oid, {})
        columns = out | {name for name, read in generated.items() if not out.isdisjoint(read)}
        found[table.schema, table.name] |= columns
        if table.load_via:
            found[table.load_via[1], table.load_via[2]] |= columns
    return found


def _as_cloned(
    one: DescribedObject, decision: Decision, out: Collection[Key], lost: Collection[Key]
) -> DescribedObject:
    changes: dict[str, str | bool | None] = {}
    parent = one.parent
    if one.kind == "sequence" and parent in out:
        # Kept for the default of another table, it belongs to nobody.
        parent, changes = None, {"owned by": None}
    if one.kind == "materialized view" and one.identity in decision.data_skipped:
        changes = {"populated": False}
    if (one.kind, one.name) in lost:
        changes = {"replica identity": "default"}
    if not changes:
        return one
    return replace(one, parent=parent, properties={**one.properties, **changes})


def _lost_identities(source: Description, out: Collection[Key]) -> set[Key]:
    """Tables whose replica identity is an index that is left out."""
    lost = set()
    for key in out:
        if key[0] == "index" and source.objects[key].properties.get("replica identity"):
            lost |= {above for above in _ancestry(source, key) if above[0] == "table"}
    return lost


def _ancestry(side: Description, key: Key) -> list[Key]:
    """The object, what it is inside of, and so on."""
    found = [key]
    while (one := side.objects.get(found[-1])) is not None and one.parent is not None:
        found.append(one.parent)
    return found


def _without_columns(relation: ComparedRelation, out: Collection[str]) -> ComparedRelation:
    if not out:
        return relation
    return replace(
        relation,
        columns=tuple(column for column in relation.columns if column[0] not in out),
        key=() if set(relation.key) & set(out) else relation.key,
    )
