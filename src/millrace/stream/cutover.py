"""The end of a migration: everything applied, sequences set, both sides compared, views filled.

Invariant: it succeeds only if every table is equal after the last change was applied; a difference
is an error, and nothing is said to be done.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from millrace.clone.compare import Compared
from millrace.clone.compare_run import CompareSettings, compare_data
from millrace.clone.engine import Engine
from millrace.clone.sequence import set_sequences
from millrace.errors import ServerError, WorkDirError
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres import catalog
from millrace.postgres.connect import connect, translated
from millrace.postgres.view_refresh import refresh_views
from millrace.stream.follow import follow, require_setup
from millrace.stream.progress import FollowReporter
from millrace.stream.sentinel import Sentinel
from millrace.stream.settings import FollowSettings
from millrace.stream.spool import Reader
from millrace.stream.spool_place import place_of
from millrace.workdir.lock import open_lock

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class CutoverResult:
    """What was done."""

    endpos: int
    sequences: int
    # Materialized views that were filled again.
    views: int
    compared: list[Compared]
    seconds: float

    @property
    def is_equal(self) -> bool:
        return all(one.is_equal for one in self.compared)


def read_end(connection: Connection) -> int:
    """The source's position now, with everything committed before it on its disk."""
    with translated("reading the source's position"):
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        if row and row[0]:
            function = "pg_last_wal_replay_lsn"
        else:
            # A commit that waits for the disk takes the ones before it along. It must have
            # written something, else it does not wait.
            connection.execute(
                "BEGIN; SET LOCAL synchronous_commit = local;"
                " SELECT pg_logical_emit_message(true, 'millrace', 'end'); COMMIT"
            )
            function = "pg_current_wal_flush_lsn"
        row = connection.execute(f"SELECT {function}()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def cutover(
    settings: FollowSettings,
    compare: CompareSettings,
    engine: Engine,
    reporter: FollowReporter,
) -> CutoverResult:
    """Bring the target to where the source stands now, and prove it."""
    began = time.monotonic()
    directory = settings.directory
    with Sentinel(directory) as sentinel:
        setup = require_setup(sentinel, directory)
        with connect(settings.source, "cutover") as source:
            endpos = read_end(source)
        sentinel.set_endpos(endpos)
        log.info("the end position is %s", render_lsn(endpos))
        _switch_on(sentinel)
        with closing(place_of(setup, directory, settings.target).open_reader()) as spool:
            if not _wait_for_other(settings, sentinel, spool):
                # Whoever else reads the spool may not be done with it.
                follow(replace(settings, keep_spool=True), engine, reporter)
            _check_applied(sentinel, spool, endpos)
    with connect(settings.source, "cutover") as source, connect(settings.target, "cutover") as to:
        with translated("reading the source's sequences"):
            sequences = catalog.read_sequences(source)
            names = {(s.schema, s.name) for s in catalog.read_sequences(to)}
        wanted = [s for s in sequences if (s.schema, s.name) in names]
        set_sequences(to, wanted)
    if len(wanted) < len(sequences) and compare.filters.is_empty:
        lacking = sorted(f"{s.schema}.{s.name}" for s in sequences if s not in wanted)
        log.warning("the target lacks sequences of the source: %s", ", ".join(lacking))
    compared = compare_data(compare, engine)
    views = 0
    if all(one.is_equal for one in compared):
        with connect(settings.target, "cutover") as to, translated("refreshing views"):
            views = refresh_views(to)
    return CutoverResult(endpos, len(wanted), views, compared, time.monotonic() - began)


def _switch_on(sentinel: Sentinel) -> None:
    """A stream that somebody has switched off would never come to its end."""
    state = sentinel.read()
    if not (state.apply and state.prefetch):
        log.warning("apply or prefetch was switched off; both are on now")
        sentinel.set_apply(True)
        sentinel.set_prefetch(True)


def _wait_for_other(settings: FollowSettings, sentinel: Sentinel, spool: Reader) -> bool:
    """Whether another process has followed to the end; waits for one that is still there."""
    log.info("waiting until the millrace that follows here has applied everything")
    while not _is_free(settings):
        time.sleep(POLL_SECONDS)
    # It may never have been there, or have been stopped before the end.
    state = sentinel.read()
    return (state.flushed_lsn or 0) >= (state.endpos or 0) and (
        spool.plan(state.applied_lsn or 0, 1, state.endpos) is None
    )


def _is_free(settings: FollowSettings) -> bool:
    try:
        with open_lock(settings.directory):
            return True
    except WorkDirError:
        return False


def _check_applied(sentinel: Sentinel, spool: Reader, endpos: int) -> None:
    state = sentinel.read()
    if state.endpos != endpos:
        raise WorkDirError(
            "somebody else changed the end position meanwhile", hint="run cutover again"
        )
    left = spool.plan(state.applied_lsn or 0, 1, endpos)
    if (state.flushed_lsn or 0) < endpos or left is not None:
        raise ServerError(
            f"the stream ended before {render_lsn(endpos)}",
            hint="run cutover again; `millrace stream sentinel get` shows where it stands",
        )
