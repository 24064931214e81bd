"""Sessions that build indexes: what ends when they are told to cancel, and how soon."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import psycopg
from tests.fixtures.proxy import open_proxy
from tests.fixtures.sql import rows
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.clone.finish.session_pool import SessionPool
from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

JOBS = 6
# Longer than anybody waits.
LONG_SECONDS = 2 * DEADLINE_SECONDS


def long_statement(connection: Connection) -> None:
    with translated("sleeping"):
        connection.execute(f"SELECT pg_sleep({LONG_SECONDS})")


def sleeping(uri: str) -> int:
    query = (
        "SELECT FROM pg_stat_activity WHERE application_name = 'millrace pool'"
        " AND datname = current_database() AND wait_event = 'PgSleep'"
    )
    return len(rows(uri, query))


@contextmanager
def at_once() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < DEADLINE_SECONDS


def test_cancelled_pool_begins_none_of_the_jobs_that_wait(target_db: str) -> None:
    pool = SessionPool(Dsn.parse(target_db), "pool", JOBS)
    running = [pool.submit(long_statement) for _ in range(JOBS)]
    waiting = [pool.submit(long_statement) for _ in range(JOBS)]
    wait_for(lambda: sleeping(target_db) == JOBS)
    with at_once():
        pool.close(cancel=True)
    assert all(job.cancelled() for job in waiting)
    assert {type(job.exception()) for job in running} == {ServerError}


def test_job_between_two_statements_is_cancelled_in_the_next(target_db: str) -> None:
    between = threading.Event()

    def work(connection: Connection) -> None:
        connection.execute("SELECT 1")
        between.set()
        time.sleep(0.5)
        long_statement(connection)

    pool = SessionPool(Dsn.parse(target_db), "pool", 1)
    job = pool.submit(work)
    assert between.wait(LONG_SECONDS)
    with at_once():
        pool.close(cancel=True)
    assert isinstance(job.exception(), ServerError)


def test_server_that_is_gone_is_no_error_of_the_end(target_cluster: Cluster) -> None:
    dsn = Dsn.parse(target_cluster.uri(tcp=True))
    asked, gone = threading.Event(), threading.Event()

    def work(connection: Connection) -> None:
        connection.execute("SELECT 1")
        asked.set()
        gone.wait(LONG_SECONDS)
        time.sleep(0.5)
        long_statement(connection)

    with open_proxy(int(dsn.parameters["port"]), cut_after=sys.maxsize) as port:
        pool = SessionPool(dsn.with_(port=str(port)), "pool", 1)
        job = pool.submit(work)
        assert asked.wait(LONG_SECONDS)
    gone.set()
    with at_once():
        pool.close(cancel=True)
    # The connection was lost, and the job not tried again.
    assert isinstance(job.exception(0), CancelledError)
