"""What the tests of several modules share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fixtures.cloning import Cloner
from tests.fixtures.processes.clone_program import CloneProgram
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.stream.rerouted import rerouted

from millrace.clone.progress import Reporter
from millrace.clone.run import CloneResult, clone
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.route import Route
from millrace.spark.session import Engine


@pytest.fixture
def cloner(engine: Engine, reporter: Reporter, tmp_path: Path) -> Cloner:
    """Clones one database into another, each time in a work directory of its own."""
    numbers = iter(range(1, 100))

    def run(source: str, target: str, reporter: Reporter = reporter, **options: Any) -> CloneResult:
        route = Route(Dsn.parse(source), Dsn.parse(target), tmp_path / f"work{next(numbers)}")
        settings = rerouted(CloneSettings(route), **options)
        return clone(settings, engine, reporter)

    return run


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., CloneProgram]]:
    """Starts `millrace clone`, with Spark if that is asked for; whatever is left is killed."""
    started: list[CloneProgram] = []

    def start(
        source: str, target: str, *options: str, has_spark: bool = False, **variables: str
    ) -> CloneProgram:
        directory, out, err = (tmp_path / name for name in ("work", "out", "err"))
        jobs = ("--table-jobs=2", "--large-objects-jobs=1")
        millrace = (sys.executable, "-m", "millrace") if has_spark else MILLRACE
        command = [*millrace, "clone", "--dir", directory, *jobs, *options]
        servers = {"MILLRACE_SOURCE": source, "MILLRACE_TARGET": target}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **servers, **variables},
                start_new_session=True,
            )
        started.append(CloneProgram(process, directory, out, err, has_spark))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            for process in psutil.Process(one.process.pid).children(recursive=True):
                process.kill()
            one.process.kill()
            one.process.wait()
