"""What waits in a tube and how fast it goes, looked at beside its delivery.

Invariant: it takes a small share of the server, however much waits: the pause after a look is many
times what the look took. A look that fails is tried again, and its age says so; it ends nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from millrace.errors import MillraceError
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.report import WorkerCounts
from millrace.tube.delivery.traffic import Traffic, listen, receive
from millrace.tube.delivery.tube import Connection, find_tube, open_reader

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 2.0
# The pause, in times that a look took.
_REST_FACTOR: Final = 20
# How often it is looked whether to stop.
_STOP_SECONDS: Final = 0.2


@dataclass(frozen=True)
class ShardState:
    """What waits in a shard."""

    partition: int
    shard: int
    pods: int = 0
    ids: int = 0
    # Now minus the oldest pod of this kind.
    lag_seconds: float = 0.0
    backfill_pods: int = 0
    backfill_ids: int = 0
    backfill_lag_seconds: float = 0.0
    control_pods: int = 0


@dataclass(frozen=True)
class TubeState:
    """A tube at one moment, and what was delivered since its delivery began."""

    tube: str
    shards: tuple[ShardState, ...] = ()
    dead: int = 0
    counts: dict[int, WorkerCounts] = field(default_factory=dict)
    ids_per_second: dict[int, float] = field(default_factory=dict)
    # time.monotonic(); None before the first look.
    looked_at: float | None = None

    @property
    def lag_seconds(self) -> float:
        """Of the oldest pod that no backfill wrote."""
        return max((one.lag_seconds for one in self.shards), default=0.0)

    def oldest(self) -> ShardState | None:
        return max(self.shards, key=lambda one: one.lag_seconds, default=None)


def read_shards(connection: Connection, schema: str, tube: str) -> tuple[ShardState, ...]:
    with translated("looking at the tube"):
        rows = connection.execute(
            "SELECT partition, shard, pods, ids, lag_seconds, backfill_pods, backfill_ids,"
            f" backfill_lag_seconds, control_pods FROM {ident(schema)}.tube_shards(%s)".encode(),
            (tube,),
        ).fetchall()
    return tuple(ShardState(*row) for row in rows)


class Observer:
    """Of one tube; `on_look` is called with what was found."""

    def __init__(self, delivery: Delivery, on_look: Callable[[TubeState], None]) -> None:
        self._delivery = delivery
        self._on_look = on_look
        self._traffic = Traffic()
        self._told = ""
        self.stop = threading.Event()
        self.is_listening = threading.Event()

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.is_listening.set()  # whoever waits for that must not wait for ever

    def _run(self) -> None:
        while not self.stop.is_set():
            try:
                with open_reader(self._delivery.source, self._delivery.tube) as session:
                    self._keep_looking(session)
            except MillraceError as error:
                if str(error) != self._told:
                    log.warning("tube %s: %s", self._delivery.tube, error)
                    self._told = str(error)
                self.is_listening.set()
            self.stop.wait(LOOK_SECONDS)

    def _keep_looking(self, session: Connection) -> None:
        wanted = self._delivery.schema or None
        schema = find_tube(session, self._delivery.tube, wanted).schema
        with translated("listening to workers"):
            listen(session)
        self.is_listening.set()
        while not self.stop.is_set():
            began = time.monotonic()
            self._on_look(self._look(session, schema))
            self._told = ""
            until = time.monotonic() + max(LOOK_SECONDS, _REST_FACTOR * (time.monotonic() - began))
            while time.monotonic() < until and not self.stop.is_set():
                with translated("listening to workers"):
                    receive(session, self._traffic, _STOP_SECONDS)

    def _look(self, session: Connection, schema: str) -> TubeState:
        tube = self._delivery.tube
        shards = read_shards(session, schema, tube)
        here = ident(schema)
        with translated("counting dead letters"):
            row = session.execute(
                f"SELECT count(*) FROM {here}._tube_dead d JOIN {here}._tube_tubes u"
                " ON u.id = d.tube WHERE u.name = %s".encode(),
                (tube,),
            ).fetchone()
        counts = self._traffic.counts(schema, tube)
        rates = {one: self._traffic.ids_per_second(schema, tube, one) for one in counts}
        return TubeState(tube, shards, row[0] if row else 0, counts, rates, time.monotonic())


class Observers:
    """Of several tubes, each looked at in a thread of its own."""

    def __init__(self, on_look: Callable[[TubeState], None]) -> None:
        self._on_look = on_look
        self._running: dict[str, tuple[Delivery, Observer, threading.Thread]] = {}

    def rearrange(self, deliveries: Sequence[Delivery]) -> None:
        """From now on these are looked at; when it returns, no report of their workers is
        missed."""
        wanted = {one.tube: one for one in deliveries}
        self._end([name for name, one in self._running.items() if wanted.get(name) != one[0]])
        begun = [self._begin(one) for name, one in wanted.items() if name not in self._running]
        for observer in begun:
            observer.is_listening.wait()

    def close(self) -> None:
        self._end(list(self._running))

    def _begin(self, delivery: Delivery) -> Observer:
        observer = Observer(delivery, self._on_look)
        thread = threading.Thread(target=observer.run, name="tube observer", daemon=True)
        self._running[delivery.tube] = delivery, observer, thread
        thread.start()
        return observer

    def _end(self, tubes: Sequence[str]) -> None:
        for tube in tubes:
            self._running[tube][1].stop.set()
        for tube in tubes:
            self._running.pop(tube)[2].join()


@contextmanager
def observed(
    deliveries: Sequence[Delivery], on_look: Callable[[TubeState], None]
) -> Iterator[Observers]:
    """While the block runs, `on_look` is called every few seconds with each tube's state, from
    other threads. The block begins when reports of workers can't be missed any more."""
    observers = Observers(on_look)
    try:
        observers.rearrange(deliveries)
        yield observers
    finally:
        observers.close()
