"""`make torture MINUTES=30 SEED=1`: clone after clone, until the time is up or one differs.

The first clone is interrupted fifty times. Ends with 1 at the first failure, leaving the work
directory, the schedule and all logs of that clone in place.
"""

from __future__ import annotations

import argparse
import platform
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
from tests.torture.campaign import Campaign
from tests.torture.schedule import Schedule, draw, long_schedules, read_schedule, schedules
from tests.torture.stage import open_stage

from millrace.spark.session import Engine, default_master

LONG = 50
# More than fit in a night.
MOST_CLONES = 2000
MEGABYTES = 6


def main() -> int:
    options = _options()
    directory = options.dir / f"seed-{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    _say(f"seed {options.seed}, {options.minutes:g} minutes, evidence in {directory}")
    with Engine(default_master(4)) as engine, open_stage(megabytes=options.megabytes) as stage:
        engine.start()
        campaign = Campaign(stage, engine, directory, options.seed, _say)
        ends_at = time.monotonic() + options.minutes * 60
        failure = ""
        for schedule in _schedules(options):
            if time.monotonic() > ends_at:
                break
            number = campaign.figures.clones + 1
            _say(f"clone {number}, {len(schedule)} interruptions planned:")
            try:
                verdict = campaign.run(schedule)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                break
            figures = campaign.figures
            _say(
                f"clone {number} is equal: {verdict.tables} tables, {verdict.rows:,} rows, "
                f"{verdict.objects:,} objects; so far {figures.total} interruptions, "
                f"{figures.processes} processes, 0 differences"
            )
            campaign.write(options.figures, **_about())
        campaign.write(options.figures, failure=failure, **_about())
    for kind, count in sorted(campaign.figures.interruptions.items()):
        _say(f"{count:6} {kind}")
    _say(f"{campaign.figures.total:6} interruptions of {campaign.figures.clones} clones")
    _say(f"{campaign.figures.differences:6} differences; figures in {options.figures}")
    if failure:
        _say(failure)
        _say(f"again: make torture SEED={options.seed}, or this clone alone: python -m "
             f"tests.torture --replay {directory}/clone-{campaign.figures.clones + 1}"
             "/schedule.json")  # fmt: skip
    return 1 if failure else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--replay", type=Path, metavar="SCHEDULE", help="this schedule, once")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="size of the shop")
    parser.add_argument("--short", action="store_true", help="without the clone of fifty")
    parser.add_argument("--dir", type=Path, default=Path("build/torture"))
    parser.add_argument("--figures", type=Path, default=Path("build/torture.json"))
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.randrange(2**31)
    return options


def _schedules(options: argparse.Namespace) -> list[Schedule]:
    if options.replay:
        return [read_schedule(options.replay)]
    short = draw(schedules(least=5, most=10), options.seed, MOST_CLONES)
    if options.short:
        return short
    # A few in reserve: some find nobody to kill.
    return [*draw(long_schedules(LONG + 20), options.seed, 1), *short]


def _about() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": f"{psutil.cpu_count()} cores, {platform.system()} {platform.machine()}",
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
