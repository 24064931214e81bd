"""Partitions that were added to a followed root since it was recorded.

Invariant: a partition gets into the record without a copy of its root only if it never had a row
that the stream did not send: it was made as a partition, and is one ever since, or it is empty
after it was written down. While it was a table of its own, its changes were left out, or not even
published.

A partition that is detached and attached again has another link, and counts as attached later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import psycopg

from millrace.filter.exclusions import Exclusions
from millrace.follow.audit.finding import Finding, FindingKind
from millrace.follow.membership import as_followed
from millrace.follow.publication import read_publications
from millrace.follow.published_table import PublishedTable, read_published_tables
from millrace.postgres.wire.connect import translated
from millrace.workdir.followed_table import FollowedTable, read_followed, write_followed
from millrace.workdir.sentinel import Sentinel, StreamSetup

Connection = psycopg.Connection[tuple[Any, ...]]

WHY_COPIED = "a table was attached to it as a partition"
# The size waits for whoever has locked the partition.
_LOCK_TIMEOUT = "2s"
# The counters show rows that are gone, and of which nothing is left in the file.
_IS_EMPTY = """
SELECT coalesce(bool_and(pg_relation_size(c.oid) = 0
                         AND pg_stat_get_tuples_inserted(c.oid) = 0), true)
  FROM pg_class c WHERE c.oid = ANY(%s::int8[]::oid[]) AND c.relkind = 'r'
"""


def note_partitions(
    source: Connection,
    sentinel: Sentinel,
    table: PublishedTable,
    known: Mapping[int, FollowedTable],
) -> bool:
    """Write down the partitions of a followed root that are new; whether the root must be copied,
    which writes them down."""
    partitions = _partitions(table, known)
    attached = _find_attached(table, known)
    # Those of a stream of an earlier version have no link yet.
    born = [
        one
        for one in partitions
        if one not in attached and (one.oid not in known or known[one.oid].link != one.link)
    ]
    if born:
        write_followed(sentinel, born)
    if not attached:
        return False
    if not _is_empty(source, attached):
        return True
    # In this order: whatever is written to them from now on is spooled.
    write_followed(sentinel, [replace(one, link="") for one in attached])
    if not _is_empty(source, attached):
        return True
    write_followed(sentinel, attached)
    return False


def find_attached(
    source: Connection, left: Exclusions, setup: StreamSetup, sentinel: Sentinel
) -> Iterator[Finding]:
    """Roots that got partitions with rows, and were not copied since."""
    known = read_followed(sentinel)
    sends = setup.plugin == "pgoutput" and (
        read_publications(source, setup.slot_name).sends_generated
    )
    tables = read_published_tables(source, plugin=setup.plugin, sends_generated=sends)
    for table in tables:
        if (table.schema, table.name) in left.tables or table.oid not in known:
            continue
        attached = _find_attached(table, known)
        if attached and not _is_empty(source, attached):
            reason = f"{WHY_COPIED} after the stream began, and it was not copied again"
            yield Finding(f"{table.schema}.{table.name}", FindingKind.NOT_FOLLOWED, reason)


def _partitions(table: PublishedTable, known: Mapping[int, FollowedTable]) -> list[FollowedTable]:
    _, *partitions = as_followed(table, is_whole=known[table.oid].is_whole)
    return partitions


def _find_attached(
    table: PublishedTable, known: Mapping[int, FollowedTable]
) -> list[FollowedTable]:
    """Partitions that are attached, or are below one that is, since they were written down."""
    partitions = _partitions(table, known)
    new = {one.oid for one in partitions if _is_new(one, known.get(one.oid))}
    return [one for one in partitions if not new.isdisjoint(table.attached_above(one.oid))]


def _is_new(partition: FollowedTable, before: FollowedTable | None) -> bool:
    if before is None or before.root_oid != partition.root_oid:
        return True
    return before.link is not None and before.link != partition.link


def _is_empty(source: Connection, tables: Collection[FollowedTable]) -> bool:
    """Whether nobody has ever written a row to them, committed or not."""
    with translated("looking at new partitions"), source.transaction():
        source.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        row = source.execute(_IS_EMPTY, ([table.oid for table in tables],)).fetchone()
    return row == (True,)
