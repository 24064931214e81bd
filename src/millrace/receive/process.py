"""The receiver as a process of its own, supervised by the one that follows.

Invariant: the process ends when its owner ends, however that happens; if it is killed it is
started again, and continues from what is in the spool.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from millrace.errors import MillraceError, ServerError
from millrace.log import LogSettings, logged_as, setup_logging
from millrace.receive.loop import ReceiveResult, ReceiveSettings, receive
from millrace.retry import iter_pauses
from millrace.spool.place import SpoolPlace
from millrace.workdir.sentinel import Sentinel

log = logging.getLogger(__name__)

OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
STOP_SECONDS = 30.0
# A receiver that lives so long was not killed by what it does.
STEADY_SECONDS = 60.0


class Receiver:
    """Starts the process, and says how it ended."""

    def __init__(
        self,
        settings: ReceiveSettings,
        place: SpoolPlace,
        log_settings: LogSettings,
        *,
        is_one_of_many: bool = False,
    ) -> None:
        """`is_one_of_many`: its process is forked from one that has loaded what all need, and
        shares that with the others. Alone, that would only be one process more."""
        self._arguments = (settings, place, log_settings)
        self._is_one_of_many = is_one_of_many
        self._process: Any = None
        self._link: Connection | None = None
        self._started_at = 0.0
        self._pauses = iter_pauses(1 << 30)
        self._restart_at: float | None = None
        # How it ended, if it was not killed.
        self._outcome: ReceiveResult | MillraceError | None = None

    def start(self) -> None:
        self._release()
        context = _context(is_one_of_many=self._is_one_of_many)
        self._link, theirs = context.Pipe()
        process = context.Process(
            target=_child, args=(*self._arguments, theirs), name="millrace receive", daemon=True
        )
        with deaf():
            process.start()
        self._process = process
        theirs.close()
        self._started_at = time.monotonic()
        self._restart_at = None
        self._outcome = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def check(self) -> ReceiveResult | None:
        """How it ended, once it has: raises its error; starts it again if it was killed."""
        if self._restart_at is not None:
            if time.monotonic() >= self._restart_at:
                self.start()
            return None
        self._outcome = self._outcome or self._told()
        if self._outcome is None and self._process.exitcode is None:
            return None
        self._outcome = self._outcome or self._told()
        if isinstance(self._outcome, ReceiveResult):
            return self._outcome
        if isinstance(self._outcome, MillraceError):
            raise self._outcome
        if time.monotonic() - self._started_at > STEADY_SECONDS:
            self._pauses = iter_pauses(1 << 30)
        pause = next(self._pauses)
        log.warning(
            "the receiver was killed (exit code %s); restarting it in %.1f s",
            self._process.exitcode,
            pause,
        )
        self._restart_at = time.monotonic() + pause
        return None

    def stop(self) -> None:
        """Tell it to stop, and wait until it has."""
        if self._process is None:
            return
        assert self._link is not None
        self._link.close()
        self._process.join(STOP_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._release()

    def _release(self) -> None:
        """What we hold of a process that has ended."""
        if self._process is not None:
            assert self._link is not None
            self._link.close()
            self._process.close()
            self._process = self._link = None

    def _told(self) -> Any:
        assert self._link is not None
        try:
            return self._link.recv() if self._link.poll() else None
        except (EOFError, ConnectionResetError):
            self._process.join(1.0)
            return None


def _context(*, is_one_of_many: bool) -> Any:
    context = multiprocessing.get_context("forkserver" if is_one_of_many else "spawn")
    if is_one_of_many:
        context.set_forkserver_preload([*_loaded_by_main(), "millrace.receive.warm"])
    return context


def _loaded_by_main() -> list[str]:
    """Modules that the main module has names from: every child runs that module once more, to know
    what is defined there, and would load them for itself."""
    values = vars(sys.modules["__main__"]).values()
    modules = {getattr(value, "__module__", None) for value in values}
    return sorted(name for name in modules if name in sys.modules and name != "__main__")


@contextmanager
def deaf() -> Iterator[None]:
    """A process that is started meanwhile hears of no terminal until it has decided about that:
    Python would print a traceback for a Ctrl-C in its first moments."""
    # Otherwise it would be started meanwhile, and hears by itself.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_TERMINALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(
    settings: ReceiveSettings, place: SpoolPlace, log_settings: LogSettings, link: Connection
) -> None:
    # Ctrl-C and a closed terminal reach all processes of it; it is the owner who decides.
    for number in OF_TERMINALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_TERMINALS)
    setup_logging(
        verbose=log_settings.verbose, quiet=log_settings.quiet, as_json=log_settings.as_json
    )
    stop = threading.Event()
    threading.Thread(target=_watch, args=(link, stop.set), daemon=True).start()
    with logged_as(log_settings.stream):
        _receive(settings, place, link, stop)


def _receive(
    settings: ReceiveSettings, place: SpoolPlace, link: Connection, stop: threading.Event
) -> None:
    try:
        with Sentinel(place.directory) as sentinel, place.open_writer() as spool:
            link.send(receive(settings, spool, sentinel, stop=stop))
    except MillraceError as error:
        link.send(error)
    except BrokenPipeError:
        log.debug("the owner is gone")
    except Exception as error:
        log.exception("the receiver failed")
        link.send(ServerError(f"the receiver failed: {type(error).__name__}: {error}"))


def _watch(link: Connection, stop: Callable[[], None]) -> None:
    """The owner says nothing; when its end of the link closes, it wants us to stop, or is dead."""
    try:
        link.recv()
    except (EOFError, OSError):
        stop()
