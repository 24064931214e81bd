"""A schema in words: every object of a database with its properties, a query for each kind.

Invariant: the same schema gives the same words on every server from 13 to 18, except
for what `compare.schema` treats with care: the text of queries, and
properties that only one of the servers knows, which the other leaves out.

Every query reads its whole kind at once. Its first columns name the object (catalog and OID,
kind, path, suffix) and what it goes away with (parent kind, parent path); each further column
is a property. Names are quoted here and not by the server, whose quoting follows its own
list of keywords.

Facts: PostgreSQL documentation, "System Catalogs"; pg_dump.c, getTriggers() for what a
partition inherits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from millrace.postgres.catalog import relations as catalog
from millrace.postgres.catalog.schemas import USER_EVENT_TRIGGER, USER_PUBLICATION, USER_SCHEMA
from millrace.postgres.quote import ident

Connection = psycopg.Connection[tuple[Any, ...]]
Key = tuple[str, str]
Value = str | int | float | bool | list[Any] | None

# How many columns of each query name the object.
_NAMING = 7
_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_$]*")


@dataclass(frozen=True)
class DescribedObject:
    """One object. `parent` is what it goes away with: a column's table, a table's schema."""

    kind: str
    name: str
    parent: Key | None
    properties: Mapping[str, Value]
    # OID of its catalog and its own: means something on its own server only. Columns have none,
    # nor have subscriptions.
    identity: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Description:
    """All objects of one database, by kind and name."""

    major: int
    objects: Mapping[Key, DescribedObject]


def read_description(connection: Connection) -> Description:
    """Every object of the database that is not an extension's, and not ours."""
    version = connection.info.server_version
    objects: dict[Key, DescribedObject] = {}
    for query in _queries(version):
        cursor = connection.execute(query)
        names = [column.name.replace("_", " ") for column in cursor.description or ()]
        for row in cursor:
            catalog_oid, oid, kind, path, suffix, parent_kind, parent_path, *values = row
            name = render_name(path) + unquoted(suffix)
            parent = (parent_kind, render_name(parent_path)) if parent_kind else None
            properties = dict(zip(names[_NAMING:], values, strict=True))
            objects[kind, name] = DescribedObject(
                kind, name, parent, properties, (catalog_oid, oid)
            )
    _add_positions(connection, objects)
    return Description(version // 10000, objects)


def render_name(path: list[str]) -> str:
    """`schema.table.column`, quoted only where a plain identifier would not do."""
    return ".".join(name if _PLAIN_NAME.fullmatch(name) else ident(name) for name in path)


def unquoted(text: str) -> str:
    """Without quotes around what is an identifier anyway: keywords differ between versions."""
    return re.sub(
        r'"((?:[^"]|"")+)"',
        lambda match: match[1] if _PLAIN_NAME.fullmatch(match[1]) else match[0],
        text,
    )


def _add_positions(connection: Connection, objects: dict[Key, DescribedObject]) -> None:
    for sequence in catalog.read_sequences(connection):
        key = "sequence", render_name([sequence.schema, sequence.name])
        if key in objects:
            found = objects[key]
            position = {"last value": sequence.last_value, "is called": sequence.is_called}
            objects[key] = replace(found, properties={**found.properties, **position})


_RELATION_KIND = (
    "CASE c.relkind WHEN 'v' THEN 'view' WHEN 'm' THEN 'materialized view'"
    " WHEN 'S' THEN 'sequence' ELSE 'table' END"
)
_IN_SCHEMA = "'schema', ARRAY[n.nspname]::text[]"
_RELATION = (
    "pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    f" AND {USER_SCHEMA} AND NOT EXISTS (SELECT FROM pg_depend e"
    " WHERE e.classid = 'pg_class'::regclass AND e.objid = c.oid AND e.deptype = 'e')"
)


def _ours(catalog_name: str, oid: str) -> str:
    """Not an extension's, and not made by the server together with something else, as the
    constructors of a range are."""
    inside = "('e')" if catalog_name in ("pg_class", "pg_type") else "('e', 'i')"
    return (
        f"NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = '{catalog_name}'::regclass"
        f" AND e.objid = {oid} AND e.deptype IN {inside})"
    )


def _key(catalog_name: str, oid: str) -> str:
    return f"'{catalog_name}'::regclass::oid::int8, {oid}::int8"


def _grants(acl: str, owner: str, object_type: str | None) -> str:
    """`role:PRIVILEGE`, with a star if it may be passed on. Who granted is left out: a restore
    grants in the owner's name. The owner has no name here, it is a property of its own."""
    given = f"coalesce({acl}, acldefault('{object_type}', {owner}))" if object_type else acl
    return f"""(SELECT array_agg(g.line ORDER BY g.line COLLATE "C") FROM (
        SELECT CASE WHEN x.grantee = 0 THEN 'PUBLIC' WHEN x.grantee = {owner} THEN 'the owner'
                    ELSE pg_get_userbyid(x.grantee) END || ':' || x.privilege_type
               || CASE WHEN bool_or(x.is_grantable) THEN '*' ELSE '' END AS line
          FROM aclexplode({given}) x GROUP BY x.grantee, x.privilege_type) g) AS grants"""


def _sorted(values: str) -> str:
    return f'(SELECT array_agg(o ORDER BY o COLLATE "C") FROM unnest({values}) o)'


def _column_options() -> str:
    """What pg_dump prints of a column's options: 15.20 and later keep a number of their own there,
    which changes whenever the column is touched."""
    return (
        '(SELECT array_agg(o ORDER BY o COLLATE "C") FROM unnest(a.attoptions) o'
        " WHERE o NOT LIKE 'pg\\_attver=%')"
    )


def _collation(collation: str, usual: str) -> str:
    return (
        f"(SELECT ns.nspname || '.' || co.collname FROM pg_collation co"
        f" JOIN pg_namespace ns ON ns.oid = co.collnamespace"
        f" WHERE co.oid = {collation} AND co.oid <> {usual})"
    )


def _since(version: int, first: int, column: str) -> str:
    """A property that older servers do not have."""
    return f", {column}" if version >= first else ""


def _queries(version: int) -> list[str]:
    return [
        _schemas(version),
        _TABLES,
        _VIEWS,
        _columns(version),
        _INDEXES,
        _constraints(version),
        _DOMAIN_CONSTRAINTS,
        _sequences(version),
        _functions(version),
        _TRIGGERS,
        _RULES,
        _POLICIES,
        _types(version),
        _EXTENSIONS,
        _DEFAULT_PRIVILEGES,
        _SUBSCRIPTIONS,
        *_publication_members(version),
        _OTHERS,
    ]


def _schemas(version: int) -> str:
    """A `public` that is as initdb made it has an owner who depends on the version."""
    return f"""
SELECT {_key("pg_namespace", "n.oid")},
       'schema', ARRAY[n.nspname]::text[], '', NULL, NULL::text[],
       CASE WHEN n.nspname = 'public' AND n.nspowner = {catalog.owner_of_public(version)}
            THEN 'as initdb made it' ELSE pg_get_userbyid(n.nspowner)::text END AS owner,
       {_grants("n.nspacl", "n.nspowner", "n")}
  FROM pg_namespace n
 WHERE {USER_SCHEMA} AND {_ours("pg_namespace", "n.oid")}"""


_TABLES = f"""
SELECT {_key("pg_class", "c.oid")},
       'table', ARRAY[n.nspname, c.relname]::text[], '', {_IN_SCHEMA},
       CASE c.relkind WHEN 'r' THEN 'table' WHEN 'p' THEN 'partitioned table'
            ELSE 'foreign table' END AS form,
       CASE c.relpersistence WHEN 'u' THEN 'unlogged' ELSE 'logged' END AS persistence,
       CASE WHEN c.relkind = 'r' THEN m.amname END AS access_method,
       CASE WHEN c.relkind = 'p' THEN pg_get_partkeydef(c.oid) END AS partition_key,
       CASE WHEN c.relispartition THEN pg_get_expr(c.relpartbound, c.oid) END AS partition_bounds,
       (SELECT array_agg(ns.nspname || '.' || p.relname ORDER BY i.inhseqno)
          FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent
          JOIN pg_namespace ns ON ns.oid = p.relnamespace WHERE i.inhrelid = c.oid) AS parents,
       c.relrowsecurity AS row_security, c.relforcerowsecurity AS forced_row_security,
       CASE c.relreplident WHEN 'd' THEN 'default' WHEN 'n' THEN 'nothing'
            WHEN 'f' THEN 'full' ELSE 'index' END AS replica_identity,
       CASE WHEN c.reloftype <> 0 THEN format_type(c.reloftype, NULL) END AS of_type,
       {_sorted("c.reloptions")} AS options,
       s.srvname::text AS server, {_sorted("f.ftoptions")} AS server_options,
       pg_get_userbyid(c.relowner) AS owner, {_grants("c.relacl", "c.relowner", "r")}
  FROM {_RELATION}
  LEFT JOIN pg_am m ON m.oid = c.relam
  LEFT JOIN pg_foreign_table f ON f.ftrelid = c.oid
  LEFT JOIN pg_foreign_server s ON s.oid = f.ftserver
 WHERE c.relkind IN ('r', 'p', 'f')"""

_VIEWS = f"""
SELECT {_key("pg_class", "c.oid")},
       {_RELATION_KIND}, ARRAY[n.nspname, c.relname]::text[], '', {_IN_SCHEMA},
       pg_get_viewdef(c.oid) AS definition,
       (SELECT array_agg(DISTINCT coalesce(
                   rn.nspname || '.' || rc.relname || coalesce('.' || a.attname, ''),
                   pn.nspname || '.' || p.proname || '(' || oidvectortypes(p.proargtypes) || ')')
               )
          FROM pg_rewrite r
          JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
          LEFT JOIN (pg_class rc JOIN pg_namespace rn ON rn.oid = rc.relnamespace)
            ON d.refclassid = 'pg_class'::regclass AND rc.oid = d.refobjid
          LEFT JOIN pg_attribute a ON a.attrelid = rc.oid AND a.attnum = d.refobjsubid
               AND d.refobjsubid > 0
          LEFT JOIN (pg_proc p JOIN pg_namespace pn ON pn.oid = p.pronamespace)
            ON d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
         WHERE r.ev_class = c.oid AND r.rulename = '_RETURN' AND rc.oid IS DISTINCT FROM c.oid
           AND (rc.oid IS NOT NULL OR p.oid IS NOT NULL)) AS depends_on,
       {_sorted("c.reloptions")} AS options,
       CASE WHEN c.relkind = 'm' THEN c.relispopulated END AS populated,
       pg_get_userbyid(c.relowner) AS owner, {_grants("c.relacl", "c.relowner", "r")}
  FROM {_RELATION}
 WHERE c.relkind IN ('v', 'm')"""


def _columns(version: int) -> str:
    # Children of inheritance get their columns in another order when they are restored.
    return f"""
SELECT 0, 0, 'column', ARRAY[n.nspname, c.relname, a.attname]::text[], '',
       {_RELATION_KIND}, ARRAY[n.nspname, c.relname]::text[],
       CASE WHEN NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid)
            THEN a.attnum END AS position,
       format_type(a.atttypid, a.atttypmod) AS type,
       {_collation("a.attcollation", "t.typcollation")} AS collation,
       a.attnotnull AS not_null,
       CASE WHEN a.attgenerated = '' THEN pg_get_expr(d.adbin, d.adrelid) END AS default,
       CASE a.attgenerated WHEN 's' THEN 'stored ' WHEN 'v' THEN 'virtual ' END
           || pg_get_expr(d.adbin, d.adrelid) AS generated,
       -- Partitions have it of their own since 17; before, their root's was meant.
       CASE WHEN c.relispartition THEN NULL WHEN a.attidentity = 'a' THEN 'always'
            WHEN a.attidentity = 'd' THEN 'by default' END AS identity,
       CASE a.attstorage WHEN 'p' THEN 'plain' WHEN 'e' THEN 'external' WHEN 'm' THEN 'main'
            ELSE 'extended' END AS storage,
       nullif(a.attstattarget, -1) AS statistics,
       {_column_options()} AS options, {_sorted("a.attfdwoptions")} AS server_options,
       {_grants("a.attacl", "c.relowner", None)}
       {_since(version, 140000, "nullif(a.attcompression, '')::text AS compression")}
  FROM {_RELATION}
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  JOIN pg_type t ON t.oid = a.atttypid
  LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
 WHERE c.relkind IN ('r', 'p', 'f', 'v', 'm')"""


_INDEXES = f"""
SELECT {_key("pg_class", "x.oid")},
       'index', ARRAY[n.nspname, x.relname]::text[], '',
       CASE WHEN con.oid IS NULL THEN {_RELATION_KIND} ELSE 'constraint' END,
       CASE WHEN con.oid IS NULL THEN ARRAY[n.nspname, c.relname]::text[]
            ELSE ARRAY[n.nspname, c.relname, con.conname]::text[] END,
       regexp_replace(pg_get_indexdef(x.oid), '^CREATE UNIQUE', 'CREATE') AS definition,
       i.indisunique AS unique, i.indisprimary AS primary, i.indisvalid AS valid,
       i.indisclustered AS clustered, i.indisreplident AS replica_identity,
       (SELECT ns.nspname || '.' || p.relname
          FROM pg_inherits h JOIN pg_class p ON p.oid = h.inhparent
          JOIN pg_namespace ns ON ns.oid = p.relnamespace WHERE h.inhrelid = x.oid) AS attached_to,
       (SELECT array_agg(a.attnum || ': ' || a.attstattarget ORDER BY a.attnum)
          FROM pg_attribute a WHERE a.attrelid = x.oid AND a.attstattarget >= 0) AS statistics
  FROM {_RELATION}
  JOIN pg_index i ON i.indrelid = c.oid
  JOIN pg_class x ON x.oid = i.indexrelid
  LEFT JOIN pg_constraint con ON con.conindid = x.oid AND con.conrelid = c.oid
       AND con.contype IN ('p', 'u', 'x')
 WHERE c.relkind IN ('r', 'p', 'm')"""


def _constraints(version: int) -> str:
    # NOT NULL has rows here since 18; before, it is a property of the column alone.
    types = "('c', 'u', 'p', 'x', 'f', 'n')" if version >= 180000 else "('c', 'u', 'p', 'x', 'f')"
    return f"""
SELECT {_key("pg_constraint", "con.oid")},
       CASE con.contype WHEN 'f' THEN 'foreign key' WHEN 'n' THEN 'not-null constraint'
            ELSE 'constraint' END,
       ARRAY[n.nspname, c.relname, con.conname]::text[], '',
       {_RELATION_KIND}, ARRAY[n.nspname, c.relname]::text[],
       regexp_replace(pg_get_constraintdef(con.oid), ' NOT VALID$', '') AS definition,
       con.convalidated AS validated
  FROM {_RELATION}
  JOIN pg_constraint con ON con.conrelid = c.oid
 WHERE con.contype IN {types} AND (con.contype <> 'f' OR con.conparentid = 0)"""


_DOMAIN_CONSTRAINTS = f"""
SELECT {_key("pg_constraint", "con.oid")},
       'domain constraint', ARRAY[n.nspname, t.typname, con.conname]::text[], '',
       'type', ARRAY[n.nspname, t.typname]::text[],
       regexp_replace(pg_get_constraintdef(con.oid), ' NOT VALID$', '') AS definition,
       con.convalidated AS validated
  FROM pg_constraint con
  JOIN pg_type t ON t.oid = con.contypid
  JOIN pg_namespace n ON n.oid = t.typnamespace
 WHERE con.contype = 'c' AND {USER_SCHEMA} AND {_ours("pg_type", "t.oid")}"""


def _sequences(version: int) -> str:
    # A restore makes the sequence of an unlogged table unlogged where the server can (15).
    return f"""
SELECT {_key("pg_class", "c.oid")},
       'sequence', ARRAY[n.nspname, c.relname]::text[], '',
       CASE WHEN o.path IS NULL THEN 'schema' ELSE 'column' END,
       coalesce(o.path, ARRAY[n.nspname]::text[]),
       format_type(s.seqtypid, NULL) AS type, s.seqstart AS start, s.seqincrement AS increment,
       s.seqmin AS min, s.seqmax AS max, s.seqcycle AS cycle, s.seqcache AS cache,
       array_to_string(o.path, '.') AS owned_by,
       pg_get_userbyid(c.relowner) AS owner, {_grants("c.relacl", "c.relowner", "s")}
       {_since(version, 150000, "c.relpersistence::text AS persistence")}
  FROM {_RELATION}
  JOIN pg_sequence s ON s.seqrelid = c.oid
  LEFT JOIN LATERAL (
        SELECT ARRAY[tn.nspname, tc.relname, a.attname]::text[] AS path
          FROM pg_depend d
          JOIN pg_class tc ON tc.oid = d.refobjid
          JOIN pg_namespace tn ON tn.oid = tc.relnamespace
          JOIN pg_attribute a ON a.attrelid = tc.oid AND a.attnum = d.refobjsubid
         WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
           AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')) o ON true"""


def _functions(version: int) -> str:
    return f"""
SELECT {_key("pg_proc", "p.oid")},
       CASE p.prokind WHEN 'p' THEN 'procedure' WHEN 'a' THEN 'aggregate' ELSE 'function' END,
       ARRAY[n.nspname, p.proname]::text[], '(' || oidvectortypes(p.proargtypes) || ')',
       {_IN_SCHEMA},
       pg_get_function_result(p.oid) AS returns,
       p.proargnames AS argument_names, p.proargmodes::text AS argument_modes,
       (SELECT array_agg(format_type(a.oid, NULL) ORDER BY a.place)
          FROM unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]))
               WITH ORDINALITY AS a (oid, place)) AS argument_types,
       pg_get_expr(p.proargdefaults, 0) AS argument_defaults,
       l.lanname::text AS language, p.prosrc AS source, p.probin AS library,
       p.prokind = 'w' AS window,
       CASE p.provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable' ELSE 'volatile' END
       AS volatility, p.proisstrict AS strict, p.prosecdef AS security_definer,
       p.proleakproof AS leakproof,
       CASE p.proparallel WHEN 's' THEN 'safe' WHEN 'r' THEN 'restricted' ELSE 'unsafe' END
       AS parallel, p.procost AS cost, p.prorows AS rows, p.proconfig AS settings,
       nullif(p.prosupport::oid, 0)::regproc::text AS support,
       CASE WHEN p.prokind = 'a' THEN ARRAY[
           'kind ' || g.aggkind::text, 'direct ' || g.aggnumdirectargs,
           'transition ' || g.aggtransfn::text, 'type ' || format_type(g.aggtranstype, NULL),
           'final ' || g.aggfinalfn::text, 'combine ' || g.aggcombinefn::text,
           'serial ' || g.aggserialfn::text, 'deserial ' || g.aggdeserialfn::text,
           'moving ' || g.aggmtransfn::text, 'inverse ' || g.aggminvtransfn::text,
           'moving final ' || g.aggmfinalfn::text,
           'extra ' || g.aggfinalextra || g.aggmfinalextra,
           'modify ' || g.aggfinalmodify::text || g.aggmfinalmodify::text,
           'sort ' || g.aggsortop::regoperator::text,
           'moving type ' || coalesce(format_type(nullif(g.aggmtranstype, 0), NULL), ''),
           'start ' || quote_nullable(g.agginitval),
           'moving start ' || quote_nullable(g.aggminitval)] END AS aggregate,
       pg_get_userbyid(p.proowner) AS owner, {_grants("p.proacl", "p.proowner", "f")}
       {_since(version, 140000, "pg_get_function_sqlbody(p.oid) AS body")}
  FROM pg_proc p
  JOIN pg_namespace n ON n.oid = p.pronamespace
  JOIN pg_language l ON l.oid = p.prolang
  LEFT JOIN pg_aggregate g ON g.aggfnoid = p.oid
 WHERE {USER_SCHEMA} AND {_ours("pg_proc", "p.oid")}"""


# Of a partition's triggers only those that were enabled otherwise than their parent's.
_TRIGGERS = f"""
SELECT {_key("pg_trigger", "t.oid")},
       'trigger', ARRAY[n.nspname, c.relname, t.tgname]::text[], '',
       {_RELATION_KIND}, ARRAY[n.nspname, c.relname]::text[],
       pg_get_triggerdef(t.oid) AS definition,
       CASE t.tgenabled WHEN 'O' THEN 'origin' WHEN 'D' THEN 'disabled' WHEN 'R' THEN 'replica'
            ELSE 'always' END AS enabled
  FROM {_RELATION}
  JOIN pg_trigger t ON t.tgrelid = c.oid
  LEFT JOIN pg_trigger u ON u.oid = t.tgparentid
 WHERE (u.oid IS NULL AND NOT t.tgisinternal)
    OR (u.tgenabled <> t.tgenabled AND NOT u.tgisinternal)"""

_RULES = f"""
SELECT {_key("pg_rewrite", "r.oid")},
       'rule', ARRAY[n.nspname, c.relname, r.rulename]::text[], '',
       {_RELATION_KIND}, ARRAY[n.nspname, c.relname]::text[],
       pg_get_ruledef(r.oid) AS definition,
       CASE r.ev_type WHEN '1' THEN 'select' WHEN '2' THEN 'update' WHEN '3' THEN 'insert'
            ELSE 'delete' END AS event, r.is_instead AS instead,
       CASE r.ev_enabled WHEN 'O' THEN 'origin' WHEN 'D' THEN 'disabled' WHEN 'R' THEN 'replica'
            ELSE 'always' END AS enabled
  FROM {_RELATION}
  JOIN pg_rewrite r ON r.ev_class = c.oid
 WHERE r.rulename <> '_RETURN'"""

_POLICIES = f"""
SELECT {_key("pg_policy", "p.oid")},
       'policy', ARRAY[n.nspname, c.relname, p.polname]::text[], '',
       {_RELATION_KIND}, ARRAY[n.nspname, c.relname]::text[],
       CASE p.polcmd WHEN 'r' THEN 'select' WHEN 'a' THEN 'insert' WHEN 'w' THEN 'update'
            WHEN 'd' THEN 'delete' ELSE 'all' END AS command, p.polpermissive AS permissive,
       (SELECT array_agg(CASE r WHEN 0 THEN 'PUBLIC' ELSE pg_get_userbyid(r)::text END
                         ORDER BY pg_get_userbyid(r)::text COLLATE "C")
          FROM unnest(p.polroles) r) AS roles,
       pg_get_expr(p.polqual, p.polrelid) AS using,
       pg_get_expr(p.polwithcheck, p.polrelid) AS "check"
  FROM {_RELATION}
  JOIN pg_policy p ON p.polrelid = c.oid"""


def _types(version: int) -> str:
    multirange = _since(
        version, 140000, "format_type(nullif(r.rngmultitypid, 0), NULL) AS multirange"
    )
    return f"""
SELECT {_key("pg_type", "t.oid")},
       'type', ARRAY[n.nspname, t.typname]::text[], '', {_IN_SCHEMA},
       CASE WHEN NOT t.typisdefined THEN 'shell' ELSE CASE t.typtype WHEN 'e' THEN 'enum'
            WHEN 'd' THEN 'domain' WHEN 'c' THEN 'composite' WHEN 'r' THEN 'range'
            ELSE 'base' END END AS form,
       (SELECT array_agg(l.enumlabel::text ORDER BY l.enumsortorder)
          FROM pg_enum l WHERE l.enumtypid = t.oid) AS labels,
       format_type(nullif(t.typbasetype, 0), t.typtypmod) AS base_type,
       t.typnotnull AS not_null, t.typdefault AS default,
       {_collation("t.typcollation", "coalesce(b.typcollation, 0)")} AS collation,
       (SELECT array_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || coalesce(
                ' ' || {_collation("a.attcollation", "at.typcollation")}, '') ORDER BY a.attnum)
          FROM pg_attribute a JOIN pg_type at ON at.oid = a.atttypid
         WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0
           AND NOT a.attisdropped) AS attributes,
       format_type(nullif(r.rngsubtype, 0), NULL) AS subtype,
       (SELECT o.opcname::text FROM pg_opclass o WHERE o.oid = r.rngsubopc) AS operator_class,
       {_collation("r.rngcollation", "0")} AS range_collation,
       nullif(r.rngcanonical::oid, 0)::regproc::text AS canonical,
       nullif(r.rngsubdiff::oid, 0)::regproc::text AS difference,
       CASE WHEN t.typtype = 'b' THEN ARRAY[t.typinput::text, t.typoutput::text,
           t.typreceive::text, t.typsend::text, t.typmodin::text, t.typmodout::text,
           t.typanalyze::text, t.typlen::text, t.typbyval::text, t.typalign::text,
           t.typstorage::text, t.typdelim::text, t.typcategory::text, t.typispreferred::text]
           END AS functions,
       pg_get_userbyid(t.typowner) AS owner, {_grants("t.typacl", "t.typowner", "T")}
       {multirange}
  FROM pg_type t
  JOIN pg_namespace n ON n.oid = t.typnamespace
  LEFT JOIN pg_class rel ON rel.oid = t.typrelid
  LEFT JOIN pg_type b ON b.oid = t.typbasetype
  LEFT JOIN pg_range r ON r.rngtypid = t.oid
 WHERE {USER_SCHEMA} AND {_ours("pg_type", "t.oid")}
   AND t.typtype IN ('e', 'd', 'c', 'r', 'b', 'p') AND (t.typtype <> 'c' OR rel.relkind = 'c')
   AND NOT EXISTS (SELECT FROM pg_type x WHERE x.typarray = t.oid)"""


_EXTENSIONS = f"""
SELECT {_key("pg_extension", "x.oid")},
       'extension', ARRAY[x.extname]::text[], '', NULL, NULL::text[],
       n.nspname::text AS schema, x.extversion AS version
  FROM pg_extension x JOIN pg_namespace n ON n.oid = x.extnamespace"""

_DEFAULT_PRIVILEGES = f"""
SELECT {_key("pg_default_acl", "d.oid")}, 'default privileges',
       ARRAY[pg_get_userbyid(d.defaclrole), coalesce(n.nspname, 'every schema'),
             CASE d.defaclobjtype WHEN 'r' THEN 'tables' WHEN 'S' THEN 'sequences'
             WHEN 'f' THEN 'functions' WHEN 'T' THEN 'types' WHEN 'n' THEN 'schemas'
             ELSE 'large_objects' END]::text[], '',
       CASE WHEN n.oid IS NOT NULL THEN 'schema' END, ARRAY[n.nspname]::text[],
       {_grants("d.defaclacl", "d.defaclrole", None)}
  FROM pg_default_acl d LEFT JOIN pg_namespace n ON n.oid = d.defaclnamespace"""

# What everyone may read of them: not the connection string, and on 13 not the OID. A restored one
# is disabled, so whether it is enabled says nothing.
_SUBSCRIPTIONS = """
SELECT 0, 0, 'subscription', ARRAY[s.subname]::text[], '', NULL, NULL::text[],
       (SELECT array_agg(p ORDER BY p COLLATE "C") FROM unnest(s.subpublications) p)
       AS publications, s.subslotname::text AS slot, pg_get_userbyid(s.subowner) AS owner
  FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid
 WHERE d.datname = current_database()"""


# Of FOR ALL TABLES there are none. Our own tables are in publications of ours.
def _publication_members(version: int) -> list[str]:
    tables = f"""
SELECT {_key("pg_publication_rel", "m.oid")},
       'publication table', ARRAY[p.pubname, n.nspname, c.relname]::text[], '',
       'publication', ARRAY[p.pubname]::text[]
       {{more}}
  FROM pg_publication_rel m
  JOIN pg_publication p ON p.oid = m.prpubid
  JOIN pg_class c ON c.oid = m.prrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE {USER_SCHEMA} AND {USER_PUBLICATION}"""
    if version < 150000:
        return [tables.format(more=", NULL::text[] AS columns, NULL AS where")]
    columns = """, (SELECT array_agg(a.attname::text ORDER BY a.attname COLLATE "C")
          FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = ANY(m.prattrs)) AS columns,
       pg_get_expr(m.prqual, m.prrelid) AS where"""
    schemas = f"""
SELECT {_key("pg_publication_namespace", "m.oid")},
       'publication schema', ARRAY[p.pubname, n.nspname]::text[], '',
       'publication', ARRAY[p.pubname]::text[]
  FROM pg_publication_namespace m
  JOIN pg_publication p ON p.oid = m.pnpubid
  JOIN pg_namespace n ON n.oid = m.pnnspid
 WHERE {USER_SCHEMA}"""
    return [tables.format(more=columns), schemas]


# Whatever else a schema holds: that it is there, and the little that says what it does.
_OTHERS = f"""
SELECT o.class::oid::int8, o.oid::int8, i.type, ARRAY[]::text[], i.identity,
       CASE WHEN n.oid IS NOT NULL THEN 'schema' END, ARRAY[n.nspname]::text[], o.definition
  FROM (SELECT 'pg_operator'::regclass AS class, oid, oprnamespace AS schema,
               oprcode::text AS definition FROM pg_operator
        UNION ALL SELECT 'pg_opclass'::regclass, oid, opcnamespace,
               format_type(opcintype, NULL) FROM pg_opclass
        UNION ALL SELECT 'pg_opfamily'::regclass, oid, opfnamespace, NULL FROM pg_opfamily
        UNION ALL SELECT 'pg_collation'::regclass, oid, collnamespace, NULL FROM pg_collation
        UNION ALL SELECT 'pg_conversion'::regclass, oid, connamespace, conproc::text
               FROM pg_conversion
        UNION ALL SELECT 'pg_ts_config'::regclass, oid, cfgnamespace, NULL FROM pg_ts_config
        UNION ALL SELECT 'pg_ts_dict'::regclass, oid, dictnamespace, dictinitoption
               FROM pg_ts_dict
        UNION ALL SELECT 'pg_ts_parser'::regclass, oid, prsnamespace, NULL FROM pg_ts_parser
        UNION ALL SELECT 'pg_ts_template'::regclass, oid, tmplnamespace, NULL FROM pg_ts_template
        UNION ALL SELECT 'pg_statistic_ext'::regclass, oid, stxnamespace,
               pg_get_statisticsobjdef(oid) FROM pg_statistic_ext
        UNION ALL SELECT 'pg_cast'::regclass, oid, NULL, castcontext::text || castmethod::text
               FROM pg_cast
        UNION ALL SELECT 'pg_am'::regclass, oid, NULL, amhandler::text FROM pg_am
        UNION ALL SELECT 'pg_language'::regclass, oid, NULL, lanpltrusted::text FROM pg_language
        UNION ALL SELECT 'pg_foreign_data_wrapper'::regclass, oid, NULL, fdwoptions::text
               FROM pg_foreign_data_wrapper
        UNION ALL SELECT 'pg_foreign_server'::regclass, oid, NULL, srvoptions::text
               FROM pg_foreign_server
        UNION ALL SELECT 'pg_publication'::regclass, oid, NULL,
               concat_ws(' ', puballtables, pubinsert, pubupdate, pubdelete, pubtruncate,
                         pubviaroot) FROM pg_publication p WHERE {USER_PUBLICATION}
        UNION ALL SELECT 'pg_event_trigger'::regclass, oid, NULL,
               concat_ws(' ', evtevent, evtfoid::regproc, evtenabled, evttags)
               FROM pg_event_trigger t WHERE {USER_EVENT_TRIGGER}) o
  LEFT JOIN pg_namespace n ON n.oid = o.schema,
       LATERAL pg_identify_object(o.class, o.oid, 0) i
 WHERE o.oid >= 16384 AND (n.oid IS NULL OR {USER_SCHEMA}) AND NOT EXISTS (
       SELECT FROM pg_depend e
        WHERE e.classid = o.class AND e.objid = o.oid AND e.deptype IN ('e', 'i'))"""
