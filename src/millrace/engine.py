"""What runs task bodies elsewhere: declared here, implemented by `millrace.spark`.

Invariant: a task body may run twice, or beside its own retry; so nothing may depend on it running
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Engine(Protocol):
    """Runs plain functions over plain values, many at once, perhaps on other machines."""

    # Whether it runs on this machine alone, so that it can be trusted to start.
    is_local: bool

    @property
    def start_seconds(self) -> float:
        """How long it took until tasks could run."""

    def start(self) -> None:
        """Begin to start, if that has not begun; returns at once."""

    def wait(self) -> float:
        """Wait until tasks can run; the seconds waited."""

    def call(self, body: Callable[[A, int], R], argument: A, description: str) -> R:
        """Run `body(argument, attempt)` in a task; blocks until it ends."""

    def cancel(self) -> None:
        """Stop every running task; of a group, its own."""

    def group(self, name: str) -> Engine:
        """The same engine for one owner of tasks, say a stream: what it cancels are the running
        tasks of all groups of exactly this name, and no others."""


class SlottedEngine(Engine, Protocol):
    """One that knows how many tasks it has room for."""

    def slots(self, wanted: int) -> int:
        """How many tasks can run at once; if they are fewer than wanted, more are waited for, some
        time."""


E = TypeVar("E", bound=Engine)


class EngineView(Generic[E]):
    """An engine seen by one of its users: it is that engine, but for what a subclass changes."""

    def __init__(self, engine: E) -> None:
        self._engine = engine
        self.is_local = engine.is_local

    @property
    def start_seconds(self) -> float:
        return self._engine.start_seconds

    def start(self) -> None:
        self._engine.start()

    def wait(self) -> float:
        return self._engine.wait()

    def call(self, body: Callable[[A, int], R], argument: A, description: str) -> R:
        return self._engine.call(body, argument, description)

    def cancel(self) -> None:
        self._engine.cancel()

    def group(self, name: str) -> Engine:
        return self._engine.group(name)
