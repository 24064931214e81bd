"""Millrace's stream with Spark running before it begins, as a server runs before a subscription.

`follow` is the function behind `millrace follow`: from the slot to the target. `apply` first
receives everything into the spool, then applies that, and only the applying is timed.

Run as a program: python -m bench.millrace_stream (follow|apply) SOURCE TARGET DIR ENDPOS RESULT
Without an end position (`none`) it follows until one is set in the sentinel.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from millrace.config.dsn import Dsn
from millrace.follow.feed import receive_settings
from millrace.follow.settings import FollowSettings
from millrace.follow.stream import follow, open_catchup, require_setup
from millrace.log import setup_logging
from millrace.lsn import parse_lsn
from millrace.postgres.wire.connect import resolve
from millrace.receive.loop import receive
from millrace.route import Route
from millrace.spark.session import Engine, default_master
from millrace.spool.writer import SpoolWriter
from millrace.workdir.sentinel import Sentinel


class _Nobody:
    """Nobody looks at the progress."""

    def update(self, progress: Any) -> None: ...

    def update_follow(self, progress: Any) -> None: ...


def run_follow(settings: FollowSettings, engine: Engine) -> dict[str, Any]:
    engine.wait()
    cpu = CpuOf()
    follow(settings, engine, _Nobody())
    return cpu.figures() | {"spark_start_seconds": engine.start_seconds}


def run_apply(settings: FollowSettings, engine: Engine) -> dict[str, Any]:
    with Sentinel(settings.directory) as sentinel:
        setup = require_setup(sentinel, settings.directory)
        with SpoolWriter(settings.directory) as spool:
            receive(receive_settings(settings, setup), spool, sentinel)
        engine.wait()
        cpu = CpuOf()
        began = time.monotonic()
        catchup = open_catchup(settings, setup, engine, sentinel)
        catchup.is_whole.set()
        catchup.run()
        window = began, time.monotonic()
    return cpu.figures() | {
        "spark_start_seconds": engine.start_seconds,
        "windows": {"apply_seconds": window},
    }


class CpuOf:
    """CPU of our processes since Spark is up, by what they are for."""

    def __init__(self) -> None:
        self._before = self._read()

    def figures(self) -> dict[str, Any]:
        spent = {kind: cpu - self._before[kind] for kind, cpu in self._read().items()}
        return {"run_cpu_seconds": sum(spent.values()), "run_cpu_seconds_of": spent}

    def _read(self) -> dict[str, float]:
        spent = dict.fromkeys(("driver", "receiver", "jvm", "workers"), 0.0)
        own = os.times()
        spent["driver"] = own.user + own.system
        # The only child that ends meanwhile.
        spent["receiver"] = own.children_user + own.children_system
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                kind = "jvm" if process.name() == "java" else "workers"
                spent[kind] += times.user + times.system
        return spent


def main() -> None:
    mode, source, target, directory, endpos, result = sys.argv[1:]
    setup_logging()
    folder = Path(directory)
    settings = FollowSettings(Route(*(resolve(Dsn.parse(uri)) for uri in (source, target)), folder))
    if endpos != "none":
        with Sentinel(folder) as sentinel:
            sentinel.set_endpos(parse_lsn(endpos))
    run = {"follow": run_follow, "apply": run_apply}[mode]
    with Engine(default_master(2), {}, folder / "spark.log", streams=True) as engine:
        figures = run(settings, engine)
    Path(result).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
