"""One stream after the other, each interrupted by schedules and compared after each of them.

Invariant: a round counts only when the stream has ended at the source's position with code 0 and
every row is equal. What a running `millrace follow` has to survive, it survives: it is not started
again, and it must get on. Whatever else a process ends with must be what was done to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.torture.campaign import EXIT_CODES
from tests.torture.failpoints import FAILPOINTS
from tests.torture.figures import FollowFigures
from tests.torture.follow_stage import FollowPlay, FollowStage
from tests.torture.ingredients import Ingredient, sequence_differences
from tests.torture.interrupt import CampaignFailed, first_of, interrupt, wait_until
from tests.torture.pair import Verdict
from tests.torture.program import WITH_SPARK, Program
from tests.torture.schedule import SURVIVED, Interruption, Kind, Schedule, write_schedule

from millrace.engine import Engine
from millrace.errors import ServerError
from millrace.spark.session import TASK_ATTEMPTS
from millrace.workdir.lock import read_holder

LOST = ServerError.exit_code
# Before every fourth interruption a column is added; before others, a table, and the like.
CHANGE_EVERY = 4
# The last ones come when the end position is set already.
WHILE_ENDING = 2
WORKER_DEATHS = (Kind.KILL_WORKER, Kind.KILL_DAEMON, Kind.KILL_EXECUTOR)


class FollowCampaign:
    """Streams on one stage, and what became of them."""

    def __init__(
        self,
        stage: FollowStage,
        engine: Engine,
        directory: Path,
        number: int,
        say: Callable[[str], None] = lambda line: None,
        command: tuple[str, ...] = WITH_SPARK,
    ) -> None:
        self.stage = stage
        self.command = command
        self.engine = engine
        self.directory = directory
        self.figures = FollowFigures(number)
        self._say = say

    def run(
        self,
        schedules: Sequence[Schedule],
        *,
        cluster: bool = False,
        is_time_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """One stream, a round for each schedule; raises CampaignFailed unless all end equal."""
        figures, stage = self.figures, self.stage
        directory = self.directory / f"stream-{figures.streams + 1}"
        directory.mkdir(parents=True)
        held = any(one.moment.failpoint in FAILPOINTS for one in schedules[0])
        with stage.play(directory, held=held, cluster=cluster) as play:
            play.command = self.command
            stream = _Interrupted(play, figures, self._say)
            try:
                for number, schedule in enumerate(schedules, 1):
                    write_schedule(directory / f"schedule-{number}.json", schedule)
                    self._round(stream, schedule, cuts_over=number % 2 == 1)
                    if is_time_up():
                        break
            finally:
                figures.processes += len(play.programs)
                figures.ingredients[Ingredient.SHORT_TIMEOUTS] += len(play.programs)
            play.assert_nothing_runs()
            figures.torn_looks += play.seen.looks
        figures.streams += 1

    def _round(self, stream: _Interrupted, schedule: Schedule, *, cuts_over: bool) -> None:
        figures, workload = self.figures, self.stage.workload
        began, written = time.monotonic(), self.stage.written()
        changed, rolled_back = workload.rows_changed, workload.rolled_back
        used = workload.ingredients.copy()
        stream.begin()
        ending = schedule[-WHILE_ENDING:] if not cuts_over else ()
        stream.run(schedule[: len(schedule) - len(ending)])
        workload.pause()
        workload.commit_asynchronously()
        if cuts_over:
            stream.cut_over()
        else:
            stream.end(ending)
        verdict = stream.compare(self.engine)
        figures.judge(verdict)
        figures.ingredients.update(workload.ingredients - used)
        figures.rounds += 1
        figures.transactions_meanwhile += self.stage.written() - written
        figures.rows_changed += workload.rows_changed - changed
        figures.transactions_rolled_back += workload.rolled_back - rolled_back
        figures.seconds += time.monotonic() - began
        self._say(
            f"round {figures.rounds} is equal: {verdict.tables} tables, {verdict.rows:,} rows; "
            f"so far {figures.total} interruptions, {figures.transactions_meanwhile:,} "
            f"transactions, {figures.rows_changed:,} rows changed, 0 differences"
        )


class _Interrupted:
    """One stream on its way through its schedules."""

    def __init__(
        self, play: FollowPlay, figures: FollowFigures, say: Callable[[str], None]
    ) -> None:
        self._play = play
        self._figures = figures
        self._say = say
        self._program: Program | None = None
        # What the present process has to bear: decides how it may end.
        self._borne: list[Interruption] = []
        # Whether it has applied anything yet; before that it may give up on a lost connection.
        self._has_got_on = False
        self._is_ending = False

    def begin(self) -> None:
        """The end of the last round is taken away."""
        play = self._play
        if self._is_ending:
            play.set_endpos("--none")
        self._is_ending = False
        play.stage.workload.resume(gentle=not play.is_cloned)

    def run(self, schedule: Schedule) -> None:
        """Everything in it, one after the other."""
        copying = [one for one in schedule if one.moment.failpoint in FAILPOINTS]
        for interruption in copying:
            self._one(interruption)
        self._follow()
        for number, interruption in enumerate(schedule[len(copying) :]):
            self._change(number)
            self._one(interruption)
        self._take_up()

    def cut_over(self) -> None:
        """`millrace cutover` ends a running `follow`, or follows by itself."""
        self._is_ending = True
        cutover = self._play.start_cutover()
        if self._program is not None and self._end(self._program) != 0:
            self._say("  the last process had not got over it; cutover goes on by itself")
        code = cutover.wait()
        if code != 0 or "Traceback" in cutover.printed():
            raise CampaignFailed(f"cutover: exit code {code}: {cutover.printed()[-2000:]}")

    def end(self, schedule: Schedule) -> None:
        """The end position is where the source stands; not all of this may happen before it."""
        self._play.end_here()
        self._is_ending = True
        for interruption in schedule:
            if not self._one(interruption):
                return
        for _ in range(3):
            if self._end(self._present()) == 0:
                return
        raise CampaignFailed(f"the stream does not end: {self._play.last_words()}")

    def compare(self, engine: Engine) -> Verdict:
        """Both sides, every row; and that they agree on how many transactions there were."""
        verdict = self._play.compare_rows(engine)
        sequences, moved = sequence_differences(self._play.stage.source_uri, self._play.target_uri)
        self._figures.ingredients[Ingredient.SEQUENCES] += sequences
        verdict = replace(verdict, differences=(*verdict.differences, *moved))
        if not verdict.differences and self._play.applied() > self._play.stage.written():
            raise CampaignFailed("the target has more transactions than the source")
        return verdict

    def _follow(self) -> None:
        """Until the copy is whole and changes are applied."""
        for _ in range(3):
            program = self._present()
            if first_of(program, lambda: self._play.is_cloned, why="it is cloned"):
                break
            self._end(program)
        else:
            raise CampaignFailed(f"the clone does not end: {self._play.last_words()}")
        self._get_on()
        self._play.release()
        self._play.stage.workload.resume(gentle=False)

    def _one(self, interruption: Interruption) -> bool:
        """True when it is over; False if the stream has ended before."""
        if not self._reach(interruption):
            self._figures.not_reached += 1
            return not self._is_ending or self._program is not None
        self._borne.append(interruption)
        done = interrupt(self._present(), interruption, self._play.stage)
        if done:
            self._figures.count(interruption)
            self._say(f"  {interruption}")
        else:
            self._borne.pop()
            self._figures.not_reached += 1
        self._settle(interruption, applied=done)
        return True

    def _reach(self, interruption: Interruption) -> bool:
        """Bring a process to the moment; False if it can't come any more."""
        play = self._play
        copying = interruption.moment.failpoint in FAILPOINTS
        for _ in range(3):
            program = self._present()
            is_over = (lambda: play.is_cloned) if copying else (lambda: False)
            if wait_until(program, interruption, play.stage.proxies, play.applied, is_over):
                return True
            if program.exit_code is None:
                program.go_on()
                return False
            if self._end(program) == 0:
                return False
        raise CampaignFailed(f"no process comes to {interruption}: {play.last_words()}")

    def _present(self) -> Program:
        if self._program is None:
            self._program = self._play.start()
            self._borne = []
            self._has_got_on = False
        return self._program

    def _settle(self, interruption: Interruption, *, applied: bool) -> None:
        """Let what was stopped go on; see off a process that had to end, and see that one that
        survives gets on."""
        program = self._present()
        program.disarm()
        program.go_on()
        if not applied:
            return
        kind = interruption.kind
        if kind not in SURVIVED and kind is not Kind.RESTART_TARGET:
            self._end(program)
            if interruption.patient:
                self._play.assert_nothing_runs()
        elif interruption.patient and not self._is_ending and self._play.is_cloned:
            self._get_on()

    def _get_on(self) -> None:
        """What is committed now comes to the target; started again only if it may have ended."""
        play = self._play
        goal = play.stage.written() + 1
        for _ in range(3):
            program = self._present()
            if first_of(program, lambda: play.applied() >= goal, why=f"{goal} transactions"):
                self._has_got_on = True
                return
            self._end(program)
        raise CampaignFailed(f"it does not get on: {play.last_words()}")

    def _end(self, program: Program) -> int:
        """Wait for the process's end, and judge it."""
        try:
            code = program.wait()
        except AssertionError as error:
            raise CampaignFailed(str(error)) from error
        self._program = None
        allowed = self._allowed(program)
        if code not in allowed or "Traceback" in program.printed():
            borne = ", ".join(map(str, self._borne)) or "nothing"
            raise CampaignFailed(
                f"exit code {code} after {borne}; see {program.log}: {program.printed()[-2000:]}"
            )
        return code

    def _allowed(self, program: Program) -> set[int]:
        """How the process may have ended after what was done to it."""
        allowed = {0} if self._is_ending else set()
        for one in self._borne:
            may_give_up = one.moment.failpoint in FAILPOINTS or not self._has_got_on
            if one.kind in (*SURVIVED, Kind.RESTART_TARGET):
                if may_give_up or one.kind is Kind.RESTART_TARGET:
                    allowed.add(LOST)
            else:
                allowed |= EXIT_CODES[one.kind] - {0}
        deaths = sum(one.kind in WORKER_DEATHS for one in self._borne)
        if deaths >= TASK_ATTEMPTS and f"failed {TASK_ATTEMPTS} times" in program.printed():
            allowed.add(LOST)  # a task is tried so often
        return allowed

    def _change(self, number: int) -> None:
        """What people do to a database while it is followed, before an interruption."""
        play, figures = self._play, self._figures
        turn = number % CHANGE_EVERY
        if turn == 1:
            play.add_column()
            figures.columns_added += 1
        elif turn == 2:
            play.add_table()
            figures.ingredients[Ingredient.LATE_TABLES] += 1
        elif turn == 3:
            play.resync()
            figures.ingredients[Ingredient.RESYNCS] += 1
        else:
            play.give_identity()

    def _take_up(self) -> None:
        """What came late has to be followed before the end is set, or it would be accused; and
        a process that has only begun to start must hold its directory, or `cutover` would take
        it."""
        play = self._play
        for _ in range(3):
            program = self._present()

            def is_taken_up(pid: int = program.process.pid) -> bool:
                return read_holder(play.work) == pid and play.is_all_followed()

            if first_of(program, is_taken_up, why="all tables are followed"):
                return
            self._end(program)
        raise CampaignFailed(f"a table is not taken up: {self._play.last_words()}")
