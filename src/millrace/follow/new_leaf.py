"""Partitions that came to a root whose leaves are published one by one, into the publication of
updates.

Invariant: a leaf gets into it without a copy of the root only if nobody has changed or deleted a
row of it before: its first file has no pages, was never vacuumed, and nobody can write to it until
the leaf is published.

Inserts of a new leaf are sent from its first row on, by way of its root; its updates and deletes
are not, before it is published itself. The file of a table loses pages only to VACUUM, and TRUNCATE
or a rewrite gives it another one. Whoever writes to the leaf after us does so after our commit in
the WAL, and no older transaction has a change of it that could be decoded with an older catalog.
So nobody needs to be waited for, as in `follow.table_sync.publication`.

Facts: PostgreSQL documentation, "Explicit Locking" (SHARE conflicts with whatever writes) and
"pg_class" (reltuples is -1 before the first VACUUM or ANALYZE, from version 14 on); heap.c,
heap_create() (the first file has the number of the table); snapbuild.c,
SnapBuildDistributeNewCatalogSnapshot().
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

from millrace.errors import ServerError
from millrace.follow.publication import Publications, alter
from millrace.follow.published_table import PublishedTable
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

WHY_COPIED: Final = "a partition was added whose updates and deletes were not published at first"
# The size waits for whoever has locked the partition.
_LOCK_TIMEOUT: Final = "2s"
# Before version 14, reltuples does not show it; the counters do, unless they were reset.
_IS_UNTOUCHED = """
SELECT coalesce(bool_and(pg_relation_size(c.oid) = 0 AND pg_relation_filenode(c.oid) = c.oid
           AND CASE WHEN current_setting('server_version_num')::int >= 140000 THEN c.reltuples < 0
                    ELSE pg_stat_get_tuples_inserted(c.oid) = 0 END), true)
  FROM pg_class c WHERE c.oid = ANY(%s::int8[]::oid[])
"""


def publish_untouched(
    source: Connection, publications: Publications, table: PublishedTable
) -> bool:
    """Publish updates and deletes of the leaves that lack it; False if the root must be copied for
    that, because there were some, or may have been."""
    lacking = publications.unsent_leaves(table)
    if not lacking:
        return True
    labels = [table.labels[oid] for oid in lacking]
    with translated(f"publishing new partitions of {table.label}"), source.transaction():
        source.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        # Before anybody is made to wait.
        if not _are_untouched(source, lacking):
            return False
        try:
            locked = ", ".join(f"ONLY {label}" for label in labels)
            source.execute(f"LOCK TABLE {locked} IN SHARE MODE NOWAIT")
            if not _are_untouched(source, lacking):
                return False
            source.execute(alter(publications.with_identity, "ADD", labels))
        except psycopg.errors.InsufficientPrivilege as error:
            raise _not_allowed(source, table, labels, error) from error
    return True


def _not_allowed(
    source: Connection, table: PublishedTable, labels: list[str], error: psycopg.Error
) -> ServerError:
    role = source.info.user
    return ServerError(
        f"{role} may not publish new partitions of {table.label}: {error.diag.message_primary}",
        hint=f"it takes their owner (ALTER TABLE {labels[0]} OWNER TO {ident(role)}) or a "
        "superuser; then run the same command again",
        table=table.label,
    )


def _are_untouched(source: Connection, oids: list[int]) -> bool:
    return source.execute(_IS_UNTOUCHED, (oids,)).fetchone() == (True,)
