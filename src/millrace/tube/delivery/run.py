"""The driver of a delivery: workers as long-lived tasks, sent anew when their lease is over.

Invariant: a worker that fails is sent again, after a pause, and never ends the others; what can't
be mended by that ends the delivery with its error: the tube was dropped, Spark is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from millrace.engine import Engine, SlottedEngine
from millrace.errors import (
    ConfigError,
    EngineLost,
    InvariantError,
    MillraceError,
    PreflightError,
    TubeLost,
)
from millrace.retry import LONGEST_PAUSE_SECONDS, is_transient
from millrace.tube.delivery.outlet import open_outlet
from millrace.tube.delivery.owner import MOST_PARTITIONS
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.report import WorkerCounts
from millrace.tube.delivery.session import require_session
from millrace.tube.delivery.tube import find_tube, open_reader
from millrace.tube.delivery.watch import watched
from millrace.tube.delivery.worker import WorkerOutcome, WorkerTask, serve
from millrace.tube.install import require_primary

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5
# How often it is looked if the delivery is to end. A task that was about to begin when the others
# were cancelled is cancelled at the next look.
_LOOK_SECONDS = 0.5
_FINAL = (ConfigError, InvariantError, TubeLost, EngineLost)


def check_delivery(delivery: Delivery, workers: int) -> Delivery:
    """The delivery with all that has to be looked up, if it can begin and every table's outlet
    opens."""
    found = find_delivery(delivery, workers)
    for error in check_outlets(found):
        raise error
    return found


def check_outlets(delivery: Delivery) -> list[MillraceError]:
    """Why tables can't be delivered now."""
    errors: list[MillraceError] = []
    with open_reader(delivery.source, delivery.tube) as source:
        tube = find_tube(source, delivery.tube, delivery.schema)
        for table in tube.tables:
            try:
                open_outlet(source, tube, table, delivery.require_table(table.label)).close()
            except MillraceError as error:
                if source.closed:
                    raise
                errors.append(error)
    return errors


def find_delivery(delivery: Delivery, workers: int) -> Delivery:
    """The delivery with all that has to be looked up: the tube is found, it has a partition for
    each worker, and the connection is a session."""
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
    return replace(delivery, schema=tube.schema)


def require_slots(engine: SlottedEngine, workers: int) -> None:
    """Workers are tasks that do not end: one that finds no slot would never begin."""
    found = engine.slots(workers)
    if found < workers:
        raise PreflightError(
            f"Spark can run {found} tasks at once, and {workers} workers need a slot each",
            hint=f"ask for {found} workers, or give Spark more: --master local[{workers}], or more"
            " executors or cores",
        )


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
    engine = engine.group(f"tube {delivery.schema}.{delivery.tube}")
    engine.start()

    def note(outcome: WorkerOutcome) -> None:
        with lock:
            total.add(outcome.counts)
            on_progress(total)

    log.info("tube %s: %d workers deliver", delivery.tube, workers)
    tasks = [WorkerTask(delivery, number, workers) for number in range(workers)]
    with watched(delivery, workers):
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
    over = threading.Event()
    with ThreadPoolExecutor(len(tasks), thread_name_prefix="tube") as threads:
        running = [threads.submit(_keep_serving, task, engine, over, note) for task in tasks]
        try:
            # Not without a limit: a signal that another thread was given wakes nobody.
            while wait(running, _LOOK_SECONDS, FIRST_EXCEPTION).not_done:
                if stop.is_set() or any(one.done() and one.exception() for one in running):
                    break
        finally:
            over.set()
            _end(running, engine)
        spread = [one.result() for one in running]  # raises what one of them met
    return any(spread)


def _end(running: list[Future[bool]], engine: Engine) -> None:
    while wait(running, 0).not_done:
        engine.cancel()
        wait(running, _LOOK_SECONDS)


def _keep_serving(
    task: WorkerTask,
    engine: Engine,
    over: threading.Event,
    note: Callable[[WorkerOutcome], None],
) -> bool:
    has_spread = False
    pause = _FIRST_PAUSE_SECONDS
    patience = task.delivery.limits.away_seconds
    gives_up_at = float("inf")
    while not over.is_set():
        began = time.monotonic()
        try:
            outcome = engine.call(serve, task, f"tube {task.delivery.tube} worker {task.number}")
        except MillraceError as error:
            if over.is_set():
                return has_spread
            now = time.monotonic()
            if now - began > patience or pause == _FIRST_PAUSE_SECONDS:
                gives_up_at = now + patience  # it had worked
            is_final = not is_transient(error) or now >= gives_up_at
            if (task.delivery.until_empty and is_final) or isinstance(error, _FINAL):
                raise
            log.warning("worker %d: %s; sent again in %.1f s", task.number, error, pause)
            over.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            continue
        note(outcome)
        has_spread |= outcome.has_spread
        pause = _FIRST_PAUSE_SECONDS
        if task.delivery.until_empty and outcome.is_empty:
            return has_spread
    return has_spread
