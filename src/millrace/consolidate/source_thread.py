"""The thread of one source, whatever it does for it.

Invariant: it ends when it is told to stop, or when its source is removed, and raises nothing.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from millrace.consolidate.registry import Registry, SourceRecord
from millrace.log import logged_as


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

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _work(self) -> None:
        with logged_as(self.name):
            self._run()

    @abstractmethod
    def _run(self) -> None:
        """Until `_is_over`."""

    def _is_over(self) -> bool:
        return self._stopping.is_set() or self._record().is_removed

    def _record(self) -> SourceRecord:
        return self._registry.require(self.name)
