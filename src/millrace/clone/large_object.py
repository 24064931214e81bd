"""Large objects, by ranges of OIDs, with owners, grants and comments.

Invariant: a range is created, filled and recorded in one transaction; an object
keeps its OID. Reading goes through lo_get, so that the rights on each object
decide, not a superuser's view of pg_largeobject.
"""

from __future__ import annotations

from millrace.clone.copy_task import PartStatements
from millrace.postgres.run_record import LARGE_OBJECTS_OID
from millrace.relation import LargeObjectRange

# One row of the stream; well below the 1 GB limit of a value, and few of them fit in memory.
CHUNK_BYTES = 1024 * 1024
BYTES_PER_RANGE = 64 * 1024 * 1024
OBJECTS_PER_RANGE = 2000
INV_READ = 0x40000

_STAGE = "CREATE TEMP TABLE millrace_lo (oid oid, at int8, data bytea, about text[]) ON COMMIT DROP"


def large_object_statements(
    objects: LargeObjectRange, *, owner: bool, acl: bool, comments: bool, replace: bool
) -> PartStatements:
    """The copy of one range.

    Each object travels as one row that describes it (owner, comment, grants as
    `grantee, privilege, grantable` triples) and rows of data. Relayed into a temporary table,
    they become objects inside the target.
    """
    unlink = (
        "SELECT lo_unlink(m.oid) FROM pg_largeobject_metadata m, millrace_lo s"
        " WHERE m.oid = s.oid AND s.at IS NULL; "
    )
    return PartStatements(
        table_oid=LARGE_OBJECTS_OID,
        part=objects.number,
        label=f"large objects {objects.first_oid}-{objects.last_oid}",
        copy_out=_copy_out(objects),
        copy_in=f"{_STAGE}; COPY millrace_lo FROM STDIN (FORMAT binary)",
        after=(unlink if replace else "") + _create_sql(owner=owner, acl=acl, comments=comments),
    )


def _copy_out(objects: LargeObjectRange) -> str:
    between = f"m.oid BETWEEN {objects.first_oid} AND {objects.last_oid}"
    return f"""COPY (
        SELECT m.oid, NULL::int8 AS at, NULL::bytea AS data,
               ARRAY[pg_get_userbyid(m.lomowner)::text, obj_description(m.oid, 'pg_largeobject'),
                     (o.own <> 2)::text]
               || (SELECT array_agg(i.item ORDER BY a.n, i.k)
                     FROM aclexplode(m.lomacl) WITH ORDINALITY
                          AS a(grantor, grantee, privilege, grantable, n),
                          unnest(ARRAY[
                            CASE a.grantee WHEN 0 THEN NULL
                              ELSE pg_get_userbyid(a.grantee)::text END,
                            a.privilege, a.grantable::text]) WITH ORDINALITY AS i(item, k)
                    WHERE a.grantee <> m.lomowner OR o.own <> 2) AS about
          FROM pg_largeobject_metadata m,
               -- How many of the two rights of an owner it has: all, unless they were taken away.
               LATERAL (SELECT CASE WHEN m.lomacl IS NULL THEN 2 ELSE count(*) END AS own
                          FROM aclexplode(m.lomacl) a WHERE a.grantee = m.lomowner) o
         WHERE {between}
        UNION ALL
        SELECT m.oid, c * {CHUNK_BYTES}, lo_get(m.oid, c * {CHUNK_BYTES}, {CHUNK_BYTES}), NULL
          FROM pg_largeobject_metadata m,
               LATERAL (SELECT lo_lseek64(lo_open(m.oid, {INV_READ}), 0, 2) AS size) s,
               LATERAL generate_series(0, (s.size - 1) / {CHUNK_BYTES}) AS c
         WHERE {between} AND s.size > 0) TO STDOUT (FORMAT binary)"""


def _create_sql(*, owner: bool, acl: bool, comments: bool) -> str:
    """What makes objects of the rows in the temporary table."""
    return f"""SELECT lo_create(oid) FROM millrace_lo WHERE at IS NULL;
        SELECT lo_put(oid, at, data) FROM millrace_lo WHERE at IS NOT NULL;
        DO $millrace$
        DECLARE o record; item int; grantee text; option text;
        BEGIN
          FOR o IN SELECT oid, about FROM millrace_lo WHERE at IS NULL LOOP
            IF {str(comments).lower()} AND o.about[2] IS NOT NULL THEN
              EXECUTE format('COMMENT ON LARGE OBJECT %s IS %L', o.oid, o.about[2]);
            END IF;
            IF {str(owner).lower()} AND o.about[1] <> current_user THEN
              EXECUTE format('ALTER LARGE OBJECT %s OWNER TO %I', o.oid, o.about[1]);
            END IF;
            IF {str(acl).lower()} AND o.about[3]::bool THEN
              EXECUTE format('REVOKE ALL ON LARGE OBJECT %s FROM %I', o.oid, o.about[1]);
            END IF;
            item := 4;
            WHILE {str(acl).lower()} AND item < cardinality(o.about) LOOP
              grantee := coalesce(quote_ident(o.about[item]), 'PUBLIC');
              option := CASE WHEN o.about[item + 2]::bool AND o.about[item] <> o.about[1]
                             THEN ' WITH GRANT OPTION' ELSE '' END;
              EXECUTE format('GRANT %s ON LARGE OBJECT %s TO %s%s',
                             o.about[item + 1], o.oid, grantee, option);
              item := item + 3;
            END LOOP;
          END LOOP;
        END $millrace$"""
