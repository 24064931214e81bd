"""Several machines, as far as one can be several: a master, two workers, executors of their own.

The program runs as a process, because one process can have one Spark application only; it takes
seconds of three JVMs to start, so all tests share it.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import psycopg
import pytest
from tests.fixtures import create_museum_roles, load_museum
from tests.fixtures.spark_folder import application_folder, remove_application_folder
from tests.fixtures.stream.followed import open_followed, writing
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.clone.progress import Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.lsn import render_lsn
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route
from millrace.spark.session import Engine
from millrace.split.plan import SplitSettings
from millrace.spool.kind import SpoolKind
from millrace.tube.install import install

SPLIT_BYTES = 1024 * 1024


def dumped(uri: str, tools: Cluster) -> str:
    """The schema as pg_dump prints it, less what names the dump itself."""
    program = tools.installation.program("pg_dump")
    output = subprocess.run(
        [program, "--schema-only", uri], capture_output=True, text=True, check=True
    ).stdout
    return re.sub(r"(?m)^(\\(un)?restrict|-- Dumped (from|by)) .*$", "", output)


class ClusterProgram:
    """`millrace` on a cluster of two executors, which all commands share."""

    def __init__(self, folder: Path) -> None:
        self.process = psutil.Popen(
            [sys.executable, "-m", "tests.fixtures.processes.cluster_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.out, self.err = folder / "out", folder / "err"
        # The executors, each a JVM, that had a Python worker, and their application's folder.
        self.executors: dict[int, Path] = {}

    def run(self, *arguments: str) -> str:
        """What the command printed; it must end well."""
        options = (*arguments, "--master", "local-cluster[2,2,1024]")
        options += ("--conf", "spark.executor.memory=512m")
        # Or the first executor to come may do everything.
        options += ("--conf", "spark.cores.max=4")
        options += ("--conf", "spark.scheduler.minRegisteredResourcesRatio=1.0")
        options += ("--conf", "spark.scheduler.maxRegisteredResourcesWaitingTime=300s")
        self.process.stdin.write(json.dumps([str(self.out), str(self.err), options]) + "\n")
        self.process.stdin.flush()
        with ThreadPoolExecutor(1) as threads:
            code = threads.submit(self.process.stdout.readline)
            try:
                wait_for(lambda: self._look() or code.done(), "it ends", 2 * DEADLINE_SECONDS)
            except BaseException:
                self.process.kill()  # or the thread would read for ever
                raise
        assert code.result().strip() == "0", self.err.read_text()
        return self.out.read_text()

    def close(self) -> None:
        """As it should; whatever is left is killed."""
        family = self.process.children(recursive=True) if self.process.is_running() else []
        self.process.stdin.close()
        _, alive = psutil.wait_procs([self.process, *family], timeout=DEADLINE_SECONDS)
        for one in alive:
            one.kill()
        self.process.wait()
        self.process.stdout.close()
        # Spark keeps an application's folder below its own installation.
        for folder in set(self.executors.values()):
            remove_application_folder(folder)

    def _look(self) -> None:
        """Note the executors at work; now and then, because it takes time."""
        time.sleep(0.2)
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()) and child.children():
                    folder = application_folder(child)
                    if folder is not None:
                        self.executors[child.pid] = folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProgram]:
    program = ClusterProgram(tmp_path_factory.mktemp("cluster"))
    yield program
    program.close()


@pytest.mark.slow
def test_museum_cloned_by_two_executors_is_the_same_as_cloned_by_threads(
    source_db: str,
    target_db: str,
    target_cluster: Cluster,
    cluster: ClusterProgram,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
) -> None:
    load_museum(source_db)
    create_museum_roles(target_db)
    sides = ("--source", source_db, "--target", target_db, "--dir", str(tmp_path / "work"))
    split = ("--split-tables-larger-than", str(SPLIT_BYTES))
    by_cluster = json.loads(cluster.run("clone", "--json", *sides, *split))
    assert len(cluster.executors) == 2
    schema = dumped(target_db, target_cluster)
    assert_equal_data(source_db, target_db, engine)

    # The same again, over it: whatever the first one made must give way.
    settings = CloneSettings(
        Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "threads"),
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
    compared = compare_data(CompareSettings(Route(Dsn.parse(source), Dsn.parse(target))), engine)
    assert [one.label for one in compared if not one.is_equal] == []
    assert len(compared) > 100


@pytest.mark.slow
def test_changes_are_applied_by_executors_from_a_spool_on_the_target(
    source_db: str, target_db: str, cluster: ClusterProgram, engine: Engine, tmp_path: Path
) -> None:
    directory = tmp_path / "work"
    opened = open_followed(source_db, target_db, directory, engine, spool=SpoolKind.TABLE)
    with opened as followed:
        with writing(source_db, seed=6) as written:
            wait_for(lambda: written() > 100)
        cluster.run(
            "follow", "--quiet", "--source", source_db, "--target", target_db,
            "--dir", str(directory), "--endpos", render_lsn(followed.end()), "--apply-jobs", "1",
        )  # fmt: skip
        followed.assert_equal()


@pytest.mark.slow
def test_a_tube_is_delivered_by_executors_if_there_is_a_slot_for_each_worker(
    source_db: str, cluster: ClusterProgram, tmp_path: Path
) -> None:
    with psycopg.connect(source_db, autocommit=True) as connection:
        install(connection)
        connection.execute(
            "SET search_path = public, tube;"
            "CREATE TABLE item (id bigint PRIMARY KEY, v text);"
            "CREATE TABLE docs (id bigint PRIMARY KEY, v text);"
            "SELECT tube_ensure_exists('items', 4);"
            "SELECT tube_table_attach('items', 'item', routing => 'id % 4');"
            "INSERT INTO item SELECT i, 'v' || i FROM generate_series(1, 1000) i"
        )
        printed = cluster.run(
            "tube", "run", "--json", "--source", source_db, "--tube", "items", "--until-empty",
            "--enrich", "SELECT id, v FROM item WHERE id = ANY($1)", "--workers", "3",
            "--sink", f"{source_db}&table=docs", "--dir", str(tmp_path / "work"),
        )  # fmt: skip
        assert json.loads(printed)["ids"] == 1000
        left = "SELECT count(*) FROM (TABLE item EXCEPT TABLE docs) x"
        assert connection.execute(left).fetchone() == (0,)
