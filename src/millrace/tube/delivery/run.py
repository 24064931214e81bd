"""The driver of a delivery: workers as long-lived tasks, sent anew when their lease is over.

Invariant: a worker that fails is sent again, after a pause, and never ends the others; what can't
be mended by that, such as an enrichment that does not compile, ends the delivery with its error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import fields, replace

from millrace.engine import Engine
from millrace.errors import ConfigError, EngineLost, InvariantError, MillraceError
from millrace.retry import LONGEST_PAUSE_SECONDS, is_transient
from millrace.tube.delivery.outlet import open_outlet
from millrace.tube.delivery.owner import MOST_PARTITIONS, require_session
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.tube import find_tube, open_reader
from millrace.tube.delivery.worker import WorkerCounts, WorkerOutcome, WorkerTask, serve
from millrace.tube.install import require_primary

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5
_LOOK_SECONDS = 1.0


def check_delivery(delivery: Delivery, workers: int) -> Delivery:
    """The delivery with all that has to be looked up, if it can begin: the tube is found, the
    connection is a session, and every table's outlet opens."""
    with open_reader(delivery.source, delivery.tube) as source:
        require_primary(source)
        require_session(source)
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
            for one in fields(WorkerCounts):
                more = getattr(outcome.counts, one.name)
                setattr(total, one.name, getattr(total, one.name) + more)
            on_progress(total)

    log.info("tube %s: %d workers deliver", delivery.tube, workers)
    tasks = [WorkerTask(delivery, number, workers) for number in range(workers)]
    # One worker may have written pods for another that had ended: then all look again.
    while _serve_all(tasks, engine, stop, note) and workers > 1 and not stop.is_set():
        log.info("tube %s: one worker wrote pods for others; all look again", delivery.tube)
    return total


def _serve_all(
    tasks: list[WorkerTask],
    engine: Engine,
    stop: threading.Event,
    note: Callable[[WorkerOutcome], None],
) -> bool:
    """Every worker, to its end; whether one has written pods for others."""
    with ThreadPoolExecutor(len(tasks), thread_name_prefix="tube") as threads:
        running = [threads.submit(_keep_serving, task, engine, stop, note) for task in tasks]
        try:
            return _wait_for_all(running)
        except BaseException:
            stop.set()
            engine.cancel()
            raise


def _wait_for_all(running: list[Future[bool]]) -> bool:
    """The first error of any of them, at once; whether one returned true. Not without a limit: a
    signal that another thread was given wakes nobody."""
    waiting, found = set(running), False
    while waiting:
        done, waiting = wait(waiting, _LOOK_SECONDS, FIRST_COMPLETED)
        found |= any(list(map(Future.result, done)))
    return found


def _keep_serving(
    task: WorkerTask,
    engine: Engine,
    stop: threading.Event,
    note: Callable[[WorkerOutcome], None],
) -> bool:
    has_spread = False
    pause = _FIRST_PAUSE_SECONDS
    while not stop.is_set():
        try:
            outcome = engine.call(serve, task, f"tube {task.delivery.tube} worker {task.number}")
        except MillraceError as error:
            if stop.is_set():
                return has_spread
            is_final = task.delivery.until_empty and not is_transient(error)
            if is_final or isinstance(error, ConfigError | EngineLost | InvariantError):
                raise
            log.warning("worker %d: %s; sent again in %.1f s", task.number, error, pause)
            stop.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            continue
        note(outcome)
        has_spread |= outcome.has_spread
        pause = _FIRST_PAUSE_SECONDS
        if task.delivery.until_empty and outcome.is_empty:
            return has_spread
    return has_spread
