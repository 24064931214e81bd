"""Catalog queries: the source's tables and what belongs to them, a query for each kind.

Invariant: every query reads the whole kind at once, so that the cost does not
grow with round trips; 5,000 tables are read in seconds.

Facts: PostgreSQL documentation, "System Catalogs"; what pg_dump leaves to the
INDEX and CONSTRAINT entries (clustering, replica identity, statistics targets,
tablespaces, extensions that are depended on) is read here, because those entries are
built by us.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import psycopg

from millrace.postgres.catalog.schemas import USER_EVENT_TRIGGER, USER_PUBLICATION, USER_SCHEMA
from millrace.postgres.quote import ident, literal, qualified
from millrace.relation import (
    Column,
    Extension,
    ForeignKey,
    Index,
    LargeObjectRange,
    Sequence,
    SplitKey,
    Table,
)

Connection = psycopg.Connection[tuple[Any, ...]]

# OIDs below this are assigned by initdb from the catalog sources: the same on every server.
FIRST_UNPINNED_OID = 10000
FIRST_SUPERUSER_OID = 10
DATABASE_OWNER_OID = 6171

# Built-in types whose binary form does not mean the same on another server (they hold OIDs of
# user objects), or is not exactly what the text form is.
_TEXT_ONLY = frozenset(
    [
        "regproc",
        "regprocedure",
        "regoper",
        "regoperator",
        "regclass",
        "regtype",
        "regrole",
        "regnamespace",
        "regconfig",
        "regdictionary",
        "regcollation",
        "regdatabase",
        "xml",
        "aclitem",
    ]
)

# Of a column `a`: no row has a NULL there. Since 18, a NOT NULL that is NOT VALID marks its column
# like any other, and the rows of before may still break it.
NEVER_NULL = (
    "(a.attnotnull AND NOT EXISTS (SELECT FROM pg_constraint v WHERE v.conrelid = a.attrelid"
    " AND v.contype = 'n' AND NOT v.convalidated AND v.conkey = ARRAY[a.attnum]))"
)
_NOT_OF_EXTENSION = (
    "NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = '{catalog}'::regclass"
    " AND e.objid = {oid} AND e.deptype = 'e')"
)
# Unlogged tables are empty on a standby, and can't be read there.
_READABLE = "c.relpersistence IN ('p', CASE WHEN pg_is_in_recovery() THEN 'p' ELSE 'u' END)"
_TABLE_NOT_OF_EXTENSION = _NOT_OF_EXTENSION.format(catalog="pg_class", oid="c.oid")


def read_tables(connection: Connection, *, same_encoding: bool = True) -> list[Table]:
    """Tables with rows of their own, and the extensions' configuration tables."""
    conditions = _extension_conditions(connection)
    roots = _read_load_roots(connection, same_encoding=same_encoding)
    rows = connection.execute(
        (
            f"""
        SELECT c.oid::int8, n.nspname, c.relname, coalesce(a.amname, 'heap'),
               c.relpersistence = 'u',
               pg_relation_size(c.oid), pg_table_size(c.oid), c.reltuples::int8
          FROM pg_class c
          JOIN pg_namespace n ON n.oid = c.relnamespace
          LEFT JOIN pg_am a ON a.oid = c.relam
         WHERE c.relkind = 'r' AND {_READABLE} AND {USER_SCHEMA}
           AND ({_TABLE_NOT_OF_EXTENSION} OR c.oid = ANY(%s))
         ORDER BY c.oid"""
        ),
        (list(conditions),),
    ).fetchall()
    columns = _read_columns(connection)
    keys = _read_split_keys(connection)
    return [
        Table(
            oid=oid,
            schema=schema,
            name=name,
            columns=tuple(columns.get(oid, ())),
            heap_bytes=heap or 0,
            total_bytes=total or 0,
            estimated_rows=max(0, tuples),
            split_key=keys.get(oid),
            access_method=method,
            is_unlogged=unlogged,
            extension_condition=conditions.get(oid),
            load_via=roots.get(oid),
        )
        for oid, schema, name, method, unlogged, heap, total, tuples in rows
    ]


def _extension_conditions(connection: Connection) -> dict[int, str]:
    rows = connection.execute(
        "SELECT unnest(extconfig)::oid::int8, unnest(extcondition) FROM pg_extension"
        " WHERE extconfig IS NOT NULL"
    )
    return {oid: condition for oid, condition in rows}


def _read_load_roots(
    connection: Connection, *, same_encoding: bool
) -> dict[int, tuple[int, str, str]]:
    """For leaves below a hash-partitioned table whose hash values may differ on the target,
    the topmost such table. Hashes of built-in types depend on the bytes alone."""
    rows = connection.execute(
        """
        SELECT DISTINCT ON (leaf.oid) leaf.oid::int8, root.oid::int8, n.nspname, root.relname
          FROM pg_partitioned_table p
          JOIN pg_class root ON root.oid = p.partrelid
          JOIN pg_namespace n ON n.oid = root.relnamespace,
               LATERAL pg_partition_tree(root.oid) tree
          JOIN pg_class leaf ON leaf.oid = tree.relid
         WHERE p.partstrat = 'h' AND tree.isleaf
           AND (%(recoded)s OR 0 = ANY(p.partattrs) OR EXISTS (
                 SELECT FROM pg_attribute a
                  WHERE a.attrelid = root.oid AND a.attnum = ANY(p.partattrs)
                    AND a.atttypid >= %(unpinned)s))
         ORDER BY leaf.oid, tree.level DESC""",
        {"recoded": not same_encoding, "unpinned": FIRST_UNPINNED_OID},
    )
    return {leaf: (root, schema, name) for leaf, root, schema, name in rows}


def _read_columns(connection: Connection) -> dict[int, list[Column]]:
    types = read_text_reasons(connection)
    columns: dict[int, list[Column]] = defaultdict(list)
    for table_oid, name, type_oid, type_name in connection.execute(
        f"""
        SELECT a.attrelid::int8, a.attname, a.atttypid::int8, format_type(a.atttypid, a.atttypmod)
          FROM pg_attribute a
          JOIN pg_class c ON c.oid = a.attrelid
          JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
           AND c.relkind = 'r' AND {USER_SCHEMA}
         ORDER BY a.attrelid, a.attnum"""
    ):
        columns[table_oid].append(Column(name, type_name, types.get(type_oid, "unknown type")))
    return columns


def read_text_reasons(connection: Connection) -> dict[int, str]:
    """For each type, why its values must travel as text; "" if binary is safe."""
    types = {
        row[0]: row[1:]
        for row in connection.execute(
            "SELECT oid::int8, typname, typtype, typbasetype::int8, typelem::int8,"
            " typsend <> 0 AND typreceive <> 0, typcategory FROM pg_type"
        )
    }

    def reason(oid: int) -> str:
        name, kind, base, element, has_binary, category = types[oid]
        if kind == "d":
            return reason(base)
        if kind == "e":
            return ""  # an enum's binary form is its label
        if not has_binary:
            return f"type {name} has no binary form"
        if oid >= FIRST_UNPINNED_OID:
            return f"type {name} is not built in"
        if name in _TEXT_ONLY:
            return f"type {name} differs between servers in binary"
        if category == "A" and element:
            return reason(element)
        return ""

    return {oid: reason(oid) for oid in types}


def _read_split_keys(connection: Connection) -> dict[int, SplitKey]:
    """The best integer key of each table: a primary key before a unique one, then by name."""
    rows = connection.execute(
        f"""
        SELECT DISTINCT ON (i.indrelid) i.indrelid::int8, a.attname, NOT {NEVER_NULL}
          FROM pg_index i
          JOIN pg_class c ON c.oid = i.indrelid
          JOIN pg_class x ON x.oid = i.indexrelid
          JOIN pg_namespace n ON n.oid = c.relnamespace
          JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
         WHERE c.relkind = 'r' AND {USER_SCHEMA}
           AND i.indisunique AND i.indisvalid AND i.indisready AND i.indimmediate
           AND i.indnkeyatts = 1 AND i.indpred IS NULL AND i.indexprs IS NULL
           AND a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype)
         ORDER BY i.indrelid, i.indisprimary DESC, NOT {NEVER_NULL}, x.relname"""
    )
    return {oid: SplitKey(column, nullable) for oid, column, nullable in rows}


def read_indexes(connection: Connection) -> list[Index]:
    """Valid indexes of tables with rows; those of partitioned tables are left to the schema."""
    period = "con.conperiod" if connection.info.server_version >= 180000 else "false"
    rows = connection.execute(
        f"""
        SELECT x.oid::int8, i.indrelid::int8, n.nspname, c.relname, x.relname,
               pg_get_indexdef(x.oid), i.indisunique, i.indisclustered, i.indisreplident,
               t.spcname, con.oid::int8, con.conname, con.contype,
               pg_get_constraintdef(con.oid), con.condeferrable, con.condeferred, {period},
               pg_relation_size(x.oid),
               (SELECT array_agg(a.attnum || ' ' || a.attstattarget ORDER BY a.attnum)
                  FROM pg_attribute a
                 WHERE a.attrelid = x.oid AND a.attstattarget >= 0),
               CASE WHEN {period} THEN x.reloptions END,
               (SELECT array_agg(e.extname::text ORDER BY e.extname)
                  FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
                 WHERE d.classid = 'pg_class'::regclass AND d.objid = x.oid
                   AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'x')
          FROM pg_index i
          JOIN pg_class x ON x.oid = i.indexrelid
          JOIN pg_class c ON c.oid = i.indrelid
          JOIN pg_namespace n ON n.oid = c.relnamespace
          LEFT JOIN pg_tablespace t ON t.oid = x.reltablespace
          LEFT JOIN pg_constraint con ON con.conindid = x.oid AND con.conrelid = c.oid
                AND con.contype IN ('p', 'u', 'x')
         WHERE c.relkind = 'r' AND x.relkind = 'i' AND {USER_SCHEMA} AND {_TABLE_NOT_OF_EXTENSION}
           AND i.indisvalid AND i.indisready
         ORDER BY x.oid"""
    )
    return [_index(*row) for row in rows]


def _index(
    oid: int,
    table_oid: int,
    schema: str,
    table: str,
    name: str,
    definition: str,
    is_unique: bool,
    is_clustered: bool,
    is_replica_identity: bool,
    tablespace: str | None,
    constraint_oid: int | None,
    constraint_name: str | None,
    constraint_type: str | None,
    constraint_definition: str | None,
    deferrable: bool | None,
    deferred: bool | None,
    period: bool | None,
    size: int,
    statistics: list[str] | None,
    # Those that no definition prints: of a constraint that is built whole.
    options: list[str] | None,
    extensions: list[str] | None,
) -> Index:
    alter = f"ALTER INDEX {qualified(schema, name)}"
    after = []
    for target in statistics or ():
        number, value = target.split()
        after.append(f"{alter} ALTER COLUMN {number} SET STATISTICS {value}")
    for option in options or ():
        key, _, value = option.partition("=")
        after.append(f"{alter} SET ({ident(key)} = {literal(value)})")
    for extension in extensions or ():
        after.append(f"{alter} DEPENDS ON EXTENSION {ident(extension)}")
    if is_clustered:
        after.append(f"ALTER TABLE ONLY {qualified(schema, table)} CLUSTER ON {ident(name)}")
    if is_replica_identity:
        after.append(
            f"ALTER TABLE ONLY {qualified(schema, table)}"
            f" REPLICA IDENTITY USING INDEX {ident(name)}"
        )
    return Index(
        oid=oid,
        table_oid=table_oid,
        schema=schema,
        name=name,
        definition=definition,
        is_unique=is_unique,
        after=tuple(after),
        tablespace=tablespace,
        constraint_oid=constraint_oid,
        constraint_name=constraint_name,
        constraint_type=constraint_type,
        constraint_definition=constraint_definition,
        deferrable=bool(deferrable),
        deferred=bool(deferred),
        built_whole=constraint_type == "x" or bool(period),
        bytes=size or 0,
        table=table,
    )


def read_foreign_keys(connection: Connection) -> list[ForeignKey]:
    """Foreign keys as they were declared; those of partitions come with their parent's."""
    rows = connection.execute(
        f"""
        SELECT con.oid::int8, con.conname, n.nspname, c.relname, c.oid::int8,
               con.confrelid::int8, pg_get_constraintdef(con.oid), c.relkind = 'p'
          FROM pg_constraint con
          JOIN pg_class c ON c.oid = con.conrelid
          JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE con.contype = 'f' AND con.conparentid = 0
           AND {USER_SCHEMA} AND {_TABLE_NOT_OF_EXTENSION}
         ORDER BY con.oid"""
    )
    return [ForeignKey(*row) for row in rows]


def read_relative_foreign_keys(connection: Connection) -> list[ForeignKey]:
    """The same in the open transaction, with definitions that name no schema: the server leaves it
    out for what the search path finds first."""
    keys = {key.oid: key for key in read_foreign_keys(connection)}
    by_schema: dict[str, list[int]] = defaultdict(list)
    for oid, schema in connection.execute(
        "SELECT con.oid::int8, n.nspname FROM pg_constraint con JOIN pg_class c"
        " ON c.oid = con.confrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE con.oid = ANY(%s::oid[])",
        (list(keys),),
    ):
        by_schema[schema].append(oid)
    for schema, oids in by_schema.items():
        _set_search_path(connection, f"{ident(schema)}, pg_catalog")
        rows = connection.execute(
            "SELECT k.oid::pg_catalog.int8, pg_catalog.pg_get_constraintdef(k.oid)"
            " FROM pg_catalog.unnest(%s::pg_catalog.oid[]) AS k (oid)",
            (oids,),
        )
        for oid, definition in rows:
            keys[oid] = replace(keys[oid], definition=definition, search_path=schema)
    _set_search_path(connection, "pg_catalog")
    return list(keys.values())


def _set_search_path(connection: Connection, path: str) -> None:
    connection.execute("SELECT pg_catalog.set_config('search_path', %s, true)", (path,))


def read_sequences(connection: Connection, *, with_extensions: bool = True) -> list[Sequence]:
    """All sequences with their positions (not transactional, so these are the latest)."""
    found = connection.execute(
        f"""
        SELECT c.oid::int8, n.nspname, c.relname
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.relkind = 'S' AND {_READABLE} AND {USER_SCHEMA}
           AND ({_TABLE_NOT_OF_EXTENSION}
                OR %s AND c.oid IN (SELECT unnest(extconfig) FROM pg_extension))
         ORDER BY c.oid""",
        (with_extensions,),
    ).fetchall()
    positions: dict[int, tuple[int, bool]] = {}
    for chunk in _chunks(found, 500):
        query = " UNION ALL ".join(
            f"SELECT {oid}::int8, last_value, is_called FROM {qualified(schema, name)}"
            for oid, schema, name in chunk
        )
        positions.update({oid: (value, called) for oid, value, called in connection.execute(query)})
    return [Sequence(oid, schema, name, *positions[oid]) for oid, schema, name in found]


def read_extensions(connection: Connection) -> list[Extension]:
    """Extensions except plpgsql, which every database has."""
    rows = connection.execute(
        "SELECT e.oid::int8, e.extname, e.extversion, n.nspname FROM pg_extension e"
        " JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname <> 'plpgsql'"
        " ORDER BY e.oid"
    )
    return [Extension(*row) for row in rows]


def read_relations_of_kind(connection: Connection, kind: str) -> list[tuple[int, str, str]]:
    """(oid, schema, name) of partitioned tables ('p') or materialized views ('m')."""
    return connection.execute(
        (
            f"""
        SELECT c.oid::int8, n.nspname, c.relname
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.relkind = %s AND {USER_SCHEMA} AND {_TABLE_NOT_OF_EXTENSION}
         ORDER BY c.oid"""
        ),
        (kind,),
    ).fetchall()


def read_own_publications(connection: Connection) -> frozenset[tuple[int, int, str]]:
    """Catalog, OID and name of the publications that streams made, and of what is in them."""
    query = f"""
        SELECT o.class::oid::int8, o.oid::int8, p.pubname FROM pg_publication p,
               LATERAL (SELECT 'pg_publication'::regclass, p.oid
                        UNION ALL SELECT 'pg_publication_rel'::regclass, r.oid
                          FROM pg_publication_rel r WHERE r.prpubid = p.oid) AS o (class, oid)
         WHERE NOT {USER_PUBLICATION}"""
    return frozenset(connection.execute(query).fetchall())


def read_own_event_triggers(connection: Connection) -> frozenset[tuple[int, int, str]]:
    """Catalog, OID and name of the event triggers that capture DDL for streams."""
    query = f"""
        SELECT 'pg_event_trigger'::regclass::oid::int8, t.oid::int8, t.evtname
          FROM pg_event_trigger t WHERE NOT {USER_EVENT_TRIGGER}"""
    return frozenset(connection.execute(query).fetchall())


def read_view_indexes(connection: Connection) -> frozenset[int]:
    """OIDs of the indexes of materialized views."""
    rows = connection.execute(
        "SELECT i.indexrelid::int8 FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid"
        " WHERE c.relkind = 'm'"
    )
    return frozenset(row[0] for row in rows)


def read_large_object_ranges(
    connection: Connection, *, bytes_per_range: int, objects_per_range: int
) -> tuple[list[LargeObjectRange], int]:
    """Ranges of OIDs of about equal count, and the size of all large objects."""
    row = connection.execute(
        "SELECT count(*), pg_relation_size('pg_largeobject') FROM pg_largeobject_metadata"
    ).fetchone()
    count, size = row if row else (0, 0)
    if not count:
        return [], 0
    ranges = max(-(-size // bytes_per_range), -(-count // objects_per_range), 1)
    rows = connection.execute(
        "SELECT bucket, min(oid)::int8, max(oid)::int8, count(*) FROM"
        " (SELECT oid::int8, ntile(%s) OVER (ORDER BY oid) AS bucket"
        " FROM pg_largeobject_metadata) o"
        " GROUP BY bucket ORDER BY bucket",
        (ranges,),
    )
    return [LargeObjectRange(*row) for row in rows], size


def read_rewritten(connection: Connection, tables: Iterable[Table]) -> list[str]:
    """Tables whose file changed since the snapshot of this session's transaction.

    TRUNCATE and most forms of ALTER TABLE are not MVCC-safe: under an older snapshot such a
    table looks empty. The snapshot sees the old pg_class row; the function looks at the
    newest one.
    """
    rows = connection.execute(
        "SELECT n.nspname || '.' || c.relname FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = ANY(%s) AND c.relfilenode IS DISTINCT FROM pg_relation_filenode(c.oid)",
        ([table.oid for table in tables],),
    )
    return [row[0] for row in rows]


def lock_tables(connection: Connection, tables: Iterable[Table]) -> None:
    """ACCESS SHARE on every table until this transaction ends: no DROP, no TRUNCATE."""
    for chunk in _chunks([qualified(t.schema, t.name) for t in tables], 200):
        connection.execute(f"LOCK TABLE ONLY {', ONLY '.join(chunk)} IN ACCESS SHARE MODE")


def read_database_settings(connection: Connection) -> list[tuple[str | None, list[str]]]:
    """(role or None, ["name=value", ...]) of ALTER DATABASE SET and ALTER ROLE IN DATABASE SET."""
    return connection.execute(
        "SELECT r.rolname, s.setconfig FROM pg_db_role_setting s"
        " JOIN pg_database d ON d.oid = s.setdatabase"
        " LEFT JOIN pg_roles r ON r.oid = s.setrole"
        " WHERE d.datname = current_database() ORDER BY r.rolname NULLS FIRST"
    ).fetchall()


def read_database_comment(connection: Connection) -> str | None:
    """COMMENT ON DATABASE."""
    row = connection.execute(
        "SELECT shobj_description(oid, 'pg_database') FROM pg_database"
        " WHERE datname = current_database()"
    ).fetchone()
    return row[0] if row else None


def render_setting(setting: str) -> str:
    """`name=value` as it is written after SET; list settings keep their quoting."""
    name, _, value = setting.partition("=")
    # These hold comma-separated identifiers, already quoted where needed.
    if name.lower() in (
        "search_path",
        "temp_tablespaces",
        "session_preload_libraries",
        "shared_preload_libraries",
        "local_preload_libraries",
    ):
        is_empty = value in ("", '""')
        return f"{ident(name)} TO {literal('') if is_empty else value}"
    return f"{'.'.join(map(ident, name.split('.')))} TO {literal(value)}"


def _chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def read_schemas(connection: Connection) -> dict[int, str]:
    """User schemas by OID."""
    rows = connection.execute(
        f"SELECT n.oid::int8, n.nspname FROM pg_namespace n WHERE {USER_SCHEMA}"
    )
    return {oid: name for oid, name in rows}


def owner_of_public(server_version: int) -> int:
    """The OID of the role to whom initdb gives the schema `public`: before 15 the first superuser,
    since then the database owner."""
    return FIRST_SUPERUSER_OID if server_version < 150000 else DATABASE_OWNER_OID


def read_schema_owners(connection: Connection) -> dict[int, str]:
    """The owners of user schemas by the schema's OID, but for a `public` that is as initdb made
    it."""
    rows = connection.execute(
        f"""
        SELECT n.oid::int8, pg_get_userbyid(n.nspowner)
          FROM pg_namespace n
         WHERE {USER_SCHEMA} AND NOT (n.nspname = 'public' AND n.nspowner = %s)""",
        (owner_of_public(connection.info.server_version),),
    )
    return {oid: owner for oid, owner in rows}


def sample_keys(connection: Connection, table: Table, percent: float) -> list[tuple[int, int]]:
    """(key or block number, bytes) of rows in randomly chosen blocks.

    The sample is the same each time for the same table. Out-of-line values are weighed
    without being fetched.
    """
    key = ident(table.split_key.column) if table.split_key else "(ctid::text::point)[0]::int8"
    weight = "1"
    if table.total_bytes > table.heap_bytes * 1.2:
        sizes = [f"coalesce(pg_column_size({ident(c.name)}), 0)" for c in table.columns]
        weight = " + ".join(["24", *sizes])
    query = (
        f"SELECT {key}::int8, {weight} FROM ONLY {qualified(table.schema, table.name)}"
        f" TABLESAMPLE SYSTEM ({percent:.6f}) REPEATABLE (1)"
    )
    conditions = [f"{key} IS NOT NULL"] if table.split_key else []
    conditions += [f"({table.where})"] if table.where else []
    if conditions:
        query += " WHERE " + " AND ".join(conditions)
    return connection.execute(query).fetchall()
