"""A clone that was stopped without any preparation: its snapshot lives on, and so does the copy."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.leaks import find_snapshot_processes
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.config.dsn import Dsn
from millrace.follow.slot import cleanup
from millrace.postgres.wire.connect import connect
from millrace.snapshot.holder import read_held

SCHEMA = """
CREATE TABLE large (id int PRIMARY KEY, body text);
INSERT INTO large SELECT i, repeat('x', 400) FROM generate_series(1, 5000) AS i;
CREATE TABLE small (id int PRIMARY KEY, n int NOT NULL);
INSERT INTO small SELECT i, i FROM generate_series(1, 100) AS i;
SELECT lo_from_bytea(0, 'object');
"""
SLOTS = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
PUBLICATIONS = "SELECT count(*) FROM pg_publication"


class Migration:
    """A clone as somebody types it, in a work directory of its own."""

    def __init__(self, source: str, target: str, directory: Path) -> None:
        execute(source, SCHEMA)
        self.source, self.target, self.directory = source, target, directory
        self.slot = "kept_" + source.partition("?")[0].rpartition("/")[2]
        self.following = ["--follow", "--slot-name", self.slot]

    def command(self, *options: str) -> list[str]:
        ends = ["--source", self.source, "--target", self.target, "--dir", str(self.directory)]
        return [*MILLRACE, "clone", *ends, "--split-tables-larger-than", "500 kB", *options]

    def run(self, *options: str, failpoints: str = "") -> subprocess.CompletedProcess[str]:
        return run(self.command(*options), failpoints)

    def endpos(self) -> list[str]:
        """Options that end the stream where the source is now."""
        return ["--endpos", str(rows(self.source, "SELECT pg_current_wal_insert_lsn()")[0][0])]

    def progress(self) -> dict[str, object]:
        ended = run([*MILLRACE, "list", "progress", "--dir", str(self.directory), "--json"])
        assert ended.returncode == 0, ended.stderr
        found: dict[str, object] = json.loads(ended.stdout)
        return found

    def kept(self) -> tuple[str, str, list[str]]:
        """Summary, log and plan of the run."""
        files = [self.directory / name for name in ("summary.json", "snapshot.log")]
        with closing(sqlite3.connect(self.directory / "schema" / "source.db")) as database:
            plan = list(database.iterdump())
        return files[0].read_text(), files[1].read_text(), plan

    def wait_for_end(self) -> None:
        wait_for(lambda: not find_snapshot_processes(self.directory), "the snapshot process ends")


def run(command: list[str], failpoints: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | {"MILLRACE_FAILPOINTS": failpoints},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


@pytest.fixture
def migration(source_db: str, target_db: str, tmp_path: Path) -> Iterator[Migration]:
    opened = Migration(source_db, target_db, tmp_path / "work")
    yield opened
    held = read_held(opened.directory)
    if held is not None:
        run([*MILLRACE, "snapshot", "--stop", "--dir", str(opened.directory)])
    with (
        connect(Dsn.parse(source_db), "test") as here,
        connect(Dsn.parse(target_db), "test") as there,
    ):
        cleanup(here, there, opened.slot, Dsn.parse(source_db).identity())


def pasted(printed: str) -> list[str]:
    """The command that the last line with one tells to run."""
    line = [line for line in printed.splitlines() if " millrace clone " in line][-1]
    return [*MILLRACE, *shlex.split(line.partition(" millrace ")[2])]


def test_a_clone_killed_at_once_goes_on_under_its_own_snapshot(migration: Migration) -> None:
    killed = migration.run(failpoints="copy.checked=kill,part.copied=kill,pre-data.done=kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    held = read_held(migration.directory)
    assert held is not None
    assert held.is_of_run
    assert "held by process" in str(migration.progress()["snapshot_state"])
    execute(migration.source, "DELETE FROM large", "UPDATE small SET n = 0")
    refused = migration.run()
    assert refused.returncode == 4
    assert "--resume" in refused.stderr
    stopping = run([*MILLRACE, "snapshot", "--stop", "--dir", str(migration.directory / "other")])
    assert stopping.returncode == 4
    done = run(pasted(refused.stderr))
    assert done.returncode == 0, done.stderr
    assert f"snapshot {held.id} is given back" in done.stderr
    assert rows(migration.target, "SELECT count(*), sum(n) FROM small, large") == [
        (500_000, 5050 * 5000)
    ]
    migration.wait_for_end()
    assert "given back at" in str(migration.progress()["snapshot_state"])
    again = migration.run("--resume")
    assert again.returncode == 0
    assert "is finished" in again.stderr


def test_a_restart_ends_the_snapshot_of_the_run_before(migration: Migration) -> None:
    killed = migration.run(failpoints="pre-data.done=kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = read_held(migration.directory)
    execute(migration.source, "DELETE FROM small")
    done = migration.run("--restart")
    assert done.returncode == 0, done.stderr
    assert before is not None
    assert rows(migration.target, "SELECT count(*) FROM small") == [(0,)]
    migration.wait_for_end()


def test_the_snapshot_is_given_back_before_the_last_index_is_built(migration: Migration) -> None:
    with subprocess.Popen(
        migration.command(),
        env=os.environ | {"MILLRACE_FAILPOINTS": "snapshot.given-back=stop"},
        stderr=subprocess.PIPE,
    ) as process:
        try:
            wait_for(lambda: (migration.directory / "snapshot.log").exists())
            migration.wait_for_end()
            assert "given back at" in str(migration.progress()["snapshot_state"])
            xmins = "SELECT count(*) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL"
            xmins += " AND datname = current_database() AND pid <> pg_backend_pid()"
            wait_for(lambda: rows(migration.source, xmins) == [(0,)])
            assert process.poll() is None
        finally:
            process.kill()
            process.communicate()
    done = migration.run("--resume")
    assert done.returncode == 0, done.stderr
    assert rows(migration.target, "SELECT count(*) FROM large") == [(5000,)]


def test_ctrl_c_of_a_followed_clone_says_what_it_costs_and_goes_on_without_a_gap(
    migration: Migration,
) -> None:
    with subprocess.Popen(
        migration.command(*migration.following),
        env=os.environ | {"MILLRACE_FAILPOINTS": "pre-data.done=stop"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: psutil_status(process.pid) == "T", "it is stopped in the middle")
        refused = run([*MILLRACE, "snapshot", "--stop", "--dir", str(migration.directory)])
        assert refused.returncode == 4
        assert f"process {process.pid} copies under snapshot" in refused.stderr
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130, said
    assert "for 12 h" in said
    assert "holds back vacuum on the source (xmin is" in said
    assert "of WAL there" in said
    assert rows(migration.source, SLOTS) == [(1,)]
    execute(
        migration.source,
        "DELETE FROM large WHERE id % 2 = 0",
        "INSERT INTO small SELECT i, -i FROM generate_series(101, 200) AS i",
    )
    done = run([*pasted(said), *migration.endpos()])
    assert done.returncode == 0, done.stderr
    both = "SELECT (SELECT count(*) FROM large), (SELECT sum(n) FROM small)"
    assert rows(migration.target, both) == rows(migration.source, both)
    migration.wait_for_end()
    assert rows(migration.source, SLOTS) == [(1,)]


def psutil_status(pid: int) -> str:
    """As ps shows it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_snapshot_that_nobody_continues_takes_its_slot_with_it(migration: Migration) -> None:
    options = [*migration.following, "--snapshot-keep", "0"]
    killed = migration.run(*options, failpoints="pre-data.done=kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    migration.wait_for_end()
    assert rows(migration.source, SLOTS) == [(0,)]
    assert rows(migration.source, PUBLICATIONS) == [(0,)]
    state = str(migration.progress()["snapshot_state"])
    for words in ("nobody continued", f"slot {migration.slot} and its publications are dropped"):
        assert words in state
        assert words in (migration.directory / "snapshot.log").read_text()
    late = migration.run(*options, "--resume")
    assert late.returncode == 5
    assert "nobody continued" in late.stderr
    done = run([*pasted(late.stderr), *migration.endpos()])
    assert done.returncode == 0, done.stderr
    assert rows(migration.target, "SELECT count(*) FROM large") == [(5000,)]


def test_until_the_snapshot_exists_its_process_ends_with_the_clone(migration: Migration) -> None:
    with psycopg.connect(migration.source) as writer:
        writer.execute("INSERT INTO small VALUES (1000, 1)")  # a slot waits for it
        with subprocess.Popen(
            migration.command(*migration.following), stderr=subprocess.PIPE
        ) as process:
            wait_for(lambda: rows(migration.source, SLOTS) == [(1,)], "the slot is being made")
            assert find_snapshot_processes(migration.directory)
            process.kill()
            process.communicate()
        migration.wait_for_end()
    wait_for(lambda: rows(migration.source, SLOTS) == [(0,)], "the server drops it")
    assert read_held(migration.directory) is None
    done = migration.run(*migration.following, *migration.endpos())
    assert done.returncode == 0, done.stderr


def test_a_refused_command_leaves_the_earlier_run_alone(migration: Migration) -> None:
    done = migration.run()
    assert done.returncode == 0, done.stderr
    before = migration.kept()
    for options, code, words in (
        ((), 3, "not empty"),
        (("--resume", "--restart"), 2, "cannot be used together"),
        (("--restart", "--split-tables-larger-than", "nonsense"), 2, "invalid size"),
        (("--restart",), 3, "not empty"),
    ):
        refused = migration.run(*options)
        assert refused.returncode == code, refused.stderr
        assert words in refused.stderr
        assert migration.kept() == before, options
    assert not find_snapshot_processes(migration.directory)


def test_a_table_that_fails_costs_no_other_and_is_all_that_is_left(migration: Migration) -> None:
    execute(
        migration.source,
        "CREATE FUNCTION good(n int) RETURNS bool LANGUAGE sql AS 'SELECT true'",
        "CREATE TABLE checked (n int CHECK (good(n)))",
        "INSERT INTO checked VALUES (7)",
        "CREATE OR REPLACE FUNCTION good(n int) RETURNS bool LANGUAGE sql AS 'SELECT n <> 7'",
    )
    failed = migration.run()
    assert failed.returncode == 5
    assert rows(migration.target, "SELECT count(*) FROM large") == [(5000,)]
    assert "stays held by process" in failed.stderr
    execute(
        migration.target,
        "CREATE OR REPLACE FUNCTION good(n int) RETURNS bool LANGUAGE sql AS 'SELECT true'",
    )
    copied = "SELECT count(*) FROM millrace.copied_part"
    before = rows(migration.target, copied)
    assert before != [(0,)]
    done = run(pasted(failed.stderr))
    assert done.returncode == 0, done.stderr
    assert rows(migration.target, "SELECT n FROM checked") == [(7,)]
    migration.wait_for_end()
