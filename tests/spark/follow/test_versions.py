"""Clone, follow and cut-over as they are typed, between servers of different versions."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.stream.followed import SCHEMA, writing
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.clone.ready import is_finished

FILTERS = """
[exclude-table]
public.left_out

[table-where]
public.parted = region <> 'far'
"""
MORE = """
CREATE TABLE left_out (id int PRIMARY KEY);
INSERT INTO left_out VALUES (1);
CREATE TABLE parted (id int, region text, note text, PRIMARY KEY (id, region))
    PARTITION BY LIST (region);
CREATE TABLE parted_near PARTITION OF parted FOR VALUES IN ('near');
CREATE TABLE parted_rest PARTITION OF parted DEFAULT;
INSERT INTO parted SELECT i, (ARRAY['near', 'far', 'else'])[1 + i % 3], 'n' FROM
    generate_series(1, 300) i;
"""
CHANGES = """
INSERT INTO left_out VALUES (2);
UPDATE parted SET region = 'near' WHERE id % 9 = 1;
UPDATE parted SET region = 'far' WHERE id % 9 = 0;
UPDATE parted SET note = 'm' WHERE id % 2 = 0;
DELETE FROM parted WHERE id % 9 = 5;
"""


CLUSTERS = {"16": "source_cluster", "18": "target_cluster", "system": "system_cluster"}


@pytest.fixture(params=["system to 18", "18 to system", "18 to 16"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    # Both servers first: where one is missing, nothing is made on the other.
    names = request.param.split(" to ")
    source, target = (request.getfixturevalue(CLUSTERS[name]) for name in names)
    yield source.create_database("followed_from"), target.create_database("followed_to")
    source.drop_database("followed_from")
    target.drop_database("followed_to")


def test_a_filtered_database_is_moved_under_writers(ends: tuple[str, str], tmp_path: Path) -> None:
    source, target = ends
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute(SCHEMA)
        connection.execute(MORE)
    filters = tmp_path / "filters.ini"
    filters.write_text(FILTERS)
    sides = [
        "--source", source, "--target", target, "--dir", str(tmp_path / "work"),
    ]  # fmt: skip
    command = [*MILLRACE]
    slot = ["--slot-name", f"versions_{time.time_ns()}"]
    with (tmp_path / "log").open("wb") as log:
        moving = subprocess.Popen(
            [*command, "clone", "--follow", *sides, *slot, "--filters", filters],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        # The writers truncate, and no snapshot outlives that.
        wait_for(lambda: is_finished(tmp_path / "work") or moving.poll() is not None)
        assert moving.poll() is None, (tmp_path / "log").read_text()
        with writing(source, seed=7) as written:
            wait_for(lambda: written() >= 100)
            with psycopg.connect(source) as connection:
                connection.execute(CHANGES)
        done = _run([*command, "cutover", "--quiet", *sides, "--filters", filters])
        assert done.returncode == 0, done.stdout + done.stderr
        assert moving.wait(DEADLINE_SECONDS) == 0, (tmp_path / "log").read_text()
    finally:
        moving.kill()
        moving.wait()
        cleaned = _run([*command, "stream", "cleanup", *sides, *slot])
    assert cleaned.returncode == 0, cleaned.stderr
    with psycopg.connect(target) as connection:
        found = connection.execute(
            "SELECT to_regclass('left_out'), (SELECT count(*) FROM parted WHERE region = 'far'),"
            " (SELECT count(*) FROM parted)"
        ).fetchone()
    with psycopg.connect(source) as connection:
        kept = connection.execute("SELECT count(*) FROM parted WHERE region <> 'far'").fetchone()
    assert kept is not None
    assert found == (None, 0, kept[0])


def test_a_stream_that_begins_anew_ends_where_it_was_told(
    source_db: str, target_db: str, tmp_path: Path
) -> None:
    command = [
        *MILLRACE, "clone", "--follow", "--source", source_db, "--target",
        target_db, "--dir", str(tmp_path / "work"), "--slot-name", f"anew_{time.time_ns()}",
    ]  # fmt: skip
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = on")
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute('CREATE SCHEMA "two words"')
        connection.execute('CREATE TABLE "two words"."o ne" (id int PRIMARY KEY)')
        connection.execute('CREATE TABLE "two words"."loose" (id int)')
        connection.execute("CREATE PUBLICATION theirs FOR TABLE t")
        connection.execute("COMMENT ON PUBLICATION theirs IS 'of others'")
        for options in ([], ["--restart", "--drop-if-exists"]):
            connection.execute("INSERT INTO t SELECT count(*) + 1 FROM t")
            row = connection.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
            assert row is not None
            done = _run([*command, *options, "--endpos", row[0]])
            assert done.returncode == 0, done.stderr
    with psycopg.connect(target_db) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (2,)
        # The stream's own belong to the source.
        publications = "SELECT pubname, tablename FROM pg_publication LEFT JOIN"
        publications += " pg_publication_tables USING (pubname)"
        assert connection.execute(publications).fetchall() == [("theirs", "t")]
    sides = ["--source", source_db, "--target", target_db]
    compared = _run([*MILLRACE, "compare", "schema", *sides])
    assert compared.returncode == 0, compared.stdout + compared.stderr
    cleaned = _run([*MILLRACE, "stream", "cleanup", *command[5:]])
    assert cleaned.returncode == 0, cleaned.stderr


def test_half_a_copy_is_not_followed(source_db: str, target_db: str, tmp_path: Path) -> None:
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")
        connection.execute("CREATE TABLE u AS SELECT generate_series(1, 1000) AS id")
    sides = [
        "--source", source_db, "--target", target_db, "--dir", str(tmp_path / "work"),
    ]  # fmt: skip
    command = [*MILLRACE]
    slot = ["--slot-name", f"half_{time.time_ns()}"]
    killed = subprocess.run(
        [*command, "clone", "--follow", *sides, *slot],
        env=os.environ | {"MILLRACE_FAILPOINTS": "schema.dumped=kill"},
        capture_output=True,
        timeout=DEADLINE_SECONDS,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    try:
        for step in (["follow"], ["stream", "catchup"]):
            refused = _run([*command, *step, *sides])
            assert refused.returncode == 4, refused.stderr
            assert "the copy in" in refused.stderr
    finally:
        cleaned = _run([*command, "stream", "cleanup", *sides, *slot])
    assert cleaned.returncode == 0, cleaned.stderr


def _run(command: list[object]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
