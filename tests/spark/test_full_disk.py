"""Whole runs on disks that fill up: they stop, say what is needed, and go on when there is room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.small_disk import SmallDisk, open_small_disk
from tests.fixtures.stream.followed import Followed, Silent, open_followed

from millrace import failpoint
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.errors import ServerError, WorkDirError
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route
from millrace.spark.session import Engine

# A new database takes 8 MB of it.
SIZE_BYTES = 20 << 20
# 16 MB in the table, and more in its log.
FILL = "INSERT INTO {} SELECT i, repeat(md5(i::text), 60) FROM generate_series(1, 8000) i"


@dataclass(frozen=True)
class SmallTarget:
    uri: str
    disk: SmallDisk


@pytest.fixture
def target(target_cluster: Cluster) -> Iterator[SmallTarget]:
    """A database of the target on a disk with some free megabytes."""
    folder = target_cluster.socket_dir / "small"
    owner = target_cluster.socket_dir.stat()
    with open_small_disk(folder, SIZE_BYTES) as disk:
        os.chown(folder, owner.st_uid, owner.st_gid)
        execute(
            target_cluster.uri(),
            f"CREATE TABLESPACE small LOCATION '{folder}'",
            "CREATE DATABASE small TEMPLATE template0 TABLESPACE small STRATEGY file_copy",
        )
        try:
            yield SmallTarget(target_cluster.uri("small"), disk)
        finally:
            target_cluster.drop_database("small")
            execute(target_cluster.uri(), "DROP TABLESPACE small")
    folder.rmdir()


def execute(uri: str, *statements: str) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def test_clone_into_a_full_target_goes_on_when_there_is_room(
    source_db: str, target: SmallTarget, engine: Engine, tmp_path: Path
) -> None:
    execute(
        source_db,
        "CREATE TABLE small (id int PRIMARY KEY, v text)",
        "CREATE TABLE big (id int PRIMARY KEY, v text)",
        "ALTER TABLE big ALTER v SET STORAGE PLAIN",
        FILL.format("big"),
    )
    source = Dsn.parse(source_db)
    settings = CloneSettings(Route(source, Dsn.parse(target.uri), tmp_path / "work"))
    with pytest.raises(ServerError) as raised:
        clone(settings, engine, Silent())
    assert raised.value.facts["sqlstate"] == "53100"
    assert raised.value.facts["needed_bytes"] > 10 << 20
    assert "make room on the target: about 1" in raised.value.hint
    assert "--resume" in raised.value.hint
    target.disk.make_room()
    clone(replace(settings, resume=True, not_consistent=True), engine, Silent())
    found = compare_data(CompareSettings(Route(source, Dsn.parse(target.uri))), engine)
    assert [one.is_equal for one in found] == [True, True]


def test_stream_into_a_full_target_goes_on_when_there_is_room(
    source_db: str, target: SmallTarget, engine: Engine, tmp_path: Path
) -> None:
    schema = (
        "CREATE TABLE big (id int PRIMARY KEY, v text)",
        "ALTER TABLE big ALTER v SET STORAGE PLAIN",
    )
    execute(source_db, *schema)
    execute(target.uri, *schema)
    with open_followed(source_db, target.uri, tmp_path / "work", engine) as followed:
        execute(source_db, "INSERT INTO seat VALUES (100, 100)", FILL.format("big"))
        with pytest.raises(ServerError) as raised:
            followed.follow()
        assert raised.value.facts["sqlstate"] == "53100"
        assert "same command again" in raised.value.hint
        target.disk.make_room()
        followed.follow()
        followed.assert_equal()


@pytest.fixture
def followed(source_db: str, target_db: str, tmp_path: Path, engine: Engine) -> Iterator[Followed]:
    with open_followed(source_db, target_db, tmp_path / "work", engine) as opened:
        yield opened


def test_stream_whose_spool_finds_no_room_goes_on_later(
    followed: Followed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(followed.source, "UPDATE account SET balance = balance + id")
    followed.follow()
    marker = tmp_path / "marker"
    marker.touch()
    monkeypatch.setenv(failpoint.VARIABLE, f"spool.before_index=full@{marker}")
    execute(followed.source, "UPDATE account SET balance = balance - id")
    with pytest.raises(WorkDirError, match="No space left on device") as raised:
        followed.follow()
    assert "at least 64 MB" in raised.value.hint
    assert not marker.exists()
    followed.follow()
    followed.assert_equal()
