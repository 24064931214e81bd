"""One clone from beginning to end.

Invariant: the run is reported as done only after every part has its record on the
target and every later step succeeded; on any other way out, its tasks, its
sessions on both servers and its snapshot are gone.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from millrace import __version__, failpoint
from millrace.clone import preflight
from millrace.clone.constraint import add_foreign_key, run_disjoint
from millrace.clone.copying import Copying, Stage
from millrace.clone.engine import Engine
from millrace.clone.plan import Plan, plan_clone
from millrace.clone.progress import Progress, Reporter
from millrace.clone.roles import copy_roles
from millrace.clone.schema import MAX_ENTRIES_IN_ONE_TRANSACTION, RestoreLists, plan_restore
from millrace.clone.sequence import set_sequences
from millrace.clone.session_pool import SessionPool
from millrace.clone.settings import CloneSettings
from millrace.clone.source import read_source, sample_tables
from millrace.clone.summary import Summary, write_summary
from millrace.clone.target import (
    drop_existing,
    read_schema_names,
    set_database_properties,
    truncate_tables,
)
from millrace.clone.vacuum import analyze_partitioned
from millrace.errors import MillraceError, PreflightError, SnapshotLost, WorkDirError
from millrace.postgres import record
from millrace.postgres.binaries import find_tools
from millrace.postgres.connect import (
    APPLICATION,
    cancel_sessions,
    connect,
    resolve,
    server_encoding,
    translated,
)
from millrace.postgres.dump import Archive, Entry, dump_schema, run_script
from millrace.relation import ForeignKey
from millrace.snapshot.export import HeldSnapshot, open_snapshot
from millrace.workdir.lock import open_lock
from millrace.workdir.store import Store

log = logging.getLogger(__name__)

R = TypeVar("R")

# A table truncated between snapshot and lock makes the snapshot useless for it; take a new one.
SNAPSHOT_ATTEMPTS = 5


@dataclass
class CloneResult:
    """What a clone, or its dry run, has to tell."""

    plan: Plan
    warnings: list[preflight.Problem]
    summary: Summary | None = None


def clone(settings: CloneSettings, engine: Engine, reporter: Reporter) -> CloneResult:
    """Copy the whole database."""
    with open_lock(settings.directory):
        run = _Run(settings, engine, reporter)
        return run.run()


def dry_run(settings: CloneSettings) -> CloneResult:
    """The plan, made by the same code; touches neither server nor work directory."""
    settings = replace(settings, source=resolve(settings.source), target=resolve(settings.target))
    with (
        connect(settings.source, "dry-run") as source,
        connect(settings.target, "dry-run") as target,
    ):
        problems = preflight.check(source, target, settings)
        preflight.raise_problems(problems)
        encoding = server_encoding(target)
    with open_snapshot(settings.source, settings.snapshot) as snapshot:
        catalog = read_source(snapshot.connection, settings, target_encoding=encoding)
        plan = plan_clone(
            catalog,
            sample_tables(snapshot.connection, catalog.tables, settings.split),
            settings.split,
            jobs=settings.table_jobs,
        )
    return CloneResult(plan, [p for p in problems if p.is_warning])


class _Run:
    def __init__(self, settings: CloneSettings, engine: Engine, reporter: Reporter) -> None:
        self.settings = settings
        self.engine = engine
        self.reporter = reporter
        self.progress = Progress()
        self.run_id = secrets.token_hex(4)
        self.epoch = 1
        self.began = time.monotonic()
        self.steps: list[tuple[str, float]] = []
        self.spark_wait_seconds = 0.0
        self.copied: dict[tuple[int, int], record.CopiedPart] = {}

    def run(self) -> CloneResult:
        settings = self.settings
        with self._step("connect and check"):
            self.settings = settings = replace(
                settings, source=resolve(settings.source), target=resolve(settings.target)
            )
            warnings = self._preflight()
        self._open_directory()
        with ExitStack() as stack:
            stack.callback(self.store.close)
            self.engine.start()
            try:
                with self._step("take a snapshot and read the catalog"):
                    snapshot = stack.enter_context(self._open_snapshot())
                result = self._run_under(snapshot)
            except BaseException:
                self._stop_everything()
                raise
        result.warnings = warnings
        return result

    def _preflight(self) -> list[preflight.Problem]:
        settings = self.settings
        with (
            connect(settings.source, "preflight") as source,
            connect(settings.target, "preflight") as target,
        ):
            problems = preflight.check(source, target, settings)
            self.target_version = target.info.server_version
            self.target_encoding = server_encoding(target)
            # pg_dump must not be older than the source; the target's writes best for the target.
            newest = max(source.info.server_version, target.info.server_version) // 10000
            programs = ("pg_dump", "pg_restore", "psql", "pg_dumpall")
            try:
                self.tools = find_tools(newest, *programs)
            except PreflightError:
                self.tools = find_tools(source.info.server_version // 10000, *programs)
        warnings = [problem for problem in problems if problem.is_warning]
        for problem in warnings:
            log.warning("%s: %s", problem.side, problem.what)
        preflight.raise_problems(problems)
        return warnings

    def _open_directory(self) -> None:
        settings = self.settings
        path = settings.directory / "schema" / "source.db"
        if path.exists():
            old = Store(path)
            setup = old.setup()
            old.close()
            if setup and not setup["finished_at"] and not settings.restart:
                raise WorkDirError(
                    f"{settings.directory} holds an unfinished run of {setup['started_at']}, "
                    f"{setup['source']} to {setup['target']}",
                    hint="start from zero with --restart, or choose another directory with --dir",
                )
        for name in ("schema", "summary.json", "spark.log"):
            leftover = settings.directory / name
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink(missing_ok=True)
        self.store = Store(path)

    def _open_snapshot(self) -> HeldSnapshot:
        """A snapshot under which every table is locked and none was rewritten since."""
        given = self.settings.snapshot
        for attempt in range(1, SNAPSHOT_ATTEMPTS + 1):
            snapshot = open_snapshot(self.settings.source, given)
            try:
                log.info("using snapshot %s", snapshot.id)
                self.catalog = read_source(
                    snapshot.connection, self.settings, target_encoding=self.target_encoding
                )
                if not self.catalog.rewritten:
                    return snapshot
                names = ", ".join(self.catalog.rewritten[:5])
                if given or attempt == SNAPSHOT_ATTEMPTS:
                    raise SnapshotLost(
                        f"truncated or rewritten after the snapshot was taken: {names}",
                        hint="take a new one when no TRUNCATE or ALTER TABLE runs on the source",
                    )
            except BaseException:
                snapshot.close()
                raise
            snapshot.close()
            log.warning("truncated or rewritten meanwhile, taking a new snapshot: %s", names)
        raise AssertionError("unreachable")

    def _run_under(self, snapshot: HeldSnapshot) -> CloneResult:
        settings, catalog = self.settings, self.catalog
        self.store.write_setup(
            run_id=self.run_id,
            millrace_version=__version__,
            source=settings.source.identity(),
            target=settings.target.identity(),
            snapshot=snapshot.id,
            split_tables_larger_than=settings.split.larger_than_bytes,
            split_max_parts=settings.split.max_parts,
        )
        with self._step("dump the schema"):
            dumping = _in_thread(
                partial(
                    dump_schema,
                    self.tools,
                    settings.source,
                    snapshot.id,
                    settings.directory / "schema" / "schema.dump",
                )
            )
            samples = sample_tables(snapshot.connection, catalog.tables, settings.split)
            plan = plan_clone(catalog, samples, settings.split, jobs=settings.table_jobs)
            every_part = [part for parts in plan.parts.values() for part in parts]
            self.store.write_plan(catalog, every_part)
            self._start_progress(plan)
            archive = dumping.result()
        lists = plan_restore(
            archive.entries("pre-data"),
            archive.entries("post-data"),
            catalog,
            settings.schema,
            existing_schema_oids=self._existing_schema_oids(),
        )
        with self._step("restore the schema"):
            self._prepare_target(archive, lists, plan)
        self._copy(plan, snapshot)
        # Nothing reads the source's tables any more: let go of its locks and its horizon.
        snapshot.close()
        self._finish(archive, lists)
        summary = self._summarize(plan, snapshot.id)
        return CloneResult(plan, [], summary)

    def _existing_schema_oids(self) -> set[int]:
        with connect(self.settings.target, f"schema {self.run_id}") as target:
            names = read_schema_names(target)
        return {oid for oid, name in self.catalog.schemas.items() if name in names}

    def _prepare_target(self, archive: Archive, lists: RestoreLists, plan: Plan) -> None:
        settings = self.settings
        with connect(settings.target, f"schema {self.run_id}") as target:
            if settings.roles:
                copy_roles(self.tools, settings, target)
            if settings.drop_if_exists:
                drop_existing(target, settings.source)
                record.drop_records(target)
            with translated("making our records on the target"):
                self.epoch = record.open_run(target, self.run_id, settings.source.identity())
            self._restore(archive, lists.before, "pre-data")
            failpoint.hit("schema.restored")
            truncate_tables(target, plan.shared_tables())

    def _restore(self, archive: Archive, entries: list[Entry], name: str) -> None:
        if not entries:
            return
        options = self.settings.schema.restore_options()
        if self.settings.drop_if_exists:
            options += ["--clean", "--if-exists"]
        script = archive.script(entries, name, options)
        run_script(
            self.tools,
            self.settings.target,
            script.read_text(encoding="utf-8", errors="surrogateescape"),
            f"restoring {name}",
            target_version=self.target_version,
            single_transaction=len(entries) <= MAX_ENTRIES_IN_ONE_TRANSACTION,
        )

    def _start_progress(self, plan: Plan) -> None:
        progress = self.progress
        parts = [part for table_parts in plan.parts.values() for part in table_parts]
        progress.tables, progress.parts = len(plan.parts), len(parts)
        progress.indexes = sum(map(len, plan.indexes.values()))
        progress.estimated_bytes = sum(part.estimated_bytes for part in parts)

    def _copy(self, plan: Plan, snapshot: HeldSnapshot) -> None:
        with self._step("wait for Spark"):
            self.spark_wait_seconds = self.engine.wait()
        stage = Stage(
            self.run_id,
            self.epoch,
            self.settings,
            self.target_encoding,
            plan,
            self.engine,
            self.store,
            self.progress,
            self.reporter,
        )
        sequences = _in_thread(self._set_sequences)
        copying = Copying(stage, snapshot)
        began = time.monotonic()
        with self._step("copy data"):
            copying.run()
        sequences.result()
        self.copied = copying.copied
        self.steps.pop()
        copy_seconds = self.progress.copy_seconds or 0.0
        self._add_step("copy", copy_seconds)
        self._add_step("indexes, constraints, vacuum", time.monotonic() - began - copy_seconds)

    def _set_sequences(self) -> None:
        with connect(self.settings.target, f"sequences {self.run_id}") as target:
            set_sequences(target, self.catalog.sequences)

    # After the data

    def _finish(self, archive: Archive, lists: RestoreLists) -> None:
        settings = self.settings
        with self._step("indexes of partitioned tables"):
            self._restore(archive, lists.attach, "attach")
        with self._step("foreign keys"):
            self._add_foreign_keys()
        with self._step("triggers, rules, views, everything else"):
            self._restore(archive, lists.after, "post-data")
        with (
            self._step("database properties"),
            connect(settings.target, f"finish {self.run_id}") as target,
        ):
            if not settings.skip_vacuum:
                for _, schema, name in self.catalog.partitioned_tables:
                    analyze_partitioned(target, schema, name)
            if not settings.skip_database_properties:
                set_database_properties(target, settings)
            self.store.write_finished()
            failpoint.hit("clone.finished")
            with translated("dropping our records on the target"):
                record.drop_records(target)

    def _add_foreign_keys(self) -> None:
        settings = self.settings
        memory = {"maintenance_work_mem": settings.maintenance_work_mem}
        pool = SessionPool(
            settings.target, f"constraint {self.run_id}", settings.restore_jobs, **memory
        )

        def add(key: ForeignKey) -> None:
            began = time.monotonic()
            pool.submit(lambda connection: add_foreign_key(connection, key)).result()
            self.store.write_timing(
                "foreign key",
                f"{key.schema}.{key.table} {key.name}",
                time.monotonic() - began,
                oid=key.oid,
            )

        try:
            run_disjoint(
                self.catalog.foreign_keys,
                add,
                jobs=settings.restore_jobs,
                families=self.catalog.families,
            )
        except BaseException:
            pool.close(cancel=True)
            raise
        pool.close()

    def _summarize(self, plan: Plan, snapshot: str) -> Summary:
        summary = Summary.build(
            plan,
            self.copied,
            self.store,
            steps=self.steps,
            seconds=time.monotonic() - self.began,
            spark_start_seconds=self.spark_wait_seconds,
            jvm_start_seconds=self.engine.start_seconds,
            snapshot=snapshot,
            run_id=self.run_id,
        )
        write_summary(self.settings.directory / "summary.json", summary)
        return summary

    # Around it all

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self.progress.step = name
        self.reporter.update(self.progress)
        log.info("%s", name)
        began = time.monotonic()
        yield
        self._add_step(name, time.monotonic() - began)

    def _add_step(self, name: str, seconds: float) -> None:
        self.steps.append((name, seconds))
        if hasattr(self, "store"):
            self.store.write_timing("step", name, seconds)

    def _stop_everything(self) -> None:
        """End our sessions on both servers; tasks that a JVM left behind included."""
        for dsn in (self.settings.source, self.settings.target):
            try:
                cancel_sessions(dsn, f"{APPLICATION} % {self.run_id}%")
            except MillraceError as error:
                log.debug("could not stop sessions on %s: %s", dsn, error.message)


def _in_thread(work: Callable[[], R]) -> Future[R]:
    """Run something beside the main thread."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return future
