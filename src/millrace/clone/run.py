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
from pathlib import Path
from typing import TypeVar

from millrace import __version__, failpoint
from millrace.clone import preflight
from millrace.clone.copying import Copying
from millrace.clone.directory import Directory, open_directory, pinned, read_setup
from millrace.clone.engine import Engine
from millrace.clone.filtering import read_decision
from millrace.clone.guard import read_guarded
from millrace.clone.job import Job
from millrace.clone.ledger import Ledger, planned_parts
from millrace.clone.plan import Plan, plan_clone
from millrace.clone.progress import Reporter
from millrace.clone.restore import (
    add_foreign_keys,
    can_refresh,
    create_extensions,
    empty_shared_tables,
    note_existing_schemas,
    open_archive,
    own_schemas,
    plan_lists,
    refresh,
    restore,
)
from millrace.clone.roles import copy_roles
from millrace.clone.schema import RestoreLists
from millrace.clone.sequence import set_sequences
from millrace.clone.settings import CloneSettings
from millrace.clone.source import read_source, sample_tables
from millrace.clone.step import Step
from millrace.clone.summary import Summary, write_summary
from millrace.clone.target import set_database_properties
from millrace.clone.vacuum import analyze_partitioned
from millrace.errors import (
    MillraceError,
    PreflightError,
    SnapshotLost,
    WorkDirError,
)
from millrace.postgres import record
from millrace.postgres.binaries import Installation, find_tools
from millrace.postgres.connect import (
    APPLICATION,
    cancel_sessions,
    connect,
    resolve,
    server_encoding,
    translated,
)
from millrace.postgres.dump import Archive
from millrace.relation import SourceCatalog
from millrace.snapshot.export import HeldSnapshot, open_snapshot
from millrace.snapshot.holder import read_held
from millrace.workdir.lock import open_lock

log = logging.getLogger(__name__)

R = TypeVar("R")

# A table truncated between snapshot and lock makes the snapshot useless for it; take a new one.
SNAPSHOT_ATTEMPTS = 5
WAYS_OUT = (
    "three ways out: (1) next time hold the snapshot in a process of its own, with `millrace "
    "snapshot`, so that it survives; (2) start from zero with --restart; (3) if nobody has "
    "written to the source since, go on with --resume --not-consistent"
)
# What goes through Spark, and what it is needed for.
MOVING = frozenset({Step.TABLE_DATA, Step.LARGE_OBJECTS})
FINISHING = frozenset({Step.INDEXES, Step.CONSTRAINTS, Step.VACUUM})
# After any of these, the last that materialized views need may be there.
FILLING = frozenset({Step.TABLE_DATA, Step.POST_DATA})


@dataclass
class CloneResult:
    """What a clone, or its dry run, has to tell."""

    plan: Plan
    warnings: list[preflight.Problem]
    summary: Summary | None = None


def clone(settings: CloneSettings, engine: Engine, reporter: Reporter) -> CloneResult:
    """Do the steps asked for: all of them are a clone."""
    settings = _resolved(settings)
    with open_lock(settings.directory):
        # Single steps share a directory, and so a run, one after the other.
        continues = settings.resume or settings.steps != CloneSettings.steps
        return _Run(settings, engine, reporter, continues=continues).run()


def is_finished(directory: Path) -> bool:
    """Whether the clone of this directory is done."""
    setup = read_setup(directory)
    return setup is not None and bool(setup["finished_at"])


def dry_run(settings: CloneSettings) -> CloneResult:
    """The plan, made by the same code; touches neither server nor work directory."""
    settings = _resolved(settings)
    problems, _, encoding = _check_servers(settings, continues=False)
    with open_snapshot(settings.source, settings.snapshot) as snapshot:
        decision = read_decision(snapshot.connection, settings.filters)
        catalog = read_source(snapshot.connection, settings, decision, target_encoding=encoding)
        samples = sample_tables(snapshot.connection, catalog.tables, settings.split)
    return CloneResult(plan_clone(catalog, samples, settings.split), problems)


def _resolved(settings: CloneSettings) -> CloneSettings:
    return replace(settings, source=resolve(settings.source), target=resolve(settings.target))


def _check_servers(
    settings: CloneSettings, *, continues: bool
) -> tuple[list[preflight.Problem], Installation, str]:
    """(warnings, programs, the target's encoding); raises if a server is not ready."""
    with (
        connect(settings.source, "preflight") as source,
        connect(settings.target, "preflight") as target,
    ):
        problems = preflight.check(source, target, settings, continues=continues)
        versions = [c.info.server_version // 10000 for c in (source, target)]
        encoding = server_encoding(target)
        tls = source.pgconn.ssl_in_use
    try:
        tools = find_dump_tools(*versions, tls=tls)
    except PreflightError as error:
        problems.append(preflight.Problem("programs", error.message, error.hint))
    warnings = [problem for problem in problems if problem.is_warning]
    for problem in warnings:
        log.warning("%s: %s", problem.side, problem.what)
    preflight.raise_problems(problems)
    return warnings, tools, encoding


def find_dump_tools(source_version: int, target_version: int, *, tls: bool) -> Installation:
    """pg_dump must not be older than the source; the target's writes best for the target."""
    programs = ("pg_dump", "pg_restore", "pg_dumpall")
    try:
        return find_tools(max(source_version, target_version), *programs, tls=tls)
    except PreflightError:
        return find_tools(source_version, *programs, tls=tls)


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
        self.owned = settings.restart and self._owns_target()
        if settings.restart:
            # Nothing of the old run is thrown away before it is sure that a new one can start.
            _check_servers(settings, continues=self.owned)
        # What is refused for the directory's sake is refused before any server is asked.
        directory = self._open_directory()
        self.setup = directory.setup
        run_id = self.setup["run_id"] if self.setup else secrets.token_hex(4)
        self.ledger = Ledger(settings, run_id)
        with ExitStack() as stack:
            stack.callback(directory.store.close)
            if settings.resume and self._was_finished():
                if self.ledger.settle(directory.store):
                    return self._nothing_left()
                log.warning(
                    "the target crashed at the end of the run: what it lost is copied again"
                )
            warnings, tools, encoding = _check_servers(
                settings, continues=self.setup is not None or self.owned
            )
            self.job = Job(
                settings,
                self.engine,
                self.reporter,
                run_id,
                directory.store,
                tools,
                encoding,
                began_at=began,
            )
            if self.setup is None:
                directory.store.write_setup(
                    run_id=self.job.run_id, millrace_version=__version__, **pinned(settings)
                )
                failpoint.hit("run.pinned")
            self.job.add_timing("connect and check", time.monotonic() - began)
            try:
                self.needs_spark = self._needs_spark()
                if self.needs_spark:
                    self.engine.start()
                    if not self.engine.is_local:
                        self.engine.wait()  # a cluster out of reach is told before anything is done
                with self.job.step("take a snapshot and read the catalog"):
                    snapshot = stack.enter_context(self._open_snapshot())
                failpoint.hit("snapshot.opened")
                self._own_target()
                try:
                    result = self._run_under(snapshot)
                except SnapshotLost as error:
                    error.hint = WAYS_OUT
                    raise
            except BaseException as error:
                self._stop_sessions()
                if isinstance(error, KeyboardInterrupt):
                    log.warning("stopped: %s", self._how_to_go_on())
                raise
        result.warnings = warnings
        return result

    def _owns_target(self) -> bool:
        """Whether the target holds records of the run in the work directory: only then may
        --restart empty it."""
        setup = read_setup(self.settings.directory)
        return setup is not None and Ledger(self.settings, setup["run_id"]).exists()

    def _was_finished(self) -> bool:
        """Whether an earlier process brought the run to its end."""
        return self.setup is not None and bool(self.setup["finished_at"])

    def _nothing_left(self) -> CloneResult:
        assert self.setup is not None
        log.info("the run of %s is finished: nothing is left to do", self.setup["started_at"])
        return CloneResult(Plan(SourceCatalog(), {}, {}), [])

    def _open_directory(self) -> Directory:
        if self.settings.resume and self.settings.restart:
            raise WorkDirError("--resume and --restart exclude each other")
        return open_directory(self.settings, continues=self.continues)

    def _needs_spark(self) -> bool:
        """False if all that goes through Spark is on the target already; should that be lost
        again meanwhile, the first task starts Spark by itself."""
        setup, store = self.setup, self.job.store
        if not self.settings.steps & MOVING:
            return False
        if setup is None or not setup["snapshot"]:
            return True  # not planned yet
        return not planned_parts(store) <= self.ledger.parts()

    def _own_target(self) -> None:
        """Take over what earlier processes of this run left on the target, or make sure that
        it is this directory's target that is about to be emptied."""
        if self.setup is not None:
            self._stop_sessions()
        self.job.epoch, self.job.done = self.ledger.open(
            takes_over=self.owned or self.settings.drop_if_exists,
            is_new=self.setup is None,
            excluded=self.decision.excluded,
        )
        failpoint.hit("run.opened")

    def _snapshot_id(self) -> str | None:
        """The snapshot to take part in; None to export one."""
        settings, setup = self.settings, self.setup
        held = read_held(settings.directory)
        given = settings.snapshot or (held.id if held else None)
        if settings.not_consistent:
            return given
        before = setup["snapshot"] if setup else None
        if before and given and before != given:
            raise WorkDirError(
                f"{settings.directory} was set up for snapshot {before}, now it is {given}",
                hint=f"use the same snapshot; if that is gone, {WAYS_OUT}",
                field="snapshot",
            )
        return given or before

    def _open_snapshot(self) -> HeldSnapshot:
        """A snapshot under which every table is locked and none was rewritten since."""
        given = self._snapshot_id()
        for attempt in range(1, SNAPSHOT_ATTEMPTS + 1):
            try:
                snapshot = open_snapshot(self.settings.source, given)
            except SnapshotLost as error:
                error.hint = WAYS_OUT
                raise
            try:
                log.info("using snapshot %s", snapshot.id)
                self.decision = read_decision(snapshot.connection, self.settings.filters)
                self.catalog = read_source(
                    snapshot.connection,
                    self.settings,
                    self.decision,
                    target_encoding=self.job.target_encoding,
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
        job, settings, steps = self.job, self.settings, self.settings.steps
        with job.step("dump the schema"):
            dumping = in_thread(partial(open_archive, job, snapshot.id))
            plan = self._plan(snapshot)
            archive = dumping.result()
        catalog = plan.catalog
        self._log_decision()
        lists = plan_lists(job, archive, catalog, self.decision)
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
                own_schemas(job, lists, catalog)
                restore(job, archive, lists.before, "pre-data", extensions=catalog.extensions)
        copied = {}
        waited = 0.0
        if steps & (MOVING | FINISHING):
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
        self.ledger.check(plan, copied)
        write_summary(settings.directory / "summary.json", summary)
        failpoint.hit("summary.written")
        if steps == CloneSettings.steps or self._was_finished():
            job.store.write_finished()
            failpoint.hit("run.finished")
            self.ledger.close(plan, copied, catalog.sequences)
        return CloneResult(plan, [], summary)

    def _log_decision(self) -> None:
        """Say what the filters leave out that no rule names, and what they could not leave out."""
        decision = self.decision
        for warning in decision.warnings:
            log.warning("%s", warning)
        for what, keys in (("left out too", decision.dependents), ("kept", decision.kept)):
            for key, reason in keys.items():
                log.info("%s: %s (%s)", what, decision.labels.get(key, key), reason)

    def _plan(self, snapshot: HeldSnapshot) -> Plan:
        """The plan of this run: made now, or by the process that began it."""
        job, settings = self.job, self.settings
        known = job.store.read_parts()
        catalog = self.catalog
        if known:
            catalog = replace(catalog, large_object_ranges=job.store.read_large_object_ranges())
        new = [table for table in catalog.tables if table.oid not in known]
        samples = sample_tables(snapshot.connection, new, settings.split)
        plan = plan_clone(catalog, samples, settings.split, known=known)
        is_planned = self.setup is not None and self.setup["snapshot"]
        if not is_planned:
            note_existing_schemas(job, catalog)
        job.store.write_plan(catalog, plan.every_part)
        failpoint.hit("plan.written")
        if not is_planned or settings.not_consistent:
            job.store.write_snapshot(snapshot.id)
        progress = job.progress
        progress.tables, progress.parts = len(plan.parts), len(plan.every_part)
        progress.indexes = sum(map(len, plan.indexes.values()))
        progress.estimated_bytes = sum(part.estimated_bytes for part in plan.every_part)
        failpoint.hit("run.planned")
        return plan

    def _find_guarded(self, plan: Plan) -> None:
        """See which tables that still lack rows have triggers and foreign keys already."""
        planned = {(part.table_oid, part.number) for part in plan.every_part}
        left = {oid for oid, _ in planned - self.ledger.parts()}
        with connect(self.settings.target, self.job.role("open")) as target:
            self.job.guarded = read_guarded(target, [plan.tables[oid] for oid in left])

    def _copy(self, plan: Plan, snapshot: HeldSnapshot) -> dict[record.PartKey, record.CopiedPart]:
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
        recorded = self.ledger.parts()
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
                set_database_properties(target, settings)
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
        if read_held(self.settings.directory) or self.settings.snapshot:
            return "go on with the same command and --resume"
        return (
            "its snapshot is gone with it; start again with --restart, or, if nobody writes to "
            "the source, go on with --resume --not-consistent"
        )

    def _stop_sessions(self) -> None:
        """End the sessions of this run on both servers, whichever process left them."""
        for dsn in (self.settings.source, self.settings.target):
            try:
                cancel_sessions(dsn, f"{APPLICATION} % {self.job.run_id}%")
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
