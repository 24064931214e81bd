"""Driver threads that each keep one connection to the target.

Invariant: a job runs on a living session or not at all; after a lost connection
the same job is tried again on a new one, as `retry` allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, MillraceError
from millrace.postgres.connect import connect
from millrace.retry import is_transient, with_retries

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]


class SessionPool:
    """`jobs` threads; `submit` runs a function with the thread's own connection."""

    def __init__(self, dsn: Dsn, role: str, jobs: int, **settings: str) -> None:
        self._dsn = dsn
        self._role = role
        self._settings = settings
        self._local = threading.local()
        self._open: list[Connection] = []
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix=role)

    def submit(self, work: Callable[[Connection], T]) -> Future[T]:
        """Queue a job."""
        return self._threads.submit(self._run, work)

    def close(self, *, cancel: bool = False) -> None:
        """Wait for the jobs, or drop those not yet begun and cancel those under way."""
        if cancel:
            for connection in list(self._open):
                if not connection.closed:
                    connection.cancel_safe(timeout=5.0)
        self._threads.shutdown(wait=True, cancel_futures=cancel)
        for connection in self._open:
            connection.close()

    def _run(self, work: Callable[[Connection], T]) -> T:
        def attempt() -> T:
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
