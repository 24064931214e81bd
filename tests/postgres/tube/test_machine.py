"""Everything that can happen to a tube, in any order: at rest its documents are its rows.

`MILLRACE_SEED` repeats what Hypothesis drew. `make torture WHAT=tube` does so for longer, with
Spark, and with servers and wires that fail.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.fixtures.processes.tube_program import TUBE_THREADS
from tests.torture.failpoints import (
    CHANGE_SINKS,
    TUBE,
    TUBE_BACKFILL,
    TUBE_BATCH,
    TUBE_GARBAGE,
    TUBE_MOVED,
    TUBE_PACKAGES,
    read_failpoints,
    some_of,
)
from tests.torture.tube_killing import freeze_at, kill_at
from tests.torture.tube_stage import ACTS, TubePlay
from tests.torture.tube_tables import SUBJECTS, Subject, TubeIngredient

from millrace.postgres.program.embedded import Cluster

SEED = int(os.environ.get("MILLRACE_SEED") or random.SystemRandom().randrange(2**31))
# Each takes some seconds; a long run is `make torture`.
EXAMPLES = int(os.environ.get("MILLRACE_TUBE_EXAMPLES") or 2)
STEPS = 20
# Outside of the sink's transaction, whose locks would be waited for until the server ends it: a
# minute. The campaign has that time.
FROZEN_AT = ("tube.after_draw", "tube.before_write")
_numbers = itertools.count(1)

Open = Callable[[Subject], TubePlay]


@pytest.fixture
def open_tube(source_cluster: Cluster, target_cluster: Cluster, tmp_path: Path) -> Open:
    def open_one(subject: Subject) -> TubePlay:
        name = f"machine_{next(_numbers)}"
        source, target = (one.create_database(name) for one in (source_cluster, target_cluster))
        return TubePlay(subject, source, target, tmp_path / name, TUBE_THREADS)

    return open_one


def test_every_failpoint_of_the_delivery_is_one_we_kill_at() -> None:
    assert read_failpoints(TUBE_PACKAGES) == {*TUBE, *CHANGE_SINKS}


def test_anything_in_any_order_ends_equal(open_tube: Open) -> None:
    class Machine(RuleBasedStateMachine):
        """A delivery goes on all the while; it is started again where it was killed."""

        def __init__(self) -> None:
            super().__init__()
            self.play: TubePlay | None = None

        @initialize(subject=st.sampled_from(SUBJECTS))
        def begin(self, subject: Subject) -> None:
            self.play = open_tube(subject)
            self.play.start()

        @rule(dice=st.integers(0, 2**31), count=st.integers(1, 8))
        def write(self, dice: int, count: int) -> None:
            assert self.play is not None
            die = random.Random(dice)
            for _ in range(count):
                self.play.write(die)

        @rule(what=st.sampled_from(ACTS), dice=st.integers(0, 2**31))
        def administer(self, what: TubeIngredient, dice: int) -> None:
            assert self.play is not None
            self.play.administer(what, random.Random(dice))

        @rule()
        def end_transactions(self) -> None:
            assert self.play is not None
            self.play.end_transactions()

        @rule()
        def heal_sink(self) -> None:
            assert self.play is not None
            self.play.heal_sink()

        @rule()
        def kill_it(self) -> None:
            assert self.play is not None
            self.play.programs[-1].process.kill()
            self.play.start()

        @precondition(lambda self: self.play and not self.play.counts[TubeIngredient.FROZEN])
        @rule(place=st.sampled_from(FROZEN_AT), dice=st.integers(0, 2**31))
        def freeze_a_worker(self, place: str, dice: int) -> None:
            """It is woken when all is at rest."""
            assert self.play is not None
            freeze_at(self.play, place, random.Random(dice))

        def teardown(self) -> None:
            if self.play is None:
                return
            try:
                verdict = self.play.rest()
                assert not verdict.differences, "\n".join(verdict.differences)
            finally:
                self.play.close()

    @seed(SEED)
    def machine() -> Machine:
        return Machine()

    try:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    except AssertionError as error:
        raise AssertionError(f"again with MILLRACE_SEED={SEED}\n{error}") from error


def test_a_delivery_killed_at_some_of_its_failpoints_ends_equal(open_tube: Open) -> None:
    dice = random.Random(SEED)
    subject = dice.choice(SUBJECTS)
    play = open_tube(subject)
    places = (
        *some_of(TUBE_BATCH, dice, 7),
        *some_of(TUBE_GARBAGE, dice, 3),
        *some_of(TUBE_BACKFILL + TUBE_MOVED, dice, 3),
    )
    try:
        for place in places:
            kill_at(play, place, dice)
        verdict = play.rest()
        assert not verdict.differences, f"MILLRACE_SEED={SEED}: {verdict.differences}"
    finally:
        play.close()


def test_what_a_frozen_worker_writes_late_loses(open_tube: Open) -> None:
    dice = random.Random(SEED)
    place = dice.choice(FROZEN_AT)
    play = open_tube(dice.choice(SUBJECTS))
    try:
        play.start()
        freeze_at(play, place, dice)
        verdict = play.rest()
        assert not verdict.differences, f"MILLRACE_SEED={SEED}: {verdict.differences}"
        assert play.counts[TubeIngredient.FROZEN] == 1
    finally:
        play.close()
