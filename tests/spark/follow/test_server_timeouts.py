"""Servers that end sessions soon: ours turn their timeouts off, all of them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psycopg
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.postgres.program.embedded import open_cluster

TIMEOUTS = {
    "idle_in_transaction_session_timeout": 14,
    "statement_timeout": 14,
    "lock_timeout": 14,
    "idle_session_timeout": 14,
    "transaction_timeout": 17,
}
LIMIT = "1s"
# Copying takes twice as long as any of them allows; so does building the index.
SLOW = """
CREATE FUNCTION slow(id int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS
    $$ BEGIN PERFORM pg_sleep(0.02); RETURN id; END $$;
CREATE TABLE slow_table (id int PRIMARY KEY, v text);
INSERT INTO slow_table SELECT i, repeat('v', 2000) FROM generate_series(1, 100) i;
"""
FILTERS = "[table-where]\npublic.slow_table = public.slow(id) > 0\n"


def _limit(uri: str) -> None:
    """For the server, the database and the role."""
    with _connect(uri) as connection:
        version = connection.info.server_version // 10000
        for name, since in TIMEOUTS.items():
            if version < since:
                continue
            for statement in (
                f"ALTER SYSTEM SET {name} = '{LIMIT}'",
                f"ALTER DATABASE {connection.info.dbname} SET {name} = '{LIMIT}'",
                f"ALTER ROLE postgres SET {name} = '{LIMIT}'",
            ):
                connection.execute(statement.encode())
        connection.execute("SELECT pg_reload_conf()")


def test_a_stream_longer_than_every_timeout_begins_and_ends(tmp_path: Path) -> None:
    with open_cluster(18) as cluster:
        source = cluster.create_database("limited")
        target = cluster.create_database("limited_copy")
        with psycopg.connect(source, autocommit=True) as connection:
            connection.execute(SLOW.encode())
        for uri in (source, target):
            _limit(uri)
        filters = tmp_path / "filters.ini"
        filters.write_text(FILTERS)
        sides = ["--source", source, "--target", target, "--dir", str(tmp_path / "work")]
        millrace = [*MILLRACE]
        # It makes the slot's creation wait, too.
        blocker = _connect(source, autocommit=False)
        blocker.execute("SELECT pg_current_xact_id()")
        with (tmp_path / "log").open("wb") as log:
            moving = subprocess.Popen(
                [*millrace, "clone", "--follow", *sides, "--filters", str(filters)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_for(lambda: "is not created yet" in _log(tmp_path) or moving.poll() is not None)
            blocker.close()
            wait_for(lambda: _is_copied(target) or moving.poll() is not None)
            _write(source)
            done = subprocess.run(
                [*millrace, "cutover", "--quiet", *sides, "--filters", str(filters)],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout + done.stderr + _log(tmp_path)
            assert moving.wait(DEADLINE_SECONDS) == 0, _log(tmp_path)
        finally:
            moving.kill()
            moving.wait()
        told = _log(tmp_path)
        assert "timeout" not in told.replace("--slot-timeout", ""), told
        cleaned = subprocess.run(
            [*millrace, "stream", "cleanup", *sides], capture_output=True, text=True
        )
        assert cleaned.returncode == 0, cleaned.stderr


def _connect(uri: str, *, autocommit: bool = True) -> psycopg.Connection[tuple[object, ...]]:
    """A session of the test's own, without limits."""
    options = " ".join(f"-c {name}=0" for name in TIMEOUTS)
    return psycopg.connect(uri, options=options, autocommit=autocommit)


def _log(tmp_path: Path) -> str:
    return (tmp_path / "log").read_text()


def _is_copied(uri: str) -> bool:
    with _connect(uri) as connection:
        try:
            row = connection.execute("SELECT count(*) FROM slow_table").fetchone()
        except psycopg.errors.UndefinedTable:
            return False
    return row == (100,)


def _write(uri: str) -> None:
    """Changes now and then, for longer than any of the timeouts."""
    for number in range(1001, 1005):
        with _connect(uri) as connection:
            connection.execute("INSERT INTO slow_table VALUES (%s, 'new')", (number,))
        time.sleep(0.7)
