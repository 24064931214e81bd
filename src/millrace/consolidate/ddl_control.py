"""What people do about captured DDL of a source: look, edit, skip, try again.

Invariant: asking changes only what the target keeps for that purpose, and only of the command that
the source is halted at; the process that runs the source does the work, in the transaction that
moves its position past the command.
"""

from __future__ import annotations

import getpass
import socket
import time
from pathlib import Path

from millrace.consolidate.config import Consolidation
from millrace.consolidate.control import resume
from millrace.consolidate.registry import source_directory
from millrace.ddl.history import Action, DdlRecord, decide, read_history
from millrace.errors import WorkDirError
from millrace.follow.bound_copy import read_stream
from millrace.postgres.origin import stream_name
from millrace.postgres.wire.connect import connect, resolve
from millrace.workdir.lock import read_holder

# How long a process that runs may take to get to a command that was decided about.
OUTCOME_SECONDS = 60.0
POLL_SECONDS = 0.2


def stream_of(directory: Path, name: str) -> str:
    """What the stream of a source is called on the target."""
    setup = read_stream(source_directory(directory, name))
    if setup is None:
        raise WorkDirError(
            f"source {name} has no stream yet in {directory}",
            hint="check --dir; `millrace consolidate status` shows what it does",
        )
    return stream_name(setup.source, setup.slot_name, setup.start_lsn)


def read_ddl(
    consolidation: Consolidation, directory: Path, name: str, *, limit: int | None = None
) -> list[DdlRecord]:
    """What became of the captured commands of a source, the newest first."""
    stream = stream_of(directory, name)
    with connect(resolve(consolidation.target), "consolidate") as connection:
        return read_history(connection, stream, limit=limit)


def read_pending(consolidation: Consolidation, directory: Path, name: str) -> DdlRecord:
    """The command that a source is halted at."""
    found = next(
        (one for one in read_ddl(consolidation, directory, name, limit=1) if one.status.is_pending),
        None,
    )
    if found is None:
        raise WorkDirError(
            f"source {name} is not halted at a captured command",
            hint=f"`millrace consolidate ddl list {name}` shows what became of its commands",
        )
    return found


def decide_ddl(
    consolidation: Consolidation,
    directory: Path,
    name: str,
    action: Action,
    *,
    lsn: str = "",
    text: str = "",
) -> DdlRecord:
    """Decide about the command that a source is halted at, and let it go on; `lsn`: which one that
    must still be."""
    pending = read_pending(consolidation, directory, name)
    if lsn and pending.lsn != lsn:
        raise WorkDirError(
            f"source {name} is now halted at {pending.lsn}, not at {lsn}",
            hint=f"look at it first: millrace consolidate ddl show {name}",
        )
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    stream = stream_of(directory, name)
    with connect(resolve(consolidation.target), "consolidate") as connection:
        if not decide(connection, stream, pending.lsn, action, text, by):
            raise WorkDirError(
                f"the command at {pending.lsn} is not pending any more",
                hint=f"`millrace consolidate ddl list {name}` shows what became of it",
            )
    resume(directory, name)
    return pending


def await_ddl(
    consolidation: Consolidation, directory: Path, name: str, pending: DdlRecord
) -> DdlRecord | None:
    """What became of a command after somebody has decided about it; None if no process runs that
    could try it, or it has not got to it in time."""
    stream = stream_of(directory, name)
    deadline = time.monotonic() + OUTCOME_SECONDS
    while read_holder(directory) is not None and time.monotonic() < deadline:
        with connect(resolve(consolidation.target), "consolidate") as connection:
            (found,) = read_history(connection, stream, lsn=pending.lsn)
        if found.changed_at != pending.changed_at:
            return found
        time.sleep(POLL_SECONDS)
    return None
