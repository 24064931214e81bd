"""Filters at work: on the source's catalog, and on the archive of its schema.

Invariant: an entry of the archive is restored unless its object is left out or it was made
for one that is; a table whose rows are left out is copied all the same, with a condition that
no row meets, so that its indexes are built when it is done like those of all others.

Facts: entries for grants, comments and attachments have no OID; those for row security and for
filling a materialized view have the relation's, and 0 for the catalog.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import psycopg

from millrace.errors import ConfigError, ServerError
from millrace.filter.decide import (
    PG_CLASS_OID,
    PG_CONSTRAINT_OID,
    PG_EXTENSION_OID,
    PG_NAMESPACE_OID,
    DbObject,
    Decision,
    Depend,
    decide,
)
from millrace.filter.rules import FilterRules
from millrace.postgres.catalog import depend
from millrace.postgres.catalog import relations as catalog_queries
from millrace.postgres.catalog.depend import EntryDepends
from millrace.postgres.digest import digest_sql
from millrace.postgres.program.dump import Entry
from millrace.postgres.quote import qualified
from millrace.postgres.wire.connect import translated
from millrace.relation import Column, SourceCatalog, Table

Connection = psycopg.Connection[tuple[Any, ...]]

# Entries that [exclude-kind] is about and that can't be found by OID, with their kinds.
_KINDS_WITHOUT_OID = {
    "ROW SECURITY": "policy",
    "SECURITY LABEL": "security label",
    "USER MAPPING": "foreign table",
}


def read_decision(connection: Connection, rules: FilterRules) -> Decision:
    """What the rules leave out of this database."""
    if rules.is_empty:
        return Decision()
    with translated("reading what depends on what"):
        objects = [DbObject(*row) for row in depend.read_objects(connection)]
        depends = [Depend(*row) for row in depend.read_depends(connection)]
    decision = decide(rules, objects, depends, _match(connection, rules))
    _check_predicates(connection, rules, decision, objects)
    return _without_kinds(connection, rules, decision)


def _without_kinds(connection: Connection, rules: FilterRules, decision: Decision) -> Decision:
    """The decision with [exclude-kind]: nothing but comments depends on what that can name."""
    kinds = {rule.parts[0].text for rule in rules.of("exclude-kind")}
    if not kinds:
        return decision
    with translated("reading objects of the kinds that are left out"):
        found = depend.read_of_kinds(connection, kinds)
    return replace(
        decision,
        excluded={**dict.fromkeys(found, "[exclude-kind]"), **decision.excluded},
        labels={**found, **decision.labels},
        kinds_excluded=frozenset(kinds),
    )


def _match(connection: Connection, rules: FilterRules) -> dict[str, set[str]]:
    patterns = rules.patterns()
    try:
        with translated("matching names with regular expressions"):
            return depend.match_names(connection, patterns) if patterns else {}
    except ServerError as error:
        cause = error.__cause__
        if not isinstance(cause, psycopg.errors.InvalidRegularExpression):
            raise
        lines = sorted(rule.line for rule in rules.rules if not rule.is_exact)
        raise ConfigError(
            f"{rules.name}, line {' or '.join(map(str, lines))}: {cause.diag.message_primary}",
            hint="the server reads them: PostgreSQL documentation, POSIX Regular Expressions",
            file=rules.name,
        ) from cause


def _check_predicates(
    connection: Connection, rules: FilterRules, decision: Decision, objects: Iterable[DbObject]
) -> None:
    """Have the server plan each one: a mistake shows now, not in the middle of the copy."""
    for table in objects:
        if table.catalog_oid != PG_CLASS_OID or table.oid not in decision.predicates:
            continue
        query = (
            f"EXPLAIN SELECT FROM ONLY {qualified(table.schema, table.name)}"
            f" WHERE ({decision.predicates[table.oid]})"
        )
        try:
            with translated("trying the predicates of [table-where]"):
                connection.execute(query)
        except ServerError as error:
            cause = error.__cause__
            if not isinstance(cause, psycopg.ProgrammingError | psycopg.DataError):
                raise
            raise ConfigError(
                f"{rules.name}, [table-where] of {table.schema}.{table.name}:"
                f" {cause.diag.message_primary}",
                hint="a predicate is what could follow WHERE, in one line",
                file=rules.name,
            ) from cause


def read_left_out_extensions(connection: Connection, rules: FilterRules) -> set[str]:
    """Names of the extensions that the rules leave out: all that preflight has to know."""
    about = tuple(rule for rule in rules.rules if rule.section.endswith("-extension"))
    if not about:
        return set()
    with translated("reading the source's extensions"):
        extensions = catalog_queries.read_extensions(connection)
    objects = [DbObject(PG_EXTENSION_OID, e.oid, "extension", "", e.name) for e in extensions]
    of_extensions = replace(rules, rules=about)
    decision = decide(of_extensions, objects, (), _match(connection, of_extensions))
    return {o.name for o in objects if o.key in decision.excluded}


def read_left_out_schemas(connection: Connection, rules: FilterRules) -> set[str]:
    """Names of the schemas that the rules leave out whole."""
    about = tuple(rule for rule in rules.rules if rule.section.endswith("-schema"))
    if not about:
        return set()
    with translated("reading the source's schemas"):
        schemas = catalog_queries.read_schemas(connection)
    objects = [DbObject(PG_NAMESPACE_OID, oid, "schema", "", n) for oid, n in schemas.items()]
    of_schemas = replace(rules, rules=about)
    decision = decide(of_schemas, objects, (), _match(connection, of_schemas))
    return {o.name for o in objects if o.key in decision.excluded}


def filter_tables(
    tables: Iterable[Table], decision: Decision, rules: FilterRules
) -> tuple[Table, ...]:
    """The tables that are kept, with the rows and columns that are."""
    return tuple(
        _filter_table(table, decision, rules)
        for table in tables
        if (PG_CLASS_OID, table.oid) not in decision.excluded
    )


def filter_catalog(catalog: SourceCatalog, decision: Decision, rules: FilterRules) -> SourceCatalog:
    """The catalog without what is left out."""
    excluded = decision.excluded
    out = {oid for catalog_oid, oid in excluded if catalog_oid == PG_CLASS_OID}
    gone = {table.label for table in catalog.tables if table.oid in out}
    return replace(
        catalog,
        tables=filter_tables(catalog.tables, decision, rules),
        indexes=tuple(
            index
            for index in catalog.indexes
            if index.oid not in out and (PG_CONSTRAINT_OID, index.constraint_oid) not in excluded
        ),
        foreign_keys=tuple(
            key for key in catalog.foreign_keys if (PG_CONSTRAINT_OID, key.oid) not in excluded
        ),
        sequences=tuple(sequence for sequence in catalog.sequences if sequence.oid not in out),
        extensions=tuple(
            extension
            for extension in catalog.extensions
            if (PG_EXTENSION_OID, extension.oid) not in excluded
        ),
        partitioned_tables=tuple(t for t in catalog.partitioned_tables if t[0] not in out),
        materialized_views=tuple(v for v in catalog.materialized_views if v[0] not in out),
        schemas={
            oid: name
            for oid, name in catalog.schemas.items()
            if (PG_NAMESPACE_OID, oid) not in excluded
        },
        families={oid: root for oid, root in catalog.families.items() if oid not in out},
        rewritten=tuple(label for label in catalog.rewritten if label not in gone),
    )


def _filter_table(table: Table, decision: Decision, rules: FilterRules) -> Table:
    changes: dict[str, Any] = {}
    if (PG_CLASS_OID, table.oid) in decision.data_skipped:
        changes = {"where": "false", "heap_bytes": 0, "total_bytes": 0, "estimated_rows": 0}
    elif table.oid in decision.predicates:
        changes = {"where": decision.predicates[table.oid]}
    if table.oid in decision.columns:
        changes["columns"] = _filter_columns(table, decision.columns[table.oid], rules)
    if table.oid in decision.hashed:
        kept = changes.get("columns", table.columns)
        changes["columns"] = hash_columns(table.label, kept, decision.hashed[table.oid])
    return replace(table, **changes) if changes else table


def hash_columns(
    label: str, columns: Iterable[Column], hashed: frozenset[str]
) -> tuple[Column, ...]:
    """The columns, with digests in the place of some."""
    found = tuple(
        replace(one, expression=digest_sql(one.name, one.type_name)) if one.name in hashed else one
        for one in columns
    )
    if missing := hashed - {one.name for one in found}:
        raise ConfigError(
            f"table {label} has no column {min(missing)} to hash",
            hint="generated columns are never copied, and one that is left out can't be hashed",
        )
    return found


def _filter_columns(
    table: Table, left_out: frozenset[str], rules: FilterRules
) -> tuple[Column, ...]:
    columns = tuple(column for column in table.columns if column.name not in left_out)
    missing = left_out - {column.name for column in table.columns}
    if columns and not missing:
        return columns
    what = f"no column {min(missing)} to copy" if missing else "no other column"
    lines = [
        str(rule.line)
        for rule in rules.of("exclude-column")
        if rule.parts[2].text in (missing or left_out)
    ]
    raise ConfigError(
        f"{rules.name}, line {' or '.join(lines)}: table {table.label} has {what}",
        hint="generated columns are never copied; [exclude-table-data] leaves out all rows",
        file=rules.name,
    )


def filter_entries(
    entries: Iterable[Entry], decision: Decision, depends: Mapping[int, EntryDepends]
) -> list[Entry]:
    """The entries without those of objects that are left out."""
    dropped = _dropped_entries(decision, depends)
    return [
        entry
        for entry in entries
        if _number(entry) not in dropped and not _is_needless(entry, decision, depends)
    ]


def _number(entry: Entry) -> int:
    return int(entry.line.partition(";")[0])


def _dropped_entries(decision: Decision, depends: Mapping[int, EntryDepends]) -> set[int]:
    dropped = {
        number
        for number, entry in depends.items()
        if (entry.catalog_oid or PG_CLASS_OID, entry.object_oid) in decision.excluded
    }
    nameless = {n: e for n, e in depends.items() if not e.object_oid}
    users: dict[int, list[int]] = defaultdict(list)
    for number, entry in depends.items():
        for needed in entry.depends_on:
            users[needed].append(number)
    # A grant may hang on another grant.
    waiting = list(dropped)
    while waiting:
        for number in users[waiting.pop()]:
            if number in nameless and number not in dropped:
                dropped.add(number)
                waiting.append(number)
    # A shell type has no OID and hangs on nothing; the functions of the type hang on it.
    for number, entry in nameless.items():
        if not entry.depends_on and users[number] and dropped.issuperset(users[number]):
            dropped.add(number)
    return dropped


def _is_needless(entry: Entry, decision: Decision, depends: Mapping[int, EntryDepends]) -> bool:
    """Filling a materialized view that stays empty; owning a sequence that outlives its table;
    what has no OID of its own, if its kind is left out."""
    if kind := _KINDS_WITHOUT_OID.get(entry.description):
        return kind in decision.kinds_excluded
    if entry.description == "MATERIALIZED VIEW DATA":
        return (PG_CLASS_OID, entry.object_oid) in decision.data_skipped
    if entry.description == "SEQUENCE OWNED BY":
        needed = [depends[number] for number in depends[_number(entry)].depends_on]
        return any((need.catalog_oid, need.object_oid) in decision.kept for need in needed)
    return False
