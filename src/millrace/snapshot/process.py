"""The snapshot process of a run: it holds the run's snapshot, and outlives the run.

Invariant: until the snapshot can be used, the process ends when whoever started it ends, however
that happens; from then on it does not need them. It ends by itself when it is told to, when no
process has worked in the directory for as long as it was to keep, when its session on the source
or its directory is gone. Ending before every row is read, it says so in its log and in
`snapshot-ended.json`, and takes back what it made on the source.

It is started, not forked: a fork would keep the sockets of the JVM, and with them the JVM. The two
talk over a socket pair, whose end is how a process learns that the other one was killed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol, TextIO

from millrace.config.dsn import Dsn
from millrace.config.duration import render_duration
from millrace.errors import InvariantError, MillraceError, ServerError, WorkDirError
from millrace.log import setup_logging
from millrace.snapshot.ended import SnapshotEnd, forget_end, write_end
from millrace.snapshot.holder import CHECK_SECONDS, FILE, GIVEN_BACK, SnapshotHolder, hold
from millrace.workdir.lock import open_lock, read_holder

log = logging.getLogger(__name__)

LOG_FILE: Final = "snapshot.log"
# A night, and the morning after it.
KEEP_SECONDS: Final = 12 * 3600.0
# How long a run may take from its snapshot to its first step.
BEGIN_SECONDS = 60.0
# How long a statement of the source may take to let go of a process that is to end.
LEAVE_SECONDS = 30.0
# How often, and for how long, what was made on the source is taken back if that fails.
RETRY_SECONDS = 5.0
RETRY_FOR_SECONDS = 3600.0

Opened = AbstractContextManager[tuple[SnapshotHolder, Callable[[], None]]]


class Holding(Protocol):
    """What a snapshot process holds; it travels to the process by pickle."""

    @property
    def directory(self) -> Path: ...
    @property
    def keep_seconds(self) -> float: ...
    def open(self) -> Opened:
        """The snapshot, and how to check that it is there."""

    @property
    def leaves_something(self) -> bool:
        """Whether there is something to take back."""

    def take_back(self, held: SnapshotHolder) -> str | None:
        """Remove what was made for the snapshot on the source, unless the run has every row: what
        was removed, None if the run has no more need of the snapshot. Raises to be tried again."""


@dataclass(frozen=True)
class PlainHolding:
    """A snapshot without a slot: nothing is left on the source."""

    dsn: Dsn
    directory: Path
    keep_seconds: float = KEEP_SECONDS

    def open(self) -> Opened:
        return hold(self.directory, self.dsn, keep_seconds=self.keep_seconds)

    @property
    def leaves_something(self) -> bool:
        return False

    def take_back(self, held: SnapshotHolder) -> str | None:
        return ""


def start(holding: Holding) -> SnapshotHolder:
    """Start a process that holds it; returns when the snapshot can be used, or raises."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        starting = subprocess.Popen(
            [sys.executable, "-m", __name__, str(holding.directory), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            # Not the terminal's: Ctrl-C and a closed window are not for it.
            start_new_session=True,
        )
        theirs.close()
        with Connection(ours.detach()) as link:
            try:
                link.send(holding)
                starting.wait()  # it has left a process that is nobody's child
                return _read_reply(link)
            except (EOFError, OSError) as error:
                raise ServerError(
                    "the snapshot process ended before it had a snapshot",
                    hint="somebody has killed it; run the same command again",
                ) from error


def _read_reply(link: Connection) -> SnapshotHolder:
    while True:
        reply = link.recv()
        if isinstance(reply, logging.LogRecord):
            logging.getLogger(reply.name).handle(reply)
        elif isinstance(reply, MillraceError):
            raise reply
        else:
            assert isinstance(reply, SnapshotHolder)
            return reply


class _LinkHandler(logging.Handler):
    """What is logged before the snapshot exists is for the one who waits for it."""

    def __init__(self, link: Connection) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self._link.send(record)


# Whether a signal interrupts what the main thread does; later it is waited for.
_interrupts = True


@dataclass
class _Told:
    """What signals have told the process."""

    stop: threading.Event
    is_given_back: bool = False

    def note(self, number: int, _frame: object) -> None:
        self.is_given_back = number == GIVEN_BACK
        self.stop.set()
        if _interrupts:
            raise KeyboardInterrupt


def main() -> None:
    """The process: `python -m millrace.snapshot.process DIRECTORY DESCRIPTOR`."""
    if os.fork():
        os._exit(0)
    told = _Told(threading.Event())
    for number in (signal.SIGTERM, signal.SIGINT, GIVEN_BACK):
        signal.signal(number, told.note)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    link = Connection(int(sys.argv[2]))
    try:
        _hold(link.recv(), link, told)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
    except Exception as error:
        with suppress(OSError):  # nobody waits any more
            link.send(InvariantError(f"the snapshot process: unexpected {error!r}"))
        raise


def _hold(holding: Holding, link: Connection, told: _Told) -> None:
    logging.getLogger().handlers[:] = [_LinkHandler(link)]
    logging.getLogger("millrace").setLevel(logging.INFO)
    has_snapshot = threading.Event()
    threading.Thread(target=_watch_parent, args=(link, has_snapshot), daemon=True).start()
    held: SnapshotHolder | None = None
    try:
        with holding.open() as (held, check), ExitStack() as lock:
            has_snapshot.set()
            _begin_keeping(holding, link, held)
            reason = _wait(holding, check, told, lock)
            if told.is_given_back:
                log.info("snapshot %s is given back: every row is copied", held.id)
            else:
                told.stop.clear()
                _end(holding, held, reason, lock, told)
    except (MillraceError, KeyboardInterrupt) as error:
        if held is None and isinstance(error, MillraceError):
            link.send(error)
        if held is None:
            return
        log.error("%s", error)
        with ExitStack() as lock:
            _end(holding, held, str(error) or "it was stopped", lock, told)


def _watch_parent(link: Connection, has_snapshot: threading.Event) -> None:
    """Until there is a snapshot, end with the one that wants it."""
    with suppress(EOFError, OSError):
        link.recv()
    if not has_snapshot.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        # A statement may not let go; the server sees that its client is gone.
        if not has_snapshot.wait(LEAVE_SECONDS):
            os._exit(1)


def _begin_keeping(holding: Holding, link: Connection, held: SnapshotHolder) -> None:
    """From here on the process is on its own."""
    global _interrupts
    _interrupts = False
    forget_end(holding.directory)
    setup_logging(stream=_open_log(holding.directory))
    log.info(
        "holding snapshot %s of %s until every row is copied, or %s after the last run in %s",
        held.id,
        held.source,
        render_duration(holding.keep_seconds),
        holding.directory,
    )
    with suppress(OSError):  # killed meanwhile; whoever resumes finds the snapshot
        link.send(held)


def _open_log(directory: Path) -> TextIO:
    """Stays open as long as the process; a full disk is no reason to let go of a snapshot."""
    try:
        return (directory / LOG_FILE).open("w", buffering=1)
    except OSError:
        return sys.stderr


def _wait(holding: Holding, check: Callable[[], None], told: _Told, lock: ExitStack) -> str:
    """Until there is a reason to end; raises if the snapshot is lost. If it is that nobody
    continues, nobody can begin to: `lock` has the directory."""
    directory = holding.directory
    # The run that it was started for is still to take the directory.
    idle_since = time.monotonic() + BEGIN_SECONDS
    while True:
        if told.stop.wait(CHECK_SECONDS):
            return "it was stopped"
        check()
        if not (directory / FILE).exists():
            return "its work directory is gone"
        if read_holder(directory) is not None:
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > holding.keep_seconds and _enter(directory, lock):
            return f"nobody continued within {render_duration(holding.keep_seconds)}"


def _end(holding: Holding, held: SnapshotHolder, reason: str, lock: ExitStack, told: _Told) -> None:
    """Take back what was made on the source. Who still works in the directory has lost the
    snapshot, and leaves soon; nobody can begin to work there meanwhile."""
    until = time.monotonic() + RETRY_FOR_SECONDS
    while True:
        if holding.leaves_something and not _has_lock(holding.directory, lock):
            if time.monotonic() > until or told.stop.wait(CHECK_SECONDS):
                return
            continue
        try:
            removed, is_over = holding.take_back(held), True
        except MillraceError as error:
            removed = f"could not take back what was made on the source: {error.message}"
            is_over = False
        if removed is None:
            log.info("snapshot %s ends (%s); every row is copied", held.id, reason)
            return
        end = SnapshotEnd(held.id, time.strftime("%Y-%m-%d %H:%M:%S"), reason, removed)
        if holding.directory.exists():
            write_end(holding.directory, end)
        log.warning("%s", end)
        if is_over or time.monotonic() > until:
            return
        lock.close()
        if told.stop.wait(RETRY_SECONDS):
            return


def _has_lock(directory: Path, lock: ExitStack) -> bool:
    """Whether nobody else works in the directory: then nobody can. One that is gone is nobody's."""
    return (
        not directory.exists() or read_holder(directory) == os.getpid() or _enter(directory, lock)
    )


def _enter(directory: Path, lock: ExitStack) -> bool:
    """Whether nobody works in the directory; then nobody can."""
    try:
        lock.enter_context(open_lock(directory))
    except WorkDirError:
        return False
    return True


if __name__ == "__main__":
    # What travels by pickle is of this module by its name.
    from millrace.snapshot import process

    process.main()
