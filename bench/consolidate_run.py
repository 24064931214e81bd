"""`millrace consolidate run` with Spark running before the sources begin, as a server runs before a
subscription.

Run as a program: python -m bench.consolidate_run CONFIG DIR; ends with SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from millrace.consolidate.config import read_config
from millrace.consolidate.run import COPIES_AT_ONCE, Consolidator
from millrace.log import LogSettings, setup_logging
from millrace.spark.session import Engine, default_master

# Tasks of one base copy.
COPY_SLOTS = 4
READY = "Spark is up"


def main() -> None:
    path, directory = map(Path, sys.argv[1:])
    setup_logging()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    slots = read_config(path).apply_jobs + COPIES_AT_ONCE * COPY_SLOTS
    with Engine(default_master(slots), {}, directory / "spark.log", streams=True) as engine:
        engine.wait()
        print(READY, flush=True)
        sys.stdin.readline()
        Consolidator(path, directory, engine, LogSettings()).run(stop)


if __name__ == "__main__":
    main()
