"""The source's tables as an audit looks at them: what each one is, and what is sent of it.

Invariant: everything but the counters is read from catalogs in the connection's own snapshot, so a
state that is read in the slot's snapshot is the one that the copy and the stream begin with.

Facts: PostgreSQL documentation, "pg_publication_rel", "pg_publication_namespace",
"pg_stat_all_tables"; publicationcmds.c: a partition is published with any of its ancestors;
pgstat.c, pgstat_report_stat(): a session writes its counters down at most once a second, and at
the latest ten seconds after it has become idle (from version 15 on).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from millrace.postgres.catalog.schemas import USER_SCHEMA, USER_TABLE, publication_names
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

# With the topmost partitioned table of each. Temporary tables are their session's own.
_TABLES = f"""
WITH RECURSIVE ancestry (oid, ancestor, is_partition) AS (
    SELECT c.oid, c.oid, c.relispartition
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind = 'r' AND c.relpersistence <> 't' AND {USER_SCHEMA} AND {USER_TABLE}
    UNION ALL
    SELECT below.oid, i.inhparent, above.relispartition
      FROM ancestry below
      JOIN pg_inherits i ON below.is_partition AND i.inhrelid = below.ancestor
      JOIN pg_class above ON above.oid = i.inhparent
), sent AS (
    SELECT a.oid, bool_or(p.pubinsert) AS inserts, bool_or(p.pubupdate AND p.pubdelete) AS updates,
           bool_or(p.pubinsert AND p.puballtables) AS is_for_all
      FROM ancestry a
      JOIN pg_class above ON above.oid = a.ancestor
      JOIN pg_publication p ON p.pubname = ANY(%(publications)s)
       AND (p.puballtables
            OR EXISTS (SELECT FROM pg_publication_rel r
                        WHERE r.prpubid = p.oid AND r.prrelid = a.ancestor)
            OR {{by_schema}})
     GROUP BY a.oid
)
SELECT c.oid::int8, n.nspname, c.relname, root.oid::int8, rn.nspname, root.relname,
       c.relpersistence = 'p', coalesce(pg_relation_filenode(c.oid), 0)::int8,
       c.relpersistence = 'p' AND (%(is_text)s OR coalesce(sent.inserts, false)),
       c.relpersistence = 'p' AND CASE WHEN %(is_text)s THEN identity.is_there
                                       ELSE coalesce(sent.updates, false) END,
       c.relpersistence = 'p' AND (%(is_text)s OR coalesce(sent.is_for_all, false)),
       (SELECT coalesce(jsonb_agg(jsonb_build_array(a.attnum, a.attname,
                                                    format_type(a.atttypid, a.atttypmod))
                                  ORDER BY a.attnum), '[]')
          FROM pg_attribute a
         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
  FROM ancestry a
  JOIN pg_class c ON c.oid = a.oid
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_class root ON root.oid = a.ancestor
  JOIN pg_namespace rn ON rn.oid = root.relnamespace
  LEFT JOIN sent ON sent.oid = c.oid
  CROSS JOIN LATERAL (
       SELECT c.relreplident = 'f' OR EXISTS (
                SELECT FROM pg_index i
                 WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate AND
                       CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                           WHEN 'i' THEN i.indisreplident END) AS is_there
       ) AS identity
 WHERE NOT a.is_partition
 ORDER BY c.oid
"""
_BY_SCHEMA = (
    "EXISTS (SELECT FROM pg_publication_namespace s"
    " WHERE s.pnpubid = p.oid AND s.pnnspid = above.relnamespace)"
)
# pg_largeobject and pg_largeobject_metadata: their OIDs never change.
LARGE_OBJECT_CATALOGS: Final = (2613, 2995)
_COUNTERS = f"""
SELECT c.oid::int8, pg_stat_get_tuples_inserted(c.oid), pg_stat_get_tuples_updated(c.oid),
       pg_stat_get_tuples_deleted(c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND ({USER_SCHEMA} OR c.oid IN {LARGE_OBJECT_CATALOGS})
"""
_SERVER = """
SELECT coalesce(pg_stat_get_db_stat_reset_time(d.oid)::text, ''),
       pg_stat_get_db_xact_commit(d.oid),
       CASE WHEN pg_is_in_recovery() THEN 0 ELSE (pg_control_checkpoint()).timeline_id END
  FROM pg_database d WHERE d.datname = current_database()
"""


@dataclass(frozen=True)
class SourceTable:
    """A table with rows of its own; a partition has a root, any other table is its own."""

    oid: int
    schema: str
    name: str
    root_oid: int
    root_schema: str
    root_name: str
    # Otherwise unlogged: none of its changes is ever sent.
    is_logged: bool
    # Another one after each rewrite.
    filenode: int
    # What the stream gets of it: inserts; updates and deletes; inserts from its first row on.
    sends_inserts: bool
    sends_updates: bool
    is_for_all: bool
    # (number, name, type) of its columns. A number is never given to another one.
    columns: tuple[tuple[int, str, str], ...]

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def root(self) -> tuple[str, str]:
        return self.root_schema, self.root_name

    @property
    def is_partition(self) -> bool:
        return self.oid != self.root_oid

    @property
    def column_numbers(self) -> frozenset[int]:
        return frozenset(number for number, _, _ in self.columns)


@dataclass(frozen=True)
class TableCounters:
    """Rows that transactions have touched, also those that were rolled back."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0

    def since(self, before: TableCounters) -> TableCounters:
        return TableCounters(
            self.inserted - before.inserted,
            self.updated - before.updated,
            self.deleted - before.deleted,
        )

    @property
    def is_less(self) -> bool:
        """Of a difference: somebody has reset them in between."""
        return min(self.inserted, self.updated, self.deleted) < 0


@dataclass(frozen=True)
class SourceCounters:
    """The counters of all tables, and what shows that they were reset."""

    reset_at: str
    commits: int
    # 0 of a standby: it does not count what its primary does.
    timeline: int
    tables: Mapping[int, TableCounters] = field(default_factory=dict)

    def of(self, oid: int) -> TableCounters:
        return self.tables.get(oid, TableCounters())

    def continues(self, before: SourceCounters) -> bool:
        """Whether the server counts on: it was not reset, did not crash, is not another one."""
        return (
            self.timeline > 0
            and (self.reset_at, self.timeline) == (before.reset_at, before.timeline)
            and self.commits >= before.commits
            and not any(
                self.of(oid).since(then).is_less
                for oid, then in before.tables.items()
                if oid in self.tables
            )
        )


def read_source_tables(connection: Connection, slot: str, plugin: str) -> dict[int, SourceTable]:
    """Every table of the user's, by OID, with what the slot's publications send of it.

    The text plugins send everything of all tables that have a replica identity.
    """
    by_schema = _BY_SCHEMA if connection.info.server_version >= 150000 else "false"
    publications = list(publication_names(slot)) if plugin == "pgoutput" else []
    with translated("reading the source's tables"):
        rows = connection.execute(
            _TABLES.format(by_schema=by_schema),
            {"publications": publications, "is_text": plugin != "pgoutput"},
        ).fetchall()
    return {row[0]: SourceTable(*(*row[:-1], as_columns(row[-1]))) for row in rows}


def as_columns(found: Iterable[Sequence[Any]]) -> tuple[tuple[int, str, str], ...]:
    """From JSON."""
    return tuple((number, name, kind) for number, name, kind in found)


def read_counters(connection: Connection) -> SourceCounters:
    """The source's counters as they are now, as far as sessions have written them down."""
    with translated("reading the source's counters"):
        connection.execute("SELECT pg_stat_clear_snapshot()")
        row = connection.execute(_SERVER).fetchone()
        assert row is not None
        counters = connection.execute(_COUNTERS).fetchall()
    reset_at, commits, timeline = row
    tables = {oid: TableCounters(*counts) for oid, *counts in counters}
    return SourceCounters(reset_at, commits, timeline, tables)
