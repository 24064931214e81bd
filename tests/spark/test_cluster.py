"""Several machines, as far as one can be several: a master, two workers, executors of their own.

The program runs as a process, because one process can have one Spark application only.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.fixtures import create_museum_roles, load_museum
from tests.fixtures.followed import open_followed, writing
from tests.fixtures.spark_folder import application_folder, remove_application_folder

from millrace.clone.compare_run import CompareSettings, compare_data
from millrace.clone.progress import Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.clone.split import SplitSettings
from millrace.config.dsn import Dsn
from millrace.lsn import render_lsn
from millrace.postgres.embedded import Cluster
from millrace.spark.session import Engine
from millrace.stream.settings import SpoolKind

DEADLINE_SECONDS = 180
SPLIT_BYTES = 1024 * 1024


def dumped(uri: str, tools: Cluster) -> str:
    """The schema as pg_dump prints it, less what names the dump itself."""
    program = tools.installation.program("pg_dump")
    output = subprocess.run(
        [program, "--schema-only", uri], capture_output=True, text=True, check=True
    ).stdout
    return re.sub(r"(?m)^(\\(un)?restrict|-- Dumped (from|by)) .*$", "", output)


def executors_at_work(process: psutil.Process) -> dict[int, Path]:
    """The executors, each a JVM, that have a Python worker, and their application's folder."""
    found = {}
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()) and child.children():
                folder = application_folder(child)
                if folder is not None:
                    found[child.pid] = folder
    return found


@pytest.mark.slow
def test_museum_cloned_by_two_executors_is_the_same_as_cloned_by_threads(
    source_db: str,
    target_db: str,
    target_cluster: Cluster,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
) -> None:
    load_museum(source_db)
    create_museum_roles(target_db)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = psutil.Popen(
            [
                sys.executable, "-m", "millrace", "clone", "--json",
                "--source", source_db, "--target", target_db, "--dir", tmp_path / "work",
                "--master", "local-cluster[2,2,1024]", "--conf", "spark.executor.memory=512m",
                "--split-tables-larger-than", str(SPLIT_BYTES),
            ],
            stdout=out,
            stderr=err,
        )  # fmt: skip
    seen: dict[int, Path] = {}
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            seen |= executors_at_work(process)
            time.sleep(0.3)
        assert process.poll() == 0, (tmp_path / "err").read_text()
    finally:
        for one in [*process.children(recursive=True), process] if process.is_running() else []:
            one.kill()
        process.wait()
        # Spark keeps an application's folder below its own installation.
        for folder in set(seen.values()):
            remove_application_folder(folder)
    assert len(seen) == 2
    by_cluster = json.loads((tmp_path / "out").read_text())
    schema = dumped(target_db, target_cluster)
    assert_equal_data(source_db, target_db, engine)

    # The same again, over it: whatever the first one made must give way.
    settings = CloneSettings(
        Dsn.parse(source_db),
        Dsn.parse(target_db),
        tmp_path / "threads",
        split=SplitSettings(larger_than_bytes=SPLIT_BYTES),
        drop_if_exists=True,
    )
    by_threads = clone(settings, engine, reporter).summary
    assert by_threads is not None
    assert dumped(target_db, target_cluster) == schema
    assert_equal_data(source_db, target_db, engine)
    for field in ("oid", "rows", "indexes", "format"):
        assert {
            (table["schema"], table["name"], table[field]) for table in by_cluster["tables"]
        } == {(table.schema, table.name, getattr(table, field)) for table in by_threads.tables}


def assert_equal_data(source: str, target: str, engine: Engine) -> None:
    compared = compare_data(CompareSettings(Dsn.parse(source), Dsn.parse(target)), engine)
    assert [one.label for one in compared if not one.is_equal] == []
    assert len(compared) > 100


@pytest.mark.slow
def test_changes_are_applied_by_executors_from_a_spool_on_the_target(
    source_db: str, target_db: str, engine: Engine, tmp_path: Path
) -> None:
    directory = tmp_path / "work"
    opened = open_followed(source_db, target_db, directory, engine, spool=SpoolKind.TABLE)
    with opened as followed:
        with writing(source_db, seed=6) as written:
            while written() < 100:
                time.sleep(0.05)
        done = subprocess.run(
            [
                sys.executable, "-m", "millrace", "follow", "--quiet",
                "--source", source_db, "--target", target_db, "--dir", directory,
                "--endpos", render_lsn(followed.end()), "--apply-jobs", "2",
                "--master", "local-cluster[2,2,1024]", "--conf", "spark.executor.memory=512m",
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        followed.assert_equal()
