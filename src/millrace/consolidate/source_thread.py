"""The thread of one source, whatever it does for it.

Invariant: it ends when it is told to stop, or when its source is removed, and raises nothing.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import suppress

from millrace.consolidate.registry import Registry, SourceRecord
from millrace.log import logged_as


class Stopped(BaseException):
    """The source is to be stopped, in the middle of whatever is done for it: as by Ctrl-C."""


class SourceThread(ABC):
    """`start` it, `stop` it, `join` it."""

    def __init__(self, name: str, registry: Registry) -> None:
        self.name = name
        self._registry = registry
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"source {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after what is under way; `join` waits for it."""
        self._stopping.set()

    def join(self, seconds: float) -> bool:
        """Whether it has ended within so many seconds."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self.is_alive

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _work(self) -> None:
        with logged_as(self.name), suppress(Stopped):
            self._run()

    @abstractmethod
    def _run(self) -> None:
        """Until `_is_over`."""

    def _is_over(self) -> bool:
        return self._find_wanted() is None

    def _find_wanted(self) -> SourceRecord | None:
        """The source, as others have left it; None if it is over."""
        if self._stopping.is_set():
            return None
        record = self._registry.find(self.name)
        return None if record is None or record.is_removed else record

    def _record(self) -> SourceRecord:
        return self._registry.require(self.name)
