"""A clone that is killed at one failpoint after the other.

Invariant: each failpoint that is named is reached: what an earlier process has done leaves it to
do.
"""

from __future__ import annotations

import signal

from tests.fixtures.wait import wait_for
from tests.torture.failpoints import TASK
from tests.torture.program import Program
from tests.torture.stage import Play

Names = tuple[str, ...]


def kill_at(play: Play, before: Names, task: Names, beside: Names, after: Names) -> None:
    """Kill the driver at each of these, and workers at every failpoint of a task."""
    for failpoint in before:
        kill_driver(stopped_at(play, failpoint))
    # In a task, first the driver is killed, then the worker, whose driver goes on. In the end all
    # rows are there and no index: from then on no process has to start Spark.
    kill_with_worker(stopped_at(play, TASK[-1]))
    kill_workers(play, "large-objects", TASK[-1:])
    for failpoint in task:
        kill_driver(stopped_at(play, failpoint))
    kill_workers(play, "table-data", TASK[:-1])
    for failpoint in beside + after:
        program = stopped_at(play, failpoint)
        assert not program.has_engine(), f"Spark was started for {failpoint}"
        kill_driver(program)


def stopped_at(play: Play, failpoint: str) -> Program:
    """A process of the clone in which something is stopped just there."""
    program = play.start()
    program.arm(failpoint)
    wait_until_hit(program, failpoint)
    wait_for(program.stopped, f"stopped at {failpoint}")
    return program


def wait_until_hit(program: Program, failpoint: str) -> None:
    wait_for(lambda: program.has_hit(failpoint) or program.exit_code is not None, failpoint)
    assert program.exit_code is None, f"not stopped at {failpoint}: {program.printed()}"


def kill_driver(program: Program) -> None:
    program.process.kill()
    assert program.wait() == -signal.SIGKILL
    program.go_on()  # a worker that was stopped has lost its driver, and may still commit


def kill_with_worker(program: Program) -> None:
    """The driver, and the worker that is stopped."""
    for process in program.stopped():
        process.kill()
    kill_driver(program)


def kill_workers(play: Play, step: str, failpoints: Names) -> None:
    """A step in which a worker is killed at each of these, and which ends well."""
    program = play.start(step=step)
    for failpoint in failpoints:
        program.arm(failpoint)
        wait_until_hit(program, failpoint)
        [worker] = wait_for(program.stopped, failpoint)
        assert worker.pid != program.process.pid
        worker.kill()
    assert program.wait() == 0, program.printed()
