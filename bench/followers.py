"""Who takes part in `bench follow`: the command of each, its slot, and what of it is timed.

Each gets a slot that holds the same changes, and all but the receivers a target that holds the
rows from before them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import subscription
from bench.contestants import environment
from millrace.postgres.catalog.schemas import publication_names

MILLRACE_SLOT = "millrace"
# Until when a contestant runs that is given no end position.
NO_END = "none"


@dataclass(frozen=True)
class Course:
    """What every contestant is given for one run; `mark` is the last one it waits for."""

    bindir: Path
    source: str
    target: str
    endpos: str
    mark: int
    seconds: float
    work_dir: Path

    @property
    def directory(self) -> Path:
        return self.work_dir / "dir"


@dataclass(frozen=True)
class Follower:
    """`timed` names the figure that makes its rate; see `bench.watch` and `own_figures`."""

    name: str
    slot: str
    command: Callable[[Course], list[str]]
    timed: str = "catch_up_seconds"
    prepare: Callable[[Course], None] = lambda course: None

    @property
    def is_receiver(self) -> bool:
        return self.timed == "receive_seconds"

    @property
    def is_ours(self) -> bool:
        return self.slot == MILLRACE_SLOT


def own_figures(work_dir: Path) -> dict[str, Any]:
    """What a contestant has written down about itself."""
    file = work_dir / "figures.json"
    return json.loads(file.read_text()) if file.exists() else {}


def setup_millrace(course: Course) -> None:
    """Publications, slot and position, as far as they are not there."""
    command = [
        *_MILLRACE, "stream", "setup", "--source", course.source, "--target", course.target,
        "--dir", str(course.directory), "--slot-name", MILLRACE_SLOT,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment(course))
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


_MILLRACE = (sys.executable, "-m", "millrace")


def _stream(mode: str) -> Callable[[Course], list[str]]:
    return lambda course: [
        sys.executable, "-m", "bench.millrace_stream", mode, course.source, course.target,
        str(course.directory), course.endpos, str(course.work_dir / "figures.json"),
    ]  # fmt: skip


def _follow(course: Course) -> list[str]:
    return [
        *_MILLRACE, "follow", "--source", course.source, "--target", course.target,
        "--dir", str(course.directory), "--endpos", course.endpos,
    ]  # fmt: skip


def _receive(course: Course) -> list[str]:
    return [
        *_MILLRACE, "stream", "receive", "--source", course.source,
        "--dir", str(course.directory), "--endpos", course.endpos,
    ]  # fmt: skip


def _pg_recvlogical(course: Course) -> list[str]:
    # The options of Millrace's receiver, so that the server has the same to do.
    options = {
        "proto_version": "1",
        "publication_names": ",".join(publication_names(MILLRACE_SLOT)),
        "binary": "true",
    }
    return [
        str(course.bindir / "pg_recvlogical"), "-d", course.source, "-S", "recvlogical",
        "--start", "-f", str(course.work_dir / "changes"), "--endpos", course.endpos, "--no-loop",
        *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
    ]  # fmt: skip


def _subscription(course: Course) -> list[str]:
    return [
        sys.executable, "-m", "bench.subscription",
        course.target, str(course.mark), str(course.seconds),
    ]  # fmt: skip


def _create_subscription(binary: str) -> Callable[[Course], None]:
    return lambda course: subscription.create(course.source, course.target, binary)


SUBSCRIPTION = Follower(
    "subscription",
    subscription.SLOT,
    _subscription,
    prepare=_create_subscription(subscription.TEXT),
)
SUBSCRIPTION_BINARY = Follower(
    "subscription binary",
    subscription.SLOT,
    _subscription,
    prepare=_create_subscription(subscription.BINARY),
)
MILLRACE = Follower("millrace", MILLRACE_SLOT, _stream("follow"), prepare=setup_millrace)
# As typed by a user: Python, Spark and the stream start together.
MILLRACE_COLD = Follower(
    "millrace cold", MILLRACE_SLOT, _follow, "whole_seconds", prepare=setup_millrace
)
MILLRACE_APPLY = Follower(
    "millrace apply alone",
    MILLRACE_SLOT,
    _stream("apply"),
    "apply_seconds",
    prepare=setup_millrace,
)
MILLRACE_RECEIVE = Follower(
    "millrace receive", MILLRACE_SLOT, _receive, "receive_seconds", prepare=setup_millrace
)
PG_RECVLOGICAL = Follower("pg_recvlogical", "recvlogical", _pg_recvlogical, "receive_seconds")
