"""`millrace tube run` on Spark: a worker that dies is replaced, a JVM that dies ends the run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from tests.fixtures.processes.clone_program import is_gone
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace import failpoint
from millrace.spark.session import Engine
from millrace.tube.install import install

SCHEMA = """
SET search_path = public, tube;
CREATE TABLE item (id bigint PRIMARY KEY, v text);
CREATE TABLE docs (id bigint PRIMARY KEY, v text);
SELECT tube_ensure_exists('items', 2);
SELECT tube_table_attach('items', 'item', routing => 'id % 2');
INSERT INTO item SELECT i, 'v' || i FROM generate_series(1, 100) i;
"""


def test_spark_says_how_many_workers_it_has_room_for(engine: Engine) -> None:
    assert (engine.slots(2), engine.group("some").slots(1000)) == (8, 8)


@pytest.fixture
def run(source_db: str, tmp_path: Path) -> Iterator[psutil.Popen]:
    with psycopg.connect(source_db, autocommit=True) as connection:
        install(connection)
    execute(source_db, SCHEMA)
    arguments = ["--source", source_db, "--tube", "items", "--workers", "2"]
    arguments += ["--enrich", "SELECT id, v FROM item WHERE id = ANY($1)"]
    arguments += ["--sink", f"{source_db}&table=docs", "--dir", str(tmp_path / "dir")]
    marker = tmp_path / "killed"
    marker.touch()
    environment = os.environ | {failpoint.VARIABLE: f"tube.before_write=kill@{marker}"}
    with (tmp_path / "err").open("w") as err:
        process = psutil.Popen(
            [sys.executable, "-m", "millrace", "tube", "run", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=err,
            env=environment,
        )
    try:
        yield process
    finally:
        family = [process, *process.children(recursive=True)] if process.is_running() else []
        for one in family:
            one.kill()
        process.wait()


def test_a_worker_that_is_killed_is_replaced_and_a_jvm_that_is_killed_ends_the_run(
    source_db: str, run: psutil.Popen, tmp_path: Path
) -> None:
    missing = "SELECT count(*) FROM (TABLE item EXCEPT TABLE docs) x"

    def is_equal() -> bool:
        assert run.poll() is None, (tmp_path / "err").read_text()
        return rows(source_db, missing) == [(0,)]

    wait_for(is_equal)
    assert not (tmp_path / "killed").exists()
    readers = "SELECT pid FROM pg_stat_activity WHERE application_name ~ '^millrace tube'"
    execute(source_db, "INSERT INTO item SELECT i, 'w' FROM generate_series(101, 200) i")
    wait_for(is_equal)
    (jvm,) = [one for one in run.children(recursive=True) if one.name() == "java"]
    family = run.children(recursive=True)
    jvm.kill()
    assert run.wait(DEADLINE_SECONDS) == 5
    printed = (tmp_path / "err").read_text()
    assert "Spark's JVM ended" in printed
    assert "Traceback" not in printed
    wait_for(lambda: all(map(is_gone, family)))
    wait_for(lambda: rows(source_db, readers) == [])
