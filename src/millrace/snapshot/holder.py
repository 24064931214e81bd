"""A process of its own that holds a snapshot, and the file by which others find it.

Invariant: the file names a snapshot only while the process that holds it lives and its
session on the source is open; losing the session ends the process with an error at once.

With a replication slot the snapshot is exported by CREATE_REPLICATION_SLOT, so that the
changes after it begin exactly where it ends. That session must stay silent: any command on it
would end the snapshot.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psycopg.pq.abc import PGconn

from millrace.config.dsn import Dsn
from millrace.errors import InvariantError, MillraceError, SnapshotLost, WorkDirError
from millrace.lsn import render_lsn
from millrace.postgres.quote import ident
from millrace.postgres.wire import slot_creation as creation
from millrace.postgres.wire.libpq import execute
from millrace.postgres.wire.slot_creation import NewSlot, SlotSnapshot
from millrace.postgres.wire.walsender import open_replication
from millrace.room import AGAIN, writing
from millrace.snapshot.export import open_snapshot
from millrace.workdir.place import make_private

log = logging.getLogger(__name__)

FILE = "snapshot.json"
# What a run tells its snapshot process when it has read every row.
GIVEN_BACK = signal.SIGUSR1
CHECK_SECONDS = 1.0
# How often a slot is made again because tables were created meanwhile.
SLOT_ATTEMPTS = 3
# Of a run's own: with what it removes from the source.
STOP_SECONDS = 60.0
# More than the file will take.
ROOM_BYTES = 8192


@dataclass(frozen=True)
class SnapshotHolder:
    """A snapshot that a living process holds."""

    id: str
    pid: int
    source: str
    since: str
    # For a snapshot that came with a replication slot.
    slot: str | None = None
    plugin: str | None = None
    start_lsn: str | None = None
    # The server process of the session, by which its cost is found.
    backend_pid: int = 0
    # Of a run's own snapshot process: how long it waits for somebody to continue. None for one that
    # is held by hand, until it is stopped.
    keep_seconds: float | None = None

    @property
    def is_of_run(self) -> bool:
        """Whether a run started the process, and ends it when it has read every row."""
        return self.keep_seconds is not None


def read_held(directory: Path) -> SnapshotHolder | None:
    """The snapshot held for this work directory, if its process lives."""
    path = directory / FILE
    try:
        with path.open() as file:
            if _is_unlocked(file):
                return None  # left behind by a process that was killed
            text = file.read()
            if not text:
                raise WorkDirError(
                    f"a snapshot is being taken for {directory}, and not held yet",
                    hint="run the same command again when `millrace snapshot` has printed its id",
                )
            return SnapshotHolder(**json.loads(text))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise WorkDirError(f"{path} is damaged: {error}", hint="remove it") from error


def give_back(directory: Path, held: SnapshotHolder) -> bool:
    """Tell a run's own process that every row is copied: it ends. Returns at once; False if it
    holds this snapshot no more."""
    now = read_held(directory)
    if now is None or now.id != held.id or not now.is_of_run:
        return False
    with suppress(ProcessLookupError):
        os.kill(now.pid, GIVEN_BACK)
    return True


def stop_held(directory: Path) -> SnapshotHolder:
    """Tell the holder to let go, and wait until it has."""
    held = read_held(directory)
    if held is None:
        raise WorkDirError(f"no snapshot is held for {directory}", hint="check --dir")
    os.kill(held.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while read_held(directory) is not None:
        if time.monotonic() > deadline:
            raise WorkDirError(f"the holder, process {held.pid}, does not stop")
        time.sleep(0.05)
    return held


@contextmanager
def hold(
    directory: Path,
    dsn: Dsn,
    *,
    slot: str | None = None,
    plugin: str = "pgoutput",
    before_slot: Callable[[], None] = lambda: None,
    is_slot_whole: Callable[[str], bool] = lambda snapshot: True,
    slot_timeout_seconds: float | None = None,
    keep_seconds: float | None = None,
) -> Iterator[tuple[SnapshotHolder, Callable[[], None]]]:
    """Hold a snapshot; yields (Held, check), where check raises SnapshotLost.

    `before_slot` makes what must be there before the slot: the publications. `is_slot_whole` says
    whether they have everything that is in the slot's snapshot; if not, both are made again.
    """
    with writing(directory / FILE, then=AGAIN):
        make_private(directory)
    with (directory / FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = read_held(directory)
            raise WorkDirError(
                f"snapshot {held.id if held else ''} is already held for {directory}"
                f" by process {held.pid if held else ''}",
                hint="use it, or end it with: millrace snapshot --stop",
            ) from None
        with writing(directory / FILE, then=AGAIN):
            # A full disk is noticed before there is a slot. Not through a buffer, which it would
            # make fail again when it is closed.
            os.write(file.fileno(), bytes(ROOM_BYTES))
            os.ftruncate(file.fileno(), 0)
        try:
            asked = _Asked(dsn, slot, plugin, before_slot, is_slot_whole, slot_timeout_seconds)
            with _session(asked) as (facts, check):
                held = SnapshotHolder(
                    pid=os.getpid(),
                    source=dsn.identity(),
                    since=_now(),
                    keep_seconds=keep_seconds,
                    **facts,
                )
                with writing(directory / FILE, then=AGAIN):
                    text = json.dumps(asdict(held), indent=2) + "\n"
                    os.write(file.fileno(), text.encode())
                yield held, check
        finally:
            (directory / FILE).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Asked:
    """A snapshot as it was asked for."""

    dsn: Dsn
    slot: str | None
    plugin: str
    before_slot: Callable[[], None]
    is_slot_whole: Callable[[str], bool]
    timeout_seconds: float | None


@contextmanager
def _session(asked: _Asked) -> Iterator[Any]:
    if asked.slot is None:
        with open_snapshot(asked.dsn) as snapshot:
            backend = snapshot.connection.info.backend_pid
            yield {"id": snapshot.id, "backend_pid": backend}, snapshot.check
        return
    connection, made = _make_slot(asked, asked.slot)
    try:
        facts = {
            "id": made.snapshot,
            "slot": asked.slot,
            "plugin": asked.plugin,
            "start_lsn": render_lsn(made.start_lsn),
            "backend_pid": connection.backend_pid,
        }
        yield facts, lambda: _check_silent(connection)
    finally:
        connection.finish()


def _make_slot(asked: _Asked, slot: str) -> tuple[PGconn, NewSlot]:
    """The slot, and the session that holds its snapshot. The last attempt counts as it is: what it
    lacks is taken up by those who follow."""
    for attempt in range(1, SLOT_ATTEMPTS + 1):
        asked.before_slot()
        connection = open_replication(asked.dsn, "snapshot", "UTF8")
        made: NewSlot | None = None
        try:
            made = creation.create_slot(
                connection,
                asked.dsn,
                slot,
                asked.plugin,
                snapshot=SlotSnapshot.EXPORT,
                timeout_seconds=asked.timeout_seconds,
            )
            if asked.is_slot_whole(made.snapshot or "") or attempt == SLOT_ATTEMPTS:
                return connection, made
            log.info("making replication slot %s again, for tables that are new", slot)
            execute(connection, f"DROP_REPLICATION_SLOT {ident(slot)}")
        except BaseException:
            if made is not None:
                with suppress(MillraceError):
                    execute(connection, f"DROP_REPLICATION_SLOT {ident(slot)}")
            connection.finish()
            raise
        connection.finish()
    raise InvariantError("no attempt was the last")


def create_slot(
    dsn: Dsn, slot: str, plugin: str, *, timeout_seconds: float | None = None
) -> NewSlot:
    """A slot without a snapshot."""
    connection = open_replication(dsn, "slot", "UTF8")
    try:
        return creation.create_slot(
            connection,
            dsn,
            slot,
            plugin,
            snapshot=SlotSnapshot.NOTHING,
            timeout_seconds=timeout_seconds,
        )
    finally:
        connection.finish()


def _check_silent(connection: PGconn) -> None:
    """A walsender that waits for commands says nothing: any word, or a hang-up, is the end."""
    readable, _, _ = select.select([connection.socket], [], [], 0)
    if readable:
        raise SnapshotLost(
            "the source closed the replication session that holds the snapshot",
            hint="start over with --restart: it drops the slot",
        )


def _is_unlocked(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
