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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psycopg import pq
from psycopg.pq.abc import PGconn

from millrace.config.dsn import Dsn
from millrace.errors import ServerError, SnapshotLost, WorkDirError
from millrace.postgres.connect import APPLICATION, error_for
from millrace.postgres.libpq import result_error
from millrace.postgres.quote import ident
from millrace.snapshot.export import open_snapshot
from millrace.workdir.lock import PRIVATE

log = logging.getLogger(__name__)

FILE = "snapshot.json"
CHECK_SECONDS = 1.0
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Held:
    """A snapshot that a living process holds."""

    id: str
    pid: int
    source: str
    since: str
    # For a snapshot that came with a replication slot.
    slot: str | None = None
    plugin: str | None = None
    start_lsn: str | None = None


def read_held(directory: Path) -> Held | None:
    """The snapshot held for this work directory, if its process lives."""
    path = directory / FILE
    try:
        with path.open() as file:
            if _is_unlocked(file):
                return None  # left behind by a process that was killed
            return Held(**json.load(file))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise WorkDirError(f"{path} is damaged: {error}", hint="remove it") from error


def stop_held(directory: Path) -> Held:
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
) -> Iterator[tuple[Held, Callable[[], None]]]:
    """Hold a snapshot; yields (Held, check), where check raises SnapshotLost.

    `before_slot` makes what must be there before the slot: the publications.
    """
    directory.mkdir(PRIVATE, parents=True, exist_ok=True)
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
        file.seek(0)
        file.truncate()
        try:
            if slot is not None:
                before_slot()
            with _session(dsn, slot, plugin) as (facts, check):
                held = Held(pid=os.getpid(), source=dsn.identity(), since=_now(), **facts)
                json.dump(asdict(held), file, indent=2)
                file.write("\n")
                file.flush()
                yield held, check
        finally:
            (directory / FILE).unlink(missing_ok=True)


@contextmanager
def _session(dsn: Dsn, slot: str | None, plugin: str) -> Iterator[Any]:
    if slot is None:
        with open_snapshot(dsn) as snapshot:
            yield {"id": snapshot.id}, snapshot.check
        return
    connection = _open_replication(dsn)
    try:
        yield _create_slot(connection, slot, plugin), lambda: _check_silent(connection)
    finally:
        connection.finish()


def _open_replication(dsn: Dsn) -> PGconn:
    conninfo = dsn.conninfo(replication="database", application_name=f"{APPLICATION} snapshot")
    connection = pq.PGconn.connect(conninfo.encode())
    if connection.status != pq.ConnStatus.OK:
        message = connection.error_message.decode(errors="replace").strip()
        connection.finish()
        raise error_for(None, message, f"can't open a replication connection to {dsn}")
    return connection


def _create_slot(connection: PGconn, slot: str, plugin: str) -> dict[str, Any]:
    lsn, snapshot = _create(connection, slot, plugin, "export")
    if not lsn or not snapshot:
        raise ServerError(f"replication slot {slot} came without a snapshot")
    return {
        "id": snapshot.decode(),
        "slot": slot,
        "plugin": plugin,
        "start_lsn": lsn.decode(),
    }


def create_slot(dsn: Dsn, slot: str, plugin: str) -> str:
    """A slot without a snapshot; the position from which on it has every change."""
    connection = _open_replication(dsn)
    try:
        lsn, _ = _create(connection, slot, plugin, "nothing")
    finally:
        connection.finish()
    if not lsn:
        raise ServerError(f"replication slot {slot} came without a position")
    return lsn.decode()


def _create(
    connection: PGconn, slot: str, plugin: str, snapshot: str
) -> tuple[bytes | None, bytes | None]:
    statement = f"CREATE_REPLICATION_SLOT {ident(slot)} LOGICAL {ident(plugin)} "
    if connection.server_version >= 150000:
        options = [f"SNAPSHOT '{snapshot}'"]
        # A standby that keeps slots in step (17+) takes this one over when it is promoted.
        if connection.server_version >= 170000 and not _is_standby(connection):
            options.append("FAILOVER true")
        statement += f"({', '.join(options)})"
    else:
        statement += {"export": "EXPORT_SNAPSHOT", "nothing": "NOEXPORT_SNAPSHOT"}[snapshot]
    result = connection.exec_(statement.encode())
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise result_error(result, f"creating replication slot {slot}")
    return result.get_value(0, 1), result.get_value(0, 2)


def _is_standby(connection: PGconn) -> bool:
    result = connection.exec_(b"SELECT pg_is_in_recovery()")
    return result.get_value(0, 0) == b"t"


def _check_silent(connection: PGconn) -> None:
    """A walsender that waits for commands says nothing: any word, or a hang-up, is the end."""
    readable, _, _ = select.select([connection.socket], [], [], 0)
    if readable:
        raise SnapshotLost(
            "the source closed the replication session that holds the snapshot",
            hint="drop the slot (SELECT pg_drop_replication_slot(...)), and start again",
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
