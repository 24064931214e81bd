"""The end of a migration: everything applied, sequences set, both sides compared, views filled.

Invariant: it succeeds only if every table is equal after the last change was applied, but for those
that the user has named, and nothing was written after that; a difference
is an error, nothing is reported as done, the stream can continue, and a source that was paused is
given back.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from millrace.apply.table_state import read_table_states
from millrace.compare.run import CompareSettings, compare_data
from millrace.compare.task import TableComparison
from millrace.engine import Engine
from millrace.errors import ServerError, WorkDirError
from millrace.follow.audit.ending import finish, take_back_endpos
from millrace.follow.audit.finding import LARGE_OBJECTS, Finding, acquit
from millrace.follow.audit.large_objects import compare_accused
from millrace.follow.late_writer import require_silence_since
from millrace.follow.pause import PauseSettings, paused
from millrace.follow.progress import FollowReporter
from millrace.follow.reached import has_applied
from millrace.follow.settings import CompareMode, FollowSettings
from millrace.follow.stream import Stream, follow, require_setup, run_until
from millrace.follow.table_sync.resync import wait_for_syncs
from millrace.lsn import render_lsn
from millrace.postgres.catalog.view_refresh import refresh_views
from millrace.postgres.wire.connect import connect, translated
from millrace.postgres.wire.wal_end import read_end
from millrace.spool.interface import Reader
from millrace.spool.place import place_of
from millrace.workdir.lock import open_lock
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.sync_request import read_requests

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
NO_PAUSE: Final = PauseSettings()


@dataclass(frozen=True)
class CutoverResult:
    """What was done."""

    endpos: int
    sequences: int
    # Materialized views that were filled again.
    views: int
    compared: list[TableComparison]
    seconds: float
    # From the moment that writers were kept off, or were said to be, until both sides were known to
    # be equal and sequences were set.
    pause_seconds: float = 0.0
    # Whether rows were compared at all.
    is_compared: bool = True
    # What the audit found and the comparison did not acquit.
    unfollowed: tuple[Finding, ...] = ()
    # Tables that may differ.
    accepted: frozenset[str] = frozenset()

    @property
    def is_equal(self) -> bool:
        return all(one.is_equal for one in self.compared) and not any(
            one.table == LARGE_OBJECTS for one in self.unfollowed
        )

    @property
    def different(self) -> list[TableComparison]:
        """Tables that differ and may not."""
        return [o for o in self.compared if not o.is_equal and o.label not in self.accepted]

    @property
    def refused(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.unfollowed if not one.is_accepted)

    @property
    def is_good(self) -> bool:
        """Whether nothing differs, and nothing may, but what was accepted."""
        return not self.different and not self.refused


def cutover(
    settings: FollowSettings,
    compare: CompareSettings,
    engine: Engine,
    reporter: FollowReporter,
    pause: PauseSettings = NO_PAUSE,
    mode: CompareMode = CompareMode.FULL,
) -> CutoverResult:
    """Bring the target to the source's current position, and prove it; a source that was paused
    for it is given back unless that succeeds."""
    began = time.monotonic()
    with paused(pause, settings.source, settings.directory) as held:
        result = _bring_to_end(settings, compare, engine, reporter, mode)
        result = replace(result, pause_seconds=time.monotonic() - held.since)
        if result.is_good:
            held.keep()
    views = 0
    if result.is_good:
        with connect(settings.target, "cutover") as to, translated("refreshing views"):
            views = refresh_views(to)
    return replace(result, views=views, seconds=time.monotonic() - began)


def _bring_to_end(
    settings: FollowSettings,
    compare: CompareSettings,
    engine: Engine,
    reporter: FollowReporter,
    mode: CompareMode,
) -> CutoverResult:
    directory = settings.directory
    with Sentinel(directory) as sentinel:
        setup = require_setup(sentinel, directory)
        before = sentinel.read().endpos
        if settings.ddl is None:
            _finish_syncs(settings, engine, sentinel)
        else:
            _finish_ddl(settings, engine, reporter, sentinel, setup)
        with connect(settings.source, "cutover") as source:
            endpos = sentinel.choose_endpos(read_end(source))
        log.info("the end position is %s", render_lsn(endpos))
        try:
            _switch_on(sentinel)
            with closing(place_of(setup, directory, settings.target).open_reader()) as spool:
                if not _wait_for_other(settings, sentinel, spool):
                    # Whoever else reads the spool may not be done with it.
                    own = replace(settings, keep_spool=True, endpos=endpos)
                    follow(own, engine, reporter, is_compared=True)
                _check_applied(sentinel, spool, endpos)
            ending = finish(settings, setup, sentinel, endpos, waits=False)
            compared = [] if mode is CompareMode.NONE else compare_data(compare, engine)
            require_silence_since(settings.source, setup, endpos)
            findings = compare_accused(ending.findings, settings.source, settings.target)
        except BaseException:
            take_back_endpos(sentinel, endpos, before)
            raise
        findings = acquit(findings, {one.label for one in compared if one.is_equal})
        result = CutoverResult(
            endpos,
            ending.sequences,
            0,
            compared,
            0.0,
            unfollowed=findings,
            accepted=settings.accepted,
            is_compared=mode is not CompareMode.NONE,
        )
        if not result.is_good:
            take_back_endpos(sentinel, endpos, before)
    return result


def _finish_syncs(settings: FollowSettings, engine: Engine, sentinel: Sentinel) -> None:
    """Tables that are to be copied again are, before the end is chosen: their copies must not be
    newer than that."""
    waiting = read_requests(sentinel, unfinished=True)
    if not waiting:
        return
    log.info("first copying tables again: %s", ", ".join(one.label for one in waiting))
    _switch_on(sentinel)
    sentinel.set_endpos(None)
    wait_for_syncs(settings, engine)


def _finish_ddl(
    settings: FollowSettings,
    engine: Engine,
    reporter: FollowReporter,
    sentinel: Sentinel,
    setup: StreamSetup,
) -> None:
    """DDL that is not replayed yet may ask for copies, and those wait for the stream: it comes to
    where the source is now, and finishes them, before the end is chosen."""
    with connect(settings.source, "cutover") as source:
        lsn = read_end(source)
    place = place_of(setup, settings.directory, settings.target)

    def is_done() -> bool:
        if not has_applied(sentinel, setup, place, lsn):
            return False
        with connect(settings.target, "cutover") as target:
            states = read_table_states(target, place.stream)
        return not any(one.is_unfinished for one in states.values())

    _switch_on(sentinel)
    sentinel.set_endpos(None)
    while not _is_free(settings):
        if is_done():
            return
        time.sleep(POLL_SECONDS)
    run_until(Stream(replace(settings, keep_spool=True), engine), reporter, is_done)


def _switch_on(sentinel: Sentinel) -> None:
    """A stream that somebody has switched off would never come to its end."""
    state = sentinel.read()
    if not (state.apply and state.prefetch):
        log.warning("apply or prefetch was switched off; both are on now")
        sentinel.set_apply(True)
        sentinel.set_prefetch(True)


def _wait_for_other(settings: FollowSettings, sentinel: Sentinel, spool: Reader) -> bool:
    """Whether another process has followed to the end; waits for one that is still there."""
    log.info(
        "waiting until the millrace process that follows in this directory has applied everything"
    )
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
            "the end position was changed by another process", hint="run cutover again"
        )
    left = spool.plan(state.applied_lsn or 0, 1, endpos)
    if (state.flushed_lsn or 0) < endpos or left is not None:
        raise ServerError(
            f"the stream ended before {render_lsn(endpos)}",
            hint="run cutover again; `millrace stream sentinel get` shows how far the stream is",
        )
