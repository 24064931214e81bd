"""What follows a table's last part: its indexes, then its constraints, then vacuum.

Invariant: an index starts when its table has no unfinished part; a table's
constraints start when all its indexes stand; vacuum comes last. Each job can be tried
again as a whole; what follows it is started once, after it succeeded. Other tables
still copy meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import psycopg

from millrace.clone.index import build_index, finish_index
from millrace.clone.job import Job
from millrace.clone.plan import Plan
from millrace.clone.session_pool import SessionPool
from millrace.clone.step import Step
from millrace.clone.vacuum import vacuum_table
from millrace.errors import InvariantError, MillraceError
from millrace.relation import Index, Table

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]


class TableFinisher:
    """Takes copied tables, builds what rests on them."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self._job = job
        self._plan = plan
        self._tables = plan.tables
        self._steps = job.settings.steps
        self._lock = threading.Lock()
        self._indexes_left: dict[int, int] = {}
        self._started: set[int] = set()
        self._vacuumed = {timing["oid"] for timing in job.store.read_timings("vacuum")}
        self._futures: set[Future[None]] = set()
        self.errors: list[MillraceError] = []
        settings = job.settings
        memory = {"maintenance_work_mem": settings.maintenance_work_mem}
        # As pg_restore does: an index without a tablespace is in the database's.
        places = {} if settings.schema.no_tablespaces else {"default_tablespace": ""}
        self._index_pool = SessionPool(
            settings.target, job.role("index"), settings.index_jobs, **memory, **places
        )
        self._vacuum_pool = SessionPool(
            settings.target, job.role("vacuum"), settings.table_jobs, **memory
        )

    def table_copied(self, table_oid: int) -> None:
        """Start what follows; saying it twice does no harm."""
        with self._lock:
            if table_oid in self._started:
                return
            self._started.add(table_oid)
            self._job.progress.tables_done += 1
        table = self._tables[table_oid]
        indexes = self._plan.indexes.get(table_oid, ())
        if not indexes or Step.INDEXES not in self._steps:
            self._constrain(table)
            return
        self._indexes_left[table_oid] = len(indexes)
        for index in sorted(indexes, key=lambda i: -i.bytes):
            self._submit(
                self._index_pool,
                partial(self._build_index, index, table),
                partial(self._index_built, table),
            )

    def wait(self, seconds: float) -> bool:
        """Wait a little; whether everything submitted so far is done."""
        with self._lock:
            pending = set(self._futures)
        wait(pending, timeout=seconds)
        with self._lock:
            return not self._futures

    def close(self, *, cancel: bool = False) -> None:
        """Stop the threads; with `cancel`, also what they run on the server."""
        self._index_pool.close(cancel=cancel)
        self._vacuum_pool.close(cancel=cancel)

    def _submit(
        self,
        pool: SessionPool,
        work: Callable[[Connection], None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        future = pool.submit(work)
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(partial(self._done, then))

    def _done(self, then: Callable[[], None], future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, MillraceError):
            log.error("%s", error.message)
            self.errors.append(error)
        elif error is not None:
            self.errors.append(InvariantError(f"unexpected: {error!r}"))
        elif not future.cancelled():
            try:
                then()
            except Exception as failure:
                self.errors.append(InvariantError(f"unexpected: {failure!r}"))
        # Only now: what follows is submitted before this one counts as done.
        with self._lock:
            self._futures.discard(future)

    def _build_index(self, index: Index, table: Table, connection: Connection) -> None:
        began = time.monotonic()
        tablespaces = not self._job.settings.schema.no_tablespaces
        build_index(connection, index, table, tablespaces=tablespaces)
        label = f"{index.schema}.{index.name}"
        seconds = time.monotonic() - began
        self._job.store.write_timing("index", label, seconds, oid=index.oid, size=index.bytes)
        log.debug("built index %s in %.2f s", label, seconds)

    def _index_built(self, table: Table) -> None:
        with self._lock:
            self._job.progress.indexes_done += 1
            self._indexes_left[table.oid] -= 1
            last = not self._indexes_left[table.oid]
        if last:
            self._constrain(table)

    def _constrain(self, table: Table) -> None:
        if Step.CONSTRAINTS in self._steps and self._plan.indexes.get(table.oid):
            self._submit(
                self._index_pool,
                partial(self._add_constraints, table),
                partial(self._vacuum, table),
            )
        else:
            self._vacuum(table)

    def _add_constraints(self, table: Table, connection: Connection) -> None:
        began = time.monotonic()
        for index in self._plan.indexes[table.oid]:
            finish_index(connection, index, table)
        seconds = time.monotonic() - began
        self._job.store.write_timing("constraint", table.label, seconds, oid=table.oid)

    def _vacuum(self, table: Table) -> None:
        wanted = Step.VACUUM in self._steps and not self._job.settings.skip_vacuum
        if wanted and table.oid not in self._vacuumed:
            self._submit(self._vacuum_pool, partial(self._run_vacuum, table))

    def _run_vacuum(self, table: Table, connection: Connection) -> None:
        began = time.monotonic()
        vacuum_table(connection, table)
        seconds = time.monotonic() - began
        self._job.store.write_timing("vacuum", table.label, seconds, oid=table.oid)
