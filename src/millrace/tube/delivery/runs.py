"""Deliveries of several tubes, in one process and on one engine.

Invariant: a tube fails alone. One that is not there yet, was dropped or can't be served is tried
again every few seconds while the others go on; only what no tube can do without, the engine, ends
all of them. With `until_empty` what failed is raised after the others have ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

from millrace.clone.problem import Problem, render_problems
from millrace.engine import Engine
from millrace.errors import ConfigError, EngineLost, MillraceError, NoSuchTube, PreflightError
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.report import WorkerCounts
from millrace.tube.delivery.run import check_outlets, find_delivery, run_delivery

log = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 0.5
_MOST_TUBES: Final = 1000


@dataclass
class TubeRun:
    """One tube of several."""

    delivery: Delivery
    workers: int
    counts: WorkerCounts = field(default_factory=WorkerCounts)

    def is_like(self, other: TubeRun) -> bool:
        return (self.delivery, self.workers) == (other.delivery, other.workers)


def check_runs(runs: Sequence[TubeRun]) -> None:
    """What a person has to put right first is raised, of all tubes in one error. A sink that is
    away, or a tube that is not there yet, is waited for later."""
    errors: list[tuple[str, MillraceError]] = []
    for run in runs:
        tube = run.delivery.tube
        try:
            found = check_outlets(find_delivery(run.delivery, run.workers))
        except NoSuchTube as error:
            found = [error] if run.delivery.until_empty else []
        except MillraceError as error:
            found = [error]
        for one in found:
            if isinstance(one, ConfigError | PreflightError):
                errors.append((tube, one))
            else:
                log.warning("tube %s: %s", tube, one)
    raise_together(errors)


def run_deliveries(
    runs: Sequence[TubeRun],
    engine: Engine,
    *,
    stop: threading.Event,
    on_progress: Callable[[str, WorkerCounts], None] = lambda tube, counts: None,
    changed: Callable[[], Sequence[TubeRun] | None] = lambda: None,
) -> None:
    """Until `stop`, or until all tubes are empty if that is asked for. `changed` is asked again and
    again for what is to be delivered from now on; None is the same as before."""
    engine.start()
    with ThreadPoolExecutor(_MOST_TUBES, thread_name_prefix="tubes") as threads:
        live = _LiveRuns(threads, engine, on_progress)
        try:
            live.rearrange(runs)
            while wait(live.futures(), _LOOK_SECONDS).not_done:
                if stop.is_set() or any(map(_has_lost_engine, live.futures())):
                    break
                again = changed()
                if again is not None:
                    live.rearrange(again)
        finally:
            live.end()
    live.raise_errors()


class _LiveRuns:
    """The tubes that are delivered now, each in a thread, with what ends it."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        engine: Engine,
        on_progress: Callable[[str, WorkerCounts], None],
    ) -> None:
        self._threads = threads
        self._engine = engine
        self._on_progress = on_progress
        self._live: dict[str, tuple[TubeRun, threading.Event, Future[None]]] = {}

    def futures(self) -> list[Future[None]]:
        return [future for _, _, future in self._live.values()]

    def rearrange(self, runs: Sequence[TubeRun]) -> None:
        """End those that are not wanted any more, or not so; begin the others."""
        wanted = {run.delivery.tube: run for run in runs}
        going = [
            tube
            for tube, (run, _, _) in self._live.items()
            if tube not in wanted or not run.is_like(wanted[tube])
        ]
        for tube in going:
            self._live[tube][1].set()
        for tube in going:
            _, _, future = self._live.pop(tube)
            if (error := future.exception()) is not None:
                log.warning("tube %s: %s", tube, error)
            if tube not in wanted:
                log.warning("tube %s is not delivered any more", tube)
        for tube, run in wanted.items():
            if tube not in self._live:
                over = threading.Event()
                future = self._threads.submit(
                    _keep_running, run, self._engine, over, self._on_progress
                )
                self._live[tube] = (run, over, future)

    def end(self) -> None:
        for _, over, _ in self._live.values():
            over.set()

    def raise_errors(self) -> None:
        found = [(tube, future.exception()) for tube, (_, _, future) in self._live.items()]
        for _, error in found:
            if error is not None and not isinstance(error, MillraceError):
                raise error
        raise_together([(tube, one) for tube, one in found if isinstance(one, MillraceError)])


def raise_together(errors: Sequence[tuple[str, MillraceError]], done: str = "delivered") -> None:
    """One error for those of several tubes; its kind is that of the first."""
    if not errors:
        return
    _, first = errors[0]
    if len(errors) == 1:
        raise first
    _, lines = render_problems([Problem(f"tube {t}", e.message, e.hint) for t, e in errors])
    raise type(first)(
        f"tubes can't be {done}:\n{lines}",
        hint="fix them, then run the same command again",
        problems=[{"tube": tube, **error.to_dict()} for tube, error in errors],
    )


def _keep_running(
    run: TubeRun,
    engine: Engine,
    over: threading.Event,
    on_progress: Callable[[str, WorkerCounts], None],
) -> None:
    tube, told = run.delivery.tube, ""

    def note(counts: WorkerCounts) -> None:
        run.counts = counts
        on_progress(tube, counts)

    while not over.is_set():
        try:
            found = find_delivery(run.delivery, run.workers)
            if told:
                log.warning("tube %s: is delivered now", tube)
                told = ""
            run_delivery(found, run.workers, engine, stop=over, on_progress=note)
            return
        except MillraceError as error:
            if run.delivery.until_empty or isinstance(error, EngineLost):
                raise
            if error.message != told:
                log.error("tube %s: %s; others go on, it is looked for again", tube, error)
                told = error.message
        over.wait(AGAIN_SECONDS)


def _has_lost_engine(future: Future[None]) -> bool:
    return future.done() and isinstance(future.exception(), EngineLost)
