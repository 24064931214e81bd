"""Tables copied again on request: by `millrace stream resync`, and before a cut-over.

Invariant: whoever waits here returns when the tables are followed again, or raises what stopped
that. A process that follows the stream does the work; if there is none, it is done here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import ExitStack, closing

from millrace.apply.table_state import TableName, read_table_states, write_abandoned
from millrace.engine import Engine
from millrace.errors import ConfigError, WorkDirError
from millrace.follow.settings import FollowSettings
from millrace.follow.stream import open_catchup, require_setup
from millrace.follow.table_sync.driver import TableSync
from millrace.follow.table_sync.source import current_lsn, find_table
from millrace.follow.table_sync.thread import SyncThread
from millrace.lsn import render_lsn
from millrace.postgres.wire.connect import connect
from millrace.spool.place import place_of
from millrace.workdir.lock import open_lock, read_holder
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.sync_request import (
    RequestState,
    SyncRequest,
    note_ended,
    read_requests,
    request_sync,
)

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
REASON = "requested by `stream resync`"


def queue_tables(settings: FollowSettings, tables: Collection[TableName]) -> list[SyncRequest]:
    """Queue tables that can be copied again; nothing is queued if one can't."""
    with Sentinel(settings.directory) as sentinel:
        require_setup(sentinel, settings.directory)
        endpos = sentinel.read().endpos
        if endpos is not None and current_lsn(settings.source) >= endpos:
            raise _too_late(endpos)
        for name in tables:
            if name in settings.left.tables:
                raise ConfigError(f"{'.'.join(name)} is left out by --filters")
            find_table(settings.source, name)
        return [request_sync(sentinel, *name, REASON) for name in tables]


def wait_for_syncs(
    settings: FollowSettings, engine: Engine, wanted: Collection[int] | None = None
) -> None:
    """Until the requests `wanted`, or all, are done: by the process that follows, or by us."""
    told: dict[int, str] = {}
    with Sentinel(settings.directory) as sentinel:
        while waiting := _unfinished(sentinel, wanted):
            with ExitStack() as stack:
                try:
                    stack.enter_context(open_lock(settings.directory))
                except WorkDirError:
                    if read_holder(settings.directory) is None:
                        raise
                    _tell_steps(waiting, told)
                    time.sleep(POLL_SECONDS)
                    continue
                sync_alone(settings, engine, sentinel)
            if _unfinished(sentinel, wanted):
                raise _held_back(sentinel)


def sync_alone(settings: FollowSettings, engine: Engine, sentinel: Sentinel) -> None:
    """Do what is queued, in a directory that we hold, with nobody following."""
    setup = require_setup(sentinel, settings.directory)
    engine.start()
    with closing(open_catchup(settings, setup, engine, sentinel)) as catchup:
        sync = TableSync(settings, setup, engine, sentinel, catchup)
        sync.prepare()
        thread = SyncThread(sync)
        thread.start()
        try:
            thread.finish()
        finally:
            thread.stop()


def cancel_tables(settings: FollowSettings, tables: Collection[TableName]) -> list[SyncRequest]:
    """Take requests back; those that were. A table whose copy has begun is not followed any more,
    until it is asked for again."""
    with ExitStack() as stack:
        sentinel = stack.enter_context(Sentinel(settings.directory))
        setup = require_setup(sentinel, settings.directory)
        found = [one for one in _unfinished(sentinel, None) if (one.schema, one.name) in tables]
        if any(one.state is RequestState.RUNNING for one in found):
            # Who copies it must not continue.
            stack.enter_context(open_lock(settings.directory))
        stream = place_of(setup, settings.directory, settings.target).stream
        with connect(settings.target, "sync") as target:
            states = read_table_states(target, stream)
            for name in tables:
                state = states.get(name)
                if state is not None and state.is_unfinished:
                    write_abandoned(target, stream, name)
                    log.warning(
                        "%s: its copy had begun, and its changes are not applied any more; to have "
                        "it followed again, ask for another copy",
                        state.label,
                    )
        for request in found:
            note_ended(sentinel, request.id, RequestState.CANCELLED)
    return found


def _unfinished(sentinel: Sentinel, wanted: Collection[int] | None) -> list[SyncRequest]:
    waiting = read_requests(sentinel, unfinished=True)
    return [one for one in waiting if wanted is None or one.id in wanted]


def _held_back(sentinel: Sentinel) -> WorkDirError:
    """Why nothing was done, although we could have."""
    state = sentinel.read()
    if state.apply and state.endpos is not None:
        return _too_late(state.endpos)
    return WorkDirError(
        "apply is switched off, so no table is copied",
        hint="switch it on: millrace stream sentinel set apply on",
    )


def _too_late(endpos: int) -> WorkDirError:
    return WorkDirError(
        f"the stream ends at {render_lsn(endpos)}, and the source is past that position: a copy "
        "made now would be newer than the stream's end",
        hint="remove the end position: millrace stream sentinel set endpos --none",
    )


def _tell_steps(waiting: list[SyncRequest], told: dict[int, str]) -> None:
    for request in waiting:
        step = request.step or f"is {request.state}"
        if told.get(request.id) != step:
            log.info("%s: the process that follows in this directory: %s", request.label, step)
            told[request.id] = step
