"""A stream that is killed, cut off, and its servers restarted: it goes on, and ends equal.

The short version of `make torture WHAT=follow`. `MILLRACE_SEED` repeats what Hypothesis drew; when
what happens, and to which transactions, is never quite the same again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.torture.failpoints import (
    APPLY,
    RECEIVER,
    STREAM,
    STREAM_PACKAGES,
    SYNC,
    SYNC_TASK,
    read_failpoints,
)
from tests.torture.follow_campaign import FollowCampaign
from tests.torture.follow_stage import FollowStage, open_follow_stage
from tests.torture.schedule import (
    Kind,
    draw,
    every_stream_failpoint,
    follow_schedules,
    read_schedule,
    write_schedule,
)

from millrace.spark.session import Engine

pytestmark = pytest.mark.shared_writers

SEED = int(os.environ.get("MILLRACE_SEED") or random.SystemRandom().randrange(2**31))
SHORT = follow_schedules(least=2, most=2, copying=False)


@pytest.fixture(scope="module")
def stage() -> Iterator[FollowStage]:
    with open_follow_stage(SEED) as opened:
        yield opened


@pytest.fixture
def campaign(stage: FollowStage, engine: Engine, tmp_path: Path) -> FollowCampaign:
    return FollowCampaign(stage, engine, tmp_path / "torture", SEED)


def test_every_failpoint_of_the_stream_is_one_we_kill_at() -> None:
    assert read_failpoints(STREAM_PACKAGES) == set(STREAM + SYNC + SYNC_TASK)
    assert len(set(STREAM)) == len(STREAM)
    killed = every_stream_failpoint()
    assert {one.moment.failpoint for one in killed if one.kind is Kind.KILL_WORKER} == set(APPLY)
    assert {one.moment.failpoint for one in killed if one.kind is Kind.KILL_RECEIVER} == set(
        RECEIVER
    )


def test_stream_killed_at_a_sixth_of_all_failpoints_ends_equal(campaign: FollowCampaign) -> None:
    campaign.command = MILLRACE
    every = every_stream_failpoint()
    chosen = random.Random(SEED).sample(range(len(every)), len(every) // 6)
    killed = tuple(every[number] for number in sorted(chosen))
    try:
        campaign.run([killed])
    except AssertionError as error:
        raise AssertionError(f"again with MILLRACE_SEED={SEED}\n{error}") from error
    assert campaign.figures.total == len(killed)
    assert campaign.figures.not_reached == 0


def test_random_interruptions_of_a_busy_stream_leave_both_sides_equal(
    campaign: FollowCampaign,
) -> None:
    [schedule] = draw(SHORT, SEED, 1)
    try:
        campaign.run([schedule])
    except AssertionError as error:
        told = "; ".join(map(str, schedule))
        raise AssertionError(f"again with MILLRACE_SEED={SEED}: {told}\n{error}") from error
    assert campaign.figures.total + campaign.figures.not_reached == len(schedule)
    assert campaign.figures.transactions_meanwhile > 0


@pytest.mark.parametrize("cluster", [False, True])
def test_same_seed_gives_the_same_schedules_of_streams(cluster: bool, tmp_path: Path) -> None:
    first, second = (draw(follow_schedules(cluster=cluster), 7, 5) for _ in range(2))
    assert first == second
    assert len(set(first)) > 1
    write_schedule(tmp_path / "schedule.json", first[-1])
    assert read_schedule(tmp_path / "schedule.json") == first[-1]
