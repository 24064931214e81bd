"""The end of a stream: whether the requested position is reached, and what is done then.

Invariant: whoever says that an end position is reached has set the target's sequences; a target
that is past an end position is never said to have ended there; tables that may differ are named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from millrace.apply.driver import Catchup
from millrace.apply.table_state import read_table_states
from millrace.apply.task import log_retry
from millrace.errors import MillraceError, MismatchError, ServerError, WorkDirError
from millrace.follow.audit.closing import audit
from millrace.follow.audit.finding import Finding
from millrace.follow.sequences import set_final_sequences
from millrace.follow.settings import FollowSettings
from millrace.follow.table_sync.audit import find_unsynced, require_synced
from millrace.follow.table_sync.source import has_table
from millrace.lsn import render_lsn
from millrace.postgres.wire.connect import connect
from millrace.retry import with_retries
from millrace.spool.interface import Reader
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.sync_request import read_requests

log = logging.getLogger(__name__)

T = TypeVar("T")

_PLANNED_BYTES = 1 << 40


@dataclass(frozen=True)
class Ending:
    """What was done at the end position, and what was found."""

    sequences: int
    findings: tuple[Finding, ...]


@contextmanager
def asked_endpos(sentinel: Sentinel, endpos: int | None) -> Iterator[None]:
    """The end position that was asked for is in its place; if what is begun with it fails, the
    one before is."""
    before = sentinel.read().endpos
    if endpos is not None:
        sentinel.set_endpos(endpos)
    try:
        yield
    except BaseException:
        if endpos is not None:
            take_back_endpos(sentinel, endpos, before)
        raise


def take_back_endpos(sentinel: Sentinel, endpos: int, before: int | None) -> None:
    """Let the stream continue: the end before, if that is yet to come, or none. One that somebody
    else has set meanwhile stays."""
    if sentinel.read().endpos == endpos:
        sentinel.set_endpos(before if before is not None and before > endpos else None)


def require_ahead(spool: Reader, setup: StreamSetup, endpos: int, applied_lsn: int) -> None:
    """Raise if the target holds changes from after the end position."""
    if endpos >= applied_lsn:
        return
    warn_before_begin(setup, endpos)
    changes = _count_changes(spool, max(endpos, setup.start_lsn), applied_lsn)
    if changes == 0:
        log.info(
            "the end position %s is before %s, which is applied already; nothing changed between",
            render_lsn(endpos),
            render_lsn(applied_lsn),
        )
        return
    found = f", with {changes:,} changes between" if changes else ""
    raise _passed(endpos, f"the target is at {render_lsn(applied_lsn)} already{found}")


def warn_before_begin(setup: StreamSetup, endpos: int) -> None:
    """Say it if the copy itself is past the end position: it can't be of an earlier moment than
    its own."""
    if endpos < setup.start_lsn:
        log.warning(
            "the end position %s is before the copy, which holds everything up to %s",
            render_lsn(endpos),
            render_lsn(setup.start_lsn),
        )


def require_reached(sentinel: Sentinel, spool: Reader, endpos: int, applied_lsn: int) -> None:
    """Raise unless everything up to the end position was received and applied."""
    received = max(sentinel.read().flushed_lsn or 0, spool.extent().complete_lsn)
    if received < endpos:
        raise ServerError(
            f"the stream ended before {render_lsn(endpos)}: nothing is missing up to "
            f"{render_lsn(received)}, and the rest was not received",
            hint="`millrace follow` receives it, or `millrace stream receive`; `millrace stream "
            "sentinel get` shows how far the stream is",
        )
    if spool.plan(applied_lsn, 1, endpos) is not None:
        raise ServerError(
            f"the stream ended at {render_lsn(applied_lsn)}, before {render_lsn(endpos)}",
            hint="run the same command again",
        )


def finish(
    settings: FollowSettings,
    setup: StreamSetup,
    sentinel: Sentinel,
    endpos: int,
    *,
    waits: bool = True,
) -> Ending:
    """What is left to do at the end position; `waits` as for `audit`."""

    def set_sequences() -> int:
        return set_final_sequences(settings)

    def look() -> tuple[Finding, ...]:
        return audit(settings, setup, sentinel, endpos, waits=waits)

    count = _do(set_sequences, endpos, "the target's sequences are not set")
    log.info("set %d sequences of the target to the source's values", count)
    return Ending(count, _do(look, endpos, "the source's tables were not looked at"))


def end_stream(
    settings: FollowSettings,
    setup: StreamSetup,
    sentinel: Sentinel,
    catchup: Catchup,
    *,
    waits: bool,
) -> Ending:
    """What an end position takes, when everything is received and applied; `waits` as for
    `audit`."""
    endpos = sentinel.read().endpos
    if endpos is None:
        raise WorkDirError(
            "the end position was removed after the stream had reached it",
            hint="run `millrace follow` again: it continues from there",
        )
    require_reached(sentinel, catchup.spool, endpos, catchup.position)
    require_ahead(catchup.spool, setup, endpos, catchup.furthest)
    _require_synced(settings, sentinel, catchup.stream, endpos)
    return finish(settings, setup, sentinel, endpos, waits=waits)


def _require_synced(settings: FollowSettings, sentinel: Sentinel, stream: str, endpos: int) -> None:
    """Raise if a table was to be copied again and is not at the end position."""
    waiting = read_requests(sentinel, unfinished=True)
    with connect(settings.target, "sync") as target:
        states = read_table_states(target, stream)
    unsynced = [
        one
        for one in find_unsynced(states, waiting, endpos)
        if (one.schema, one.name) not in settings.left.tables
        and one.label not in settings.accepted
        and has_table(settings.source, (one.schema, one.name))
    ]
    require_synced(unsynced, endpos)


def _do(work: Callable[[], T], endpos: int, failed: str) -> T:
    try:
        return with_retries(work, on_retry=log_retry)
    except MillraceError as error:
        raise ServerError(
            f"everything up to {render_lsn(endpos)} is applied, but {failed}: {error}",
            hint="fix that and run the same command again before anything writes to the target",
            **error.facts,
        ) from error


def _count_changes(spool: Reader, after_lsn: int, until_lsn: int) -> int | None:
    """Changes of the transactions between; None if the spool no longer knows."""
    count, lsn = 0, after_lsn
    try:
        while (found := spool.plan(lsn, _PLANNED_BYTES, until_lsn)) is not None:
            count, lsn = count + found.changes, found.end_lsn
    except WorkDirError:
        return None
    # What is applied and not in the spool was pruned, or lost with it.
    return count if lsn == until_lsn else None


def _passed(endpos: int, how: str) -> MismatchError:
    return MismatchError(
        f"the stream can't end at {render_lsn(endpos)}: {how}",
        hint="choose a later end position; `millrace stream sentinel set endpos --current` takes "
        "the source's current position",
    )
