"""What `millrace list` shows of a server beyond what a clone reads.

Invariant: reads only, a query for each kind; what the role may not see is left empty, never an
error.

Facts: PostgreSQL documentation, "pg_collation", "pg_database": the ICU locale is in colliculocale
and daticulocale in 15 and 16, in colllocale and datlocale from 17 on; a database has a provider
and a version from 15 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.postgres.catalog.schemas import USER_SCHEMA

Connection = psycopg.Connection[tuple[Any, ...]]

_PROVIDER = (
    "CASE {} WHEN 'c' THEN 'libc' WHEN 'i' THEN 'icu' WHEN 'b' THEN 'builtin' ELSE 'default' END"
)
DEFAULT_COLLATION_OID = 100


@dataclass(frozen=True)
class Database:
    """A database one can connect to; its size is None if that is not for this role to know."""

    oid: int
    name: str
    owner: str
    encoding: str
    collation: str
    bytes: int | None


@dataclass(frozen=True)
class Collation:
    """A collation that the database uses or defines."""

    oid: int
    schema: str
    name: str
    provider: str
    locale: str | None
    # As recorded when it was made, and as the server's library has it now.
    version: str | None
    actual_version: str | None
    is_deterministic: bool
    # Made by a user of this database, not by the server.
    is_defined: bool
    is_default: bool
    # Columns, indexes and types, as PostgreSQL describes them.
    used_by: Sequence[str] = ()


@dataclass(frozen=True)
class Available:
    """An extension as another server offers it."""

    default_version: str
    installed_version: str | None
    versions: tuple[str, ...]


def read_databases(connection: Connection) -> list[Database]:
    """All databases but templates, the largest first."""
    rows = connection.execute(
        "SELECT d.oid::int8, d.datname, pg_get_userbyid(d.datdba),"
        " pg_encoding_to_char(d.encoding), d.datcollate,"
        " CASE WHEN has_database_privilege(d.oid, 'CONNECT')"
        " OR pg_has_role('pg_read_all_stats', 'USAGE') THEN pg_database_size(d.oid) END AS size"
        " FROM pg_database d WHERE d.datallowconn AND NOT d.datistemplate"
        " ORDER BY size DESC NULLS LAST, d.datname"
    )
    return [Database(*row) for row in rows]


def read_available_extensions(connection: Connection) -> dict[str, Available]:
    """What this server could install, by name."""
    rows = connection.execute(
        "SELECT e.name::text, e.default_version, e.installed_version, (SELECT"
        " array_agg(v.version ORDER BY v.version) FROM pg_available_extension_versions v"
        " WHERE v.name = e.name) FROM pg_available_extensions e"
    )
    return {
        name: Available(default, installed, tuple(versions or ()))
        for name, default, installed, versions in rows
    }


def read_sequence_owners(connection: Connection) -> dict[int, str]:
    """By the sequence's OID, the column it belongs to."""
    rows = connection.execute(
        "SELECT d.objid::int8, n.nspname || '.' || c.relname || '.' || a.attname"
        " FROM pg_depend d JOIN pg_class s ON s.oid = d.objid AND s.relkind = 'S'"
        " JOIN pg_class c ON c.oid = d.refobjid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.refobjsubid"
        " WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass"
        " AND d.deptype IN ('a', 'i')"
    )
    return {oid: column for oid, column in rows}


def read_collations(connection: Connection) -> list[Collation]:
    """The database's own, then those its objects name, then those defined and not used."""
    version = connection.info.server_version
    locale = "coll.collcollate"
    if version >= 150000:
        icu = "colllocale" if version >= 170000 else "colliculocale"
        locale = f"coalesce(coll.{icu}, coll.collcollate)"
    rows = connection.execute(
        f"""
        WITH used (collation_oid, description) AS (
            SELECT a.attcollation, pg_describe_object('pg_class'::regclass, c.oid, a.attnum)
              FROM pg_attribute a
              JOIN pg_class c ON c.oid = a.attrelid
              JOIN pg_namespace n ON n.oid = c.relnamespace
              JOIN pg_type t ON t.oid = a.atttypid
             WHERE c.relkind IN ('r', 'p', 'f', 'v', 'm', 'c') AND {USER_SCHEMA}
               AND a.attnum > 0 AND NOT a.attisdropped AND a.attcollation <> t.typcollation
            UNION
            SELECT u.collation_oid, pg_describe_object('pg_class'::regclass, c.oid, 0)
              FROM pg_index i
              JOIN pg_class c ON c.oid = i.indexrelid
              JOIN pg_namespace n ON n.oid = c.relnamespace,
                   unnest(i.indcollation::oid[]) u (collation_oid)
             WHERE {USER_SCHEMA}
            UNION
            SELECT coalesce(r.rngcollation, t.typcollation),
                   pg_describe_object('pg_type'::regclass, t.oid, 0)
              FROM pg_type t
              JOIN pg_namespace n ON n.oid = t.typnamespace
              LEFT JOIN pg_type b ON b.oid = t.typbasetype
              LEFT JOIN pg_range r ON r.rngtypid = t.oid
             WHERE {USER_SCHEMA}
               AND (t.typtype = 'r' OR t.typtype = 'd' AND t.typcollation <> b.typcollation))
        SELECT coll.oid::int8, n.nspname::text, coll.collname::text,
               {_PROVIDER.format("coll.collprovider")}, {locale}, coll.collversion,
               pg_collation_actual_version(coll.oid), coll.collisdeterministic,
               coll.oid >= 16384 AS is_defined, false,
               coalesce(array_agg(used.description ORDER BY used.description)
                        FILTER (WHERE used.description IS NOT NULL), '{{}}')
          FROM pg_collation coll
          JOIN pg_namespace n ON n.oid = coll.collnamespace
          LEFT JOIN used ON used.collation_oid = coll.oid
         WHERE coll.oid <> {DEFAULT_COLLATION_OID} AND (used.description IS NOT NULL
               OR coll.oid >= 16384 AND {USER_SCHEMA} AND NOT EXISTS (
                   SELECT FROM pg_depend e WHERE e.classid = 'pg_collation'::regclass
                      AND e.objid = coll.oid AND e.deptype = 'e'))
         GROUP BY coll.oid, n.nspname
         ORDER BY count(used.description) DESC, n.nspname, coll.collname"""
    )
    return [
        _default_collation(connection),
        *(Collation(*row) for row in rows),
    ]


def _default_collation(connection: Connection) -> Collation:
    """That of the database: what every column has that names no other."""
    version = connection.info.server_version
    provider, locale, recorded, actual = "'libc'", "datcollate", "NULL", "NULL"
    if version >= 150000:
        icu = "datlocale" if version >= 170000 else "daticulocale"
        provider = _PROVIDER.format("datlocprovider")
        locale = f"coalesce({icu}, datcollate)"
        recorded, actual = "datcollversion", "pg_database_collation_actual_version(oid)"
    row = connection.execute(
        f"SELECT {DEFAULT_COLLATION_OID}, 'pg_catalog', 'default', {provider}, {locale},"
        f" {recorded}, {actual}, true, false, true FROM pg_database"
        " WHERE datname = current_database()"
    ).fetchone()
    assert row is not None
    return Collation(*row)
