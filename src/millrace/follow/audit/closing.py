"""The closing audit: the source's tables, held against what the stream has followed.

Invariant: a table of which the target may lack something is named. The source's counters accuse and
never acquit: they count work that was rolled back, are written down late, and are reset by a
reset or a crash. Only a comparison acquits.

Looked at is what the stream can't have brought: tables that it does not know, updates and deletes
of tables that it follows for inserts only, partitions that had rows before, and large objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.apply.table_state import SyncState, TableStates, read_table_states
from millrace.clone.kept_view import are_large_objects_skipped
from millrace.filter.exclusions import Exclusions
from millrace.follow.audit.added_columns import AddedColumn, find_added_columns
from millrace.follow.audit.attached import find_attached
from millrace.follow.audit.baseline import Baseline, read_baseline
from millrace.follow.audit.changed_columns import iter_changed_columns
from millrace.follow.audit.finding import LARGE_OBJECTS, Finding, FindingKind
from millrace.follow.audit.large_objects import accuse, has_large_objects
from millrace.follow.audit.source_state import (
    SourceCounters,
    SourceTable,
    TableCounters,
    read_counters,
    read_source_tables,
)
from millrace.follow.settings import FollowSettings
from millrace.follow.table_sync.audit import find_unsynced
from millrace.name import IDENTITY, Naming
from millrace.postgres.origin import stream_name
from millrace.postgres.wire.connect import connect, translated
from millrace.workdir.followed_table import FollowedTable, read_followed
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.sync_request import read_requests

Connection = psycopg.Connection[tuple[Any, ...]]

# A session that became idle has written its counters down after this, with room to spare.
SETTLE_SECONDS = 10.5
SETTLE_POLL_SECONDS = 0.2
# Of one table, whose partitions may have one each.
MOST_REASONS = 3
# Sessions of others in this database. What other roles do is not shown to everybody: then it is
# NULL.
_OTHERS = """
    FROM pg_stat_activity AS a
   WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
     AND coalesce(a.backend_type, 'client backend') = 'client backend'
     AND coalesce(a.application_name, '') !~ '^millrace '
"""
# Whether some may have counters in hand.
_BUSY = f"""
SELECT EXISTS (SELECT {_OTHERS}
     AND (a.state IS DISTINCT FROM 'idle'
          OR a.state_change > clock_timestamp() - make_interval(secs => %s)))
"""
# Their open transactions: within one, nothing is written down of what came before it. Locks are
# shown to everybody.
_OPEN = f"""
SELECT l.pid, l.virtualxid FROM pg_locks AS l
 WHERE l.locktype = 'virtualxid' AND l.granted AND l.pid IN (SELECT a.pid {_OTHERS})
"""


def audit(
    settings: FollowSettings,
    setup: StreamSetup,
    sentinel: Sentinel,
    endpos: int,
    *,
    waits: bool = True,
) -> tuple[Finding, ...]:
    """What is found at the end position, by table.

    `waits`: until sessions of the source have written their counters down, as far as that can be
    told; not needed where all tables are compared anyway.
    """
    baseline = read_baseline(sentinel)
    with connect(settings.source, "audit") as source, connect(settings.target, "audit") as target:
        stream = stream_name(setup.source, setup.slot_name, setup.start_lsn)
        states = read_table_states(target, stream)
        tables = read_source_tables(source, setup.slot_name, setup.plugin)
        before = baseline or Baseline(tables)
        judge = Judge(
            before,
            tables,
            states,
            read_followed(sentinel),
            settings.left,
            settings.naming,
            has_ddl=settings.ddl is not None and setup.has_all_ddl,
        )
        has_objects = not are_large_objects_skipped(settings.directory) and (
            has_large_objects(source) or has_large_objects(target)
        )

        def is_enough(counters: SourceCounters) -> bool:
            is_told = (
                not has_objects
                or LARGE_OBJECTS in settings.accepted
                or accuse(before, counters, is_settled=True) is not None
            )
            return not waits or (is_told and judge.is_told(counters, settings.accepted))

        read = _read_settled(source, is_enough)
        objects = None
        if has_objects:
            is_settled = waits or read.is_settled
            objects = accuse(before, read.counters, read.silent, is_settled=is_settled)
        findings = [
            *judge.judge(read.counters, read.silent),
            *([objects] if objects else []),
            *find_attached(source, settings.left, setup, sentinel),
            *judge.dropped(target),
            *judge.changed(),
            *judge.added(
                find_added_columns(
                    source, target, before.tables.values(), tables.values(), settings.naming
                )
            ),
            *(
                Finding(one.label, FindingKind.UNPROVED, one.reason)
                for one in find_unsynced(states, read_requests(sentinel), endpos)
            ),
        ]
    return _merged(findings, settings.accepted)


class Judge:
    """Holds what is there now against what the stream began with."""

    def __init__(
        self,
        before: Baseline,
        tables: Mapping[int, SourceTable],
        states: TableStates,
        record: Mapping[int, FollowedTable],
        left: Exclusions,
        naming: Naming = IDENTITY,
        *,
        has_ddl: bool = False,
    ) -> None:
        self._before = before
        # What became of a table came with the stream, at its place; what its rows need beyond that
        # is copied.
        self._has_ddl = has_ddl
        # Empty for a stream that takes whatever its publications send.
        self._record = record
        self._tables = {oid: t for oid, t in tables.items() if t.root not in left.tables}
        self._left = left
        self._naming = naming
        self._states = states
        self._names = {table.label for table in before.tables.values()}
        self._roots = {table.root_oid: table for table in before.tables.values()}

    def judge(self, counters: SourceCounters, silent: Collection[int] = ()) -> Iterator[Finding]:
        """`silent`: processes that may have counted something and have not written it down."""
        for table in self._tables.values():
            yield from self._moved(table)
            lack = self._lack(table)
            if lack is not None:
                yield _finding(table, *lack)
            elif not self._is_whole(table) and (reason := self._reason(table, counters, silent)):
                yield _finding(table, FindingKind.UNPROVED, reason)

    def _reason(self, table: SourceTable, counters: SourceCounters, silent: Collection[int]) -> str:
        """Why a table of which not everything is sent may differ; empty if nothing says so."""
        has_inserts = self._has_inserts(table)
        reason = _accusation(self._before.moved(counters, table.oid), has_inserts=has_inserts)
        before = self._before.tables.get(table.oid)
        if not reason and not has_inserts and before and before.filenode != table.filenode:
            return "its changes are not followed (it is unlogged, or was), and it was rewritten"
        if not reason and silent:
            pids = ", ".join(map(str, sorted(silent)[:MOST_REASONS]))
            return (
                f"its updates and deletes are not followed, and sessions of the source (pid {pids})"
                " have been in a transaction too long to tell what they did before it"
            )
        return reason

    def _moved(self, table: SourceTable) -> Iterator[Finding]:
        """Changes go by name: those of a table that got another one may have gone elsewhere."""
        before = self._before.tables.get(table.oid)
        if before is None or before.root == table.root or self._has_ddl or self._is_synced(table):
            return
        old = ".".join(before.root)
        reason = f"it was {old}, or a partition of it, when the stream began"
        yield _finding(table, FindingKind.UNPROVED, reason)
        if before.is_partition:
            reason = f"{table.label} was a partition of it when the stream began, and is not now"
            yield Finding(old, FindingKind.UNPROVED, reason)

    def is_told(self, counters: SourceCounters, accepted: Collection[str]) -> bool:
        """Whether every table that counters could accuse is accused, or accepted, already."""
        told = {finding.table for finding in self.judge(counters)} | set(accepted)
        return all(
            self._is_whole(table) or ".".join(table.root) in told for table in self._tables.values()
        )

    def dropped(self, target: Connection) -> Iterator[Finding]:
        """Tables that only the target has by now."""
        now = {table.label for table in self._tables.values()}
        gone = [
            table
            for oid, table in self._before.tables.items()
            if (oid not in self._tables or self._tables[oid].root != table.root)
            and table.label not in now
            and table.root not in self._left.tables
        ]
        there = _read_existing(target)
        for table in gone:
            if self._naming.target(table.schema, table.name) in there:
                reason = "it was dropped, renamed or moved on the source, and the target has it"
                yield _finding(table, FindingKind.DROPPED, reason)

    def changed(self) -> Iterator[Finding]:
        """Tables whose rows were changed by ALTER TABLE, which nobody sends."""
        if self._has_ddl:
            return
        for oid, table in self._tables.items():
            before = self._before.tables.get(oid)
            for reason in iter_changed_columns(before, table) if before else ():
                yield _finding(table, FindingKind.UNPROVED, reason)

    def added(self, columns: Iterable[AddedColumn]) -> Iterator[Finding]:
        for one in columns:
            if one.table.oid in self._tables and not self._has_ddl:
                yield _finding(
                    one.table,
                    FindingKind.UNPROVED,
                    f"column {one.name} was added with a default that each server computes by "
                    "itself",
                )

    def _lack(self, table: SourceTable) -> tuple[FindingKind, str] | None:
        """What is missing of it for certain, whatever the counters say."""
        if not table.is_logged or self._is_synced(table):
            return None
        before = self._before.tables.get(table.oid)
        if before is None and table.label in self._names and not self._has_ddl:
            return FindingKind.RECREATED, "it was dropped and created again since the stream began"
        if before is None and not self._begins_with_its_rows(table):
            reason = "it was created after the stream began, and is not followed"
            return FindingKind.NOT_FOLLOWED, reason
        if before is not None and before.is_logged and not before.sends_inserts:
            reason = "it was not published when the stream began"
            return FindingKind.NOT_FOLLOWED, reason
        if not table.sends_inserts:
            return FindingKind.NOT_FOLLOWED, "it is no longer published"
        return None

    def _begins_with_its_rows(self, table: SourceTable) -> bool:
        """Of a table that came later: whether it was followed before it had any."""
        if self._record:
            return table.root_oid in self._record or table.oid in self._record
        root = self._roots.get(table.root_oid)
        return table.is_for_all or (
            table.is_partition and root is not None and root.sends_inserts and table.sends_inserts
        )

    def _has_inserts(self, table: SourceTable) -> bool:
        """Whether its inserts have been followed all the time."""
        before = self._before.tables.get(table.oid, table)
        return table.sends_inserts and before.sends_inserts

    def _is_whole(self, table: SourceTable) -> bool:
        """Whether its updates and deletes have been followed all the time."""
        written = self._record.get(table.oid) or self._record.get(table.root_oid)
        if not table.sends_updates or (written is not None and not written.is_whole):
            return False
        before = self._before.tables.get(table.oid)
        if before is None and written is not None and self._has_ddl:
            return True
        if before is None and table.is_partition:
            before = self._roots.get(table.root_oid)
        return self._is_synced(table) or (before is not None and before.sends_updates)

    def _is_synced(self, table: SourceTable) -> bool:
        """Whether it was copied again, and is followed since."""
        state = self._states.get(table.root)
        return (
            state is not None
            and state.state is SyncState.FOLLOWED
            and state.source_oid == table.root_oid
        )


def _finding(table: SourceTable, kind: FindingKind, reason: str) -> Finding:
    partitions = (table.label,) if table.is_partition else ()
    return Finding(".".join(table.root), kind, reason, partitions=partitions)


def _accusation(moved: TableCounters | None, *, has_inserts: bool) -> str:
    """Why a table may differ of which not everything is sent, by the source's counters (None if
    they began anew); empty if nothing was done to it."""
    what = "its updates and deletes are not followed"
    if not has_inserts:
        what = "its changes are not followed (it is unlogged, or was)"
    if moved is None:
        return (
            f"{what}, and the source's counters do not say if there were any: they were reset, or "
            "lost in a crash or failover, or the source is a standby"
        )
    counted = {"updates": moved.updated, "deletes": moved.deleted}
    if not has_inserts:
        counted["inserts"] = moved.inserted
    told = [f"{count:,} {kind}" for kind, count in counted.items() if count]
    return f"{what}, and the source counts {' and '.join(told)}" if told else ""


@dataclass(frozen=True)
class _Read:
    """The source's counters, and what they may lack."""

    counters: SourceCounters
    # Processes that had no chance to write theirs down.
    silent: frozenset[int]
    # Whether all others have.
    is_settled: bool


def _read_settled(source: Connection, is_enough: Callable[[SourceCounters], bool]) -> _Read:
    """The counters; if more of them may matter, after sessions had time to write them down."""
    deadline = time.monotonic() + SETTLE_SECONDS
    open_then = set(source.execute(_OPEN).fetchall())
    while True:
        row = source.execute(_BUSY, (SETTLE_SECONDS,)).fetchone()
        is_late = time.monotonic() > deadline
        open_now = set(source.execute(_OPEN).fetchall()) if is_late else set()
        counters = read_counters(source)
        is_settled = is_late or row == (False,)
        if is_settled or is_enough(counters):
            silent = frozenset(pid for pid, _ in open_then & open_now)
            return _Read(counters, silent, is_settled)
        time.sleep(SETTLE_POLL_SECONDS)


def _read_existing(target: Connection) -> set[tuple[str, str]]:
    with translated("reading the target's tables"):
        rows = target.execute(
            "SELECT n.nspname, c.relname FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE c.relkind IN ('r', 'p')"
        ).fetchall()
    return {(schema, name) for schema, name in rows}


def _merged(findings: Iterable[Finding], accepted: Collection[str]) -> tuple[Finding, ...]:
    """One for each table and kind, the partitions of one root together."""
    grouped: dict[tuple[str, FindingKind], list[Finding]] = {}
    for one in findings:
        grouped.setdefault((one.table, one.kind), []).append(one)
    return tuple(
        Finding(
            table,
            kind,
            _reasons([one.reason for one in group]),
            table in accepted,
            tuple(dict.fromkeys(name for one in group for name in one.partitions)),
        )
        for (table, kind), group in sorted(grouped.items())
    )


def _reasons(reasons: Iterable[str]) -> str:
    """Each once, and not more than a person reads."""
    told = list(dict.fromkeys(reasons))
    more = f"; and {len(told) - MOST_REASONS} more like that" if len(told) > MOST_REASONS else ""
    return "; ".join(told[:MOST_REASONS]) + more
