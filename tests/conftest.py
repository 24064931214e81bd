"""The servers of a test run: two clusters for all tests, one database for each."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import psycopg
import pytest
from tests.fixtures.processes.warm_programs import warm_programs
from tests.fixtures.processes.warm_receivers import warm_receivers
from tests.fixtures.wait import wait_for

from millrace.clone.progress import Progress
from millrace.postgres.program.binaries import server_installations
from millrace.postgres.program.embedded import FOLDER_VARIABLE, Cluster, open_cluster
from millrace.spark.session import Engine, default_master

pytest_plugins = ["tests.fixtures.leaks"]

# A command that is not told a work directory must not use that of whoever runs the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="millrace-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Programs of the tests start hundreds of times; each would compile whatever it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_HERE = Path(__file__).parent
_numbers = itertools.count(1)

# How long an example takes, or the drawing of one, says more about the machine than about the code.
hypothesis.settings.register_profile(
    "millrace", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("millrace")

# Servers in memory, where there is room: a database is made in a tenth of the time.
_MEMORY = "/dev/shm"
_ROOM_BYTES = 8 << 30
if Path(_MEMORY).is_dir():
    _room = min(shutil.disk_usage(_MEMORY).free, psutil.virtual_memory().available)
    if _room > _ROOM_BYTES:
        os.environ.setdefault(FOLDER_VARIABLE, _MEMORY)


# The slowest first, then by folder: a few processes share out the files, and should end together.
_SLOWEST = (
    "spark/test_torture.py",
    "spark/test_torture_follow.py",
    "spark/test_cluster.py",
    "spark/clone/test_many_tables.py",
    "spark/follow/test_versions.py",
    "postgres/follow/test_table_sync_killed.py",
    "spark/test_demo.py",
    "spark/test_class_archive.py",
)
_FOLDERS = ("spark", "postgres", "unit")

# What it does, and when, is nobody's subject here: it moves counters, holds locks and snapshots for
# a moment, and writes WAL on a source that is idle. The campaigns have it.
_QUIET = {"autovacuum": "off"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, int]:
    name = item.path.relative_to(_HERE).as_posix()
    slow = _SLOWEST.index(name) if name in _SLOWEST else len(_SLOWEST)
    return slow, _FOLDERS.index(name.split("/")[0])


@pytest.fixture(scope="session")
def source_cluster() -> Iterator[Cluster]:
    with open_cluster(16, tcp=True, settings=_QUIET) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def target_cluster() -> Iterator[Cluster]:
    with open_cluster(18, tcp=True, settings=_QUIET) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def system_cluster() -> Iterator[Cluster]:
    """A server packaged by somebody else: another version, other build options."""
    found = [i for i in server_installations() if i.origin != "wheel"]
    if not found:
        pytest.skip("no PostgreSQL server of the system")
    version, chosen = found[0].version, found[0]
    with open_cluster(version, installation=chosen, tcp=True, settings=_QUIET) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def receivers() -> Iterator[None]:
    """For whoever follows in this process, or starts a program that does."""
    with warm_receivers("tests.fixtures.processes.warm_commands"), warm_programs():
        yield


@pytest.fixture
def source_db(
    source_cluster: Cluster, receivers: None, request: pytest.FixtureRequest
) -> Iterator[str]:
    yield from fresh_database(source_cluster, "source", request)


@pytest.fixture
def target_db(target_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    yield from fresh_database(target_cluster, "target", request)


def fresh_database(cluster: Cluster, role: str, request: pytest.FixtureRequest) -> Iterator[str]:
    from tests.fixtures.leaks import FAILED, end_snapshot_processes  # a plug-in of pytest's

    name = f"{role}_{next(_numbers)}"
    place = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield cluster.create_database(name)
    if place is not None:
        end_snapshot_processes(place)
    if request.node.stash.get(FAILED, False):
        _drop_slots(cluster, name)
    cluster.drop_database(name)


def _drop_slots(cluster: Cluster, database: str) -> None:
    """A test that has failed may have left a slot and a receiver, which comes back as long as it
    finds the slot."""
    mine = f"FROM pg_replication_slots WHERE database = '{database}' AND NOT temporary"

    def are_gone() -> bool:
        with psycopg.connect(cluster.uri(), autocommit=True) as connection:
            connection.execute(f"SELECT pg_terminate_backend(active_pid) {mine}".encode())
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {mine}".encode())
            return connection.execute(f"SELECT {mine}".encode()).fetchone() is None

    wait_for(are_gone, f"the slots of {database} are gone")


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Spark, started once; `engine.call` runs task bodies in real Python workers."""
    with Engine(default_master(8)) as shared:
        shared.wait()
        yield shared


class NoDisplay:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def update(self, progress: Progress) -> None:
        if not self.steps or self.steps[-1] != progress.step:
            self.steps.append(progress.step)


@pytest.fixture
def reporter() -> NoDisplay:
    return NoDisplay()
