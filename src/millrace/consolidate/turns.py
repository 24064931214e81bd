"""Workers shared by all sources: whoever has waited longest is next.

Invariant: at most as many tasks apply changes at once as there are workers, and a source that
applies again and again never keeps another from its turn. What is copied takes no turn: it has
slots of its own, so that a long copy does not hold up what is followed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar, cast

from millrace.apply.task import apply_spool
from millrace.engine import Engine, EngineView

A = TypeVar("A")
R = TypeVar("R")


class Turns:
    """A number of workers, and those who wait for one, in their order."""

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._free = workers
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """With a worker."""
        turn = threading.Event()
        with self._lock:
            if self._free and not self._waiting:
                self._free -= 1
                turn.set()
            else:
                self._waiting.append(turn)
        turn.wait()
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    # It passes from hand to hand.
                    self._waiting.popleft().set()
                else:
                    self._free += 1


class SharedEngine(EngineView[Engine]):
    """An engine whose tasks of apply take turns with those of all other streams."""

    def __init__(self, engine: Engine, turns: Turns) -> None:
        super().__init__(engine)
        self._turns = turns

    def call(self, body: Callable[[A, int], R], argument: A, description: str) -> R:
        is_apply = body is cast(object, apply_spool)
        with self._turns.taken() if is_apply else nullcontext():
            return super().call(body, argument, description)

    def group(self, name: str) -> SharedEngine:
        return SharedEngine(super().group(name), self._turns)
