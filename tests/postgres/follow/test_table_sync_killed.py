"""Tables copied again by processes that are killed, from sources of several versions, while others
write to the very tables."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.stream.followed import Followed, open_followed, writing
from tests.fixtures.stream.syncing import request, requested, run_sql, states_of, wait_until_done
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for
from tests.torture.failpoints import SYNC, SYNC_TASK

from millrace.apply.table_state import SyncState
from millrace.failpoint import VARIABLE
from millrace.postgres.program.embedded import Cluster
from millrace.workdir.sync_request import RequestState

LATE = "CREATE TABLE late_{} (id int PRIMARY KEY, value int, note text)"


@pytest.fixture(params=["wheel", "system"])
def any_source(request: pytest.FixtureRequest) -> str:
    """A database of an embedded server, and of one that the system has."""
    if request.param == "wheel":
        return str(request.getfixturevalue("source_db"))
    cluster: Cluster = request.getfixturevalue("system_cluster")
    name = f"late_{random.SystemRandom().randrange(1 << 30)}"
    return cluster.create_database(name)


@contextmanager
def writing_to(source: str, tables: list[str]) -> Iterator[None]:
    """A writer of the tables in the list, which may grow."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        dice = random.Random(7)
        try:
            with psycopg.connect(source, autocommit=True) as connection:
                while not stop.wait(0.01):
                    name, key = dice.choice(tables), dice.randrange(200)
                    statement = dice.choice(
                        [
                            f"INSERT INTO {name} VALUES ({key}, {dice.randrange(9)}, 'x')"
                            " ON CONFLICT (id) DO UPDATE SET value = excluded.value",
                            f"DELETE FROM {name} WHERE id = {key}",
                            f"UPDATE {name} SET id = {key + 1000} WHERE id = {key} AND NOT EXISTS"
                            f" (SELECT FROM {name} WHERE id = {key + 1000})",
                            f"DELETE FROM {name} WHERE id > 1000 AND id % 7 = {key % 7}",
                        ]
                    )
                    connection.execute(statement)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        assert not failures, failures


def start_child(followed: Followed, failpoint: str | None = None) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if failpoint:
        environment[VARIABLE] = f"{failpoint}=kill"
    command = [sys.executable, "-m", "tests.fixtures.processes.follow_child"]
    arguments = [followed.source, followed.target, str(followed.directory), "2"]
    return subprocess.Popen([*command, *arguments], env=environment)


def _points(source: str) -> tuple[str, ...]:
    """All of them, or on the second server what differs between versions."""
    if "late_" in source:
        return ("sync.published", "sync.before_copy_commit", "sync.caught_up")
    return (*SYNC, *SYNC_TASK)


def test_process_killed_at_every_failpoint_of_table_sync_ends_equal(
    any_source: str, target_db: str, tmp_path: Path
) -> None:
    names = ["late_0"]
    with open_followed(any_source, target_db, tmp_path, DirectEngine()) as followed:
        for uri in (any_source, target_db):
            run_sql(uri, LATE.format(0))
        writers = writing(any_source, 5, writers=1, pause_seconds=0.05)
        with writers, writing_to(any_source, names):
            for number, failpoint in enumerate(_points(any_source), 1):
                for uri in (any_source, target_db):
                    run_sql(uri, LATE.format(number))
                names.append(f"late_{number}")
                # What was never followed, and what is followed.
                asked = [request(followed, names[-1]), request(followed, "account")]
                if number == 1:
                    asked.append(request(followed, "late_0"))
                child = start_child(followed, failpoint)
                assert child.wait(DEADLINE_SECONDS) == -signal.SIGKILL, failpoint
            child = start_child(followed)
            for one in asked:
                wait_until_done(followed, one)
        followed.set_endpos(followed.end())
        assert child.wait(DEADLINE_SECONDS) == 0
        followed.assert_equal()
        states = states_of(followed)
        assert {name for _, name in states} == {*names, "account"}
        assert {state.state for state in states.values()} == {SyncState.FOLLOWED}


def test_sync_waits_for_older_transactions_says_so_and_can_be_stopped(
    source_db: str, target_db: str, tmp_path: Path
) -> None:
    slots = "SELECT count(*) FROM pg_replication_slots WHERE temporary"
    with open_followed(source_db, target_db, tmp_path, DirectEngine()) as followed:
        for uri in (source_db, target_db):
            run_sql(uri, LATE.format(0))
        with psycopg.connect(source_db, application_name="long") as older:
            older.execute("INSERT INTO late_0 VALUES (1, 1, 'before')")
            older.execute("UPDATE account SET balance = 5 WHERE id = 1")
            asked = request(followed, "late_0")
            again = request(followed, "account")
            child = start_child(followed)
            wait_for(lambda: "long" in requested(followed, asked).step, "it says what it waits for")
            # The others go on.
            run_sql(source_db, "UPDATE seat SET place = 77 WHERE id = 1")
            with psycopg.connect(target_db, autocommit=True) as target:
                wait_for(
                    lambda: (
                        target.execute("SELECT FROM seat WHERE place = 77").fetchone() is not None
                    )
                )
            child.send_signal(signal.SIGINT)
            assert child.wait(DEADLINE_SECONDS) != 0
            assert requested(followed, asked).state is RequestState.RUNNING
            with psycopg.connect(source_db) as connection:
                row = connection.execute(slots).fetchone()
                assert row == (0,)
            child = start_child(followed)
            wait_for(lambda: "long" in requested(followed, asked).step)
            older.execute("INSERT INTO late_0 VALUES (2, 2, 'late')")
            older.commit()
        run_sql(
            source_db,
            "INSERT INTO late_0 VALUES (3, 3, 'after')",
            "DELETE FROM late_0 WHERE id = 1",
        )
        for one in (asked, again):
            wait_until_done(followed, one)
        run_sql(
            source_db,
            "INSERT INTO late_0 VALUES (4, 4, 'after')",
            "DELETE FROM late_0 WHERE id = 2",
        )
        followed.set_endpos(followed.end())
        assert child.wait(DEADLINE_SECONDS) == 0
        followed.assert_equal()
