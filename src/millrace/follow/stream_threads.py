"""The threads of an open stream: apply, table sync, and those that look after it.

Invariant: all of them have ended when `close` returns; what stopped one of them stops the others,
and is raised.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

from millrace.apply.driver import Catchup
from millrace.engine import Engine
from millrace.follow.lookout import looking_out
from millrace.follow.progress import FollowProgress
from millrace.follow.sequences import following_sequences
from millrace.follow.settings import FollowSettings
from millrace.follow.source_watch import ASK_SECONDS, MANY_ASK_SECONDS, watching_source
from millrace.follow.table_sync.driver import TableSync
from millrace.follow.table_sync.thread import SyncThread
from millrace.follow.watch import Watch
from millrace.log import as_logged
from millrace.workdir.sentinel import Sentinel, StreamSetup

# How often tasks are cancelled again: one may have begun in between.
CANCEL_SECONDS = 1.0


class StreamThreads:
    """Those of one stream; `start`, then `wait` until apply has ended, then `close`."""

    def __init__(
        self,
        settings: FollowSettings,
        setup: StreamSetup,
        engine: Engine,
        sentinel: Sentinel,
        catchup: Catchup,
        name: str,
    ) -> None:
        self._settings = settings
        self._setup = setup
        self._sentinel = sentinel
        self._catchup = catchup
        self._name = name
        sync = TableSync(settings, setup, engine, sentinel, catchup)
        self._prepare_syncs = sync.prepare
        self._syncs = SyncThread(sync, on_failure=catchup.stop)
        self._apply = threading.Thread(target=as_logged(self._run), name="catchup", daemon=True)
        self._others = ExitStack()
        self._is_over = threading.Event()
        # What ended apply or table sync.
        self.failure: BaseException | None = None

    def start(self) -> None:
        settings, setup, stop = self._settings, self._setup, self._catchup.stop
        others = self._others
        others.enter_context(following_sequences(settings, stop))
        others.enter_context(looking_out(settings, setup, self._sentinel, stop))
        ask_seconds = MANY_ASK_SECONDS if settings.is_one_of_many else ASK_SECONDS
        source = others.enter_context(
            watching_source(settings.source, setup.slot_name, ask_seconds)
        )
        self._watch = Watch(self._sentinel, self._catchup, source, setup.slot_name, self._name)
        self._prepare_syncs()
        self._syncs.start()
        self._apply.start()

    def wait(self, seconds: float) -> bool:
        """Whether apply has ended; waits so long for it."""
        return self._is_over.wait(seconds)

    def look(self) -> FollowProgress:
        return self._watch.look()

    def stop(self, *, cancels: bool = False) -> None:
        """End apply and table sync: after the tasks under way, or in the middle of them."""
        self._catchup.stop()
        while cancels and self._apply.is_alive():
            self._catchup.cancel()
            self._catchup.end_sessions()
            self._apply.join(CANCEL_SECONDS)
        self._syncs.stop()
        if self._apply.ident is not None:
            self._apply.join()

    def close(self) -> None:
        """End all of them; raises what stopped one of those beside apply and table sync."""
        self.stop()
        self._others.close()

    def _run(self) -> None:
        try:
            self._catchup.run()
            if self._catchup.is_whole.is_set():
                # The stream ends with everything that was asked for.
                self._syncs.finish()
            elif self._syncs.failure is not None:
                raise self._syncs.failure
        except BaseException as error:
            self.failure = error
        finally:
            self._is_over.set()
