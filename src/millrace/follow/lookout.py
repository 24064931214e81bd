"""Looks periodically for tables of the source that a running stream does not follow fully.

Invariant: whatever is found is either copied again by table sync, which follows it from then on, or
stops the stream with its name. Nothing is taken up by changing the publications alone: what they
did not have before that is lost.

A stream that demands the same tables on both sides stops, too, if one is dropped that the target
has.

What is looked for are tables that were created since the stream began, tables that were dropped and
created again, new inheritance children, tables that were attached as partitions, partitions whose
updates are not published, and tables that got a replica identity. A table that has lost its
identity is taken out of the publication of updates, where its own statements fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import psycopg

from millrace.errors import ApplyError, ConfigError, MillraceError
from millrace.follow.audit.attached import WHY_COPIED, note_partitions
from millrace.follow.background import in_background
from millrace.follow.membership import as_followed, write_beginning
from millrace.follow.new_leaf import WHY_COPIED as WHY_NEW_LEAF
from millrace.follow.new_leaf import publish_untouched
from millrace.follow.publication import Publications, demote, read_publications, withdraw
from millrace.follow.published_table import PublishedTable, read_published_tables
from millrace.follow.settings import FollowSettings
from millrace.follow.setup import published, read_left
from millrace.follow.table_sync.source import current_lsn
from millrace.name import QualifiedName
from millrace.postgres.quote import qualified
from millrace.postgres.wire.connect import connect, translated
from millrace.room import AGAIN
from millrace.workdir.followed_table import (
    FollowedTable,
    lose_wholeness,
    read_followed,
    write_followed,
)
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.stream_state import StreamState
from millrace.workdir.sync_request import RequestState, read_requests, request_sync

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]
Name = tuple[str, str]

# How often is looked; a table that the target lacks stops the stream when it is seen twice, since
# many live for seconds only.
LOOK_SECONDS = 20.0
# The same, where there are many streams: it takes some queries, and time of both sides.
MANY_LOOK_SECONDS = 60.0
# Somebody has locked a table, or has dropped it since it was read.
_TRY_AGAIN: Final = frozenset({"55P03", "42P01"})


class Lookout:
    """Looks for tables, and remembers what it has seen."""

    def __init__(self, settings: FollowSettings, setup: StreamSetup, sentinel: Sentinel) -> None:
        self._settings = settings
        self._setup = setup
        self._sentinel = sentinel
        # OIDs of tables that the target had no table for.
        self._lacking: set[int] = set()
        self._excluded: set[PublishedTable] = set()
        # Tables that the source has dropped, and where it was when that was seen first.
        self._dropped: dict[Name, int] = {}

    def look(self) -> list[Name]:
        """Request a copy of what is not followed as it could be; the names of these tables."""
        settings, setup = self._settings, self._setup
        write_beginning(settings.source, self._sentinel, setup)
        with connect(settings.source, "look") as source:
            found = self._read_tables(source)
            self._withdraw_lost(source, found)
            known = read_followed(self._sentinel)
            publications = self._publications(source)
            if self._settings.ddl is not None:
                self._note_new(publications, found, known)
                return self._request(_gained(found, known))
            whys = [
                (table, _why_copied(table, known) or self._note(source, publications, table, known))
                for table in found
            ]
        self._require_kept(found, known)
        return self._request([(table, why) for table, why in whys if why])

    def _note_new(
        self,
        publications: Publications,
        tables: Collection[PublishedTable],
        known: dict[int, FollowedTable],
    ) -> None:
        """Tables whose creation comes with the stream are followed from there on."""
        new = [table for table in tables if table.oid not in known]
        for table in new:
            is_sent = publications.is_for_all or table.oid in (
                publications.whole | publications.inserts
            )
            if is_sent:
                is_whole = publications.sends_updates(table)
                write_followed(self._sentinel, as_followed(table, is_whole=is_whole))

    def _request(self, wanted: list[tuple[PublishedTable, str]]) -> list[Name]:
        """Request a copy of these; the names of those that are copied."""
        if self._is_too_late():
            return []
        wanted = self._without_excluded(wanted)
        pending = self._pending()
        wanted = [(table, why) for table, why in wanted if _name(table) not in pending]
        self._require_rules({_name(table) for table, _ in wanted})
        with_target = self._on_target([table for table, _ in wanted])
        for table, why in wanted:
            if _name(table) in with_target:
                request_sync(self._sentinel, table.schema, table.name, why)
                log.warning("%s.%s is copied again: %s", table.schema, table.name, why)
        return [_name(table) for table, _ in wanted if _name(table) in with_target]

    def read_unfollowed(self) -> list[Name]:
        """The tables that `look` would request a copy of, or stop the stream for; changes
        nothing."""
        with connect(self._settings.source, "look") as source:
            found = self._read_tables(source)
        known, pending = read_followed(self._sentinel), self._pending()
        wanted = [(table, why) for table in found if (why := _why_copied(table, known))]
        if self._settings.ddl is not None:
            wanted = _gained(found, known)
        wanted = self._without_excluded(wanted)
        # With DDL, what became of a table comes with the stream.
        has_ddl = self._settings.ddl is not None
        dropped = [] if has_ddl else sorted(self._read_dropped(found, known))
        return [*(_name(table) for table, _ in wanted if _name(table) not in pending), *dropped]

    def read_known(self) -> set[Name]:
        """The tables that are followed, and still there."""
        with connect(self._settings.source, "look") as source:
            found = self._read_tables(source)
        known = read_followed(self._sentinel)
        return {_name(table) for table in found if table.oid in known}

    def _read_tables(self, source: Connection) -> list[PublishedTable]:
        settings, setup = self._settings, self._setup
        sends = self._publications(source).sends_generated
        tables = read_published_tables(source, plugin=setup.plugin, sends_generated=sends)
        return [table for table in tables if _name(table) not in settings.left.tables]

    def _without_excluded(
        self, tables: list[tuple[PublishedTable, str]]
    ) -> list[tuple[PublishedTable, str]]:
        """Less those that filters leave out. What filters say takes a while to find out, so each
        table is asked about once."""
        rules = self._settings.filters
        if not rules.keeps_all_rows and any(table not in self._excluded for table, _ in tables):
            kept = published(self._settings.source, rules) or set()
            self._excluded = {table for table, _ in tables if kept.isdisjoint(table.tree)}
        return [(table, why) for table, why in tables if table not in self._excluded]

    def _is_too_late(self) -> bool:
        """Whether a copy would be newer than the stream's end: the audit there lists what is not
        followed."""
        endpos = self._sentinel.read().endpos
        return endpos is not None and current_lsn(self._settings.source) >= endpos

    def _publications(self, source: Connection) -> Publications:
        """Of another plugin, nothing: there it may be that a note is kept in one."""
        slot = self._setup.slot_name if self._setup.plugin == "pgoutput" else ""
        return read_publications(source, slot)

    def _withdraw_lost(self, source: Connection, tables: Collection[PublishedTable]) -> None:
        """Out of the publication of updates: tables that lost their identity, and partitions that
        were detached, which nobody follows any more."""
        known = read_followed(self._sentinel)
        publications = self._publications(source)
        for table in tables:
            if table.oid not in known:
                continue
            with _trying_again():
                if known[table.oid].root_oid is not None:
                    withdraw(source, publications, table)
                elif not table.has_identity and _is_whole(table, publications, known):
                    if self._setup.plugin == "pgoutput":
                        demote(source, publications, table)
                    lose_wholeness(self._sentinel, known, table.oid)
                    log.warning("source: %s", table.warning())

    def _note(
        self,
        source: Connection,
        publications: Publications,
        table: PublishedTable,
        known: dict[int, FollowedTable],
    ) -> str:
        """Write down new partitions: they are followed with their root, and one that is detached
        later is known as such. Why the root must be copied for them; empty if it need not be."""
        root = known.get(table.oid)
        if root is None or root.root_oid is not None:
            return ""
        with _trying_again():
            if note_partitions(source, self._sentinel, table, known):
                return WHY_COPIED
            if not root.is_whole or not table.has_identity or self._setup.plugin != "pgoutput":
                return ""
            if not publish_untouched(source, publications, table):
                # Until it is copied.
                lose_wholeness(self._sentinel, read_followed(self._sentinel), table.oid)
                return WHY_NEW_LEAF
        return ""

    def _pending(self) -> set[Name]:
        """Tables whose copy is under way, or was given up by somebody."""
        last = {(one.schema, one.name): one for one in read_requests(self._sentinel)}
        return {
            name
            for name, request in last.items()
            if request.is_unfinished or request.state is RequestState.CANCELLED
        }

    def _require_rules(self, names: set[Name]) -> None:
        """Raise if filters speak of columns or rows of a table that is new: those who apply have
        read them before it was there."""
        settings = self._settings
        if settings.filters.is_empty or not names:
            return
        left = read_left(settings.source, settings.filters)
        for name in sorted(names):
            for rules, before in (
                (left.columns, settings.left.columns),
                (left.where, settings.left.where),
                (left.hashed, settings.left.hashed),
            ):
                if rules.get(name) != before.get(name):
                    raise ConfigError(
                        f"--filters has rules for {'.'.join(name)}, which is new on the source",
                        hint="run the same command again: then they are followed",
                    )

    def _require_kept(
        self, tables: Collection[PublishedTable], known: dict[int, FollowedTable]
    ) -> None:
        """Raise, if tables of both sides must be the same, for one that the source has dropped and
        the target has: once everything is applied that may have come before."""
        dropped = self._read_dropped(tables, known)
        if not dropped:
            self._dropped = {}
            return
        here = current_lsn(self._settings.source)
        self._dropped = {name: self._dropped.get(name, here) for name in dropped}
        state = self._sentinel.read()
        received = max(state.flushed_lsn or 0, self._sentinel.read_source().complete_lsn or 0)
        for (schema, name), lsn in sorted(self._dropped.items()):
            if state.state == StreamState.FOLLOWING and received >= lsn:
                raise _dropped(schema, name, self._settings.naming.target(schema, name))

    def _read_dropped(
        self, tables: Collection[PublishedTable], known: dict[int, FollowedTable]
    ) -> set[Name]:
        if not self._settings.is_strict:
            return set()
        oids = {oid for table in tables for oid in (table.oid, *table.tree)}
        names = {_name(table) for table in tables} | self._settings.left.tables
        gone = {
            (one.schema, one.name)
            for one in known.values()
            if one.oid not in oids and one.root_oid is None
        }
        gone -= names
        return gone & self._read_target() if gone else set()

    def _read_target(self) -> set[Name]:
        """The tables of the target, by the source's names."""
        with connect(self._settings.target, "look") as target, translated("looking for tables"):
            return {
                named
                for schema, name in target.execute(
                    "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n"
                    " ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p')"
                )
                if (named := self._settings.naming.source(schema, name)) is not None
            }

    def _on_target(self, tables: Collection[PublishedTable]) -> set[Name]:
        """Those that the target has, by the source's names; raises for one it still has not."""
        if not tables:
            return set()
        found = self._read_target()
        lacking = {table.oid: table for table in tables if _name(table) not in found}
        if self._settings.ddl is not None:
            return found  # it comes with the stream
        for table in lacking.values():
            if table.oid in self._lacking:
                raise _not_on_target(table)
            log.warning(
                "%s was created on the source, and the target has no such table", table.label
            )
        self._lacking = set(lacking)
        return found


def looking_out(
    settings: FollowSettings,
    setup: StreamSetup,
    sentinel: Sentinel,
    on_failure: Callable[[], None],
) -> AbstractContextManager[None]:
    """Meanwhile, look every so often. Errors that may go away are reported by those who receive and
    apply; what stops the stream is raised at the end."""
    lookout = Lookout(settings, setup, sentinel)
    pause = MANY_LOOK_SECONDS if settings.is_one_of_many else LOOK_SECONDS
    return in_background("lookout", lookout.look, pause, on_failure, at_once=True)


@contextmanager
def _trying_again() -> Iterator[None]:
    """What others are in the way of is left to the next look."""
    try:
        yield
    except MillraceError as error:
        if error.facts.get("sqlstate") not in _TRY_AGAIN:
            raise
        log.debug("%s", error)


def _is_whole(
    table: PublishedTable, publications: Publications, known: dict[int, FollowedTable]
) -> bool:
    """Whether updates are followed of a table, or published of a partition of it."""
    leaves = {oid for oid in table.leaves & known.keys() if known[oid].root_oid is not None}
    return known[table.oid].is_whole or not publications.whole.isdisjoint(leaves)


def _name(table: PublishedTable) -> Name:
    return table.schema, table.name


def _why_copied(table: PublishedTable, known: dict[int, FollowedTable]) -> str:
    """Why less of the table is followed than could be; empty if that is not so."""
    here = known.get(table.oid)
    if here is None:
        if any((one.schema, one.name) == _name(table) for one in known.values()):
            return "it was dropped and created again on the source"
        return "it was created on the source after the stream began"
    if here.root_oid is not None:
        return ""  # a partition that was detached: for the target, too, that is done by hand
    if table.has_identity and not here.is_whole:
        return "it has a replica identity now, so that its updates and deletes can be followed"
    return ""


def _gained(
    tables: Collection[PublishedTable], known: dict[int, FollowedTable]
) -> list[tuple[PublishedTable, str]]:
    """Tables whose updates were not followed, and can be."""
    return [
        (table, why)
        for table in tables
        if table.oid in known and (why := _why_copied(table, known))
    ]


def _dropped(schema: str, name: str, target: QualifiedName) -> ApplyError:
    label = f"{schema}.{name}"
    return ApplyError(
        f"{label} was dropped on the source, and the target has it",
        hint=f"on the target: DROP TABLE {qualified(*target)}, or ALTER TABLE ... SET SCHEMA to one"
        f" of your own; then {AGAIN}",
        table=label,
    )


def _not_on_target(table: PublishedTable) -> ApplyError:
    label = f"{table.schema}.{table.name}"
    return ApplyError(
        f"{label} was created on the source after the stream began, and the target has no such "
        "table",
        hint="create it there, then run the same command again: it is copied and followed; or "
        "leave it out with --filters",
        table=label,
    )
