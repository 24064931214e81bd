"""What follows a table's last part: its indexes, then its constraints, then vacuum.

Invariant: an index starts when its table has no unfinished part; a table's
constraints start when all its indexes are built; vacuum comes last. Each step can be tried
again as a whole; what follows it is started once, after it succeeded. Other tables
still copy meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from functools import partial
from typing import Any

import psycopg

from millrace.clone.finish.index import build_index, finish_index
from millrace.clone.finish.session_pool import SessionPool
from millrace.clone.finish.vacuum import vacuum_table
from millrace.clone.plan import Plan
from millrace.clone.run_state import Run
from millrace.clone.step import Step
from millrace.errors import InvariantError, MillraceError
from millrace.relation import Index, Table

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]


class TableFinisher:
    """Takes copied tables, builds what rests on them."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self._run = run
        self._plan = plan
        self._lock = threading.Lock()
        self._started: set[int] = set()
        self._running: list[Future[None]] = []
        self._vacuumed = {timing["oid"] for timing in run.store.read_timings("vacuum")}
        self._is_cancelled = False
        self.errors: list[MillraceError] = []
        settings = run.settings
        memory = {"maintenance_work_mem": settings.maintenance_work_mem}
        # As pg_restore does: an index without a tablespace is in the database's.
        places = {} if settings.schema.no_tablespaces else {"default_tablespace": ""}
        self._index_pool = SessionPool(
            settings.target, run.role("index"), settings.index_jobs, **memory, **places
        )
        self._vacuum_pool = SessionPool(
            settings.target, run.role("vacuum"), settings.table_jobs, **memory
        )
        # As many tables at once as keep every session busy; those that wait for vacuum are apart,
        # so that they keep no session from building indexes.
        self._build_threads = ThreadPoolExecutor(settings.index_jobs, "finish")
        self._vacuum_threads = ThreadPoolExecutor(settings.table_jobs, "finish-vacuum")

    def table_copied(self, table_oid: int) -> None:
        """Start what follows; saying it twice does no harm."""
        if table_oid not in self._started:
            self._started.add(table_oid)
            self._run.progress.tables_done += 1
            self._start(self._build_threads, self._build, self._plan.tables[table_oid])

    def wait(self, seconds: float) -> bool:
        """Wait a little; whether everything handed over so far is done."""
        with self._lock:
            self._running = [future for future in self._running if not future.done()]
            running = list(self._running)
        wait(running, timeout=seconds)
        with self._lock:
            return all(future.done() for future in self._running)

    def close(self, *, cancel: bool = False) -> None:
        """Stop the threads; with `cancel`, also what they run on the server."""
        self._is_cancelled = cancel
        for threads in (self._build_threads, self._vacuum_threads):
            threads.shutdown(wait=False, cancel_futures=cancel)
        self._index_pool.close(cancel=cancel)
        self._vacuum_pool.close(cancel=cancel)

    def _start(
        self, threads: ThreadPoolExecutor, work: Callable[[Table], None], table: Table
    ) -> None:
        with self._lock:
            self._running.append(threads.submit(self._try, work, table))

    def _try(self, work: Callable[[Table], None], table: Table) -> None:
        try:
            work(table)
        except Exception as error:
            self._note(error)

    def _build(self, table: Table) -> None:
        """Everything that follows the rows of one table."""
        settings, indexes = self._run.settings, self._plan.indexes.get(table.oid, ())
        if Step.INDEXES in settings.steps and not self._build_indexes(indexes, table):
            return
        if Step.CONSTRAINTS in settings.steps and indexes:
            self._index_pool.submit(partial(self._add_constraints, table)).result()
        is_wanted = Step.VACUUM in settings.steps and not settings.skip_vacuum
        if is_wanted and table.oid not in self._vacuumed:
            self._start(self._vacuum_threads, self._vacuum, table)

    def _build_indexes(self, indexes: Sequence[Index], table: Table) -> bool:
        """All of a table's, the largest first; False if one of them failed."""
        largest_first = sorted(indexes, key=lambda index: -index.bytes)
        building = [
            self._index_pool.submit(partial(self._build_index, index, table))
            for index in largest_first
        ]
        is_whole = True
        for future in as_completed(building):
            error = future.exception()
            if error is not None:
                self._note(error)
                is_whole = False
        return is_whole

    def _build_index(self, index: Index, table: Table, connection: Connection) -> None:
        began = time.monotonic()
        tablespaces = not self._run.settings.schema.no_tablespaces
        build_index(connection, index, table, tablespaces=tablespaces)
        label = f"{index.schema}.{index.name}"
        seconds = time.monotonic() - began
        self._run.store.write_timing("index", label, seconds, oid=index.oid, size=index.bytes)
        with self._lock:
            self._run.progress.indexes_done += 1
        log.debug("built index %s in %.2f s", label, seconds)

    def _add_constraints(self, table: Table, connection: Connection) -> None:
        began = time.monotonic()
        for index in self._plan.indexes[table.oid]:
            finish_index(connection, index, table)
        seconds = time.monotonic() - began
        self._run.store.write_timing("constraint", table.label, seconds, oid=table.oid)

    def _vacuum(self, table: Table) -> None:
        began = time.monotonic()
        analyzes = table.target not in self._run.carried
        self._vacuum_pool.submit(partial(self._vacuum_on, table, analyzes)).result()
        seconds = time.monotonic() - began
        self._run.store.write_timing("vacuum", table.label, seconds, oid=table.oid)

    def _vacuum_on(self, table: Table, analyzes: bool, connection: Connection) -> None:
        vacuum_table(connection, table, analyzes=analyzes)

    def _note(self, error: BaseException) -> None:
        if self._is_cancelled:
            return  # whatever is under way ends with an error
        if not isinstance(error, MillraceError):
            error = InvariantError(f"unexpected: {error!r}")
        log.error("%s", error.message)
        with self._lock:
            self.errors.append(error)
