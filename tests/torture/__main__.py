"""`make torture MINUTES=30 SEED=1`: clone after clone, until the time is up or one differs.

The first clone is interrupted fifty times. With `WHAT=follow`, stream after stream, each compared
after every round of interruptions. With `WHAT=tube`, tube after tube; with `WHAT=consolidate`, ten
sources in one target; with `WHAT=resume`, clones that are killed with nothing prepared; with
`WHAT=decode`, WAL files are decoded and held against the server's own decoding. Ends with 1 at the
first failure, leaving the work directory, the schedules and all logs of that one in place.
"""

from __future__ import annotations

import argparse
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from tests.fixtures.processes.usual_signals import usual_signals_for_children
from tests.torture.campaign import Campaign
from tests.torture.consolidate_campaign import KINDS as CONSOLIDATE_KINDS
from tests.torture.consolidate_campaign import ConsolidateCampaign
from tests.torture.consolidate_stage import SOURCES, open_consolidate_stage
from tests.torture.decode_campaign import DecodeCampaign
from tests.torture.figures import Figures
from tests.torture.follow_campaign import FollowCampaign
from tests.torture.follow_stage import open_follow_stage
from tests.torture.schedule import (
    Schedule,
    draw,
    every_stream_failpoint,
    follow_schedules,
    long_schedules,
    read_schedule,
    schedules,
)
from tests.torture.stage import open_stage
from tests.torture.tube_campaign import TubeCampaign, open_tube_stage
from tests.torture.unprepared import UnpreparedCampaign

from millrace.spark.session import Engine, default_master

LONG = 50
# More than fit in a night.
MOST_CLONES = 2000
MOST_STREAMS = 300
ROUNDS = 3
# Every third stream, the second first, runs on a cluster of its own, whose executor can be killed.
CLUSTER_EVERY = 3
MEGABYTES = 6
FIGURES = {
    "clone": Path("build/torture.json"),
    "follow": Path("build/torture-follow.json"),
    "tube": Path("build/torture-tube.json"),
    "consolidate": Path("build/torture-consolidate.json"),
    "resume": Path("build/torture-resume.json"),
    "decode": Path("build/torture-decode.json"),
}


def main() -> int:
    options = _options()
    usual_signals_for_children()
    directory = options.dir / f"{options.what}-seed-{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    _say(f"seed {options.seed}, {options.minutes:g} minutes, evidence in {directory}")
    with Engine(default_master(4)) as engine:
        if options.what not in ("tube", "decode"):
            engine.start()
        run = {
            "clone": run_clones,
            "follow": run_streams,
            "tube": run_tubes,
            "consolidate": run_consolidation,
            "resume": run_unprepared,
            "decode": run_decodings,
        }[options.what]
        figures, failure = run(options, engine, directory)
    figures.write(options.figures, failure=failure, **_about(options.what))
    for kind, count in sorted(figures.interruptions.items()):
        _say(f"{count:6} {kind}")
    _say(f"{figures.total:6} interruptions")
    _say(f"{figures.differences:6} differences; figures in {options.figures}")
    if failure:
        _say(failure)
        _say(f"again: make torture WHAT={options.what} SEED={options.seed}, or with --replay and a "
             f"schedule in the last folder of {directory}")  # fmt: skip
    return 1 if failure else 0


def run_clones(options: argparse.Namespace, engine: Engine, directory: Path) -> tuple[Figures, str]:
    """One clone after the other; what stopped it, if something did."""
    ends_at = time.monotonic() + options.minutes * 60
    with open_stage(megabytes=options.megabytes) as stage:
        campaign = Campaign(stage, engine, directory, options.seed, _say)
        figures = campaign.figures
        if not options.short and not options.replay:
            _say("a clone that is killed at every failpoint:")
            try:
                campaign.kill_everywhere()
            except Exception as error:
                return figures, f"{type(error).__name__}: {error}"
        for schedule in _clone_schedules(options):
            if time.monotonic() > ends_at:
                break
            number = figures.clones + 1
            _say(f"clone {number}, {len(schedule)} interruptions planned:")
            try:
                verdict = campaign.run(schedule)
            except Exception as error:
                return figures, f"{type(error).__name__}: {error}"
            _say(
                f"clone {number} is equal: {verdict.tables} tables, {verdict.rows:,} rows, "
                f"{verdict.objects:,} objects; so far {figures.total} interruptions, "
                f"{figures.processes} processes, 0 differences"
            )
            figures.write(options.figures, **_about("clone"))
    return figures, ""


def run_unprepared(
    options: argparse.Namespace, engine: Engine, directory: Path
) -> tuple[Figures, str]:
    """Clones whose snapshot only they themselves hold."""
    ends_at = time.monotonic() + options.minutes * 60
    with open_stage(megabytes=options.megabytes) as stage:
        campaign = UnpreparedCampaign(stage, engine, directory, options.seed, _say)
        figures = campaign.figures
        while time.monotonic() < ends_at:
            try:
                campaign.run()
            except Exception as error:
                return figures, f"{type(error).__name__}: {error}"
            _say(f"clone {figures.clones} is equal; so far {figures.total} interruptions")
            figures.write(options.figures, **_about("resume"))
    return figures, ""


def run_decodings(
    options: argparse.Namespace, engine: Engine, directory: Path
) -> tuple[Figures, str]:
    """One workload after the other, on every version in turn."""
    ends_at = time.monotonic() + options.minutes * 60
    campaign = DecodeCampaign(directory, options.seed, _say)
    while time.monotonic() < ends_at or not campaign.figures.workloads:
        try:
            campaign.run()
        except Exception as error:
            return campaign.figures, f"{type(error).__name__}: {error}"
        campaign.figures.write(options.figures, **_about("decode"))
    if missing := campaign.figures.missing():
        return campaign.figures, f"never came up: {'; '.join(missing)}"
    return campaign.figures, ""


def run_streams(
    options: argparse.Namespace, engine: Engine, directory: Path
) -> tuple[Figures, str]:
    """One stream after the other; what stopped it, if something did."""
    ends_at: float = time.monotonic() + options.minutes * 60

    def is_time_up() -> bool:
        return time.monotonic() > ends_at

    with open_follow_stage(options.seed) as stage:
        campaign = FollowCampaign(stage, engine, directory, options.seed, _say)
        figures = campaign.figures
        for number, rounds in enumerate(_stream_schedules(options), 1):
            if is_time_up():
                break
            cluster = number % CLUSTER_EVERY == 2
            _say(f"stream {number}{', on a cluster' if cluster else ''}:")
            try:
                campaign.run(rounds, cluster=cluster, is_time_up=is_time_up)
            except Exception as error:
                return figures, f"{type(error).__name__}: {error}"
            figures.write(options.figures, **_about("follow"))
    if figures.missing() and not options.replay:
        return figures, f"never came up: {'; '.join(figures.missing())}"
    return figures, ""


def run_tubes(options: argparse.Namespace, engine: Engine, directory: Path) -> tuple[Figures, str]:
    """One tube after the other; what stopped it, if something did."""
    ends_at = time.monotonic() + options.minutes * 60
    with open_tube_stage(options.seed) as stage:
        campaign = TubeCampaign(stage, directory, options.seed, _say)
        figures = campaign.figures
        while time.monotonic() < ends_at:
            try:
                campaign.run()
            except Exception as error:
                return figures, f"{type(error).__name__}: {error}"
            figures.write(options.figures, **_about("tube"))
    if figures.missing():
        return figures, f"never came up: {'; '.join(figures.missing())}"
    return figures, ""


def run_consolidation(
    options: argparse.Namespace, engine: Engine, directory: Path
) -> tuple[Figures, str]:
    """Ten sources in one target, round after round; what stopped it, if something did."""
    with open_consolidate_stage(options.seed, directory, sources=options.sources) as stage:
        campaign = ConsolidateCampaign(stage, engine, options.seed, _say)
        figures = campaign.figures
        try:
            campaign.run(options.minutes * 60)
        except Exception as error:
            stage.keep_logs()
            return figures, f"{type(error).__name__}: {error}"
    missing = figures.missing(CONSOLIDATE_KINDS)
    return figures, f"never came up: {'; '.join(missing)}" if missing else ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--what", choices=tuple(FIGURES), default="clone")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--replay", type=Path, metavar="SCHEDULE", help="this schedule, once")
    parser.add_argument(
        "--megabytes", type=int, default=MEGABYTES, help="size of the shop that is cloned"
    )
    parser.add_argument("--sources", type=int, default=SOURCES, help="how many are consolidated")
    parser.add_argument("--short", action="store_true", help="without the clone of fifty")
    parser.add_argument("--dir", type=Path, default=Path("build/torture"))
    parser.add_argument("--figures", type=Path, help="build/torture.json, or that of WHAT")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.randrange(2**31)
    # Executors of a cluster have another working directory.
    options.dir = options.dir.resolve()
    options.figures = options.figures or FIGURES[options.what]
    return options


def _clone_schedules(options: argparse.Namespace) -> list[Schedule]:
    if options.replay:
        return [read_schedule(options.replay)]
    short = draw(schedules(least=5, most=10), options.seed, MOST_CLONES)
    if options.short:
        return short
    # A few in reserve: some find nobody to kill.
    long = draw(long_schedules(LONG + 20), options.seed, 1)
    return [*long, *short]


def _stream_schedules(options: argparse.Namespace) -> Iterator[list[Schedule]]:
    """The rounds of each stream; only in the first is there a copy to be interrupted."""
    if options.replay:
        yield [read_schedule(options.replay)]
        return
    for number in range(1, MOST_STREAMS + 1):
        cluster = number % CLUSTER_EVERY == 2
        rounds = []
        for place in range(ROUNDS):
            # Of one seed, the schedules would be much alike.
            seed = (options.seed * MOST_STREAMS + number) * ROUNDS + place
            rounds += draw(follow_schedules(copying=place == 0, cluster=cluster), seed, 1)
        yield [*rounds, every_stream_failpoint()] if number == 1 else rounds


def _about(what: str) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "what": what,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": f"{psutil.cpu_count()} cores, {platform.system()} {platform.machine()}",
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
