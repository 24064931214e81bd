"""One clone after the other, each interrupted by a schedule, resumed, and compared at its end.

Invariant: a clone counts as done only when its process ended with 0 and the target equals the
source under the snapshot. Whatever else a process ends with must be what was done to it, or a
server's error; an error of our own making is a failure of the campaign.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.torture.failpoints import AFTER, BEFORE, BESIDE, FAILPOINTS, TASK
from tests.torture.figures import CloneFigures
from tests.torture.interrupt import CampaignFailed, interrupt, wait_until
from tests.torture.killing import kill_at
from tests.torture.pair import Verdict
from tests.torture.program import Program
from tests.torture.schedule import After, Interruption, Kind, Schedule, write_schedule
from tests.torture.stage import Play, Stage

from millrace.engine import Engine
from millrace.errors import ServerError

# How a process may end after this; whatever it survives ends with 0.
EXIT_CODES = {
    Kind.KILL_DRIVER: {-signal.SIGKILL},
    Kind.TERMINATE: {143},
    Kind.INTERRUPT: {130},
    Kind.QUIT: {-signal.SIGQUIT},
    Kind.KILL_JVM: {0, ServerError.exit_code},
    Kind.KILL_WORKER: {0, ServerError.exit_code},
    Kind.KILL_DAEMON: {0, ServerError.exit_code},
    Kind.CUT_SOURCE: {0, ServerError.exit_code},
    Kind.CUT_TARGET: {0, ServerError.exit_code},
    Kind.RESTART_TARGET: {0, ServerError.exit_code},
}
# A signal at the very end finds nothing left to stop.
LATE = ("run.finished", "records.dropped")
# After the last interruption nothing is in the way of a process; a second one may still be needed
# when the last interruption was one that a process survives for a while.
LAST_ATTEMPTS = 2


class Campaign:
    """Clones on one stage, and what became of them."""

    def __init__(
        self,
        stage: Stage,
        engine: Engine,
        directory: Path,
        number: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.stage = stage
        self.engine = engine
        self.directory = directory
        self.figures = CloneFigures(number)
        self._say = say

    def run(self, schedule: Schedule) -> Verdict:
        """One clone; raises CampaignFailed, with everything left in place, unless it ends equal."""
        directory = self._next_directory()
        write_schedule(directory / "schedule.json", schedule)
        return self._judge(
            directory, lambda play: _Interrupted(play, self.figures, self._say).run(schedule)
        )

    def kill_everywhere(self) -> Verdict:
        """One clone, its driver killed at every failpoint, its workers at those of tasks."""

        def kill(play: Play) -> int:
            kill_at(play, BEFORE, TASK[:-1], BESIDE, AFTER)
            last = play.start()
            if last.wait() != 0:
                raise CampaignFailed(f"the clone does not end: {play.last_words()}")
            deaths = len(FAILPOINTS) + len(TASK)
            self.figures.interruptions[Kind.KILL_DRIVER] += len(FAILPOINTS)
            self.figures.interruptions[Kind.KILL_WORKER] += len(TASK)
            self.figures.moments[After.FAILPOINT] += deaths
            return deaths

        return self._judge(self._next_directory(), kill)

    def _next_directory(self) -> Path:
        directory = self.directory / f"clone-{self.figures.clones + 1}"
        directory.mkdir(parents=True)
        return directory

    def _judge(self, directory: Path, interrupt_all: Callable[[Play], int]) -> Verdict:
        figures = self.figures
        began, written = time.monotonic(), self.stage.writers.committed
        with self.stage.play(directory) as play:
            applied = interrupt_all(play)
            verdict = play.compare(self.engine)
            figures.judge(verdict)
            play.assert_nothing_runs()
            figures.processes += len(play.programs)
        figures.clones += 1
        figures.most_in_one_clone = max(figures.most_in_one_clone, applied)
        figures.transactions_meanwhile += self.stage.writers.committed - written
        figures.seconds += time.monotonic() - began
        return verdict


class _Interrupted:
    """One clone on its way through its schedule."""

    def __init__(self, play: Play, figures: CloneFigures, say: Callable[[str], None]) -> None:
        self._play = play
        self._figures = figures
        self._say = say
        self._program: Program | None = None
        # What the present process has to bear: decides how it may end.
        self._borne: list[Interruption] = []

    def run(self, schedule: Schedule) -> int:
        """Until the clone is done; the number of interruptions it took."""
        applied = 0
        for number, interruption in enumerate(schedule):
            if not self._reach(interruption):
                self._figures.not_reached += len(schedule) - number
                break  # the clone is done
            done = self._apply(interruption)
            if done:
                applied += 1
                self._figures.count(interruption)
                self._say(f"  {interruption}")
            else:
                self._figures.not_reached += 1
            self._settle(interruption, applied=done)
        self._finish()
        return applied

    def _reach(self, interruption: Interruption) -> bool:
        """Bring a process to the moment; False if the clone is done before."""
        for _ in range(3):
            program = self._present()
            if wait_until(
                program, interruption, self._play.stage.proxies, self._play.committed_parts
            ):
                return True
            if self._end(program) == 0:
                return False
        raise CampaignFailed(f"no process comes to {interruption}: {self._play.last_words()}")

    def _present(self) -> Program:
        if self._program is None:
            self._program = self._play.start()
            self._borne = []
        return self._program

    def _apply(self, interruption: Interruption) -> bool:
        """Do it; False if there is nobody to do it to."""
        self._borne.append(interruption)
        return interrupt(self._present(), interruption, self._play.stage)

    def _settle(self, interruption: Interruption, *, applied: bool) -> None:
        """Let what was stopped go on; see off a process that had to end."""
        program = self._present()
        program.disarm()
        program.go_on()
        # Without its JVM a process can't go on, unless it has moved everything before.
        moving = interruption.moment.failpoint not in AFTER
        lost_jvm = applied and interruption.kind is Kind.KILL_JVM and moving
        if lost_jvm or not EXIT_CODES[interruption.kind] & {0}:
            self._end(program)
            if interruption.patient:
                self._play.assert_nothing_runs()

    def _end(self, program: Program) -> int:
        """Wait for the process's end, and judge it."""
        try:
            code = program.wait()
        except AssertionError as error:
            raise CampaignFailed(str(error)) from error
        self._program = None
        allowed = {0} if not self._borne else set()
        for one in self._borne:
            allowed |= EXIT_CODES[one.kind]
            if one.moment.failpoint in LATE:
                allowed.add(0)
        if code not in allowed or "Traceback" in program.printed():
            borne = ", ".join(map(str, self._borne)) or "nothing"
            raise CampaignFailed(
                f"exit code {code} after {borne}; see {program.log}: {self._play.last_words()}"
            )
        return code

    def _finish(self) -> None:
        for _ in range(LAST_ATTEMPTS):
            if self._end(self._present()) == 0 and self._is_done():
                return
        raise CampaignFailed(f"the clone does not end: {self._play.last_words()}")

    def _is_done(self) -> bool:
        return (self._play.work / "summary.json").exists()
