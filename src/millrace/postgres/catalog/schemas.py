"""Which schemas are the user's, and those in which a clone and a stream keep their tables.

Invariant: every query that lists a user's objects uses USER_SCHEMA or USER_PUBLICATION, so that
what we made ourselves is never copied, compared or followed. Ours is recognised by its comment: a
schema of the user's own that has the same name is theirs.
"""

from __future__ import annotations

from typing import Final

_COMMENT: Final = "made by millrace"
# Where a clone keeps its records on the target, and its comment; see millrace.postgres.run_record.
RECORD_SCHEMA: Final = "millrace"
RECORD_COMMENT: Final = "records of a running millrace; dropped when it is done"
# For a pg_namespace that the query calls n.
USER_SCHEMA: Final = (
    "n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'"
    " AND n.oid NOT IN (SELECT d.objoid FROM pg_description d"
    " WHERE d.classoid = 'pg_namespace'::regclass"
    f" AND d.description IN ('{_COMMENT}', '{RECORD_COMMENT}'))"
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
# A stream's tables, and columns by which they are known: a schema of the user's own that has the
# same name may have a table of such a name.
STREAM_TABLES: Final = {
    "stream_copy": ("source", "slot", "run_id", "host", "directory"),
    "stream_position": ("stream", "lsn", "committed_at", "applied_at"),
    "stream_table": ("stream", "schema_name", "table_name", "state", "lsn", "sync_id"),
    "raw_messages": ("stream", "number", "block", "frames", "end_lsn"),
    "raw_relations": ("stream", "number", "oid", "frame"),
}


def own_table_sql(name: str) -> str:
    """A condition: there is a stream's table of that name, and it is ours."""
    columns = STREAM_TABLES[name]
    names = ", ".join(f"'{column}'" for column in columns)
    return (
        f"(SELECT count(*) = {len(columns)} FROM pg_attribute AS a"
        f" WHERE a.attrelid = to_regclass('{STREAM_SCHEMA}.{name}') AND a.attname IN ({names})"
        " AND NOT a.attisdropped)"
    )


# Streams that began with an older release may have theirs in a schema of the user's.
_HAS_OWN: Final = " OR ".join(own_table_sql(name) for name in STREAM_TABLES)
# Whether the schema is somebody else's: what we keep there would be copied and compared.
FOREIGN_STREAM_SCHEMA: Final = (
    f"(EXISTS (SELECT FROM pg_namespace n WHERE n.nspname = '{STREAM_SCHEMA}' AND {USER_SCHEMA})"
    f" AND NOT ({_HAS_OWN}))"
)
INSTALL_STREAM_SCHEMA: Final = f"""
DO $$ BEGIN
    -- Of two that begin at once, the second would fail: IF NOT EXISTS does not see the other's.
    PERFORM pg_advisory_xact_lock(hashtextextended('millrace makes schema {STREAM_SCHEMA}', 0));
    IF {FOREIGN_STREAM_SCHEMA} THEN
        RAISE duplicate_schema USING MESSAGE = 'the target has a schema {STREAM_SCHEMA} that'
            ' millrace did not make, where a stream keeps its tables: rename that';
    END IF;
    IF to_regnamespace('{STREAM_SCHEMA}') IS NULL THEN
        CREATE SCHEMA {STREAM_SCHEMA};
        COMMENT ON SCHEMA {STREAM_SCHEMA} IS '{_COMMENT}';
    END IF;
END $$;
"""
DROP_STREAM_SCHEMA: Final = f"""
DO $$ BEGIN
    IF obj_description(to_regnamespace('{STREAM_SCHEMA}'), 'pg_namespace') = '{_COMMENT}' THEN
        DROP SCHEMA {STREAM_SCHEMA};
    END IF;
END $$;
"""

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
