"""An iterator that is a little ahead of its reader, on a thread of its own.

Invariant: the reader sees the same items, and the same error at the same place; leaving early
ends the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")

_CHECK_SECONDS = 0.2


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


@contextmanager
def ahead(items: Iterable[T], depth: int) -> Iterator[Iterator[T]]:
    """Make up to `depth` items before they are asked for."""
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    left = threading.Event()

    def put(item: T | _End) -> None:
        while not left.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=_CHECK_SECONDS)
                return

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                put(item)
                if left.is_set():
                    return
        except BaseException as caught:
            error = caught
        put(_End(error))

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        yield _taken(ready)
    finally:
        left.set()
        thread.join()


def _taken(ready: queue.Queue[T | _End]) -> Iterator[T]:
    while True:
        item = ready.get()
        if isinstance(item, _End):
            if item.error is not None:
                raise item.error
            return
        yield item
