"""What is asked of a running consolidation from another process.

Invariant: asking changes only what the registry and the sentinels keep for that purpose; the
process that runs the source does the work. `wait` returns only when everything that was committed
on a source before the call is on the target, tables that are copied again included.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from millrace.clone.ready import is_finished
from millrace.consolidate.config import Consolidation
from millrace.consolidate.registry import Registry, SourceState, source_directory
from millrace.consolidate.settings import SourceSettings, source_settings
from millrace.consolidate.status import read_records
from millrace.errors import ApplyError, ServerError, WorkDirError
from millrace.follow.bound_copy import read_stream
from millrace.follow.table_sync.resync import queue_tables
from millrace.log import LogSettings
from millrace.lsn import render_lsn
from millrace.postgres.wire.connect import connect, resolve
from millrace.postgres.wire.wal_end import read_end
from millrace.spool.place import place_of
from millrace.workdir.lock import read_holder
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.sync_request import SyncRequest, read_requests

POLL_SECONDS = 0.2
# A running process looks at the file every two seconds.
BEGIN_SECONDS = 60.0


def pause(directory: Path, name: str) -> None:
    """Receive a source and apply nothing, until it is resumed."""
    with Registry(directory) as registry:
        registry.require(name)
        registry.set_paused(name, True)


def resume(directory: Path, name: str) -> None:
    """Continue a source that is paused, halted or failed."""
    with Registry(directory) as registry:
        registry.require(name)
        registry.set_paused(name, False)
        registry.ask_retry(name)


def wait_until_begun(directory: Path, name: str) -> bool:
    """Whether a running process has begun the source; False if none runs."""
    deadline = time.monotonic() + BEGIN_SECONDS
    while read_holder(directory) is not None:
        record = read_records(directory).get(name)
        if record is not None and not record.is_removed:
            return True
        if time.monotonic() > deadline:
            raise ServerError(
                f"source {name} is not begun after {BEGIN_SECONDS:.0f} s",
                hint="the log of `millrace consolidate run` says why",
            )
        time.sleep(POLL_SECONDS)
    return False


def begin_again(directory: Path, name: str) -> None:
    """A source that was removed, and is in the file, is begun like a new one."""
    record = read_records(directory).get(name)
    if record is not None and record.state is SourceState.REMOVED:
        with Registry(directory) as registry:
            registry.forget(name)


def settings_of(consolidation: Consolidation, directory: Path, name: str) -> SourceSettings:
    """The settings of a source that was begun."""
    with Registry(directory) as registry:
        record = registry.require(name)
    source = consolidation.require(name)
    return source_settings(source, consolidation, record.plan, directory, LogSettings())


def resync(
    consolidation: Consolidation, directory: Path, name: str, tables: Collection[tuple[str, str]]
) -> list[SyncRequest]:
    """Queue tables of a source to be copied again while it is followed; without names, all."""
    settings = settings_of(consolidation, directory, name)
    follow = settings.follow()
    if not tables:
        with Sentinel(settings.directory) as sentinel:
            from millrace.workdir.followed_table import read_followed

            tables = {
                (one.schema, one.name)
                for one in read_followed(sentinel).values()
                if one.root_oid is None
            }
    return queue_tables(follow, tables)


def wait(
    consolidation: Consolidation,
    directory: Path,
    *,
    timeout_seconds: float | None,
) -> None:
    """Until everything that is committed now, on every source of the file, is on the target."""
    ends = {}
    known = read_records(directory)
    for name, source in consolidation.sources.items():
        if name in known and known[name].state is SourceState.REMOVED:
            continue
        with connect(resolve(source.dsn), "consolidate") as connection:
            ends[name] = read_end(connection)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    waiting = dict(ends)
    while waiting:
        _require_well(directory, waiting)
        for name, lsn in list(waiting.items()):
            if _has_applied(consolidation, source_directory(directory, name), lsn):
                del waiting[name]
        if not waiting:
            return
        if deadline is not None and time.monotonic() > deadline:
            left = [f"{name} up to {render_lsn(lsn)}" for name, lsn in waiting.items()]
            raise ServerError(
                f"not yet applied: {', '.join(left)}",
                hint="wait longer: --timeout; `millrace consolidate status` shows the lag",
            )
        time.sleep(POLL_SECONDS)


def _require_well(directory: Path, names: Collection[str]) -> None:
    if read_holder(directory) is None:
        raise WorkDirError(
            f"nothing runs in {directory}", hint="start it: millrace consolidate run"
        )
    with Registry(directory) as registry:
        known = registry.read()
    for name in names:
        record = known.get(name)
        if record is None:
            continue
        is_down = record.state in (SourceState.HALTED, SourceState.FAILED)
        if is_down and not record.is_retried:
            raise ApplyError(
                f"source {name} is {record.state}: {record.error}",
                hint=record.hint or f"mend it, then: millrace consolidate resume {name}",
                source=name,
            )
        if record.is_paused:
            raise ApplyError(
                f"source {name} is paused", hint=f"millrace consolidate resume {name}", source=name
            )


def _has_applied(consolidation: Consolidation, directory: Path, lsn: int) -> bool:
    setup = read_stream(directory)
    if setup is None or not is_finished(directory):
        return False
    with Sentinel(directory) as sentinel:
        # In this order: what was complete then is in the spool that is looked at afterwards.
        complete = sentinel.read_source().complete_lsn or 0
        state = sentinel.read()
        if read_requests(sentinel, unfinished=True):
            return False
    if max(complete, state.flushed_lsn or 0) < lsn:
        return False
    place = place_of(setup, directory, resolve(consolidation.target))
    with closing(place.open_reader()) as spool:
        return spool.plan(max(state.applied_lsn or 0, setup.start_lsn), 1, lsn) is None
