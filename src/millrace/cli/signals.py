"""The signals that stop the program: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal.

Invariant: each of them ends the program in the same way, by KeyboardInterrupt in the main thread,
so that whoever holds something (a slot, sessions, directories) lets go of it. A signal that was
ignored when the program began, as under `nohup`, stays ignored.
"""

from __future__ import annotations

import errno
import os
import signal
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Those that came, but for SIGINT: Python has a handler for that.
_received: list[int] = []


def stop_on_signals() -> None:
    """SIGTERM and SIGHUP stop the program as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)


def stopped_code() -> int:
    """What a shell reports for a program that a signal ended: 128 and the signal's number."""
    return 128 + (_received[0] if _received else signal.SIGINT)


@contextmanager
def noted_signals() -> Iterator[threading.Event]:
    """The event is set by any of them, and work ends in good order; then they take their usual
    way."""
    stop = threading.Event()
    caught: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        stop.set()

    usual: dict[int, Any] = {
        number: signal.signal(number, note)
        for number in STOPPING
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield stop
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    for number, frame in caught[:1]:
        usual[number](number, frame)


def _stop(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if number == signal.SIGHUP:
        _leave_terminal()
    raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Nothing can be written to a terminal that is gone, and cleaning up must not fail by that."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
