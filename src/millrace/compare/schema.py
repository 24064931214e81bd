"""Two descriptions of a schema, compared: pure.

Invariant: what a dump and restore between any two supported versions changes in words
alone is no difference; whatever else differs is one, and is reported once: an object
that is missing is reported for all that is inside it.

What changes in words alone:
- The text of queries (views, rules, SQL function bodies) between major versions: 16, for
  one, names columns without their table. Between versions, a view is compared by its
  columns, their types and what it depends on; a different text is a note.
- `(ARRAY['a'::varchar])::text[]` comes back as `ARRAY[('a'::varchar)::text]`, even from
  the same version: the parser pushes the cast down (parse_expr.c, transformArrayExpr()).
- Keywords, which are quoted, differ between versions.
- The MAINTAIN privilege exists from 17 on; NOT NULL constraints have names from 18 on.
- An extension may have another version on another server: a note.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.postgres.catalog.describe import DescribedObject, Description, Key, Value, unquoted

# (kind, property) whose text follows the version of the server that prints it.
_QUERIES = frozenset(
    [
        ("view", "definition"),
        ("materialized view", "definition"),
        ("rule", "definition"),
        ("function", "body"),
        ("procedure", "body"),
    ]
)
_NOTED = frozenset([("extension", "version")])
# Literal text of people, in which nothing may be rewritten.
_VERBATIM = frozenset(["source", "labels", "settings"])
_FIRST_WITH_MAINTAIN = 17
_FIRST_WITH_NAMED_NOT_NULL = 18

OWNER_PROPERTIES = frozenset(["owner"])
ACL_PROPERTIES = frozenset(["grants"])
POSITION_PROPERTIES = frozenset(["last value", "is called"])


@dataclass(frozen=True)
class Difference:
    """One property of one object; "" is the object itself, present or missing."""

    kind: str
    name: str
    property: str
    source: Value
    target: Value


@dataclass(frozen=True)
class SchemaComparison:
    """What differs, what is worth a note, and how many objects of each kind the source has."""

    differences: tuple[Difference, ...] = ()
    notes: tuple[Difference, ...] = ()
    objects: dict[str, int] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        return not self.differences


def compare_descriptions(
    source: Description, target: Description, leave_out: frozenset[str] = frozenset()
) -> SchemaComparison:
    """Every difference but in the properties to leave out."""
    majors = source.major, target.major
    left, right = (_comparable(side, majors, leave_out) for side in (source, target))
    differences: list[Difference] = []
    notes: list[Difference] = []
    for key in sorted(left.keys() | right.keys()):
        one, other = left.get(key), right.get(key)
        if one is None or other is None:
            if not _goes_with_parent(one or other, left, right):
                sides = [("present" if side else "missing") for side in (one, other)]
                differences.append(Difference(*key, "", *sides))
            continue
        for difference, is_note in _property_differences(one, other, majors, leave_out):
            (notes if is_note else differences).append(difference)
    differences += _order_differences(left, right)
    counts: dict[str, int] = defaultdict(int)
    for kind, _ in left:
        counts[kind] += 1
    return SchemaComparison(tuple(differences), tuple(notes), dict(counts))


def spread_array_casts(text: str) -> str:
    """`(ARRAY[a, b])::t[]` as `ARRAY[(a)::t, (b)::t]`, wherever it occurs."""
    start = 0
    while (at := text.find("(ARRAY[", start)) >= 0:
        start = at + 1
        opening = at + len("(ARRAY")
        elements, closing = _split_brackets(text, opening)
        cast = re.compile(r"\)::([^\[\]()]+(?:\(\d+\))?)\[\]").match(text, closing + 1)
        if cast is None or not elements:
            continue
        spread = ", ".join(f"({element})::{cast[1]}" for element in elements)
        text = f"{text[:at]}ARRAY[{spread}]{text[cast.end() :]}"
    return text


def _comparable(
    side: Description, majors: tuple[int, int], leave_out: frozenset[str]
) -> dict[Key, DescribedObject]:
    """The objects that both servers can have."""
    dropped = set()
    if min(majors) < _FIRST_WITH_NAMED_NOT_NULL:
        dropped.add("not-null constraint")
    if leave_out >= ACL_PROPERTIES:
        dropped.add("default privileges")
    return {key: one for key, one in side.objects.items() if key[0] not in dropped}


def _goes_with_parent(
    one: DescribedObject | None, left: dict[Key, DescribedObject], right: dict[Key, DescribedObject]
) -> bool:
    """Whether the parent is missing on the same side, so that its line says it all."""
    if one is None or one.parent is None:
        return False
    return (one.parent in left) != (one.parent in right)


def _property_differences(
    one: DescribedObject, other: DescribedObject, majors: tuple[int, int], leave_out: frozenset[str]
) -> Iterator[tuple[Difference, bool]]:
    for name in one.properties.keys() & other.properties.keys() - leave_out - {"position"}:
        values = one.properties[name], other.properties[name]
        if values[0] == values[1]:
            continue
        is_query = (one.kind, name) in _QUERIES and majors[0] != majors[1]
        plain = [_canonical(value, name, majors) for value in values]
        if is_query:
            plain = [_without_qualifiers(value) for value in plain]
        if plain[0] != plain[1]:
            is_note = is_query or (one.kind, name) in _NOTED
            yield Difference(one.kind, one.name, name, *values), is_note


def _canonical(value: Value, name: str, majors: tuple[int, int]) -> Value:
    if name == "grants" and isinstance(value, list) and min(majors) < _FIRST_WITH_MAINTAIN:
        return [line for line in value if not line.rstrip("*").endswith(":MAINTAIN")] or None
    if name in _VERBATIM or not isinstance(value, str):
        return value
    if majors[0] != majors[1]:
        value = unquoted(value)
    return spread_array_casts(value)


def _without_qualifiers(value: Value) -> Value:
    """Words of a query, without the tables that columns are named with, and without layout."""
    if not isinstance(value, str):
        return value
    words = re.sub(r'(?:[a-z_][a-z0-9_$]*|"(?:[^"]|"")+")\.', "", value)
    return re.sub(r"[\s();]+", " ", words).strip()


def _order_differences(
    left: dict[Key, DescribedObject], right: dict[Key, DescribedObject]
) -> Iterator[Difference]:
    """Tables whose columns, as far as both sides have them, are in another order."""
    common: dict[Key, list[tuple[DescribedObject, DescribedObject]]] = defaultdict(list)
    for key, one in left.items():
        other = right.get(key)
        if other is not None and one.parent is not None and "position" in one.properties:
            common[one.parent].append((one, other))
    for (kind, name), pairs in sorted(common.items()):
        places = [(a.properties["position"], b.properties.get("position")) for a, b in pairs]
        if any(None in place for place in places):
            continue
        orders = [
            [pair[side].name.removeprefix(f"{name}.") for pair in _by_position(pairs, side)]
            for side in (0, 1)
        ]
        if orders[0] != orders[1]:
            yield Difference(kind, name, "column order", *orders)


def _by_position(
    pairs: list[tuple[DescribedObject, DescribedObject]], side: int
) -> list[tuple[DescribedObject, DescribedObject]]:
    return sorted(pairs, key=lambda pair: int(str(pair[side].properties["position"])))


def _split_brackets(text: str, opening: int) -> tuple[list[str], int]:
    """The elements between the bracket at `opening` and its partner, and where that is;
    commas and brackets in quotes or deeper brackets do not count."""
    elements: list[str] = []
    depth, start, at = 0, opening + 1, opening
    while at < len(text):
        character = text[at]
        if character in "'\"":
            at = text.find(character, at + 1)
            if at < 0:
                break
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
            if depth == 0:
                return [*elements, text[start:at].strip()], at
        elif character == "," and depth == 1:
            elements.append(text[start:at].strip())
            start = at + 1
        at += 1
    return [], len(text)
