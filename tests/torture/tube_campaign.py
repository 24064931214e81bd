"""One tube after the other, each interrupted in every way there is, and compared at rest.

Invariant: a round counts only when its documents are the rows that are shown. What a running
`millrace tube run` has to survive, it survives: it is not started again, and it must get on.
Whatever else a process ends with must be what was done to it.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psycopg
from tests.fixtures.processes.program import MILLRACE
from tests.torture.campaign import EXIT_CODES
from tests.torture.failpoints import TUBE, TUBE_BATCH
from tests.torture.figures import TubeFigures
from tests.torture.follow_stage import SOURCE_SETTINGS, SYNCED
from tests.torture.interrupt import CampaignFailed, first_of, interrupt, wait_until
from tests.torture.pair import Pair
from tests.torture.program import WITH_SPARK, Program
from tests.torture.schedule import TUBE_KINDS, After, Interruption, Kind, Moment, at
from tests.torture.tube_killing import freeze_at, kill_at
from tests.torture.tube_stage import ACTS, TubePlay
from tests.torture.tube_tables import SUBJECTS, Subject

from millrace.errors import ServerError
from millrace.postgres.program.embedded import open_cluster

LOST = ServerError.exit_code
WRITERS = 2
# Of the deck of interruptions, for each round.
HAND = 5
# What ends a process; everything else it has to survive.
ENDINGS = (Kind.KILL_DRIVER, Kind.TERMINATE, Kind.INTERRUPT, Kind.KILL_JVM)
SOURCE_LOST = (Kind.CUT_SOURCE, Kind.RESTART_SOURCE, Kind.CRASH_SOURCE)

T = TypeVar("T")


class TubeStage(Pair):
    """Two servers, a proxy before each."""

    def restart_source(self, mode: str = "fast") -> None:
        self.source.restart(mode)

    def play(self, subject: Subject, directory: Path, command: tuple[str, ...]) -> TubePlay:
        name = f"tube_{directory.name.replace('-', '_')}"
        return TubePlay(
            subject,
            self.source.create_database(name),
            self.target.create_database(name),
            directory,
            command,
            proxied=(self.proxied("source", name), self.proxied("target", name)),
        )


@contextmanager
def open_tube_stage(seed: int) -> Iterator[TubeStage]:
    with (
        open_cluster((16, 18)[seed % 2], tcp=True, settings=SOURCE_SETTINGS) as source,
        open_cluster(18, tcp=True, settings=SYNCED) as target,
        closing(TubeStage(source, target)) as stage,
    ):
        yield stage


class TubeCampaign:
    """Tubes on one stage, and what became of them."""

    def __init__(
        self,
        stage: TubeStage,
        directory: Path,
        seed: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.stage = stage
        self.directory = directory
        self.figures = TubeFigures(seed)
        self._dice = random.Random(seed)
        self._say = say
        # The one with partitions first: it has the most to go wrong.
        self._subjects = itertools.cycle(SUBJECTS[::-1])
        self._kinds = _deal(TUBE_KINDS, self._dice)
        self._acts = _deal(ACTS, self._dice)

    def run(self) -> None:
        """A round; every other one with Spark, the first is killed at every failpoint."""
        number = self.figures.rounds + 1
        command = WITH_SPARK if number % 2 == 0 else MILLRACE
        subject = next(self._subjects)
        self._say(f"round {number}, {subject.name}, {'Spark' if number % 2 == 0 else 'processes'}:")
        began = time.monotonic()
        play = self.stage.play(subject, self.directory / f"round-{number}", command)
        with closing(play):
            interrupted = _Interrupted(self.stage, play, self.figures, self._dice, self._say)
            with _writing(play, self._dice.randrange(2**31)):
                if number == 1:
                    interrupted.kill_everywhere()
                for kind in self._hand(has_jvm=command == WITH_SPARK):
                    for act in itertools.islice(self._acts, 2):
                        play.administer(act, self._dice)
                    interrupted.one(kind)
            verdict = play.rest()
            self.figures.ingredients.update(play.counts)
            self.figures.processes += len(play.programs)
            self.figures.judge(verdict)
        self.figures.rounds += 1
        self.figures.seconds += time.monotonic() - began
        self._say(f"round {number} is equal: {verdict.rows} documents")

    def _hand(self, *, has_jvm: bool) -> list[Kind]:
        """What is done to a round. A JVM is killed where there is one, and each time."""
        found = list(itertools.islice(self._kinds, HAND))
        others = [kind for kind in found if kind is not Kind.KILL_JVM]
        return [*others, Kind.KILL_JVM] if has_jvm else others


class _Interrupted:
    """One tube on its way."""

    def __init__(
        self,
        stage: TubeStage,
        play: TubePlay,
        figures: TubeFigures,
        dice: random.Random,
        say: Callable[[str], None],
    ) -> None:
        self._stage, self._play, self._figures = stage, play, figures
        self._dice, self._say = dice, say
        self._has_got_on = False

    def kill_everywhere(self) -> None:
        for place in TUBE:
            self._play.heal_sink()
            kill_at(self._play, place, self._dice)
            self._count(Interruption(Kind.KILL_WORKER, at(place)))
        self._play.end(self._play.programs[-1])

    def one(self, kind: Kind) -> None:
        """Bring a process to some moment, do it, and see that it gets on or ends as it must."""
        program = self._present()
        if kind is not Kind.FREEZE_WORKER and not self._has_got_on:
            program = self._get_on(program)
        interruption = Interruption(kind, self._moment(kind))
        if kind is Kind.FREEZE_WORKER:
            self._play.heal_sink()
            freeze_at(self._play, interruption.moment.failpoint, self._dice)
            self._count(interruption)
            program.go_on()
            self._play.end(program)
            return
        self._play.heal_sink()
        if not wait_until(program, interruption, self._stage.proxies, self._play.delivered):
            raise CampaignFailed(f"it ended before {interruption}: {program.printed()[-2000:]}")
        if kind in SOURCE_LOST:
            self._play.excuse()
        is_done = self._do(program, interruption)
        if is_done:
            self._count(interruption)
        else:
            self._figures.not_reached += 1
        program.disarm()
        program.go_on()
        if is_done and kind in ENDINGS:
            self._see_off(program, kind)
        else:
            self._get_on(program)

    def _do(self, program: Program, interruption: Interruption) -> bool:
        if interruption.kind is not Kind.KILL_WORKER:
            return interrupt(program, interruption, self._stage)
        stopped = [one for one in program.stopped() if one.pid != program.process.pid]
        workers = stopped or self._play.workers(program)
        for worker in workers[:1]:
            worker.kill()
        return bool(workers)

    def _moment(self, kind: Kind) -> Moment:
        dice = self._dice
        number = dice.choice((dice.randrange(1, 2000), dice.randrange(2000, 200_000)))
        if kind is Kind.FREEZE_WORKER:
            return at(dice.choice(TUBE_BATCH))
        return dice.choice(
            (
                at(dice.choice(TUBE_BATCH)),
                Moment(After.TRANSACTIONS, number=dice.randrange(1, 60)),
                Moment(After.SOURCE_BYTES, number=number),
                Moment(After.TARGET_BYTES, number=number),
            )
        )

    def _present(self) -> Program:
        programs = self._play.programs
        if not programs or programs[-1].exit_code is not None:
            self._has_got_on = False
            self._play.start()
        return self._play.programs[-1]

    def _get_on(self, program: Program) -> Program:
        """It delivers; one that never did may have given up on a server that was away."""
        self._play.heal_sink()
        for _ in range(3):
            goal = self._play.delivered() + 1
            if first_of(
                program, lambda goal=goal: self._play.delivered() > goal, why="it delivers"
            ):  # type: ignore[misc]
                self._has_got_on = True
                return program
            self._judge(program, {LOST} if not self._has_got_on else set())
            program = self._present()
        raise CampaignFailed(f"it does not get on: {program.printed()[-2000:]}")

    def _see_off(self, program: Program, kind: Kind) -> None:
        program.wait()
        self._judge(program, EXIT_CODES[kind] - {0})
        self._play.end(program)
        self._has_got_on = False

    def _judge(self, program: Program, allowed: set[int]) -> None:
        code = program.exit_code
        if code not in allowed or "Traceback" in program.printed():
            raise CampaignFailed(
                f"exit code {code}; see {program.log}: {program.printed()[-2000:]}"
            )

    def _count(self, interruption: Interruption) -> None:
        self._figures.count(interruption)
        self._say(f"  {interruption}")


@contextmanager
def _writing(play: TubePlay, seed: int) -> Iterator[None]:
    """Clients that write all the while, and leave transactions open for some time."""
    stop = threading.Event()

    def write(number: int) -> None:
        dice = random.Random(seed + number)
        for turn in itertools.count():
            if stop.wait(0.02):
                return
            with suppress(psycopg.OperationalError):
                play.write(dice)
                if turn % 40 == 39:
                    play.end_transactions()

    threads = [threading.Thread(target=write, args=[number]) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _deal(cards: Sequence[T], dice: random.Random) -> Iterator[T]:
    """Each once, in any order, then again."""
    while True:
        yield from dice.sample(list(cards), len(cards))
