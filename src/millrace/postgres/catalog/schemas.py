"""Which schemas are the user's, and which are ours.

Invariant: every query that lists a user's objects uses one of the USER_ conditions, so that
what we made ourselves is never copied, compared or followed. Ours is recognised by its comment: a
schema of the user's own that has the same name is theirs.
"""

from __future__ import annotations

from typing import Final

# Where runs and streams keep their tables on the target; see millrace.postgres.own_schema.
OWN_SCHEMA: Final = "millrace"
OWN_COMMENT: Final = "made by millrace"
# Of our schema on a source: what DDL was captured there; see millrace.ddl.capture.
DDL_TABLE: Final = (OWN_SCHEMA, "sql_ddl_statements")
# That of older releases.
_RECORD_COMMENT: Final = "records of a running millrace; dropped when it is done"
# For a pg_namespace that the query calls n.
_OWN_SCHEMAS: Final = (
    "(SELECT d.objoid FROM pg_description d WHERE d.classoid = 'pg_namespace'::regclass"
    f" AND d.description IN ('{OWN_COMMENT}', '{_RECORD_COMMENT}'))"
)
USER_SCHEMA: Final = (
    f"n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND n.oid NOT IN {_OWN_SCHEMAS}"
)
# For a pg_event_trigger that the query calls t.
USER_EVENT_TRIGGER: Final = (
    "NOT EXISTS (SELECT FROM pg_proc f WHERE f.oid = t.evtfoid"
    f" AND f.pronamespace IN {_OWN_SCHEMAS})"
)
# For a pg_class that the query calls c: it belongs to no extension, or the extension says that all
# its rows are the user's.
USER_TABLE: Final = (
    "(NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass"
    " AND e.objid = c.oid AND e.deptype = 'e')"
    " OR EXISTS (SELECT FROM pg_extension x, unnest(x.extconfig, x.extcondition) AS t (oid, rows)"
    " WHERE t.oid = c.oid AND t.rows = ''))"
)
# A stream's publications have this comment, and the name of its slot behind.
PUBLICATION_COMMENT: Final = f"{OWN_COMMENT} for replication slot "
# For a pg_publication that the query calls p.
USER_PUBLICATION: Final = (
    "NOT EXISTS (SELECT FROM pg_description d WHERE d.classoid = 'pg_publication'::regclass"
    f" AND d.objoid = p.oid AND starts_with(d.description, '{PUBLICATION_COMMENT}'))"
)
# PostgreSQL's names end after 63 bytes.
_NAME_BYTES = 63

_SUFFIX = "_insert_only"


def publication_names(slot: str) -> tuple[str, str]:
    """(of tables with an identity, of inserts) for a slot."""
    raw = slot.encode()
    short = raw[: _NAME_BYTES - len(_SUFFIX)].decode(errors="ignore")
    return raw[:_NAME_BYTES].decode(errors="ignore"), short + _SUFFIX


# Whether c was made by CREATE TABLE ... PARTITION OF, and is attached ever since: then it never had
# rows as a table of its own. To attach or detach a table updates the catalog's rows of its columns,
# so that none is left as it was made, together with the system columns.
IS_BORN_PARTITION: Final = """EXISTS (
    SELECT FROM pg_attribute made
      JOIN pg_attribute a ON a.attrelid = made.attrelid AND a.xmin::text = made.xmin::text
                         AND a.cmin::text = made.cmin::text
     WHERE made.attrelid = c.oid AND made.attnum = -1
       AND a.attnum > 0 AND a.attinhcount > 0 AND NOT a.attislocal)"""
