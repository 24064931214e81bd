"""Filling materialized views again.

Invariant: a view is refreshed after every view that it reads; one that holds nothing stays so.
"""

from __future__ import annotations

import logging
from graphlib import TopologicalSorter
from typing import Any

import psycopg

from millrace.postgres.catalog.schemas import USER_SCHEMA, USER_TABLE
from millrace.postgres.quote import qualified
from millrace.postgres.wire.connect import translated

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

_FILLED = f"""
SELECT c.oid::int8, n.nspname, c.relname
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'm' AND c.relispopulated AND {USER_SCHEMA} AND {USER_TABLE}
 ORDER BY 2, 3
"""
# What each view reads, other views among it; what functions read is not known.
_READS = """
SELECT DISTINCT r.ev_class::int8, d.refobjid::int8
  FROM pg_rewrite r
  JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
   AND d.refclassid = 'pg_class'::regclass AND d.refobjid <> r.ev_class
  JOIN pg_class c ON c.oid = r.ev_class AND c.relkind IN ('v', 'm')
 WHERE r.ev_type = '1'  -- its query, not what it does instead of INSERT
"""


def refresh_views(connection: Connection) -> int:
    """How many were; a view that can't be is a warning."""
    with translated("reading materialized views"):
        views = {oid: (schema, name) for oid, schema, name in connection.execute(_FILLED)}
        order = TopologicalSorter(dict.fromkeys(views, ()))
        for view, read in connection.execute(_READS) if views else ():
            order.add(view, read)
    refreshed = 0
    for oid in order.static_order():
        if oid not in views:
            continue
        try:
            connection.execute(f"REFRESH MATERIALIZED VIEW {qualified(*views[oid])}")
            refreshed += 1
        except psycopg.DatabaseError as error:
            if connection.broken:
                raise
            log.warning("materialized view %s was not refreshed: %s", ".".join(views[oid]), error)
    return refreshed
