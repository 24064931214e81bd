"""What others have made of a source's tables: views that are in the way of a change.

Invariant: a view of somebody else's is never dropped for good: after the change it is there again,
with its owner, its grants, its comment and its indexes, or the change does not happen and the view
is named.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg.pq.abc import PGconn

from millrace.errors import ApplyError, ServerError
from millrace.postgres.wire.libpq import execute, fetch

# Views outside some schemas that depend on relations inside, directly or by way of others; those
# that others depend on first. What recreates each is printed while it is still there.
_VIEWS: Final = """
WITH RECURSIVE above (oid, depth) AS (
    SELECT c.oid, 0 FROM pg_class c WHERE c.relnamespace IN ({schemas})
    UNION ALL
    SELECT r.ev_class, above.depth + 1
      FROM above
      JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = above.oid
      JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
     WHERE r.ev_class <> above.oid AND above.depth < 100
), outside AS (
    SELECT c.oid, max(above.depth) AS depth
      FROM above JOIN pg_class c ON c.oid = above.oid
     WHERE c.relkind IN ('v', 'm') AND c.relnamespace NOT IN ({schemas})
     GROUP BY c.oid
)
SELECT c.oid::text, format('%I.%I', n.nspname, c.relname), c.relkind,
       format('CREATE %s %I.%I%s AS %s', CASE c.relkind WHEN 'm' THEN 'MATERIALIZED VIEW'
                                         ELSE 'VIEW' END, n.nspname, c.relname,
              ' WITH (' || array_to_string(c.reloptions, ', ') || ')',
              rtrim(pg_get_viewdef(c.oid), ';')),
       format('ALTER TABLE %I.%I OWNER TO %I', n.nspname, c.relname, pg_get_userbyid(c.relowner)),
       (SELECT string_agg(format('GRANT %s ON %I.%I TO %s%s', a.privilege_type, n.nspname,
                                 c.relname, CASE a.grantee WHEN 0 THEN 'PUBLIC'
                                 ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
                                 CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END),
                          '; ')
          FROM aclexplode(c.relacl) a WHERE a.grantee <> c.relowner),
       (SELECT format('COMMENT ON %s %I.%I IS %L', CASE c.relkind WHEN 'm' THEN
                      'MATERIALIZED VIEW' ELSE 'VIEW' END, n.nspname, c.relname, o)
          FROM obj_description(c.oid, 'pg_class') o WHERE o IS NOT NULL),
       (SELECT string_agg(pg_get_indexdef(i.indexrelid), '; ')
          FROM pg_index i WHERE i.indrelid = c.oid)
  FROM outside JOIN pg_class c ON c.oid = outside.oid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 ORDER BY outside.depth, c.oid
"""


@dataclass(frozen=True)
class OutsideView:
    """A view of somebody else's, and what brings it back."""

    oid: str
    name: str
    kind: str
    statements: tuple[str, ...]

    @property
    def drop(self) -> str:
        return f"DROP {'MATERIALIZED VIEW' if self.kind == 'm' else 'VIEW'} {self.name}"


def read_views(session: PGconn, schema_oids: Collection[str]) -> list[OutsideView]:
    """Those that depend on these schemas, in the order in which they can be made."""
    if not schema_oids:
        return []
    execute(session, "SAVEPOINT millrace_views; SET LOCAL search_path = pg_catalog, pg_temp")
    rows = fetch(session, _VIEWS.format(schemas=", ".join(schema_oids)))
    execute(session, "ROLLBACK TO SAVEPOINT millrace_views; RELEASE SAVEPOINT millrace_views")
    return [
        OutsideView(str(oid), str(name), str(kind), tuple(one for one in rest if one))
        for oid, name, kind, *rest in rows
    ]


def drop_views(session: PGconn, views: Sequence[OutsideView]) -> None:
    for one in reversed(views):
        execute(session, one.drop)


def create_views(session: PGconn, views: Sequence[OutsideView]) -> None:
    """As they were; raises and names them if one can't be."""
    for one in views:
        try:
            for statement in one.statements:
                execute(session, statement)
        except ServerError as error:
            names = ", ".join(each.name for each in views)
            raise ApplyError(
                f"view {one.name} of the target would not work any more: {error.message}; it "
                f"depends on what changes (with it: {names})",
                hint="change or drop the view, then `millrace consolidate ddl retry`",
                views=[each.name for each in views],
            ) from error
