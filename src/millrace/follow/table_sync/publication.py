"""A table into the publications of a running stream.

Invariant: when `publish_table` returns, every transaction that begins from now on sends all of the
table's changes that can be sent, and the source's own statements on it keep working.

A walsender remembers what is published of a table until it decodes a change of the publications. A
transaction that was open during that change, and commits after it, is decoded by the catalog of its
own time. On servers without a fix of 2025, what is found then stays in the walsender's memory, and
the table's later changes are not sent. So the older transactions are waited for, and then the
publications are changed once more, to what they are.

Facts: pgoutput.c, get_rel_sync_entry() and rel_sync_cache_publication_cb(); publicationcmds.c,
AlterPublicationOptions(); reorderbuffer.c, ReorderBufferAddDistributedInvalidations() (17.5, 16.9).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from millrace import failpoint
from millrace.config.dsn import Dsn
from millrace.errors import ApplyError, ServerError
from millrace.follow.publication import alter, read_publications
from millrace.follow.published_table import PublishedTable, read_published_tables
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import connect, translated

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

POLL_SECONDS = 0.1
# A wait that takes longer says what it waits for; then every so often.
FIRST_WORD_SECONDS = 2.0
WORD_SECONDS = 30.0
# ADD TABLE waits for VACUUM and CREATE INDEX, and who wants a lock after us waits for us.
LOCK_TIMEOUT = "5s"

_INSERTS = frozenset({"insert", "truncate"})
_ALL = _INSERTS | {"update", "delete"}
_PUBLICATIONS = """
SELECT p.pubname, p.puballtables,
       array_remove(ARRAY[CASE WHEN p.pubinsert THEN 'insert' END,
                          CASE WHEN p.pubupdate THEN 'update' END,
                          CASE WHEN p.pubdelete THEN 'delete' END,
                          CASE WHEN p.pubtruncate THEN 'truncate' END], NULL),
       array(SELECT r.prrelid::int8 FROM pg_publication_rel r
              WHERE r.prpubid = p.oid AND r.prrelid = ANY(%s::int8[]::oid[]))
  FROM pg_publication p WHERE p.pubname = ANY(%s)
"""
_OLDER = """
SELECT a.pid, a.application_name, coalesce(a.state, ''),
       extract(epoch FROM clock_timestamp() - a.xact_start)::int8
  FROM pg_stat_activity a
 WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_backend_pid()
 ORDER BY a.xact_start LIMIT 3
"""


@dataclass(frozen=True)
class _Publication:
    name: str
    is_for_all: bool
    operations: frozenset[str]
    # Of the table and everything below it.
    listed: frozenset[int]

    def has(self, path: set[int]) -> bool:
        """Whether it publishes a relation; `path` is that and everything above it."""
        return self.is_for_all or not self.listed.isdisjoint(path)


def publish_table(
    source: Dsn, slot: str, oid: int, is_stopped: Callable[[], bool], tell: Callable[[str], None]
) -> bool:
    """Have everything sent of the table that can be; whether anything had to be changed. `tell`
    gets what it waits for."""
    with connect(source, "sync") as connection:
        if not _publish(connection, slot, oid):
            return False
        failpoint.hit("sync.published")
        _wait_for_older(connection, is_stopped, tell)
        _change_once_more(connection, slot)
    return True


def _publish(connection: Connection, slot: str, oid: int) -> bool:
    sends = read_publications(connection, slot).sends_generated
    found_tables = read_published_tables(connection, [oid], sends_generated=sends)
    tables = [one for one in found_tables if one.oid == oid]
    if not tables:
        raise ApplyError(
            f"relation {oid} of the source can't be followed",
            hint="only permanent tables can; of a partitioned one, name the root",
        )
    table = tables[0]
    names = publication_names(slot)
    with translated(f"publishing {table.label}"):
        rows = connection.execute(_PUBLICATIONS, (list(table.tree), list(names))).fetchall()
        found = [
            _Publication(name, is_for_all, frozenset(operations), frozenset(listed))
            for name, is_for_all, operations, listed in rows
        ]
        statements = _plan(table, found, names)
        if not statements:
            return False
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
            for statement in statements:
                connection.execute(statement)
    log.info("the source publishes %s from now on", table.label)
    return True


def _plan(table: PublishedTable, found: list[_Publication], names: tuple[str, ...]) -> list[str]:
    """What makes the publications send all that can be sent."""
    statements, sending = [], []
    for one in found:
        unfit = _unfit(table, one)
        if unfit:
            statements.append(alter(one.name, "DROP", [table.labels[oid] for oid in sorted(unfit)]))
        sending.append(replace(one, listed=one.listed - unfit))
    lacking: dict[str, list[str]] = {}
    for oid, operations in _places(table):
        path = table.path(oid)
        sent = frozenset[str]().union(*(one.operations for one in sending if one.has(path)))
        if operations <= sent:
            continue
        fitting = [one for one in found if not one.is_for_all and one.operations == operations]
        if not fitting:
            raise _no_publication(table.label, names)
        lacking.setdefault(fitting[0].name, []).append(table.labels[oid])
    return statements + [alter(name, "ADD", labels) for name, labels in lacking.items()]


def _unfit(table: PublishedTable, publication: _Publication) -> frozenset[int]:
    """What a publication of updates may not list: there, statements on a table without identity
    fail on the source, and on such partitions that come later."""
    if publication.operations <= _INSERTS:
        return frozenset()
    if not table.has_identity:
        return publication.listed
    return publication.listed - table.leaves if table.is_by_leaves else frozenset()


def _places(table: PublishedTable) -> list[tuple[int, frozenset[str]]]:
    """What is to be published, and which operations."""
    if not table.has_identity:
        return [(table.oid, _INSERTS)]
    if not table.is_by_leaves:
        return [(table.oid, _ALL)]
    return [(table.oid, _INSERTS), *((oid, _ALL) for oid in sorted(table.leaves))]


def _no_publication(label: str, names: tuple[str, ...]) -> ServerError:
    return ServerError(
        f"none of the publications {', '.join(names)} can take {label}",
        hint="they were changed or dropped by somebody else; begin the stream again with `millrace "
        "clone --follow --restart`",
    )


def _wait_for_older(
    connection: Connection, is_stopped: Callable[[], bool], tell: Callable[[str], None]
) -> None:
    """Until every transaction has ended that began before now."""
    with translated("waiting for transactions of the source"):
        row = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())").fetchone()
        assert row is not None
        next_word = time.monotonic() + FIRST_WORD_SECONDS
        while True:
            older = connection.execute(
                "SELECT pg_snapshot_xmin(pg_current_snapshot()) < %s::xid8", (str(row[0]),)
            ).fetchone()
            if older != (True,):
                tell("")
                return
            if is_stopped():
                raise ServerError("waiting for transactions of the source: stopped")
            if time.monotonic() > next_word:
                next_word = time.monotonic() + WORD_SECONDS
                tell(f"waits for a transaction that is open on the source: {_oldest(connection)}")
            time.sleep(POLL_SECONDS)


def _oldest(connection: Connection) -> str:
    rows = connection.execute(_OLDER).fetchall()
    sessions = [
        f"process {pid} ({application or 'no name'}, {state}, {age or 0} s)"
        for pid, application, state, age in rows
    ]
    return "; ".join(sessions) or "a prepared one, or one of a standby"


def _change_once_more(connection: Connection, slot: str) -> None:
    """To what they are: who decodes looks at them again."""
    with translated("refreshing the publications"):
        rows = connection.execute(_PUBLICATIONS, ([], list(publication_names(slot)))).fetchall()
        for name, _, operations, _ in rows:
            published = ", ".join(operations)
            connection.execute(f"ALTER PUBLICATION {ident(name)} SET (publish = '{published}')")
