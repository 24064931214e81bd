"""The tables that a stream begins with: those of the slot's snapshot, recorded by OID.

Invariant: a table is written down as followed whole only if the publications had it before the
slot's first change. Publications are made before the slot, and a slot may take long to make; tables
that were committed meanwhile are in its snapshot, so they are copied, and would not be followed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from millrace.config.dsn import Dsn
from millrace.follow.publication import find_unpublished, read_publications
from millrace.follow.published_table import PublishedTable, read_published_tables
from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import connect, translated
from millrace.workdir.followed_table import (
    FollowedTable,
    read_followed,
    replace_followed,
    write_followed,
)
from millrace.workdir.sentinel import Sentinel, StreamSetup

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]


def has_all(
    source: Dsn, slot: str, plugin: str, oids: Collection[int] | None, snapshot: str | None = None
) -> bool:
    """Whether the publications have every table that the slot's snapshot has; of a slot without
    one, every table that there is by now."""
    if plugin != "pgoutput":
        return True  # they send what there is
    with _seen_by(source, snapshot) as connection:
        late = find_unpublished(connection, slot, oids)
    for table in late:
        log.info("%s was made while the replication slot was", table.label)
    return not late


def write_beginning(
    source: Dsn, sentinel: Sentinel, setup: StreamSetup, snapshot: str | None = None
) -> None:
    """Write down what is followed from the beginning, unless that was done for this stream. What
    an attempt left that never became a stream is replaced. Without a snapshot, it is what there is
    now."""
    found = sentinel.read_setup()
    is_this = found is not None and _identity(found) == _identity(setup)
    if is_this and read_followed(sentinel):
        return
    with _seen_by(source, snapshot) as connection:
        tables = _read_beginning(connection, setup)
    # Of a stream of an earlier version, others may write down tables at the same time.
    (write_followed if is_this else replace_followed)(sentinel, tables)


def take_up(connection: Connection, sentinel: Sentinel, setup: StreamSetup, oid: int) -> None:
    """Let changes of a table, and of everything below it, into the spool from now on.

    For `follow.table_sync`: when the publications have the table, and before the position is taken
    at which it is copied, so that whatever is committed after that position is spooled.
    """
    found = _read_beginning(connection, setup)
    if read_followed(sentinel):
        found = [one for one in found if oid in (one.oid, one.root_oid)]
    # Else it is the first word about any table: what is published was followed all the time.
    write_followed(sentinel, found)


def _read_beginning(connection: Connection, setup: StreamSetup) -> list[FollowedTable]:
    if setup.plugin != "pgoutput":
        tables = read_published_tables(connection, plugin=setup.plugin)
        return [one for t in tables for one in as_followed(t, is_whole=t.has_identity)]
    published = read_publications(connection, setup.slot_name)
    tables = read_published_tables(connection, sends_generated=published.sends_generated)
    return [
        one
        for table in tables
        if published.is_for_all or table.oid in published.whole | published.inserts
        for one in as_followed(table, is_whole=published.sends_updates(table))
    ]


def _identity(setup: StreamSetup) -> tuple[str, str, int]:
    return setup.source, setup.slot_name, setup.start_lsn


@contextmanager
def _seen_by(source: Dsn, snapshot: str | None) -> Iterator[Connection]:
    with connect(source, "setup") as connection, translated("reading the source's tables"):
        if snapshot is None:
            yield connection
            return
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            connection.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            yield connection


def as_followed(table: PublishedTable, *, is_whole: bool) -> list[FollowedTable]:
    """The table, and the partitions below it by their root's name."""
    root = FollowedTable(table.oid, table.schema, table.name, is_whole)
    return [
        root,
        *(
            FollowedTable(oid, table.schema, table.name, is_whole, table.oid, table.links.get(oid))
            for oid in table.tree
            if oid != table.oid
        ),
    ]
