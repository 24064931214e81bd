"""A sink that has failed stays failed.

Invariant: once a guarded step has raised, no later one begins; so what half a write left behind is
never committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millrace.errors import SinkError


class FailureGuard:
    """Guards the steps of one sink; `label` is what messages call it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._has_failed = False

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """Errors of files become SinkError; a reader that went away stays what it is."""
        if self._has_failed:
            raise SinkError(
                f"{self._label} failed earlier and accepts nothing more",
                hint="the first error has the reason",
            )
        try:
            yield
        except BrokenPipeError:
            self._has_failed = True
            raise
        except OSError as error:
            self._has_failed = True
            raise SinkError(
                f"{doing} {self._label} failed: {error.strerror or error}",
                hint="look at that disk and at the rights on it, then run the same command again",
            ) from error
        except BaseException:
            self._has_failed = True
            raise
