"""The driver's look at a tube, while its workers serve it.

Invariant: it delivers nothing and holds no lock; what fails here is said once and tried at the next
look. Partitions that an attached table got since get statement triggers, so that they cost as
little as the others, and what the plan and the tube do not agree about is said.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millrace.errors import MillraceError, TubeLost
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.tube import Connection, Tube, open_reader, read_tube

log = logging.getLogger(__name__)

WATCH_SECONDS: Final = 3.0


@contextmanager
def watched(delivery: Delivery, workers: int) -> Iterator[None]:
    """While the block runs, the tube is looked at every few seconds."""
    watch = Watch(delivery, workers)
    thread = threading.Thread(target=watch.run, name=f"watch {delivery.tube}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.stop.set()
        thread.join()


class Watch:
    """One tube."""

    def __init__(self, delivery: Delivery, workers: int) -> None:
        self._delivery = delivery
        self._workers = workers
        self.stop = threading.Event()
        self._told: dict[str, str] = {}

    def run(self) -> None:
        """Until it is stopped, on one session for as long as that lives."""
        while not self.stop.is_set():
            try:
                with open_reader(self._delivery.source, self._delivery.tube) as session:
                    self._keep_looking(session)
            except TubeLost:
                return  # its workers say so
            except MillraceError as error:
                self._tell("session", f"looking at it: {error}")
            self.stop.wait(WATCH_SECONDS)

    def _keep_looking(self, session: Connection) -> None:
        while not self.stop.is_set():
            with translated("looking at the tube"):
                tube = read_tube(session, self._delivery.schema, self._delivery.tube)
            self._compare(tube)
            self._refresh(session)
            self._tell("session", "")
            self.stop.wait(WATCH_SECONDS)

    def _refresh(self, session: Connection) -> None:
        here = ident(self._delivery.schema)
        try:
            with translated("triggers of new partitions"):
                row = session.execute(
                    f"SELECT {here}.tube_partitions_refresh(%s)".encode(), (self._delivery.tube,)
                ).fetchone()
        except MillraceError as error:
            if session.closed:
                raise
            self._tell("partitions", f"{error}; touches of new partitions cost a pod for each row")
            return
        self._tell("partitions", "")
        if row is not None and row[0]:
            log.info("tube %s: %d new partitions have triggers", self._delivery.tube, row[0])

    def _compare(self, tube: Tube) -> None:
        attached = {table.label for table in tube.tables}
        planned = self._delivery.tables.keys() - {""}
        missing = sorted(planned - attached)
        self._tell(
            "missing",
            f"{', '.join(missing)} not attached to it: see `millrace tube apply --dry-run`"
            if missing
            else "",
        )
        idle = self._workers - tube.partitions
        self._tell(
            "idle",
            f"{idle} of {self._workers} workers have nothing to do, because it has"
            f" {tube.partitions} partitions"
            if idle > 0
            else "",
        )

    def _tell(self, about: str, text: str) -> None:
        """Once, until it is another text."""
        if text and self._told.get(about) != text:
            log.warning("tube %s: %s", self._delivery.tube, text)
        self._told[about] = text
