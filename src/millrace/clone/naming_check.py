"""Whether the source's schemas can have the requested names on the target.

Invariant: reads only. What would fail in the middle of a restore under other names is refused
here: names that clash, schemas that can't be renamed, extensions that can't be moved. What is
restored and still names the old schemas is reported by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from millrace.clone.problem import Problem
from millrace.clone.settings import CloneSettings
from millrace.filter.apply import (
    read_decision,
    read_left_out_extensions,
    read_left_out_schemas,
)
from millrace.filter.decide import PG_CLASS_OID
from millrace.postgres.catalog.schemas import OWN_SCHEMA, USER_SCHEMA
from millrace.postgres.own_schema import SPOOL_SCHEMA
from millrace.postgres.quote import ident

Connection = psycopg.Connection[tuple[Any, ...]]


def check_naming(
    source: Connection, target: Connection, settings: CloneSettings, *, continues: bool = False
) -> list[Problem]:
    """Every problem of --rename-schema; none if all names stay."""
    if settings.naming.is_identity:
        return []
    return [
        *_check_source_names(source, settings),
        *_check_target_schemas(target, settings, continues=continues),
        *_check_extensions(source, target, settings),
        *_check_columns(source, settings),
        *_warn_of_strings(source, settings),
    ]


def _check_source_names(source: Connection, settings: CloneSettings) -> Iterable[Problem]:
    naming = settings.naming
    rows = source.execute(f"SELECT n.nspname FROM pg_namespace n WHERE {USER_SCHEMA} ORDER BY 1")
    names = [name for (name,) in rows]
    for old in naming.renamed_schemas:
        if old not in names:
            yield Problem(
                "source",
                f"there is no schema {old}, which --rename-schema names",
                "check the name: `millrace list schemas`; names are case-sensitive",
            )
    left_out = read_left_out_schemas(source, settings.filters)
    taken: dict[str, str] = {}
    for name in names:
        if name in left_out:
            continue
        other = taken.setdefault(naming.schema(name), name)
        if other != name:
            yield Problem(
                "source",
                f"schemas {other} and {name} would both be called {naming.schema(name)} on the "
                "target",
                "give each a name of its own with --rename-schema, or leave one out with --filters",
            )


def _check_target_schemas(
    target: Connection, settings: CloneSettings, *, continues: bool
) -> Iterable[Problem]:
    renamed = settings.naming.renamed_schemas
    for own in (OWN_SCHEMA, SPOOL_SCHEMA):
        if own in renamed.values():
            yield Problem(
                "target", f"millrace keeps its own tables in schema {own}", "choose another name"
            )
    rows = target.execute(
        "SELECT n.nspname, pg_get_userbyid(n.nspowner), pg_has_role(n.nspowner, 'USAGE'),"
        " EXISTS (SELECT FROM pg_depend d WHERE d.refclassid = 'pg_namespace'::regclass"
        " AND d.refobjid = n.oid) FROM pg_namespace n WHERE n.nspname = ANY(%s) ORDER BY 1",
        ([*renamed, *renamed.values()],),
    )
    for name, owner, is_own, is_used in rows.fetchall():
        if not is_own:
            yield Problem(
                "target",
                f"schema {name} belongs to {owner}: it has to be renamed while the schema is "
                "restored, which only its owner may do",
                f"ALTER SCHEMA {ident(name)} OWNER TO {ident(target.info.user)}, or connect as "
                f"a member of {owner}",
            )
        if name in renamed.values() and is_used and not (continues or settings.drop_if_exists):
            yield Problem(
                "target",
                f"there is a schema {name} already, with objects in it",
                f"choose another name, or DROP SCHEMA {ident(name)} CASCADE",
            )


def _check_extensions(
    source: Connection, target: Connection, settings: CloneSettings
) -> Iterable[Problem]:
    """Those in schemas that are renamed: their own functions may name the schema."""
    naming = settings.naming
    left_out = read_left_out_extensions(source, settings.filters)
    there = {
        name: (schema, is_own)
        for name, schema, is_own in target.execute(
            "SELECT e.extname, n.nspname, pg_has_role(e.extowner, 'USAGE') FROM pg_extension e"
            " JOIN pg_namespace n ON n.oid = e.extnamespace"
        )
    }
    rows = source.execute(
        "SELECT e.extname, n.nspname, e.extrelocatable FROM pg_extension e"
        " JOIN pg_namespace n ON n.oid = e.extnamespace WHERE n.nspname = ANY(%s) ORDER BY 1",
        (list(naming.renamed_schemas),),
    )
    for name, schema, is_relocatable in rows.fetchall():
        if name in left_out or (settings.schema.skip_extensions and name not in there):
            continue
        if not is_relocatable:
            yield Problem(
                "source",
                f"extension {name} is in schema {schema}, and can't be moved to another one",
                f"keep the name of {schema}, or leave the extension out: [exclude-extension] in "
                "--filters",
            )
        home, is_own = there.get(name, (naming.schema(schema), True))
        if home != naming.schema(schema) and not is_own:
            yield Problem(
                "target",
                f"extension {name} is in schema {home}, and belongs to another user: it has to be "
                "moved while the schema is restored",
                f"ALTER EXTENSION {ident(name)} SET SCHEMA {ident(naming.schema(schema))}",
            )


def _check_columns(source: Connection, settings: CloneSettings) -> Iterable[Problem]:
    """Columns whose values are names: the target would look for the source's."""
    decision = read_decision(source, settings.filters)
    names = [
        f"{schema}.{table}.{column}"
        for oid, schema, table, column in source.execute(_HOLDING_NAMES)
        if (PG_CLASS_OID, oid) not in decision.excluded
        and (PG_CLASS_OID, oid) not in decision.data_skipped
        and column not in decision.columns.get(oid, ())
    ]
    if names:
        yield Problem(
            "source",
            "columns hold names of objects (regclass and the like), which --rename-schema does not "
            f"change: {', '.join(names)}",
            "leave them out: [exclude-column] in --filters; or give them another type, such as "
            "text, on the source",
        )


# Types by whose values objects in schemas are named, and all that is made of these.
_HOLDING_NAMES = f"""
WITH RECURSIVE naming (oid) AS (
    SELECT oid FROM pg_type
     WHERE typnamespace = 'pg_catalog'::regnamespace
       AND typname IN ('regclass', 'regproc', 'regprocedure', 'regoper', 'regoperator', 'regtype',
                       'regconfig', 'regdictionary', 'regcollation', 'regnamespace')
    UNION
    SELECT t.oid FROM naming JOIN pg_type t ON naming.oid IN (
        t.typbasetype, CASE WHEN t.typcategory = 'A' THEN t.typelem END)
        OR naming.oid IN (SELECT a.atttypid FROM pg_attribute a
                           WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND t.typtype = 'c')
)
SELECT c.oid::int8, n.nspname, c.relname, a.attname
  FROM pg_attribute a JOIN naming ON naming.oid = a.atttypid
  JOIN pg_class c ON c.oid = a.attrelid AND c.relkind = 'r' AND c.relpersistence <> 't'
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND {USER_SCHEMA}
 ORDER BY 2, 3, a.attnum"""


def _warn_of_strings(source: Connection, settings: CloneSettings) -> Iterable[Problem]:
    """Bodies that are strings: the server does not look into them before they run."""
    parsed = "p.prosqlbody IS NULL AND" if source.info.server_version >= 140000 else ""
    rows = source.execute(
        f"""SELECT format('%%I.%%I(%%s)', n.nspname, p.proname,
                          pg_get_function_identity_arguments(p.oid))
             FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
             JOIN pg_language l ON l.oid = p.prolang
             WHERE {USER_SCHEMA} AND {parsed} l.lanname NOT IN ('c', 'internal')
             AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.objid = p.oid
                 AND e.classid = 'pg_proc'::regclass AND e.deptype = 'e')
             AND EXISTS (SELECT FROM unnest(%s::text[]) AS o (name)
                 WHERE strpos(p.prosrc, o.name) > 0)
             ORDER BY 1""",
        (list(settings.naming.renamed_schemas),),
    ).fetchall()
    if rows:
        yield Problem(
            "source",
            "functions whose bodies are strings that contain the name of a renamed schema; they "
            f"are copied as they are: {', '.join(name for (name,) in rows)}",
            "CREATE OR REPLACE them on the target where they mean the schema",
            is_warning=True,
        )
