"""The driver's side of apply: ranges of the spool become tasks.

Invariant: a worker asks for the next task only after the last one has reported where it left the
stream; what the target says is the truth, what is noted here is for people.

Each worker has tables of its own and a position of its own. With one worker, the default, no
source transaction is ever torn on the target; with several, tables may be at different
transactions until the stream ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from millrace.apply.conflict import ApplyCounts
from millrace.apply.position import (
    read_position,
    read_worker_positions,
    setup_position,
    worker_name,
)
from millrace.apply.prepare import Share
from millrace.apply.task import (
    ApplyOutcome,
    ApplyTask,
    apply_spool,
    log_retry,
    since_1970,
)
from millrace.apply.trigger_silence import warn_of_loud
from millrace.engine import Engine
from millrace.errors import Blocked, ConfigError, WorkDirError
from millrace.log import as_logged
from millrace.lsn import render_lsn
from millrace.postgres.wire.connect import cancel_sessions, connect
from millrace.retry import with_retries
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.sync_request import spool_floor

log = logging.getLogger(__name__)

# How soon a worker sees that the spool has grown: part of the delay of every change.
POLL_SECONDS = 0.05
# The same, where there are many streams, most of which have nothing to do: so often while changes
# come, and less and less often without any.
MANY_POLL_SECONDS = 0.2
LONGEST_POLL_SECONDS = 1.0
# Tasks in a row that may find nothing where the driver sees something.
BLIND_TASKS = 5
# Pauses after a lock was not got in time.
FIRST_BLOCKED_SECONDS = 1.0
MOST_BLOCKED_SECONDS = 30.0
# Applied segments are removed not more often than this.
PRUNE_SECONDS = 5.0


@dataclass
class Counts:
    """What was applied since the process began."""

    transactions: int = 0
    batches: int = 0
    applied: ApplyCounts = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.applied = self.applied or ApplyCounts()


class Catchup:
    """Applies the spool until it is reported complete."""

    def __init__(
        self,
        task: ApplyTask,
        jobs: int,
        engine: Engine,
        sentinel: Sentinel,
        *,
        prunes: Callable[[int], object] | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        if task.structure is not None and jobs > 1:
            raise ConfigError(
                f"--apply-jobs {jobs} can't be used with DDL that is replayed at its position in "
                "the stream: several workers are at different positions",
                hint="use --apply-jobs 1",
            )
        if task.message_hooks and jobs > 1:
            raise ConfigError(
                f"--apply-jobs {jobs} can't be used with logical messages that must be handled at "
                "their position in the stream: several workers are at different positions",
                hint="use --apply-jobs 1",
            )
        self._engine = engine
        self.stream = task.stream
        self._sentinel = sentinel
        self._prunes = prunes
        self._poll_seconds = poll_seconds
        self._pruned_at = time.monotonic()
        self._stop = threading.Event()
        # Set when nothing more comes in: the spool, up to the end position, is whole.
        self.is_whole = threading.Event()
        self._lock = threading.Lock()
        self._tasks = [
            replace(
                task,
                stream=worker_name(task.stream, number, jobs),
                share=Share(number, jobs, naming=task.naming),
                family=task.stream,
            )
            for number in range(jobs)
        ]
        self.spool = task.open_spool()
        self.positions = [0] * jobs
        self._blocked_pause = FIRST_BLOCKED_SECONDS
        self.counts = Counts()

    def setup(self, start_lsn: int) -> int:
        """Make the positions on the target, or find them; the least of them."""
        with connect(self._tasks[0].target, "setup") as target:
            self._refuse_other_number(read_worker_positions(target, self.stream))
            for number, task in enumerate(self._tasks):
                kind = setup_position(target, task.stream, start_lsn)
                self._tasks[number] = replace(task, position_kind=kind)
                self.positions[number] = read_position(target, task.stream) or start_lsn
            warn_of_loud(target)
        self._sentinel.write_apply_jobs(len(self._tasks))
        self._sentinel.write_applied(self.position)
        self._sentinel.reset_claim(self.furthest)
        return self.position

    def _refuse_other_number(self, found: dict[str, int]) -> None:
        """Other workers would begin at the beginning, and apply everything again."""
        others = found.keys() - {task.stream for task in self._tasks}
        if others:
            raise WorkDirError(
                f"this stream was started with --apply-jobs {len(others)}, not {len(self._tasks)}",
                hint=f"give --apply-jobs {len(others)}: a stream keeps the number it started with",
            )

    @property
    def position(self) -> int:
        """Everything up to here is on the target."""
        return min(self.positions)

    @property
    def furthest(self) -> int:
        """Nothing that ends after this is on the target."""
        return max(self.positions)

    def worker_of(self, schema: str, name: str) -> ApplyTask:
        """The task of the worker whose table this is."""
        return next(task for task in self._tasks if task.share.has_name(schema, name))

    def run(self) -> None:
        """Until the spool is whole and applied, or `stop`; raises what stopped a worker.

        Their threads keep no process from ending: one that is left to itself, say by Ctrl-C in
        another thread, would wait for changes for ever.
        """
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                self._work(number)
            except BaseException as error:
                failures.append(error)
                self.cancel()

        workers = [
            threading.Thread(
                target=as_logged(work), args=(number,), name=f"apply {number}", daemon=True
            )
            for number in range(len(self._tasks))
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except BaseException:
            self.cancel()
            raise
        if failures:
            raise failures[0]

    def close(self) -> None:
        self.spool.close()

    def stop(self) -> None:
        """End after the batches under way."""
        self._stop.set()

    def cancel(self) -> None:
        """End the tasks under way; `end_sessions` rolls their batches back."""
        self.stop()
        self._engine.cancel()

    def end_sessions(self) -> None:
        """End what tasks left on the target: sessions of this stream's workers and of no other
        stream's, be it of another slot, or of a slot of the same name of another source."""
        workers = [task.stream for task in self._tasks]
        cancel_sessions(self._tasks[0].target, workers, "apply")

    def _work(self, number: int) -> None:
        blind = 0
        pause = self._poll_seconds
        try:
            while not self._stop.is_set():
                # In this order: what came in before the spool was whole is seen afterwards.
                is_whole = self.is_whole.is_set()
                before = self.positions[number]
                if self._step(number):
                    blind = blind + 1 if self.positions[number] == before else 0
                    if blind == BLIND_TASKS:
                        raise out_of_sight()
                    pause = self._poll_seconds
                    continue
                blind = 0
                if is_whole and not self._has_more(number):
                    return
                self._stop.wait(pause)
                if self._poll_seconds > POLL_SECONDS:
                    pause = min(1.2 * pause, LONGEST_POLL_SECONDS)
        except BaseException:
            self._stop.set()
            raise

    def _has_more(self, number: int) -> bool:
        endpos = self._sentinel.read().endpos
        plan = partial(self.spool.plan, self.positions[number], 1, endpos)
        return with_retries(plan, on_retry=log_retry) is not None

    def _step(self, number: int) -> bool:
        """One task, if there is something for it to do and apply is on."""
        if not self._sentinel.read().apply or not self._has_more(number):
            return False
        task = self._tasks[number]
        if task.directory is None:
            until_lsn = self._claim_spooled()
            if until_lsn is None:
                return False
            task = replace(task, until_lsn=until_lsn)
        outcome = self._engine.call(apply_spool, task, f"apply {task.stream}")
        self._note(number, outcome)
        if isinstance(outcome.error, Blocked):
            self._wait_for_others(outcome.error)
            return False
        self._blocked_pause = FIRST_BLOCKED_SECONDS
        if outcome.error is not None:
            raise outcome.error
        return not outcome.made_way

    def _wait_for_others(self, error: Blocked) -> None:
        """Somebody holds a lock on the target; meanwhile other streams have our place."""
        log.warning("%s; trying again in %.0f s", error, self._blocked_pause)
        self._stop.wait(self._blocked_pause)
        self._blocked_pause = min(2 * self._blocked_pause, MOST_BLOCKED_SECONDS)

    def _claim_spooled(self) -> int | None:
        """How far a task may go that can't see the sentinel: to the end of what is spooled now,
        which no end position set meanwhile can undercut; None if one was set just now."""
        spooled = with_retries(self.spool.last_end_lsn, on_retry=log_retry)
        endpos = self._sentinel.read().endpos
        until_lsn = spooled if endpos is None else min(spooled, endpos)
        return until_lsn if self._sentinel.claim(until_lsn) else None

    def _note(self, number: int, outcome: ApplyOutcome) -> None:
        with self._lock:
            self.positions[number] = max(self.positions[number], outcome.position)
            self.counts.transactions += outcome.transactions
            self.counts.batches += outcome.batches
            self.counts.applied.add(outcome.applied)
            at = outcome.committed_at
            self._sentinel.write_applied(self.position, None if at is None else since_1970(at))
            log.debug("applied up to %s", render_lsn(self.position))
            if self._prunes and time.monotonic() - self._pruned_at > PRUNE_SECONDS:
                # Tables that are copied again may need more of it than their worker.
                self._prunes(min(self.position, spool_floor(self._sentinel) or self.position))
                self._pruned_at = time.monotonic()


def out_of_sight() -> WorkDirError:
    """Tasks run where the spool is not."""
    return WorkDirError(
        "Spark's workers find nothing in the spool, although there is something to apply",
        hint="they must be able to read --dir; if they can't, begin the stream with --spool table",
    )
