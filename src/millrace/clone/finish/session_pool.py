"""Driver threads that each keep one connection to the target.

Invariant: a job runs on a living session or not at all; after a lost connection
the same job is tried again on a new one, as `retry` allows. Once the pool is told
to cancel, no job begins and none is tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, MillraceError
from millrace.postgres.wire.connect import connect
from millrace.retry import is_transient, with_retries

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

# How long one request to cancel may take, and how long to wait for its effect before the next.
CANCEL_SECONDS = 5.0
CANCEL_PAUSE_SECONDS = 0.1


class SessionPool:
    """`jobs` threads; `submit` runs a function with the thread's own connection."""

    def __init__(self, dsn: Dsn, role: str, jobs: int, **settings: str) -> None:
        self._dsn = dsn
        self._role = role
        self._settings = settings
        self._local = threading.local()
        self._open: list[Connection] = []
        self._jobs: set[Future[Any]] = set()
        self._is_cancelled = False
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix=role)

    def submit(self, work: Callable[[Connection], T]) -> Future[T]:
        """Queue a job."""
        job = self._threads.submit(self._run, work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def close(self, *, cancel: bool = False) -> None:
        """Wait for the jobs, or drop those not yet begun and cancel those under way."""
        if cancel:
            # First of all: a thread whose job is cancelled takes the next one from the queue.
            self._is_cancelled = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._cancel_jobs()
        self._threads.shutdown(wait=True)
        for connection in self._open:
            connection.close()

    def _cancel_jobs(self) -> None:
        """Until the last job under way has ended: one that is between two statements, or about to
        connect, has nothing yet to cancel."""
        while running := [job for job in list(self._jobs) if not job.done()]:
            for connection in list(self._open):
                # A server that can't be asked has ended the statement, or will not end it sooner.
                with suppress(psycopg.Error):
                    connection.cancel_safe(timeout=CANCEL_SECONDS)
            wait(running, timeout=CANCEL_PAUSE_SECONDS)

    def _run(self, work: Callable[[Connection], T]) -> T:
        def attempt() -> T:
            if self._is_cancelled:
                raise CancelledError
            try:
                return work(self._connection())
            except MillraceError as error:
                if isinstance(error, ConnectionLost) or is_transient(error):
                    self._drop()
                raise

        return with_retries(attempt)

    def _connection(self) -> Connection:
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None or connection.closed:
            connection = connect(self._dsn, self._role, **self._settings)
            self._local.connection = connection
            self._open.append(connection)
        return connection

    def _drop(self) -> None:
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._open.remove(connection)
            self._local.connection = None
