"""Workers of a tube that are killed or frozen at a place in the code.

Invariant: the place is reached: whatever leads there is written first. A frozen worker wakes only
when its successor has delivered everything, so that its own write is late.
"""

from __future__ import annotations

import random
from contextlib import suppress

import psutil
import psycopg
from tests.fixtures.wait import wait_for
from tests.torture.failpoints import TUBE_BACKFILL, TUBE_GARBAGE, TUBE_MOVED
from tests.torture.interrupt import first_of
from tests.torture.program import Program
from tests.torture.tube_stage import TubePlay
from tests.torture.tube_tables import TubeIngredient, insert, truncate


def kill_at(play: TubePlay, place: str, dice: random.Random) -> None:
    """The worker that comes to this place; its driver, if it is another process, has the work done
    once more."""
    program = _program_for(play, place, dice)
    for process in stop_at(play, program, place, dice):
        process.kill()
        if process.pid == program.process.pid:
            program.wait()
    program.disarm()
    program.go_on()
    if place in TUBE_GARBAGE:
        play.end(program)


def _program_for(play: TubePlay, place: str, dice: random.Random) -> Program:
    """One that runs. A collection ends at once only where the tube is to be emptied; that one has
    ended when this is over."""
    running = [one for one in play.programs if one.exit_code is None]
    if place not in TUBE_GARBAGE:
        return running[-1] if running else play.start()
    for program in running:
        play.end(program)
    before = play.counts[TubeIngredient.TRUNCATES]

    def is_truncated() -> bool:
        play.end_transactions()
        lead_to(play, place, dice)
        return play.counts[TubeIngredient.TRUNCATES] > before

    wait_for(is_truncated, "there is garbage")
    return play.start("--until-empty")


def freeze_at(play: TubePlay, place: str, dice: random.Random) -> None:
    """Freeze the worker that comes to this place, and have another process take its partitions
    over. The first one is woken by whoever ends it."""
    program = play.programs[-1]
    stop_at(play, program, place, dice)
    play.lose_sessions()
    program.disarm()
    before = play.delivered()
    successor = play.start()

    def is_taken_over() -> bool:
        lead_to(play, "", dice)
        return play.delivered() > before

    if not first_of(successor, is_taken_over, why="the successor delivers"):
        raise AssertionError(f"the successor ended: {successor.printed()[-2000:]}")
    play.counts[TubeIngredient.FROZEN] += 1


def stop_at(
    play: TubePlay, program: Program, place: str, dice: random.Random
) -> list[psutil.Process]:
    """Who is stopped there, after what leads there was written."""
    program.arm(place)

    def is_there() -> bool:
        # What garbage is collected for was written before.
        if not program.has_hit(place) and place not in TUBE_GARBAGE:
            lead_to(play, place, dice)
        return program.has_hit(place)

    if not first_of(program, is_there, why=place):
        raise AssertionError(f"it ended before {place}: {program.printed()[-2000:]}")
    return wait_for(program.stopped, place)


def lead_to(play: TubePlay, place: str, dice: random.Random) -> None:
    """One transaction that makes a worker pass the place, sooner or later."""
    if place in TUBE_BACKFILL:
        play.administer(TubeIngredient.SCHEDULED, dice)
        return
    if place in TUBE_MOVED:
        play.administer(TubeIngredient.SHARDS, dice)
    with suppress(psycopg.OperationalError, psycopg.IntegrityError), play.connect() as connection:
        play.counts[TubeIngredient.ROWS] += insert(connection, play.subject, dice)
        if place in TUBE_GARBAGE:
            play.counts[TubeIngredient.TRUNCATES] += truncate(connection, play.subject, dice)
