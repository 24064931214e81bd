"""What is asked of a running consolidation from another process.

Invariant: asking changes only what the registry and the sentinels keep for that purpose; the
process that runs the source does the work. `wait` returns only when everything that was committed
on a source before the call is on the target, tables that are copied again included.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from millrace.clone.ready import is_finished
from millrace.consolidate.config import Consolidation
from millrace.consolidate.registry import Registry, SourceState, source_directory
from millrace.consolidate.settings import SourceSettings, source_settings
from millrace.consolidate.status import read_records
from millrace.errors import ApplyError, ServerError, WorkDirError
from millrace.follow.bound_copy import read_stream
from millrace.follow.lookout import Lookout
from millrace.follow.reached import has_applied
from millrace.follow.stream import require_setup
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
    if not record.is_planned:
        raise WorkDirError(
            f"source {name} is not planned yet: {record.error or 'its server was not reached'}",
            hint="`millrace consolidate status` shows why",
        )
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
            lookout = Lookout(follow, require_setup(sentinel, settings.directory), sentinel)
            tables = lookout.read_known()
    return queue_tables(follow, tables)


def wait(
    consolidation: Consolidation,
    directory: Path,
    *,
    timeout_seconds: float | None,
) -> None:
    """Until everything that is committed now, on every source of the file, is on the target."""
    ends = {}
    gone = {name for name, record in read_records(directory).items() if record.is_gone}
    for name, source in consolidation.sources.items():
        if name in gone:
            continue
        try:
            with connect(resolve(source.dsn), "consolidate") as connection:
                ends[name] = read_end(connection)
        except ServerError:
            _require_well(directory, [name])
            raise
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    waiting = dict(ends)
    while waiting:
        _require_well(directory, waiting)
        for name, lsn in list(waiting.items()):
            if _has_applied(
                consolidation, source_directory(directory, name), lsn
            ) and not _has_unfollowed(consolidation, directory, name):
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
        if record is None or record.is_retried:
            continue  # it is about to begin, or to go on
        if record.state in (SourceState.HALTED, SourceState.FAILED):
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
    place = place_of(setup, directory, resolve(consolidation.target))
    with Sentinel(directory) as sentinel:
        return has_applied(sentinel, setup, place, lsn)


def _has_unfollowed(consolidation: Consolidation, directory: Path, name: str) -> bool:
    """Whether the source has tables that are not followed yet: those that came, or were made anew,
    since it was looked at for them. They are copied soon, or halt the source."""
    settings = settings_of(consolidation, directory, name)
    with Sentinel(settings.directory) as sentinel:
        setup = require_setup(sentinel, settings.directory)
        if Lookout(settings.follow(), setup, sentinel).read_unfollowed():
            return True
        # One of them may have been queued, and followed, meanwhile.
        return bool(read_requests(sentinel, unfinished=True))
