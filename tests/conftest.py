"""The servers of a test run: two clusters for all tests, one database for each."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from millrace.clone.progress import Progress
from millrace.postgres.binaries import server_installations
from millrace.postgres.embedded import FOLDER_VARIABLE, Cluster, open_cluster
from millrace.spark.session import Engine, default_master

_numbers = itertools.count(1)

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("millrace", deadline=None)
hypothesis.settings.load_profile("millrace")

# Servers in memory, where there is room: a database is made in a tenth of the time.
_MEMORY = "/dev/shm"
_ROOM_BYTES = 8 << 30
if Path(_MEMORY).is_dir():
    _room = min(shutil.disk_usage(_MEMORY).free, psutil.virtual_memory().available)
    if _room > _ROOM_BYTES:
        os.environ.setdefault(FOLDER_VARIABLE, _MEMORY)


# The slowest first: two processes share out the files, and should end together.
_FOLDERS = ("spark", "postgres", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: ("torture" not in item.path.name, _FOLDERS.index(item.path.parent.name))
    )


@pytest.fixture(scope="session")
def source_cluster() -> Iterator[Cluster]:
    with open_cluster(16, tcp=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def target_cluster() -> Iterator[Cluster]:
    with open_cluster(18, tcp=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def system_cluster() -> Iterator[Cluster]:
    """A server packaged by somebody else: another version, other build options."""
    found = [i for i in server_installations() if i.origin != "wheel"]
    if not found:
        pytest.skip("no PostgreSQL server of the system")
    with open_cluster(found[0].version, installation=found[0], tcp=True) as cluster:
        yield cluster


@pytest.fixture
def source_db(source_cluster: Cluster) -> Iterator[str]:
    yield from _fresh_database(source_cluster, "source")


@pytest.fixture
def target_db(target_cluster: Cluster) -> Iterator[str]:
    yield from _fresh_database(target_cluster, "target")


def _fresh_database(cluster: Cluster, role: str) -> Iterator[str]:
    name = f"{role}_{next(_numbers)}"
    yield cluster.create_database(name)
    cluster.drop_database(name)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Spark, started once; `engine.call` runs task bodies in real Python workers."""
    with Engine(default_master(8)) as shared:
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
