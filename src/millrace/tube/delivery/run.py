"""The driver of a delivery: workers as long-lived tasks, sent anew when their lease is over.

Invariant: a worker that fails is sent again, after a pause, and never ends the others; what can't
be mended by that, such as an enrichment that does not compile, ends the delivery with its error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from millrace.engine import Engine
from millrace.errors import ConfigError, InvariantError, MillraceError
from millrace.retry import LONGEST_PAUSE_SECONDS, is_transient
from millrace.tube.delivery.outlet import open_outlet
from millrace.tube.delivery.owner import MOST_PARTITIONS
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.report import WorkerCounts
from millrace.tube.delivery.session import require_session
from millrace.tube.delivery.tube import find_tube, open_reader
from millrace.tube.delivery.worker import WorkerOutcome, WorkerTask, serve
from millrace.tube.install import require_primary

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5


def check_delivery(delivery: Delivery, workers: int) -> Delivery:
    """The delivery with all that has to be looked up, if it can begin: the tube is found, the
    connection is a session, and every table's outlet opens."""
    with open_reader(delivery.source, delivery.tube) as source:
        require_primary(source)
        require_session(source, delivery.source)
        tube = find_tube(source, delivery.tube, delivery.schema or None)
        if workers > tube.partitions:
            raise ConfigError(
                f"{workers} workers are more than the {tube.partitions} partitions of tube"
                f" {tube.name}: a worker serves whole partitions",
                hint=f"--workers {tube.partitions}, or `millrace tube create {tube.name}"
                f" --partitions {workers}`",
            )
        if tube.partitions >= MOST_PARTITIONS:
            raise ConfigError(f"tube {tube.name} has too many partitions", hint="use fewer")
        for table in tube.tables:
            open_outlet(source, tube, table, delivery.require_table(table.label)).close()
    return replace(delivery, schema=tube.schema)


def run_delivery(
    delivery: Delivery,
    workers: int,
    engine: Engine,
    *,
    stop: threading.Event,
    on_progress: Callable[[WorkerCounts], None] = lambda counts: None,
) -> WorkerCounts:
    """Until `stop`, or until the tube is empty if that is asked for; what was done."""
    total, lock = WorkerCounts(), threading.Lock()
    engine.start()

    def note(outcome: WorkerOutcome) -> None:
        with lock:
            total.add(outcome.counts)
            on_progress(total)

    with ThreadPoolExecutor(workers, thread_name_prefix="tube") as threads:
        running = [
            threads.submit(_keep_serving, WorkerTask(delivery, number, workers), engine, stop, note)
            for number in range(workers)
        ]
        try:
            for one in running:
                one.result()
        except BaseException:
            stop.set()
            engine.cancel()
            raise
    return total


def _keep_serving(
    task: WorkerTask,
    engine: Engine,
    stop: threading.Event,
    note: Callable[[WorkerOutcome], None],
) -> None:
    pause = _FIRST_PAUSE_SECONDS
    while not stop.is_set():
        try:
            outcome = engine.call(serve, task, f"tube {task.delivery.tube} worker {task.number}")
        except MillraceError as error:
            if stop.is_set():
                return
            is_final = task.delivery.until_empty and not is_transient(error)
            if is_final or isinstance(error, ConfigError | InvariantError):
                raise
            log.warning("worker %d: %s; sent again in %.1f s", task.number, error, pause)
            stop.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            continue
        note(outcome)
        pause = _FIRST_PAUSE_SECONDS
        if task.delivery.until_empty and outcome.is_empty:
            return
