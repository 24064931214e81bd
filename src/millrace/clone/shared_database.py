"""A target database that others use too: other runs, or the owners of other schemas.

Invariant: a run changes the schemas that it fills and nothing that belongs to the others. Of what
belongs to the whole database, it makes what is missing; what is there under the same name and is
not its own is refused beforehand or, where it is a value, stays and is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import psycopg

from millrace.clone.problem import Problem
from millrace.clone.settings import CloneSettings
from millrace.filter.apply import read_decision
from millrace.filter.decide import PG_NAMESPACE_OID, Decision
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.catalog.schemas import USER_PUBLICATION, USER_SCHEMA
from millrace.postgres.quote import ident
from millrace.postgres.run_record import read_runs

Connection = psycopg.Connection[tuple[Any, ...]]

# Large objects looked up in one question.
OIDS_AT_ONCE = 10_000
LISTED = 5


def read_filled_schemas(source: Connection, settings: CloneSettings) -> frozenset[str]:
    """The target's names of the schemas that a run fills."""
    excluded = read_decision(source, settings.filters).excluded
    return frozenset(
        settings.naming.schema(name)
        for oid, name in catalog.read_schemas(source).items()
        if (PG_NAMESPACE_OID, oid) not in excluded
    )


def is_shared(target: Connection, schemas: Collection[str]) -> bool:
    """Whether somebody else has, or is about to fill, other schemas of the database."""
    if any(run.schemas and run.schemas.isdisjoint(schemas) for run in read_runs(target)):
        return True
    row = target.execute(
        f"""SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE {USER_SCHEMA} AND n.nspname <> ALL(%s) AND c.relpersistence <> 't'
             AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.objid = c.oid
                 AND e.classid = 'pg_class'::regclass AND e.deptype = 'e') LIMIT 1""",
        (list(schemas),),
    ).fetchone()
    return row is not None


def read_used_extensions(target: Connection, schemas: Collection[str]) -> set[str]:
    """The extensions whose types, functions or operators other schemas use: they must not be
    dropped and made again."""
    rows = target.execute(
        f"""SELECT DISTINCT e.extname FROM pg_extension e
             JOIN pg_depend m ON m.refclassid = 'pg_extension'::regclass
              AND m.refobjid = e.oid AND m.deptype = 'e'
             JOIN pg_depend d ON d.refclassid = m.classid AND d.refobjid = m.objid
              AND d.deptype IN ('n', 'a')
             JOIN (SELECT 'pg_class'::regclass AS catalog, oid, relnamespace FROM pg_class
                   UNION ALL SELECT 'pg_proc'::regclass, oid, pronamespace FROM pg_proc)
                  AS o (catalog, oid, schema) ON d.classid = o.catalog AND d.objid = o.oid
             JOIN pg_namespace n ON n.oid = o.schema
             WHERE {USER_SCHEMA} AND n.nspname <> ALL(%s)""",
        (list(schemas),),
    )
    return {name for (name,) in rows}


def check_database(
    source: Connection, target: Connection, settings: CloneSettings, *, continues: bool
) -> Iterator[Problem]:
    """What of the whole database this run would have to share with others, and can't."""
    schemas = read_filled_schemas(source, settings)
    shared = is_shared(target, schemas)
    if not continues or settings.restart:
        decision = read_decision(source, settings.filters)
        yield from _check_named(source, target, settings, decision, schemas if shared else None)
    if not continues:
        yield from _check_large_objects(source, target, settings, is_shared=shared)
    if shared:
        yield from _warn_of_reach(source, target, settings)


def _check_named(
    source: Connection,
    target: Connection,
    settings: CloneSettings,
    decision: Decision,
    schemas: Collection[str] | None,
) -> Iterable[Problem]:
    """Objects that have a name in the whole database; `schemas` are ours, if others are there."""
    names = {
        (kind, name)
        for catalog_oid, oid, kind, name, _ in source.execute(_named_sql(source))
        if (catalog_oid, oid) not in decision.excluded
    }
    replaces = settings.drop_if_exists or settings.restart
    for _, _, kind, name, places in target.execute(_named_sql(target)).fetchall():
        if (kind, name) not in names:
            continue
        is_others = schemas is not None and not set(places or ("",)) <= set(schemas)
        if replaces and not is_others:
            continue
        whose = ", for other schemas" if is_others and places else ""
        yield Problem(
            "target",
            f"there is {kind} {name} already{whose}: its name belongs to the whole database",
            f"DROP {kind.upper()} {ident(name)}, or rename it: ALTER {kind.upper()} "
            f"{ident(name)} RENAME TO ...",
        )


def _named_sql(connection: Connection) -> str:
    """(catalog, OID, kind, name, schemas that it is about; NULL for the whole database)"""
    of_schemas = (
        " UNION SELECT n.nspname FROM pg_publication_namespace m"
        " JOIN pg_namespace n ON n.oid = m.pnnspid WHERE m.pnpubid = p.oid"
        if connection.info.server_version >= 150000
        else ""
    )
    return f"""
SELECT 'pg_publication'::regclass::oid::int8, p.oid::int8, 'publication', p.pubname,
       CASE WHEN NOT p.puballtables THEN array(
           SELECT n.nspname FROM pg_publication_rel m JOIN pg_class c ON c.oid = m.prrelid
             JOIN pg_namespace n ON n.oid = c.relnamespace WHERE m.prpubid = p.oid{of_schemas}) END
  FROM pg_publication p WHERE {USER_PUBLICATION}
UNION ALL
SELECT 'pg_event_trigger'::regclass::oid::int8, t.oid::int8, 'event trigger', t.evtname,
       ARRAY[n.nspname] FROM pg_event_trigger t JOIN pg_proc f ON f.oid = t.evtfoid
  JOIN pg_namespace n ON n.oid = f.pronamespace
 WHERE NOT EXISTS (SELECT FROM pg_depend e WHERE e.objid = t.oid
                   AND e.classid = 'pg_event_trigger'::regclass AND e.deptype = 'e')
UNION ALL
SELECT 'pg_foreign_server'::regclass::oid::int8, s.oid::int8, 'server', s.srvname, NULL
  FROM pg_foreign_server s
 WHERE NOT EXISTS (SELECT FROM pg_depend e WHERE e.objid = s.oid
                   AND e.classid = 'pg_foreign_server'::regclass AND e.deptype = 'e')
 ORDER BY 3, 4"""


def _check_large_objects(
    source: Connection, target: Connection, settings: CloneSettings, *, is_shared: bool
) -> Iterable[Problem]:
    """Large objects keep their OIDs, and have no schema that shows whose they are."""
    if settings.skip_large_objects or (settings.drop_if_exists and not is_shared):
        return
    count, first, after = 0, None, 0
    while True:
        rows = target.execute(
            "SELECT oid::int8 FROM pg_largeobject_metadata WHERE oid > %s ORDER BY oid LIMIT %s",
            (after, OIDS_AT_ONCE),
        ).fetchall()
        if not rows:
            break
        oids = [oid for (oid,) in rows]
        after = oids[-1]
        found = source.execute(
            "SELECT count(*), min(oid)::int8 FROM pg_largeobject_metadata WHERE oid = ANY(%s)",
            (oids,),
        ).fetchone()
        if found and found[0]:
            count, first = count + found[0], first or found[1]
    if count:
        yield Problem(
            "target",
            f"{count} large objects there have OIDs that the source uses too, the first is {first}",
            "--skip-large-objects"
            if is_shared  # nothing shows whose they are
            else "SELECT lo_unlink(oid) FROM pg_largeobject_metadata, or --drop-if-exists, or "
            "--skip-large-objects",
        )


def _warn_of_reach(
    source: Connection, target: Connection, settings: CloneSettings
) -> Iterable[Problem]:
    """What a source has for all its schemas reaches the other ones on the target."""
    excluded = read_decision(source, settings.filters).excluded
    wide = [
        f"{kind} {name}"
        for catalog_oid, oid, kind, name, places in source.execute(_named_sql(source))
        if (catalog_oid, oid) not in excluded
        and (kind == "event trigger" or (kind == "publication" and places is None))
    ]
    if wide:
        yield Problem(
            "target",
            "the database has other schemas, and these will apply to them too: "
            f"{', '.join(wide[:LISTED])}",
            "drop or disable them on the target afterwards, if that is not wanted",
            is_warning=True,
        )
    ours, theirs = (
        [(name, acl) for name, acl in connection.execute(_DEFAULT_PRIVILEGES)]
        for connection in (source, target)
    )
    differing = sorted(name for name, acl in ours if (name, acl) not in theirs)
    if differing and not settings.schema.no_acl:
        yield Problem(
            "target",
            "the database has other schemas, and default privileges for every schema will be about "
            f"them too: {', '.join(differing[:LISTED])}",
            "--no-acl leaves out all privileges; or ALTER DEFAULT PRIVILEGES afterwards",
            is_warning=True,
        )


_DEFAULT_PRIVILEGES = """
SELECT format('FOR ROLE %I ON %s', pg_get_userbyid(defaclrole), CASE defaclobjtype
              WHEN 'r' THEN 'TABLES' WHEN 'S' THEN 'SEQUENCES' WHEN 'f' THEN 'FUNCTIONS'
              WHEN 'T' THEN 'TYPES' WHEN 'n' THEN 'SCHEMAS' ELSE 'LARGE OBJECTS' END),
       array(SELECT a::text FROM unnest(defaclacl) a ORDER BY 1)
  FROM pg_default_acl WHERE defaclnamespace = 0"""
