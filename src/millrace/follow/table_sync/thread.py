"""Table sync on a thread of its own, or alone.

Invariant: the thread has ended when `stop` or `finish` returns; a copy under way is rolled back by
`stop`, and its temporary slot is gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from millrace.follow.table_sync.driver import TableSync
from millrace.log import as_logged

log = logging.getLogger(__name__)

# How often a copy is cancelled again: its session may not have been open the first time.
STOP_SECONDS = 1.0


class SyncThread:
    """Runs a TableSync, and keeps what stopped it."""

    def __init__(self, sync: TableSync, on_failure: Callable[[], None] = lambda: None) -> None:
        self._sync = sync
        self._on_failure = on_failure
        self._thread = threading.Thread(target=as_logged(self._run), name="table sync", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Do what is queued; raises what stopped it."""
        self._sync.finish()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End soon, and wait for it."""
        while self._thread.is_alive():
            self._sync.stop()
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            self._sync.run()
        except BaseException as error:
            self.failure = error
            self._on_failure()
