"""What an object of the target is, in the words of the source's capture; and where two differ.

Invariant: both sides are described by the same query, in a session with an empty search path, while
the target's schemas have the source's names. So two descriptions of one object are equal, whatever
the major versions are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from psycopg.pq.abc import PGconn

from millrace.ddl.entry import CapturedObject
from millrace.errors import ServerError
from millrace.postgres.quote import literal, qualified
from millrace.postgres.wire.libpq import execute, fetch

Description = Mapping[str, Any]

_BACK: Final = "ROLLBACK TO SAVEPOINT millrace_describe; RELEASE SAVEPOINT millrace_describe"

_RELATIONS: Final = (
    "table",
    "view",
    "materialized view",
    "foreign table",
    "sequence",
    "index",
    "composite type",
)
_BODY: Final = re.compile(r"AS \$millrace\$\n(.*)\$millrace\$;", re.S)
# undefined_object and its like: function, table, column, schema, parameter
_NOT_THERE: Final = ("42704", "42883", "42P01", "42703", "3F000")
# Of a column; "missing" is where values of old rows are, and not what it is.
_COLUMN: Final = ("type", "not_null", "default", "identity", "generated", "collation")
_OTHERS: Final = (
    "parents",
    "partition_key",
    "bound",
    "definition",
    "labels",
    "type",
    "increment",
    "min",
    "max",
    "start",
    "cycle",
    "result",
    "language",
)


def read_description(session: PGconn, one: CapturedObject) -> Description | None:
    """Of the target's object of that name; None if there is none."""
    query = f"SELECT ({_describe_sql()}) FROM ({_address(one)}) AS address"
    execute(session, "SAVEPOINT millrace_describe; SET LOCAL search_path = pg_catalog, pg_temp")
    try:
        rows = fetch(session, query)
    except ServerError as error:
        if error.facts.get("sqlstate") not in _NOT_THERE:
            raise
        execute(session, _BACK)
        return None
    execute(session, _BACK)
    if not rows:
        return None
    return json.loads(rows[0][0]) if rows[0][0] else {}


def _address(one: CapturedObject) -> str:
    """A query for the OIDs of an object. Of relations pg_get_object_address() knows some kinds."""
    if one.type.removesuffix(" column") in _RELATIONS:
        relation = f"to_regclass({literal(qualified(*one.names[:2]))})"
        return (
            f"SELECT 'pg_class'::regclass::oid AS class, {relation}::oid AS object"
            f" WHERE {relation} IS NOT NULL"
        )
    names, args = _array(one.names), _array(one.args)
    return (
        "SELECT classid AS class, objid AS object"
        f" FROM pg_get_object_address({literal(one.type)}, {names}, {args})"
    )


@cache
def _describe_sql() -> str:
    """The query of the function that is installed on sources."""
    text = files("millrace.ddl").joinpath("sql", "20_describe.sql").read_text(encoding="utf-8")
    found = _BODY.search(text)
    assert found is not None
    return f"SELECT jsonb_strip_nulls(({found[1]}))"


def _array(values: Collection[str]) -> str:
    return f"ARRAY[{', '.join(map(literal, values))}]::text[]"


def iter_differences(
    wanted: Description, found: Description, columns_out: Collection[str] = ()
) -> Iterator[str]:
    """What the target's object has in another way than the source's."""
    if wanted.get("kind") != found.get("kind"):
        yield f"it is a {found.get('kind')} on the target and a {wanted.get('kind')} on the source"
        return
    yield from _column_differences(wanted, found, columns_out)
    yield from _constraint_differences(wanted, found, columns_out)
    for key in _OTHERS:
        if wanted.get(key) != found.get(key):
            yield f"{key}: {found.get(key)} on the target, {wanted.get(key)} on the source"


def _column_differences(
    wanted: Description, found: Description, columns_out: Collection[str]
) -> Iterator[str]:
    theirs, ours = columns(wanted), columns(found)
    for name in sorted(theirs.keys() - ours.keys() - set(columns_out)):
        yield f"column {name} is missing on the target"
    for name in sorted(ours.keys() - theirs.keys()):
        yield f"column {name} is on the target only"
    for name in sorted(theirs.keys() & ours.keys() - set(columns_out)):
        for key in _COLUMN:
            if theirs[name].get(key) != ours[name].get(key):
                yield (
                    f"column {name}: {key} is {ours[name].get(key)} on the target and "
                    f"{theirs[name].get(key)} on the source"
                )


def _constraint_differences(
    wanted: Description, found: Description, columns_out: Collection[str]
) -> Iterator[str]:
    theirs, ours = wanted.get("constraints") or {}, found.get("constraints") or {}
    if columns_out:
        return  # what names a column that is not there is not there either
    for name in theirs.keys() ^ ours.keys():
        side = "source" if name in theirs else "target"
        yield f"constraint {name} is on the {side} only"
    for name in theirs.keys() & ours.keys():
        if theirs[name] != ours[name]:
            yield f"constraint {name}: {ours[name]} on the target, {theirs[name]} on the source"


def columns(description: Description | None) -> dict[str, Mapping[str, Any]]:
    """By name; a composite type's are pairs of name and type."""
    found = (description or {}).get("columns") or ()
    pairs = ({"name": one[0], "type": one[1]} if isinstance(one, list) else one for one in found)
    return {one["name"]: one for one in pairs}
