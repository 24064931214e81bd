"""A clone that is killed, cut off, starved: it goes on, and ends equal to its snapshot.

The short version of `make torture`: one source that is written to all the while, a few clones of
it, each interrupted many times. `MILLRACE_SEED` repeats what Hypothesis drew.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for
from tests.torture.campaign import Campaign
from tests.torture.failpoints import (
    AFTER,
    BEFORE,
    BESIDE,
    FAILPOINTS,
    OWN_SNAPSHOT,
    TASK,
    read_failpoints,
    some_of,
)
from tests.torture.killing import kill_at, stopped_at
from tests.torture.program import Program
from tests.torture.schedule import (
    CLONE_KINDS,
    draw,
    long_schedules,
    read_schedule,
    schedules,
    schedules_of_every_kind,
    write_schedule,
)
from tests.torture.stage import Play, Stage, open_stage
from tests.torture.unprepared import UnpreparedCampaign

from millrace.errors import SnapshotLost, WorkDirError
from millrace.spark.session import Engine

pytestmark = pytest.mark.shared_writers

MEGABYTES = 3
SEED = int(os.environ.get("MILLRACE_SEED") or random.SystemRandom().randrange(2**31))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with open_stage(megabytes=MEGABYTES) as opened:
        yield opened


@pytest.fixture
def play(stage: Stage, tmp_path: Path) -> Iterator[Play]:
    """One clone, its tasks run by processes: a campaign has Spark."""
    with stage.play(tmp_path / "play") as opened:
        opened.command = MILLRACE
        yield opened


def assert_ends_equal(play: Play, engine: Engine) -> None:
    """One more process, undisturbed, brings the clone to its end."""
    last = play.start()
    assert last.wait() == 0, last.printed()
    assert play.compare(engine).differences == ()
    play.assert_nothing_runs()


# Failpoints


def test_every_failpoint_of_the_source_is_one_we_kill_at() -> None:
    assert read_failpoints() == {*FAILPOINTS, *OWN_SNAPSHOT}
    assert len(set(FAILPOINTS)) == len(FAILPOINTS)


def test_clone_killed_at_failpoints_of_every_stage_ends_equal_to_its_snapshot(
    play: Play, engine: Engine
) -> None:
    dice = random.Random(SEED)
    chosen = [some_of(names, dice, 7) for names in (BEFORE, TASK[:-1], BESIDE, AFTER)]
    logging.info("again with MILLRACE_SEED=%d: %s", SEED, chosen)
    kill_at(play, *chosen)
    assert_ends_equal(play, engine)


# Everything else


def test_clone_killed_with_nothing_prepared_ends_equal(
    stage: Stage, engine: Engine, tmp_path: Path
) -> None:
    campaign = UnpreparedCampaign(stage, engine, tmp_path, SEED)
    try:
        campaign.run()
    except AssertionError as error:
        raise AssertionError(f"again with MILLRACE_SEED={SEED}: {error}") from error


def test_a_third_of_all_kinds_of_interruption_at_random_moments_of_one_clone(
    stage: Stage, engine: Engine, tmp_path: Path
) -> None:
    campaign = Campaign(stage, engine, tmp_path, SEED)
    [schedule] = draw(schedules_of_every_kind(), SEED, 1)
    schedule = schedule[: len(CLONE_KINDS) // 3]
    try:
        campaign.run(schedule)
    except AssertionError as error:
        told = "; ".join(map(str, schedule))
        raise AssertionError(f"again with MILLRACE_SEED={SEED}: {told}\n{error}") from error
    # Some may find nobody: a worker that has just ended, a clone that was done before its turn.
    figures = campaign.figures
    assert figures.total + figures.not_reached == len(schedule), f"MILLRACE_SEED={SEED}"


@pytest.mark.parametrize("strategy", [schedules(), schedules_of_every_kind(), long_schedules(50)])
def test_same_seed_gives_the_same_schedules(strategy: object, tmp_path: Path) -> None:
    first, second = (draw(strategy, 7, 5) for _ in range(2))  # type: ignore[arg-type]
    assert first == second
    assert len(set(first)) > 1
    write_schedule(tmp_path / "schedule.json", first[-1])
    assert read_schedule(tmp_path / "schedule.json") == first[-1]


def test_killed_holder_means_no_process_goes_on_and_two_ways_out(play: Play) -> None:
    program = stopped_at(play, "copy.begin")
    assert play.holder is not None
    play.holder.process.kill()
    play.holder.process.wait()
    wait_for(lambda: not backend_lives(play), "the snapshot's session is gone")
    program.go_on()
    assert program.wait() == SnapshotLost.exit_code
    assert_two_ways_out(program)
    play.assert_nothing_runs()
    again = play.start()
    assert again.wait() == SnapshotLost.exit_code
    assert_two_ways_out(again)


def backend_lives(play: Play) -> bool:
    with psycopg.connect(play.stage.source_uri) as connection:
        query = "SELECT FROM pg_stat_activity WHERE pid = ANY (%s)"
        return connection.execute(query, (play.held_by,)).fetchone() is not None


def assert_two_ways_out(program: Program) -> None:
    printed = program.printed()
    for way in ("--restart", "--resume --not-consistent"):
        assert way in printed
    assert "Traceback" not in printed


def test_restarted_source_means_a_clean_refusal_with_two_ways_out(play: Play) -> None:
    program = stopped_at(play, "copy.begin")
    play.stage.restart_source()
    program.go_on()
    assert program.wait() == SnapshotLost.exit_code
    assert "Traceback" not in program.printed()
    again = play.start()
    assert again.wait() == SnapshotLost.exit_code
    assert_two_ways_out(again)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk that is easily filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    deadline = time.monotonic() + DEADLINE_SECONDS
    while subprocess.run(["umount", folder], capture_output=True).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_full_disk_of_the_work_directory_is_told_and_gone_on_with_when_there_is_room(
    stage: Stage, engine: Engine, small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"
    with stage.play(tmp_path / "play", work=small_disk / "work") as play:
        play.command = MILLRACE
        for failpoint in ("snapshot.opened", "copy.begin"):
            program = stopped_at(play, failpoint)
            fill(filler)
            program.go_on()
            assert program.wait() == WorkDirError.exit_code, program.printed()
            filler.unlink()
            printed = program.printed()
            assert str(small_disk / "work") in printed
            assert "make room" in printed
            assert "Traceback" not in printed
        assert_ends_equal(play, engine)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return
