"""What depends on what: the source's objects, and the entries of an archive.

Invariant: every query reads a whole kind at once, under the snapshot of the session; names are
matched against regular expressions by the server, as pgcopydb does it.

Facts: PostgreSQL documentation, "pg_depend"; a view hangs on what it reads through its rule
_RETURN, a table on what its defaults use through pg_attrdef, so both are joined to their
parts here ("whole"). `pg_restore --list --verbose` prints after an entry the numbers of the
entries it was made for (pg_backup_archiver.c, PrintTOCSummary()): the only sure way to see
whose comment, grant or attachment it is, since those have no OID, and names may have blanks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.errors import ServerError
from millrace.postgres.catalog.schemas import USER_SCHEMA
from millrace.postgres.program.dump import Archive
from millrace.postgres.program.process import run_program

Connection = psycopg.Connection[tuple[Any, ...]]
# OID of the catalog, OID of the object.
Key = tuple[int, int]

# OIDs below this belong to initdb; a user's objects may only depend on its schema public.
FIRST_USER_OID = 16384


def read_objects(connection: Connection) -> Iterator[tuple[Any, ...]]:
    """Schemas, extensions, relations, constraints, and all else that a dump can have.

    Rows are (catalog OID, OID, kind, schema, name), then for some the OID of the relation it
    belongs to, and for indexes that of the constraint that rests on it.
    """
    for query in (_SCHEMAS, _EXTENSIONS, _RELATIONS, _CONSTRAINTS, _OTHERS):
        yield from connection.execute(query)


_SCHEMAS = f"""
    SELECT 'pg_namespace'::regclass::oid::int8, n.oid::int8, 'schema', '', n.nspname
      FROM pg_namespace n WHERE {USER_SCHEMA}"""

_EXTENSIONS = """
    SELECT 'pg_extension'::regclass::oid::int8, oid::int8, 'extension', '', extname
      FROM pg_extension WHERE extname <> 'plpgsql'"""

# The owner of a sequence is the table of the column it belongs to.
_RELATIONS = f"""
    SELECT 'pg_class'::regclass::oid::int8, c.oid::int8,
           CASE c.relkind WHEN 'r' THEN 'table' WHEN 'p' THEN 'partitioned table'
                WHEN 'f' THEN 'foreign table' WHEN 'm' THEN 'materialized view'
                WHEN 'v' THEN 'view' WHEN 'S' THEN 'sequence'
                WHEN 'i' THEN 'index' WHEN 'I' THEN 'partitioned index' END,
           n.nspname, c.relname,
           coalesce(i.indrelid, owned.refobjid, 0)::int8, coalesce(con.oid, 0)::int8
      FROM pg_class c
      JOIN pg_namespace n ON n.oid = c.relnamespace
      LEFT JOIN pg_index i ON i.indexrelid = c.oid
      LEFT JOIN pg_constraint con ON con.conindid = c.oid AND con.conrelid = i.indrelid
            AND con.contype IN ('p', 'u', 'x')
      LEFT JOIN (SELECT DISTINCT ON (objid) objid, refobjid FROM pg_depend
                  WHERE classid = 'pg_class'::regclass AND refclassid = 'pg_class'::regclass
                    AND refobjsubid > 0 AND deptype IN ('a', 'i')) owned
            ON c.relkind = 'S' AND owned.objid = c.oid
     WHERE c.relkind IN ('r', 'p', 'f', 'm', 'v', 'S', 'i', 'I')
       AND c.relpersistence <> 't' AND {USER_SCHEMA}"""

# Those of partitions come with their parent's and have no entry of their own, if foreign keys.
_CONSTRAINTS = f"""
    SELECT 'pg_constraint'::regclass::oid::int8, con.oid::int8,
           CASE con.contype WHEN 'f' THEN 'foreign key' WHEN 'c' THEN 'check'
                WHEN 'p' THEN 'primary key' ELSE 'constraint' END,
           n.nspname, c.relname || '.' || con.conname, c.oid::int8
      FROM pg_constraint con
      JOIN pg_class c ON c.oid = con.conrelid
      JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE con.contype IN ('f', 'c', 'p', 'u', 'x') AND {USER_SCHEMA}
       AND NOT (con.contype = 'f' AND con.conparentid <> 0)"""

# Row types, array types, rules of views and triggers of constraints are parts of others. OFFSET 0
# keeps the planner from asking for the names of all of them first.
_OTHERS = f"""
    SELECT o.classid::int8, o.objid::int8, i.type, '', i.identity
      FROM (SELECT d.classid, d.objid
              FROM (SELECT DISTINCT classid, objid FROM pg_depend
                     WHERE objid >= {FIRST_USER_OID}
                       AND classid NOT IN ('pg_class'::regclass, 'pg_attrdef'::regclass,
                           'pg_constraint'::regclass, 'pg_namespace'::regclass,
                           'pg_extension'::regclass, 'pg_amop'::regclass,
                           'pg_amproc'::regclass)) d
              LEFT JOIN pg_type t ON d.classid = 'pg_type'::regclass AND t.oid = d.objid
              LEFT JOIN pg_class r ON r.oid = t.typrelid
              LEFT JOIN pg_rewrite w ON d.classid = 'pg_rewrite'::regclass AND w.oid = d.objid
              LEFT JOIN pg_trigger g ON d.classid = 'pg_trigger'::regclass AND g.oid = d.objid
             WHERE (t.oid IS NULL OR (coalesce(r.relkind, 'c') = 'c'
                    AND t.oid NOT IN (SELECT typarray FROM pg_type)))
               AND (w.oid IS NULL OR w.rulename <> '_RETURN')
               AND (g.oid IS NULL OR NOT g.tgisinternal)
               AND (d.classid, d.objid) NOT IN
                   (SELECT classid, objid FROM pg_depend WHERE deptype = 'e')
            OFFSET 0) o,
           LATERAL pg_identify_object(o.classid, o.objid, 0) i
     WHERE i.identity IS NOT NULL"""


def read_of_kinds(connection: Connection, kinds: Iterable[str]) -> dict[Key, str]:
    """The label of every object of these kinds that is no relation; a publication's tables and
    schemas count as it, and servers as foreign tables."""
    wanted = [kind for kind in kinds if kind in _OF_KIND]
    if "publication" in wanted and connection.info.server_version >= 150000:
        wanted.append("published schema")
    found = {}
    for kind in wanted:
        for catalog, oid, name in connection.execute(_OF_KIND[kind]):
            found[catalog, oid] = f"{kind} {name}"
    return found


# Triggers of constraints are parts of them; those of a partition come with its root's.
_OF_KIND = {
    "trigger": """
    SELECT 'pg_trigger'::regclass::oid::int8, oid::int8, tgname FROM pg_trigger
     WHERE NOT tgisinternal""",
    "event trigger": """
    SELECT 'pg_event_trigger'::regclass::oid::int8, oid::int8, evtname FROM pg_event_trigger""",
    "policy": """
    SELECT 'pg_policy'::regclass::oid::int8, oid::int8, polname FROM pg_policy""",
    "publication": """
    SELECT 'pg_publication'::regclass::oid::int8, oid::int8, pubname FROM pg_publication
    UNION ALL
    SELECT 'pg_publication_rel'::regclass::oid::int8, r.oid::int8, p.pubname
      FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid""",
    "published schema": """
    SELECT 'pg_publication_namespace'::regclass::oid::int8, n.oid::int8, p.pubname
      FROM pg_publication_namespace n JOIN pg_publication p ON p.oid = n.pnpubid""",
    "subscription": """
    SELECT 'pg_subscription'::regclass::oid::int8, s.oid::int8, s.subname FROM pg_subscription s
      JOIN pg_database d ON d.oid = s.subdbid WHERE d.datname = current_database()""",
    "foreign table": """
    SELECT 'pg_foreign_server'::regclass::oid::int8, oid::int8, srvname FROM pg_foreign_server
    UNION ALL
    SELECT 'pg_foreign_data_wrapper'::regclass::oid::int8, oid::int8, fdwname
      FROM pg_foreign_data_wrapper w
     WHERE NOT EXISTS (SELECT FROM pg_depend e WHERE e.objid = w.oid
                       AND e.classid = 'pg_foreign_data_wrapper'::regclass AND e.deptype = 'e')""",
}


def read_depends(connection: Connection) -> Iterator[tuple[Key, Key, str]]:
    """All edges between users' objects: (dependent, referenced, kind).

    The kind is pg_depend's deptype, or "inherits" from child to parent, or "whole" from an
    object to what is a part of its definition.
    """
    for query in (_DEPENDS, _INHERITS, _WHOLES):
        for catalog, oid, referenced_catalog, referenced, kind in connection.execute(query):
            yield (catalog, oid), (referenced_catalog, referenced), kind


_DEPENDS = f"""
    SELECT DISTINCT classid::int8, objid::int8, refclassid::int8, refobjid::int8, deptype::text
      FROM pg_depend
     WHERE deptype IN ('n', 'a', 'i', 'P', 'S', 'e') AND objid >= {FIRST_USER_OID}
       AND (refobjid >= {FIRST_USER_OID} OR refclassid = 'pg_namespace'::regclass)
       AND (classid, objid) <> (refclassid, refobjid)"""

# Indexes have parents, too.
_INHERITS = """
    SELECT 'pg_class'::regclass::oid::int8, inhrelid::int8,
           'pg_class'::regclass::oid::int8, inhparent::int8, 'inherits'
      FROM pg_inherits"""

_WHOLES = f"""
    SELECT 'pg_class'::regclass::oid::int8, ev_class::int8,
           'pg_rewrite'::regclass::oid::int8, oid::int8, 'whole'
      FROM pg_rewrite WHERE rulename = '_RETURN' AND oid >= {FIRST_USER_OID}
    UNION ALL
    SELECT 'pg_class'::regclass::oid::int8, d.adrelid::int8,
           'pg_attrdef'::regclass::oid::int8, d.oid::int8, 'whole'
      FROM pg_attrdef d JOIN pg_class c ON c.oid = d.adrelid
     WHERE c.relkind IN ('r', 'p', 'f') AND d.oid >= {FIRST_USER_OID}
    UNION ALL
    SELECT CASE WHEN conrelid <> 0 THEN 'pg_class'::regclass::oid
                ELSE 'pg_type'::regclass::oid END::int8,
           CASE WHEN conrelid <> 0 THEN conrelid ELSE contypid END::int8,
           'pg_constraint'::regclass::oid::int8, oid::int8, 'whole'
      FROM pg_constraint WHERE contype = 'c' AND oid >= {FIRST_USER_OID}"""


def match_names(connection: Connection, patterns: list[str]) -> dict[str, set[str]]:
    """For each regular expression, the names of schemas, relations and extensions it matches."""
    matched: dict[str, set[str]] = {pattern: set() for pattern in patterns}
    for catalog, column in (
        ("pg_namespace", "nspname"),
        ("pg_class", "relname"),
        ("pg_extension", "extname"),
    ):
        rows = connection.execute(
            f"SELECT p.pattern, o.name FROM unnest(%s::text[]) p (pattern)"
            f" JOIN (SELECT DISTINCT {column} AS name FROM {catalog}) o ON o.name ~ p.pattern",
            (patterns,),
        )
        for pattern, name in rows:
            matched[pattern].add(name)
    return matched


_ENTRY = re.compile(r"(\d+); (\d+) (\d+) ")
_DEPENDS_ON = ";\tdepends on:"


@dataclass(frozen=True)
class EntryDepends:
    """An entry of an archive by number: what it is, and the entries it was made for."""

    catalog_oid: int
    object_oid: int
    depends_on: tuple[int, ...] = ()


def parse_entry_depends(lines: Iterable[str]) -> dict[int, EntryDepends]:
    """The entries of `pg_restore --list --verbose`, by number."""
    entries: dict[int, EntryDepends] = {}
    number = 0
    for line in lines:
        if match := _ENTRY.match(line):
            number = int(match[1])
            entries[number] = EntryDepends(int(match[2]), int(match[3]))
        elif line.startswith(_DEPENDS_ON) and number:
            entry = entries[number]
            numbers = tuple(int(word) for word in line[len(_DEPENDS_ON) :].split())
            entries[number] = EntryDepends(entry.catalog_oid, entry.object_oid, numbers)
    return entries


def read_entry_depends(archive: Archive) -> dict[int, EntryDepends]:
    """What the entries of an archive were made for."""
    command = [archive.tools.program("pg_restore"), "--list", "--verbose", str(archive.path)]
    process = run_program(command, os.environ | {"LC_MESSAGES": "C"})
    if process.returncode:
        raise ServerError(
            f"reading the dumped schema: {process.stderr.strip()}",
            hint="the archive in the work directory is damaged; start again with --restart",
            exit_status=process.returncode,
        )
    # Only line feeds end a line: names may hold what splitlines() takes for one.
    return parse_entry_depends(process.stdout.split("\n"))
