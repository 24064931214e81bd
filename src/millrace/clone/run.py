"""One clone from beginning to end, or from where an earlier process stopped.

Invariant: the run is reported as done only after every part has its record on the
target and every later step succeeded; on any other way out, its tasks, its
sessions on both servers and its own snapshot are gone, and `--resume` goes on from
what is committed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from millrace import __version__, failpoint
from millrace.clone.copy_guard import check_more_rows, check_new_copy, check_slot
from millrace.clone.copy_stage import Copying
from millrace.clone.directory import (
    open_directory,
    pinned,
    read_setup,
    require_usable,
)
from millrace.clone.finish.sequence import set_sequences
from millrace.clone.finish.vacuum import analyze_partitioned
from millrace.clone.job import Job
from millrace.clone.kept_view import keep, keep_skipped_large_objects, read_kept
from millrace.clone.plan import Plan, plan_clone
from millrace.clone.problem import Problem
from millrace.clone.progress import Reporter
from millrace.clone.ready import (
    check_servers,
    claim,
    has_every_row,
    owns_target,
    read_schemas,
    resolved,
)
from millrace.clone.run_record import RunRecords, rows_left
from millrace.clone.schema.database import set_database_properties
from millrace.clone.schema.entries import RestoreLists
from millrace.clone.schema.mapping import (
    create_schemas,
    map_function_settings,
    to_target,
)
from millrace.clone.schema.restore import (
    add_foreign_keys,
    archive_path,
    can_refresh,
    create_extensions,
    empty_shared_tables,
    note_existing,
    open_archive,
    own_schemas,
    plan_lists,
    refresh,
    restore,
)
from millrace.clone.schema.roles import copy_roles
from millrace.clone.settings import CloneSettings
from millrace.clone.shared_database import is_shared
from millrace.clone.source import read_source
from millrace.clone.step import Step
from millrace.clone.summary import Summary, write_summary
from millrace.clone.trigger_silence import read_guarded
from millrace.clone.view import (
    WAYS_OUT,
    WAYS_OUT_OF_A_STREAM,
    View,
    choose_snapshot,
    kept_view,
    open_view,
)
from millrace.engine import Engine
from millrace.errors import (
    MillraceError,
    SnapshotLost,
    WorkDirError,
)
from millrace.filter.apply import read_decision
from millrace.postgres import run_record as record
from millrace.postgres.program.dump import Archive
from millrace.postgres.wire.connect import (
    cancel_sessions,
    connect,
    translated,
)
from millrace.relation import SourceCatalog
from millrace.snapshot.export import HeldSnapshot, ReleasedSnapshot, open_snapshot
from millrace.snapshot.holder import read_held
from millrace.split.sample import sample_tables
from millrace.workdir.lock import open_lock
from millrace.workdir.stream_binding import bind_copy, read_binding

log = logging.getLogger(__name__)

R = TypeVar("R")

# What goes through Spark, and what it is needed for.
MOVING = frozenset({Step.TABLE_DATA, Step.LARGE_OBJECTS})
FINISHING = frozenset({Step.INDEXES, Step.CONSTRAINTS, Step.VACUUM})
# After any of these, the last that materialized views need may be there.
FILLING = frozenset({Step.TABLE_DATA, Step.POST_DATA})


@dataclass
class CloneResult:
    """What a clone, or its dry run, has to tell."""

    plan: Plan
    warnings: list[Problem]
    summary: Summary | None = None


def clone(settings: CloneSettings, engine: Engine, reporter: Reporter) -> CloneResult:
    """Do the steps asked for: all of them are a clone."""
    settings = resolved(settings)
    with open_lock(settings.directory):
        # Single steps share a directory, and so a run, one after the other.
        continues = settings.resume or settings.steps != CloneSettings.steps
        return _Run(settings, engine, reporter, continues=continues).run()


def dry_run(settings: CloneSettings) -> CloneResult:
    """The plan, made by the same code; touches neither server nor work directory."""
    settings = resolved(settings)
    problems, _, encoding = check_servers(settings, continues=False)
    with open_snapshot(settings.source, settings.snapshot) as snapshot:
        decision = read_decision(snapshot.connection, settings.filters)
        catalog = read_source(snapshot.connection, settings, decision, target_encoding=encoding)
        samples = sample_tables(snapshot.connection, catalog.tables, settings.split)
    return CloneResult(plan_clone(catalog, samples, settings.split), problems)


class _Run:
    """A run in its directory, from opening to summary."""

    def __init__(
        self, settings: CloneSettings, engine: Engine, reporter: Reporter, *, continues: bool
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.reporter = reporter
        self.continues = continues

    def run(self) -> CloneResult:
        settings, began = self.settings, time.monotonic()
        # What is refused for the directory's sake is refused before any server is asked.
        self.held = read_held(settings.directory)
        self.stream = read_binding(settings.directory)
        if settings.resume and settings.restart:
            raise WorkDirError("--resume and --restart cannot be used together")
        before = read_setup(settings.directory)
        setup = require_usable(settings, continues=self.continues)
        check_slot(settings, setup, self.held)
        if setup is None:
            given = settings.snapshot or (self.held.id if self.held else None)
            check_new_copy(settings, self.stream, given)
        self.owned = settings.restart and owns_target(settings)
        self.former = before["run_id"] if before and settings.restart else ""
        run_id = setup["run_id"] if setup else secrets.token_hex(4)
        self.schemas = read_schemas(settings)
        claimed = claim(settings, run_id, self.schemas, takes_over=self.owned)
        with ExitStack() as stack:
            if settings.restart:
                # Nothing of the old run is thrown away before it is sure that a new one can start.
                stack.enter_context(claimed)
                check_servers(settings, continues=self.owned)
            self.setup = setup
            store = open_directory(settings, setup)
            stack.callback(store.close)
            if not settings.restart:
                stack.enter_context(claimed)
            self.records = RunRecords(settings, run_id)
            if settings.resume and self._was_finished():
                if self.records.settle(store):
                    return self._nothing_left()
                log.warning(
                    "the target crashed at the end of the run: what it lost is copied again"
                )
            warnings, tools, encoding = check_servers(
                settings, continues=self.setup is not None or self.owned
            )
            self.job = Job(
                settings,
                self.engine.group(f"clone {run_id}"),
                self.reporter,
                run_id,
                store,
                tools,
                encoding,
                began_at=began,
            )
            if self.setup is None:
                self._pin()
                failpoint.hit("run.pinned")
            if Step.LARGE_OBJECTS in settings.steps:
                is_skipped = settings.skip_large_objects
                keep_skipped_large_objects(store, is_skipped=is_skipped)
            self.job.add_timing("connect and check", time.monotonic() - began)
            try:
                self._look_for_rows()
                if self.needs_spark:
                    self.engine.start()
                    if not self.engine.is_local:
                        self.engine.wait()  # a cluster out of reach is told before anything is done
                with self.job.step("take a snapshot and read the catalog"):
                    view = self._open_view()
                    stack.callback(view.snapshot.close)
                    self.catalog, self.decision = view.catalog, view.decision
                failpoint.hit("snapshot.opened")
                self._own_target()
                try:
                    result = self._run_under(view.snapshot)
                except SnapshotLost as error:
                    error.hint = WAYS_OUT
                    raise
            except BaseException as error:
                if isinstance(error, SnapshotLost) and self.stream is not None:
                    error.hint = WAYS_OUT_OF_A_STREAM
                self._stop_sessions()
                if isinstance(error, KeyboardInterrupt):
                    log.warning("stopped: %s", self._how_to_go_on())
                raise
        result.warnings = warnings
        return result

    def _pin(self) -> None:
        """From here on the directory is this run's, and its stream, if there is one, too."""
        job, held = self.job, self.held
        job.store.write_setup(
            run_id=job.run_id,
            millrace_version=__version__,
            slot_name=held.slot if held else None,
            plugin=held.plugin if held and held.slot else None,
            **pinned(self.settings),
        )
        if self.stream is not None:
            self.stream = replace(self.stream, run_id=job.run_id)
            bind_copy(self.settings.directory, job.run_id, job.target_encoding)

    def _was_finished(self) -> bool:
        """Whether an earlier process brought the run to its end."""
        return self.setup is not None and bool(self.setup["finished_at"])

    def _nothing_left(self) -> CloneResult:
        assert self.setup is not None
        log.info("the run of %s is finished: nothing is left to do", self.setup["started_at"])
        return CloneResult(Plan(SourceCatalog(), {}, {}), [])

    def _look_for_rows(self) -> None:
        """See what of the source's rows is still to be read: only that takes Spark and a snapshot.
        Should rows be lost again meanwhile, the first task starts Spark by itself."""
        setup, store, settings = self.setup, self.job.store, self.settings
        self.is_released = False
        self.needs_spark = bool(settings.steps & MOVING)
        if setup is None or not setup["snapshot"]:
            return  # not planned yet
        self.records.require(store)
        self.needs_spark = bool(rows_left(store, self.records.parts(), settings))
        check_more_rows(
            settings,
            self.stream,
            rows_left=self.needs_spark,
            # Without records, nothing says that the schema is there.
            makes_tables=Step.PRE_DATA in settings.steps and not self.records.exists(),
        )
        self.is_released = not self.needs_spark and archive_path(settings.directory).exists()

    def _own_target(self) -> None:
        """Take over what earlier processes of this run left on the target, or make sure that
        it is this directory's target that is about to be emptied."""
        if self.setup is not None:
            self._stop_sessions()
        self.job.epoch, self.job.done = self.records.open(
            schemas=self.schemas,
            takes_over=self.owned or self.settings.drop_if_exists,
            is_new=self.setup is None,
            excluded=self.decision.excluded,
            former=self.former,
            stream=self.stream,
        )
        failpoint.hit("run.opened")

    def _open_view(self) -> View:
        """The view of the source that the run has: under its snapshot, or, once it has read every
        row, as it has kept it."""
        settings, setup = self.settings, self.setup
        kept = read_kept(self.job.store) if self.is_released else None
        if kept is not None and setup is not None:
            return kept_view(settings, setup["snapshot"], *kept)
        snapshot = choose_snapshot(settings, setup, self.held)
        return open_view(settings, snapshot, self.job.target_encoding)

    def _run_under(self, snapshot: HeldSnapshot | ReleasedSnapshot) -> CloneResult:
        job, settings, steps = self.job, self.settings, self.settings.steps
        with job.step("dump the schema"):
            dumping = in_thread(partial(open_archive, job, snapshot.id))
            plan = self._plan(snapshot)
            archive = dumping.result()
        catalog = plan.catalog
        self._log_decision()
        lists = plan_lists(job, archive, catalog, self.decision)
        job.extension_homes = {one.name: one.schema for one in catalog.extensions}
        if Step.ROLES in steps and settings.roles:
            with job.step("roles"), connect(settings.target, job.role("roles")) as target:
                failpoint.hit("roles.begin")
                copy_roles(job.tools, settings, target)
                failpoint.hit("roles.done")
        if Step.EXTENSIONS in steps:
            with job.step("extensions"):
                create_extensions(job, catalog)
        if Step.PRE_DATA in steps:
            with job.step("restore the schema"):
                create_schemas(job, catalog)
                own_schemas(job, lists, catalog)
                restore(job, archive, lists.before, "pre-data", extensions=catalog.extensions)
                map_function_settings(job, catalog)
        plan = to_target(job, plan, archive, lists)
        self.catalog = catalog = plan.catalog
        copied = {}
        waited = 0.0
        if steps & (MOVING | FINISHING):
            if self.stream is not None and self.stream.run_id == job.run_id:
                self.records.note_stream(self.stream)
            if Step.TABLE_DATA in steps:
                self._find_guarded(plan)
                empty_shared_tables(job, plan)
            if self.needs_spark:
                with job.step("wait for Spark"):
                    waited = self.engine.wait()
            copied = self._copy(plan, snapshot)
        elif Step.SEQUENCES in steps:
            self._set_sequences()
        snapshot.close()
        if Step.CONSTRAINTS in steps:
            with job.step("indexes of partitioned tables"):
                restore(job, archive, lists.attach, "attach")
            with job.step("foreign keys"):
                add_foreign_keys(job, catalog)
        if Step.POST_DATA in steps:
            with job.step("triggers, rules, views, everything else"):
                restore(job, archive, lists.after, "post-data")
        if steps & FILLING and lists.refresh:
            self._refresh(archive, lists, plan)
        if Step.PROPERTIES in steps:
            self._set_properties()
        summary = Summary.build(
            plan,
            copied,
            job.store,
            steps=job.timings,
            seconds=time.monotonic() - job.began_at,
            spark_start_seconds=waited,
            jvm_start_seconds=self.engine.start_seconds,
            snapshot=snapshot.id,
            run_id=job.run_id,
            consistency=self._consistency(),
        )
        self.records.check(plan, copied)
        write_summary(settings.directory / "summary.json", summary)
        failpoint.hit("summary.written")
        if steps == CloneSettings.steps or self._was_finished():
            job.store.write_finished()
            failpoint.hit("run.finished")
            self.records.close(plan, copied, catalog.sequences)
        return CloneResult(plan, [], summary)

    def _log_decision(self) -> None:
        """Say what the filters leave out that no rule names, and what they could not leave out."""
        decision = self.decision
        for warning in decision.warnings:
            log.warning("%s", warning)
        for what, keys in (("left out too", decision.dependents), ("kept", decision.kept)):
            for key, reason in keys.items():
                log.info("%s: %s (%s)", what, decision.labels.get(key, key), reason)

    def _plan(self, snapshot: HeldSnapshot | ReleasedSnapshot) -> Plan:
        """The plan of this run: made now, or by the process that began it."""
        job, settings = self.job, self.settings
        known = job.store.read_parts()
        catalog = self.catalog
        if known:
            catalog = replace(catalog, large_object_ranges=job.store.read_large_object_ranges())
        if isinstance(snapshot, ReleasedSnapshot):
            plan = plan_clone(catalog, {}, settings.split, known=known)
        else:
            new = [table for table in catalog.tables if table.oid not in known]
            samples = sample_tables(snapshot.connection, new, settings.split)
            plan = plan_clone(catalog, samples, settings.split, known=known)
            self._write_plan(plan, snapshot.id)
        progress = job.progress
        progress.tables, progress.parts = len(plan.parts), len(plan.every_part)
        progress.indexes = sum(map(len, plan.indexes.values()))
        progress.estimated_bytes = sum(part.estimated_bytes for part in plan.every_part)
        failpoint.hit("run.planned")
        return plan

    def _write_plan(self, plan: Plan, snapshot: str) -> None:
        store = self.job.store
        is_planned = self.setup is not None and self.setup["snapshot"]
        if not is_planned:
            note_existing(self.job, plan.catalog)
        store.write_plan(plan.catalog, plan.every_part)
        keep(store, plan.catalog, self.decision)
        failpoint.hit("plan.written")
        if not is_planned or self.settings.not_consistent:
            store.write_snapshot(snapshot)

    def _find_guarded(self, plan: Plan) -> None:
        """See which tables that still lack rows have triggers and foreign keys already."""
        planned = {(part.table_oid, part.number) for part in plan.every_part}
        left = {oid for oid, _ in planned - self.records.parts()}
        with connect(self.settings.target, self.job.role("open")) as target:
            self.job.guarded = read_guarded(target, [plan.tables[oid] for oid in left])

    def _copy(
        self, plan: Plan, snapshot: HeldSnapshot | ReleasedSnapshot
    ) -> dict[record.PartKey, record.CopiedPart]:
        job = self.job
        wants_sequences = Step.SEQUENCES in self.settings.steps
        sequences = in_thread(self._set_sequences) if wants_sequences else None
        copying = Copying(job, plan, snapshot)
        began = time.monotonic()
        job.progress.step = "copy data"
        log.info("copy data")
        copying.run()
        if sequences is not None:
            sequences.result()
        copy_seconds = job.progress.copy_seconds or 0.0
        job.add_timing("copy", copy_seconds)
        job.add_timing("indexes, constraints, vacuum", time.monotonic() - began - copy_seconds)
        return copying.copied

    def _set_sequences(self) -> None:
        failpoint.hit("sequences.begin")
        with (
            connect(self.settings.target, self.job.role("sequences")) as target,
            translated("setting sequences on the target"),
            target.transaction(),
        ):
            set_sequences(target, self.catalog.sequences)
            record.note_sequences(target, self.job.run_id)
        failpoint.hit("sequences.done")

    def _refresh(self, archive: Archive, lists: RestoreLists, plan: Plan) -> None:
        recorded = self.records.parts()
        if can_refresh(self.job, lists, plan, recorded, was_finished=self._was_finished()):
            with self.job.step("materialized views"):
                refresh(self.job, archive, lists, plan)
        else:
            log.info("materialized views are filled when all rows and post-data are there")

    def _set_properties(self) -> None:
        settings = self.settings
        with (
            self.job.step("database properties"),
            connect(settings.target, self.job.role("finish")) as target,
        ):
            failpoint.hit("properties.begin")
            if not settings.skip_vacuum:
                for _, schema, name in self.catalog.partitioned_tables:
                    analyze_partitioned(target, schema, name)
            if not settings.skip_database_properties:
                shared = is_shared(target, self.schemas)
                set_database_properties(target, settings, is_shared=shared)
            failpoint.hit("properties.done")

    def _consistency(self) -> str:
        """In words, what the target holds."""
        if not self.settings.not_consistent:
            return "the target holds the source as it was at one instant, that of the snapshot"
        return (
            "--not-consistent: parts copied by different processes were read at different "
            "instants; the target equals the source only if nobody wrote to it meanwhile"
        )

    def _how_to_go_on(self) -> str:
        if self.held or self.settings.snapshot or self._has_every_row():
            return "go on with the same command and --resume"
        return (
            "its snapshot is gone with it; start again with --restart, or, if nobody writes to "
            "the source, go on with --resume --not-consistent"
        )

    def _has_every_row(self) -> bool:
        try:
            return has_every_row(self.settings)
        except MillraceError as error:
            log.debug("%s", error)
            return False

    def _stop_sessions(self) -> None:
        """End the sessions of this run on both servers, whichever process left them."""
        for dsn in (self.settings.source, self.settings.target):
            try:
                cancel_sessions(dsn, [self.job.run_id])
            except MillraceError as error:
                log.debug("could not stop sessions on %s: %s", dsn, error.message)


def in_thread(work: Callable[[], R]) -> Future[R]:
    """Run something beside the main thread."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return future
