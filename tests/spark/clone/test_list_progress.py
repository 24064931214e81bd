"""`millrace list progress`, asked while a clone runs in another process, and afterwards.

Nothing here sleeps: the clone waits for us. Its process is stopped by a failpoint; a COPY and
an index wait for advisory locks of the target that the test holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.clone.progress import Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.clone.status import read_run_status
from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
from millrace.route import Route
from millrace.spark.session import Engine

pytestmark = pytest.mark.slow


# Each row asks for a lock that nobody holds on the source.
SCHEMA = """
CREATE FUNCTION wait_for(number int) RETURNS bool LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    PERFORM pg_catalog.pg_advisory_lock_shared(number);
    PERFORM pg_catalog.pg_advisory_unlock_shared(number);
    RETURN true;
END $$;
CREATE TABLE quick (id int PRIMARY KEY, t text UNIQUE);
INSERT INTO quick SELECT i, 'text ' || i FROM generate_series(1, 1000) AS i;
CREATE TABLE slow (id int PRIMARY KEY, t text,
    CONSTRAINT waits CHECK (id < 4000 OR wait_for(77)));
INSERT INTO slow SELECT i, repeat('x', 200) FROM generate_series(1, 8000) AS i;
CREATE INDEX slow_index ON slow ((CASE WHEN id < 4000 THEN true ELSE public.wait_for(78) END));
ALTER TABLE slow ADD FOREIGN KEY (id) REFERENCES slow;
SELECT lo_from_bytea(4001, 'one'), lo_from_bytea(4002, 'two');
ANALYZE;
"""


def millrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
    return subprocess.run(
        [*MILLRACE, *arguments],
        capture_output=True,
        text=True,
        env={**environment, "MILLRACE_CONFIG": os.devnull},
        timeout=DEADLINE_SECONDS,
    )


class Asking:
    """Asks where the run of a directory stands."""

    def __init__(self, directory: Path, target: str) -> None:
        self.directory = ["--dir", str(directory)]
        self.target = ["--target", target]

    def __call__(self, *, watched: bool = True) -> dict[str, Any]:
        ended = self.run("--json", watched=watched)
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout)
        return found

    def text(self, *, watched: bool = True) -> str:
        ended = self.run(watched=watched)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def run(self, *more: str, watched: bool) -> subprocess.CompletedProcess[str]:
        target = self.target if watched else []
        return millrace("list", "progress", *self.directory, *target, *more)

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition(found := self()):
            assert time.monotonic() < deadline, found
        return found


@contextmanager
def held(target: str, number: int) -> Iterator[None]:
    """An advisory lock of the target, which makes whoever calls wait_for(number) wait."""
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", (number,))
        yield


@contextmanager
def cloning(source: str, target: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A clone in another process, which stops itself as soon as it has its plan."""
    command = [*MILLRACE, "clone", "--source", source, "--target", target]
    command += ["--dir", str(directory), "--split-tables-larger-than", "1 MB", "--table-jobs", "2"]
    failpoints = {"MILLRACE_FAILPOINTS": "run.planned=stop", "MILLRACE_CONFIG": os.devnull}
    process = subprocess.Popen(
        command, env=os.environ | failpoints, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(DEADLINE_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    watched = psutil.Process(process.pid)
    wait_for(lambda: process.poll() is not None or watched.status() == psutil.STATUS_STOPPED)
    if process.returncode is not None:
        pytest.fail(f"the clone ended: {process.communicate()[0]}")


def test_progress_of_a_run_in_another_process(
    source_db: str, target_db: str, tmp_path: Path
) -> None:
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(SCHEMA)
    directory = tmp_path / "work"
    ask = Asking(directory, target_db)
    assert ask.run(watched=False).returncode == 4

    with cloning(source_db, target_db, directory) as process:
        with held(target_db, 78):
            with held(target_db, 77):
                wait_until_stopped(process)
                check_planned(ask)
                process.send_signal(signal.SIGCONT)
                check_copying(ask, ask.until(is_slow_copied))
            indexing = ask.until(lambda found: bool(found["running_indexes"]))
            check_indexing(ask, indexing)
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 0, output
    check_finished(ask)


def check_planned(ask: Asking) -> None:
    """The clone is frozen in the middle of its work: nobody else is."""
    for watched in (True, False):
        found = ask(watched=watched)
        assert (found["status"], found["finished_at"]) == ("running", None)
        assert found["tables"] == {"done": 0, "total": 2}
        assert found["parts"]["total"] >= 3
        assert found["indexes"] == {"done": 0, "total": 4}
        assert found["constraints"] == {"done": 0, "total": 3}
        assert found["foreign_keys"] == {"done": 0, "total": 1}
        assert found["large_objects"] == {"done": 0, "total": 2}
        assert (found["percent"], found["is_watched"]) == (0.0, watched)
    assert "give --target" in ask.text(watched=False)


def is_slow_copied(found: dict[str, Any]) -> bool:
    """And nothing else any more."""
    labels = [copy["label"] for copy in found["running_copies"]]
    return bool(labels) and all(label.startswith("public.slow [") for label in labels)


def check_copying(ask: Asking, found: dict[str, Any]) -> None:
    assert found["tables"]["done"] < 2
    assert found["percent"] < 100
    found = ask.until(lambda found: found["tables"]["done"] == 1 and found["running_copies"])
    assert found["parts"]["done"] < found["parts"]["total"]
    assert found["copied_rows"] >= 1000
    assert found["estimated_bytes"]["done"] < found["estimated_bytes"]["total"]
    text = ask.text()
    assert "running" in text
    assert "copy   public.slow [" in text


def check_indexing(ask: Asking, found: dict[str, Any]) -> None:
    found = ask.until(lambda found: found["indexes"]["done"] == 3 and found["running_indexes"])
    assert found["tables"] == {"done": 2, "total": 2}
    assert found["percent"] == 100.0
    assert found["running_copies"] == []
    assert found["copied_rows"] == 9000
    assert found["foreign_keys"]["done"] == 0
    assert found["status"] == "running"
    assert "index  " in ask.text()


def check_finished(ask: Asking) -> None:
    for watched in (True, False):
        found = ask(watched=watched)
        assert (found["status"], found["percent"]) == ("finished", 100.0)
        assert found["finished_at"]
        for kind in ("tables", "parts", "indexes", "constraints", "foreign_keys", "large_objects"):
            assert found[kind]["done"] == found[kind]["total"] > 0, kind
        assert found["copied_rows"] == 9000
        assert (found["running_copies"], found["running_indexes"]) == ([], [])
        assert "foreign keys" in found["steps"]
    assert "finished" in ask.text()


def test_another_target_is_refused(
    source_db: str, target_db: str, engine: Engine, reporter: Reporter, tmp_path: Path
) -> None:
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY)")
    source, target = Dsn.parse(source_db), Dsn.parse(target_db)
    clone(CloneSettings(Route(source, target, tmp_path)), engine, reporter)
    assert read_run_status(tmp_path, target).status == "finished"
    with pytest.raises(WorkDirError, match="the run copies to"):
        read_run_status(tmp_path, source)
