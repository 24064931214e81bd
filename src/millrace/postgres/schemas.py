"""Which schemas are the user's, and the one in which a stream keeps its tables.

Invariant: every query that lists a user's objects uses USER_SCHEMA or USER_PUBLICATION, so that
what we made ourselves is never copied, compared or followed. A schema of the user's own that has
the same name is theirs.
"""

from __future__ import annotations

from typing import Final

# Where a clone keeps its records on the target; see millrace.postgres.record.
_RECORDS: Final = "millrace"
_COMMENT: Final = "made by millrace"
# For a pg_namespace that the query calls n.
USER_SCHEMA: Final = (
    f"n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', '{_RECORDS}')"
    " AND n.oid NOT IN (SELECT d.objoid FROM pg_description d"
    f" WHERE d.classoid = 'pg_namespace'::regclass AND d.description = '{_COMMENT}')"
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
PUBLICATION_COMMENT: Final = f"{_COMMENT} for replication slot "
# For a pg_publication that the query calls p.
USER_PUBLICATION: Final = (
    "NOT EXISTS (SELECT FROM pg_description d WHERE d.classoid = 'pg_publication'::regclass"
    f" AND d.objoid = p.oid AND starts_with(d.description, '{PUBLICATION_COMMENT}'))"
)
STREAM_SCHEMA: Final = "replication"
INSTALL_STREAM_SCHEMA: Final = f"""
DO $$ BEGIN
    IF to_regnamespace('{STREAM_SCHEMA}') IS NULL THEN
        CREATE SCHEMA {STREAM_SCHEMA};
        COMMENT ON SCHEMA {STREAM_SCHEMA} IS '{_COMMENT}';
    END IF;
END $$;
"""
