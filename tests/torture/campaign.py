"""One clone after the other, each interrupted by a schedule, resumed, and compared at its end.

Invariant: a clone counts as done only when its process ended with 0 and the target equals the
source under the snapshot. Whatever else a process ends with must be what was done to it, or a
server's error; an error of our own making is a failure of the campaign.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.torture.failpoints import AFTER
from tests.torture.program import POLL_SECONDS, Program, wait_for
from tests.torture.schedule import (
    SIDES,
    After,
    Interruption,
    Kind,
    Schedule,
    write_schedule,
)
from tests.torture.stage import Play, Stage, Verdict

from millrace.clone.engine import Engine
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
BYTES = {After.SOURCE_BYTES: "source", After.TARGET_BYTES: "target"}
# A signal at the very end finds nothing left to stop.
LATE = ("run.finished", "records.dropped")
# After the last interruption nothing is in the way of a process; a second one may still be needed
# when the last interruption was one that a process survives for a while.
LAST_ATTEMPTS = 2
SIGNALS = {Kind.TERMINATE: signal.SIGTERM, Kind.INTERRUPT: signal.SIGINT, Kind.QUIT: signal.SIGQUIT}


# How long a worker may take to come.
VICTIM_SECONDS = 5


class CampaignFailed(AssertionError):
    """A clone that differs, or ended in a way it must not."""


@dataclass
class Figures:
    """What a campaign has done so far."""

    seed: int
    clones: int = 0
    processes: int = 0
    interruptions: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    most_in_one_clone: int = 0
    # Drawn, but the clone was done before, or the process to be killed was not there.
    not_reached: int = 0
    tables_compared: int = 0
    rows_compared: int = 0
    differences: int = 0
    transactions_meanwhile: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.interruptions.values())

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "total_interruptions": self.total}


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
        self.figures = Figures(number)
        self._say = say

    def run(self, schedule: Schedule) -> Verdict:
        """One clone; raises CampaignFailed, with everything left in place, unless it ends equal."""
        figures = self.figures
        directory = self.directory / f"clone-{figures.clones + 1}"
        directory.mkdir(parents=True)
        write_schedule(directory / "schedule.json", schedule)
        began, written = time.monotonic(), self.stage.writers.committed
        with self.stage.play(directory) as play:
            applied = _Interrupted(play, figures, self._say).run(schedule)
            verdict = play.compare(self.engine)
            figures.differences += len(verdict.differences)
            if verdict.differences:
                raise CampaignFailed("\n".join(["the target differs:", *verdict.differences]))
            play.assert_nothing_runs()
            figures.processes += len(play.programs)
        figures.clones += 1
        figures.most_in_one_clone = max(figures.most_in_one_clone, applied)
        figures.tables_compared += verdict.tables
        figures.rows_compared += verdict.rows
        figures.transactions_meanwhile += self.stage.writers.committed - written
        figures.seconds += time.monotonic() - began
        return verdict

    def write(self, path: Path, **more: Any) -> None:
        """The figures so far, as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**self.figures.as_dict(), **more}, indent=2) + "\n")


class _Interrupted:
    """One clone on its way through its schedule."""

    def __init__(self, play: Play, figures: Figures, say: Callable[[str], None]) -> None:
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
                self._figures.interruptions[interruption.kind] += 1
                self._figures.moments[interruption.moment.after] += 1
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
            if _wait_until(self._play, program, interruption):
                return True
            if self._end(program) == 0:
                return False
        raise CampaignFailed(f"no process comes to {interruption}: {self._last_words()}")

    def _present(self) -> Program:
        if self._program is None:
            self._program = self._play.start()
            self._borne = []
        return self._program

    def _apply(self, interruption: Interruption) -> bool:
        """Do it; False if there is nobody to do it to."""
        program, kind = self._present(), interruption.kind
        self._borne.append(interruption)
        if kind is Kind.KILL_DRIVER:
            program.process.kill()
        elif kind in SIGNALS:
            # A terminal sends the first two to all processes, a supervisor SIGTERM to one.
            if kind is Kind.TERMINATE:
                program.process.send_signal(signal.SIGTERM)
            else:
                program.signal_group(SIGNALS[kind])
        elif kind is Kind.KILL_JVM:
            return _kill(program.jvm())
        elif kind is Kind.KILL_DAEMON:
            return _kill(_victim(program, program.daemons))
        elif kind is Kind.KILL_WORKER:
            stopped = [p for p in program.stopped() if p.pid != program.process.pid]
            return _kill(stopped[0] if stopped else _victim(program, program.workers))
        elif kind in SIDES:
            if BYTES.get(interruption.moment.after) != SIDES[kind]:
                self._play.stage.proxies[SIDES[kind]].cut()
        else:
            self._play.stage.restart_target()
        return True

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
                f"exit code {code} after {borne}; see {program.log}: {self._last_words()}"
            )
        return code

    def _finish(self) -> None:
        for _ in range(LAST_ATTEMPTS):
            if self._end(self._present()) == 0 and self._is_done():
                return
        raise CampaignFailed(f"the clone does not end: {self._last_words()}")

    def _is_done(self) -> bool:
        return (self._play.work / "summary.json").exists()

    def _last_words(self) -> str:
        return self._play.programs[-1].printed()[-2000:] if self._play.programs else ""


def _wait_until(play: Play, program: Program, interruption: Interruption) -> bool:
    """True at the moment; False if the process ended before it. A wire that is to be cut at some
    byte is cut then."""
    moment = interruption.moment
    if moment.after is After.FAILPOINT:
        program.arm(moment.failpoint)
        reached = _first_of(program, lambda: program.has_hit(moment.failpoint))
        if not reached:
            program.disarm()
            return False
        # It may have ended just behind its last failpoint.
        wait_for(lambda: program.stopped() or program.exit_code is not None, "it is stopped")
        return program.exit_code is None
    if moment.after is After.PARTS:
        wanted = play.committed_parts() + moment.number
        return _first_of(program, lambda: play.committed_parts() >= max(wanted, 1))
    proxy = play.stage.proxies[BYTES[moment.after]]
    if SIDES.get(interruption.kind) == BYTES[moment.after]:
        proxy.arm(moment.number, every=interruption.patient)
        reached = _first_of(program, lambda: not proxy.is_armed())
        proxy.disarm()
        return reached
    goal = proxy.passed_bytes() + moment.number
    return _first_of(program, lambda: proxy.passed_bytes() >= goal)


def _first_of(program: Program, what: Callable[[], bool]) -> bool:
    """True when `what` comes true, False when the process ends."""
    result: list[bool] = []

    def look() -> bool:
        program.family()
        if program.exit_code is not None:
            result.append(False)
        elif what():
            result.append(True)
        return bool(result)

    wait_for(look, "the moment, or the end", 240)
    return result[0]


def _victim(program: Program, find: Callable[[], list[psutil.Process]]) -> psutil.Process | None:
    """One of them, as soon as there is one."""
    deadline = time.monotonic() + VICTIM_SECONDS
    while time.monotonic() < deadline and program.exit_code is None:
        if found := find():
            return found[0]
        if program.stopped():
            break  # none will come
        time.sleep(POLL_SECONDS)
    return None


def _kill(process: psutil.Process | None) -> bool:
    if process is None:
        return False
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True
