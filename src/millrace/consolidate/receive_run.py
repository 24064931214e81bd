"""One source received by a service of its own, while another applies it.

Invariant: a source is received from the end of its base copy on, which receives for itself.
Whatever goes wrong is tried again, and concerns no other source. Nothing here needs the target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from millrace.clone.ready import is_finished
from millrace.consolidate.registry import Registry, SourceRecord
from millrace.consolidate.settings import SourceSettings
from millrace.consolidate.source_run import FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS, receiving
from millrace.consolidate.source_thread import SourceThread
from millrace.errors import MillraceError, as_bug
from millrace.follow.bound_copy import read_stream
from millrace.follow.feed import open_receiver

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class ReceiveRun(SourceThread):
    """Receives a source whenever it can be."""

    def __init__(
        self,
        name: str,
        find_settings: Callable[[SourceRecord], SourceSettings],
        registry: Registry,
    ) -> None:
        super().__init__(name, registry)
        self._find_settings = find_settings

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._is_over():
            try:
                with as_bug(f"source {self.name}"):
                    self._receive()
                pause = FIRST_PAUSE_SECONDS
            except (MillraceError, OSError, MemoryError) as error:
                log.error("not received: %s; tried again in %.0f s", error, pause)
                self._stopping.wait(pause)
                pause = min(2 * pause, MOST_PAUSE_SECONDS)

    def _receive(self) -> None:
        """Until it is over, or the receiver has ended."""
        settings = self._find_settings(self._record())
        setup = read_stream(settings.directory)
        if setup is None or not is_finished(settings.directory):
            self._stopping.wait(POLL_SECONDS)
            return
        receiver = open_receiver(settings.follow(), setup, self.name)
        with receiving(receiver):
            while not self._is_over() and receiver.check() is None:
                self._stopping.wait(POLL_SECONDS)
