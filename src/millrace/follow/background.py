"""Work that a thread repeats while a stream runs.

Invariant: the thread has ended when the context is left. An error that may go away is logged and
the work is tried again; any other stops the stream and is raised when the context is left.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from millrace.log import as_logged
from millrace.retry import is_transient

log = logging.getLogger(__name__)


@contextmanager
def in_background(
    name: str,
    work: Callable[[], object],
    seconds: float,
    on_failure: Callable[[], None] = lambda: None,
    *,
    at_once: bool = False,
) -> Iterator[None]:
    """Repeat `work` with this pause until the context is left, or until it returns True.

    `on_failure` is called by the thread when an error has stopped it. `at_once` means no pause
    before the first time.
    """
    failures: list[BaseException] = []
    done = threading.Event()

    def repeat() -> None:
        try:
            is_finished = at_once and _attempt(name, work)
            while not is_finished and not done.wait(seconds):
                is_finished = _attempt(name, work)
        except BaseException as error:
            failures.append(error)
            on_failure()

    thread = threading.Thread(target=as_logged(repeat), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failures:
        raise failures[0]


def _attempt(name: str, work: Callable[[], object]) -> bool:
    """Whether there is nothing more to do."""
    try:
        return work() is True
    except Exception as error:
        if not is_transient(error):
            raise
        log.debug("%s: %s", name, error)
        return False
