"""What follows a table's last part: its indexes, then its constraints, then vacuum.

Invariant: an index starts when its table has no unfinished part; a table's
constraints start when all its indexes stand; vacuum comes last. Other tables
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
from millrace.clone.plan import Plan
from millrace.clone.progress import Progress
from millrace.clone.session_pool import SessionPool
from millrace.clone.settings import CloneSettings
from millrace.clone.step import Step
from millrace.clone.vacuum import vacuum_table
from millrace.errors import MillraceError
from millrace.relation import Index, Table
from millrace.workdir.store import Store

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]


class TableFinisher:
    """Takes copied tables, builds what rests on them."""

    def __init__(
        self, plan: Plan, settings: CloneSettings, store: Store, progress: Progress, run_id: str
    ) -> None:
        self._plan = plan
        self._tables = plan.tables
        self._settings = settings
        self._store = store
        self._progress = progress
        self._lock = threading.Lock()
        self._indexes_left: dict[int, int] = {}
        self._started: set[int] = set()
        self._vacuumed = {timing["oid"] for timing in store.read_timings("vacuum")}
        self._futures: set[Future[None]] = set()
        self.errors: list[MillraceError] = []
        memory = {"maintenance_work_mem": settings.maintenance_work_mem}
        self._index_pool = SessionPool(
            settings.target, f"index {run_id}", settings.index_jobs, **memory
        )
        self._vacuum_pool = SessionPool(
            settings.target, f"vacuum {run_id}", settings.table_jobs, **memory
        )

    def table_copied(self, table_oid: int) -> None:
        """Start what follows; saying it twice does no harm."""
        with self._lock:
            if table_oid in self._started:
                return
            self._started.add(table_oid)
            self._progress.tables_done += 1
        table = self._tables[table_oid]
        indexes = self._plan.indexes.get(table_oid, ())
        self._indexes_left[table_oid] = len(indexes)
        if not indexes:
            self._vacuum(table)
        elif Step.INDEXES in self._settings.steps:
            for index in sorted(indexes, key=lambda i: -i.bytes):
                self._submit(self._index_pool, partial(self._build, index, table))
        else:
            self._submit(self._index_pool, partial(self._constrain, table))

    def wait(self, seconds: float) -> bool:
        """Wait a little; whether everything submitted so far is done."""
        with self._lock:
            pending = set(self._futures)
        wait(pending, timeout=seconds)
        with self._lock:
            # A finished job may have submitted the next one.
            self._futures = {future for future in self._futures if not future.done()}
            return not self._futures

    def close(self, *, cancel: bool = False) -> None:
        """Stop the threads; with `cancel`, also what they run on the server."""
        self._index_pool.close(cancel=cancel)
        self._vacuum_pool.close(cancel=cancel)

    def _submit(self, pool: SessionPool, work: Callable[[Connection], None]) -> None:
        future = pool.submit(work)
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._note_failure)

    def _note_failure(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, MillraceError):
            log.error("%s", error.message)
            self.errors.append(error)
        elif error is not None:
            self.errors.append(MillraceError(f"unexpected: {error!r}"))

    def _build(self, index: Index, table: Table, connection: Connection) -> None:
        began = time.monotonic()
        build_index(connection, index, table, tablespaces=not self._settings.schema.no_tablespaces)
        seconds = time.monotonic() - began
        label = f"{index.schema}.{index.name}"
        self._store.write_timing("index", label, seconds, oid=index.oid, size=index.bytes)
        log.debug("built index %s in %.2f s", label, seconds)
        with self._lock:
            self._progress.indexes_done += 1
            self._indexes_left[table.oid] -= 1
            last = not self._indexes_left[table.oid]
        if last:
            self._constrain(table, connection)

    def _constrain(self, table: Table, connection: Connection) -> None:
        if Step.CONSTRAINTS in self._settings.steps:
            began = time.monotonic()
            for index in self._plan.indexes[table.oid]:
                finish_index(connection, index, table)
            self._store.write_timing(
                "constraint", table.label, time.monotonic() - began, oid=table.oid
            )
        self._vacuum(table)

    def _vacuum(self, table: Table) -> None:
        wanted = Step.VACUUM in self._settings.steps and not self._settings.skip_vacuum
        if wanted and table.oid not in self._vacuumed:
            self._submit(self._vacuum_pool, partial(self._run_vacuum, table))

    def _run_vacuum(self, table: Table, connection: Connection) -> None:
        began = time.monotonic()
        vacuum_table(connection, table)
        self._store.write_timing("vacuum", table.label, time.monotonic() - began, oid=table.oid)
