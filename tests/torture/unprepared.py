"""Clones that are killed with nothing prepared, continued, and compared.

Invariant: every clone ends equal to the source as of the snapshot that its own process held,
however often and whenever its driver was killed; and that process ends with the last row.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.wait import wait_for
from tests.torture.failpoints import AFTER, BEFORE, BESIDE, OWN_SNAPSHOT
from tests.torture.figures import CloneFigures
from tests.torture.interrupt import CampaignFailed, interrupt, wait_until
from tests.torture.program import Program
from tests.torture.schedule import After, Interruption, Kind, Moment, at, parts
from tests.torture.stage import Play, Stage

from millrace.engine import Engine
from millrace.snapshot.holder import read_held

# How a driver ends by what is done to it.
_CODES = {Kind.KILL_DRIVER: -signal.SIGKILL, Kind.INTERRUPT: 130, Kind.TERMINATE: 143}


class UnpreparedCampaign:
    """Clones of one stage."""

    def __init__(
        self,
        stage: Stage,
        engine: Engine,
        directory: Path,
        seed: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.figures = CloneFigures(seed)
        self._stage = stage
        self._engine = engine
        self._directory = directory
        self._dice = random.Random(seed)
        self._say = say

    def run(self) -> None:
        """One clone, killed one to three times; raises CampaignFailed unless it ends equal."""
        number = self.figures.clones + 1
        began = time.monotonic()
        with self._stage.play(self._directory / f"clone-{number}", prepared=False) as play:
            play.command = MILLRACE
            self._interrupt(play)
            last = play.start()
            if last.wait() != 0:
                raise CampaignFailed(f"the clone does not end: {play.last_words()}")
            wait_for(lambda: read_held(play.work) is None, "the snapshot is given back")
            play.held_by = []
            self.figures.judge(play.compare(self._engine))
            play.assert_nothing_runs()
            self.figures.processes += len(play.programs)
        self.figures.clones += 1
        self.figures.seconds += time.monotonic() - began

    def _interrupt(self, play: Play) -> None:
        """Before the snapshot, perhaps; then in the moments of the dice."""
        if self._dice.random() < 0.25:
            self._kill_at(play, play.start(), Interruption(Kind.KILL_DRIVER, at("run.pinned")))
        program = play.start()
        program.arm(OWN_SNAPSHOT[0])
        wait_for(lambda: program.has_hit(OWN_SNAPSHOT[0]) or program.exit_code, "a snapshot")
        wait_for(lambda: program.stopped() or program.exit_code, "it is stopped")
        play.adopt()
        for _ in range(self._dice.randrange(1, 4)):
            one = Interruption(self._dice.choice(list(_CODES)), self._moment())
            program.go_on()
            if not self._kill_at(play, program, one):
                return  # it is done
            program = play.start()
        program.wait()

    def _moment(self) -> Moment:
        return self._dice.choice(
            [
                at(self._dice.choice(BEFORE[1:] + BESIDE + AFTER[:-3])),
                parts(self._dice.randrange(1, 7)),
                Moment(After.SOURCE_BYTES, number=self._dice.randrange(1, 400_000)),
                Moment(After.TARGET_BYTES, number=self._dice.randrange(1, 400_000)),
            ]
        )

    def _kill_at(self, play: Play, program: Program, one: Interruption) -> bool:
        """False if it ended, well, before the moment."""
        if not wait_until(program, one, self._stage.proxies, play.committed_parts):
            if program.wait() != 0:
                raise CampaignFailed(f"it fails by itself: {play.last_words()}")
            return False
        interrupt(program, one, self._stage)
        program.disarm()
        program.go_on()
        code = program.wait()
        # A signal at the very end finds nothing left to stop.
        if code not in (_CODES[one.kind], 0) or "Traceback" in program.printed():
            raise CampaignFailed(f"exit code {code} after {one}: {play.last_words()}")
        self.figures.count(one)
        self._say(f"  {one}")
        return code != 0
