"""One clone from beginning to end, or from where an earlier process stopped.

Invariant: the run is reported as done only after every part has its record on the
target and every later step succeeded; on any other way out, its tasks, its
sessions on both servers and its own snapshot are gone, and `--resume` continues from
what is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from millrace import failpoint
from millrace.clone.copy_stage import CopyStage
from millrace.clone.finish.sequence import set_sequences
from millrace.clone.finish.statistics import keep_statistics, read_carried, restore_statistics
from millrace.clone.finish.vacuum import analyze_partitioned
from millrace.clone.kept_view import keep, read_kept
from millrace.clone.opening import MOVING, look_for_rows, open_run, own_target
from millrace.clone.plan import Plan, plan_clone
from millrace.clone.problem import Problem
from millrace.clone.progress import Reporter
from millrace.clone.ready import check_servers, resolved
from millrace.clone.run_state import Run
from millrace.clone.schema.database import set_database_properties
from millrace.clone.schema.entries import RestoreLists
from millrace.clone.schema.mapping import (
    create_schemas,
    map_function_settings,
    to_target,
)
from millrace.clone.schema.restore import (
    add_foreign_keys,
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
from millrace.clone.stopped import find_held, tell_kept_snapshot
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
from millrace.errors import SnapshotLost
from millrace.filter.apply import read_decision
from millrace.filter.decide import Decision
from millrace.postgres import run_record as record
from millrace.postgres.program.dump import Archive
from millrace.postgres.wire.connect import connect, translated
from millrace.relation import SourceCatalog
from millrace.room import RESUME
from millrace.snapshot.export import ReleasedSnapshot, open_snapshot
from millrace.split.sample import sample_tables
from millrace.workdir.lock import open_lock

log = logging.getLogger(__name__)

R = TypeVar("R")
Copied = dict[record.PartKey, record.CopiedPart]

FINISHING = frozenset({Step.INDEXES, Step.CONSTRAINTS, Step.VACUUM})
# After any of these, the last that materialized views need may be there.
FILLING = frozenset({Step.TABLE_DATA, Step.POST_DATA})


@dataclass
class CloneResult:
    """What a clone, or its dry run, has to report."""

    plan: Plan
    warnings: list[Problem]
    summary: Summary | None = None


def clone(settings: CloneSettings, engine: Engine, reporter: Reporter) -> CloneResult:
    """Do the steps asked for: all of them are a clone."""
    settings = resolved(settings)
    with open_lock(settings.directory), ExitStack() as stack:
        opened = open_run(settings, engine, reporter, stack)
        if opened is None:
            log.info("the run in %s is finished: nothing is left to do", settings.directory)
            return CloneResult(Plan(SourceCatalog(), {}, {}), [])
        run, warnings = opened
        with _stopping_sessions(run):
            look_for_rows(run)
            if run.needs_rows:
                engine.start()
                if not engine.is_local:
                    engine.wait()  # a cluster out of reach is reported before anything is done
            with run.step("take a snapshot and read the catalog"):
                view = _open_view(run)
                stack.callback(view.snapshot.close)
            failpoint.hit("snapshot.opened")
            own_target(run, view.decision)
            plan, summary = _run_steps(run, view)
    return CloneResult(plan, warnings, summary)


def dry_run(settings: CloneSettings) -> CloneResult:
    """The plan, made by the same code; touches neither server nor work directory."""
    settings = resolved(settings)
    problems, _, encoding = check_servers(settings, continues=False)
    with open_snapshot(settings.source, settings.snapshot) as snapshot:
        decision = read_decision(snapshot.connection, settings.filters)
        catalog = read_source(snapshot.connection, settings, decision, target_encoding=encoding)
        samples = sample_tables(snapshot.connection, catalog.tables, settings.split)
    return CloneResult(plan_clone(catalog, samples, settings.split), problems)


@contextmanager
def _stopping_sessions(run: Run) -> Iterator[None]:
    """If what is done in it fails, no session of the run is left, and the error says how to
    continue."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, SnapshotLost):
            error.hint = _way_out(run)
        run.stop_sessions()
        tell_kept_snapshot(run.settings)
        raise


def _way_out(run: Run) -> str:
    """Of a run whose own session under the snapshot is gone."""
    held = find_held(run.settings.directory)
    if held is not None and run.held is not None and held.id == run.held.id:
        return RESUME
    return WAYS_OUT if run.beginning.stream is None else WAYS_OUT_OF_A_STREAM


def _open_view(run: Run) -> View:
    """The view of the source that the run has: under its snapshot, or, once it has read every
    row, as it has kept it."""
    settings, setup = run.settings, run.beginning.setup
    kept = read_kept(run.store) if run.is_released else None
    if kept is not None and setup is not None:
        return kept_view(settings, setup["snapshot"], *kept)
    snapshot = choose_snapshot(settings, setup, run.held)
    renew = run.renew_snapshot if _may_renew(run, snapshot) else None
    return open_view(settings, snapshot, run.target_encoding, renew)


def _may_renew(run: Run, snapshot: str | None) -> bool:
    """Whether the run may have another snapshot: nothing was read under the one it has."""
    if run.settings.snapshot_keep_seconds is None:
        return False
    is_own = run.held is not None and run.held.is_of_run and run.held.slot is None
    return snapshot is None or (is_own and not run.beginning.is_planned)


def _run_steps(run: Run, view: View) -> tuple[Plan, Summary]:
    plan, archive, lists = _make_schema(run, view)
    copied, waited = _move_rows(run, view, plan)
    view.snapshot.close()
    _complete_schema(run, plan, archive, lists)
    summary = Summary.build(
        plan,
        copied,
        run.store,
        steps=run.timings,
        seconds=time.monotonic() - run.beginning.began_at,
        spark_start_seconds=waited,
        jvm_start_seconds=run.engine.start_seconds,
        snapshot=view.snapshot.id,
        run_id=run.run_id,
        consistency=_consistency(run.settings),
        statistics_carried=run.statistics_carried,
    )
    run.records.check(plan, copied)
    write_summary(run.settings.directory / "summary.json", summary)
    failpoint.hit("summary.written")
    if run.settings.steps == CloneSettings.steps or run.beginning.was_finished:
        run.store.write_finished()
        failpoint.hit("run.finished")
        run.records.close(plan, copied, plan.catalog.sequences)
    return plan, summary


def _make_schema(run: Run, view: View) -> tuple[Plan, Archive, RestoreLists]:
    """Everything that rows need, on the target; the plan under the target's names."""
    settings, steps = run.settings, run.settings.steps
    with run.step("dump the schema"):
        dumping = in_thread(partial(open_archive, run, view.snapshot.id))
        plan = _plan(run, view)
        archive = dumping.result()
        if not isinstance(view.snapshot, ReleasedSnapshot):
            keep_statistics(run, view.snapshot.id)
        run.carried = read_carried(run, [table.target for table in plan.catalog.tables])
    catalog = plan.catalog
    _log_decision(view.decision)
    lists = plan_lists(run, archive, catalog, view.decision)
    run.extension_homes = {one.name: one.schema for one in catalog.extensions}
    if Step.ROLES in steps and settings.roles:
        with run.step("roles"), connect(settings.target, run.role("roles")) as target:
            failpoint.hit("roles.begin")
            copy_roles(run.tools, settings, target)
            failpoint.hit("roles.done")
    if Step.EXTENSIONS in steps:
        with run.step("extensions"):
            create_extensions(run, catalog)
    if Step.PRE_DATA in steps:
        with run.step("restore the schema"):
            create_schemas(run, catalog)
            own_schemas(run, lists, catalog)
            restore(run, archive, lists.before, "pre-data", extensions=catalog.extensions)
            map_function_settings(run, catalog)
    return to_target(run, plan, archive, lists), archive, lists


def _move_rows(run: Run, view: View, plan: Plan) -> tuple[Copied, float]:
    """Rows, indexes, constraints, sequences: what is copied, and the seconds waited for Spark."""
    steps, stream = run.settings.steps, run.beginning.stream
    waited = 0.0
    if not steps & (MOVING | FINISHING):
        if Step.SEQUENCES in steps:
            _set_sequences(run, plan)
        return {}, waited
    is_new = run.beginning.setup is None
    if stream is not None and (is_new or stream.run_id == run.run_id):
        run.records.note_stream(stream)
    if Step.TABLE_DATA in steps:
        _find_guarded(run, plan)
        empty_shared_tables(run, plan)
    if run.needs_rows:
        with run.step("wait for Spark"):
            waited = run.engine.wait()
    return _copy(run, view, plan), waited


def _complete_schema(run: Run, plan: Plan, archive: Archive, lists: RestoreLists) -> None:
    """What comes after the rows."""
    steps = run.settings.steps
    if Step.VACUUM in steps and run.carried:
        with run.step("statistics"):
            run.statistics_carried = restore_statistics(run)
    if Step.CONSTRAINTS in steps:
        with run.step("indexes of partitioned tables"):
            restore(run, archive, lists.attach, "attach")
        with run.step("foreign keys"):
            add_foreign_keys(run, plan.catalog)
    if Step.POST_DATA in steps:
        with run.step("triggers, rules, views, everything else"):
            restore(run, archive, lists.after, "post-data")
    if steps & FILLING and lists.refresh:
        _refresh(run, archive, lists, plan)
    if Step.PROPERTIES in steps:
        _set_properties(run, plan.catalog)


def _log_decision(decision: Decision) -> None:
    """Say what the filters leave out that no rule names, and what they could not leave out."""
    for warning in decision.warnings:
        log.warning("%s", warning)
    for what, keys in (("left out too", decision.dependents), ("kept", decision.kept)):
        for key, reason in keys.items():
            log.info("%s: %s (%s)", what, decision.labels.get(key, key), reason)


def _plan(run: Run, view: View) -> Plan:
    """The plan of this run: made now, or by the process that began it."""
    settings, snapshot, catalog = run.settings, view.snapshot, view.catalog
    known = run.store.read_parts()
    if known:
        catalog = replace(catalog, large_object_ranges=run.store.read_large_object_ranges())
    if isinstance(snapshot, ReleasedSnapshot):
        plan = plan_clone(catalog, {}, settings.split, known=known)
    else:
        new = [table for table in catalog.tables if table.oid not in known]
        samples = sample_tables(snapshot.connection, new, settings.split)
        plan = plan_clone(catalog, samples, settings.split, known=known)
        _write_plan(run, plan, view)
    progress = run.progress
    progress.tables, progress.parts = len(plan.parts), len(plan.every_part)
    progress.indexes = sum(map(len, plan.indexes.values()))
    progress.estimated_bytes = sum(part.estimated_bytes for part in plan.every_part)
    failpoint.hit("run.planned")
    return plan


def _write_plan(run: Run, plan: Plan, view: View) -> None:
    is_planned = run.beginning.is_planned
    if not is_planned:
        note_existing(run, plan.catalog)
    run.store.write_plan(plan.catalog, plan.every_part)
    keep(run.store, plan.catalog, view.decision)
    failpoint.hit("plan.written")
    if not is_planned or run.settings.not_consistent:
        run.store.write_snapshot(view.snapshot.id)


def _find_guarded(run: Run, plan: Plan) -> None:
    """See which tables that still lack rows have triggers and foreign keys already."""
    planned = {(part.table_oid, part.number) for part in plan.every_part}
    left = {oid for oid, _ in planned - run.records.parts()}
    with connect(run.settings.target, run.role("open")) as target:
        run.guarded = read_guarded(target, [plan.tables[oid] for oid in left])


def _copy(run: Run, view: View, plan: Plan) -> Copied:
    wants_sequences = Step.SEQUENCES in run.settings.steps
    sequences = in_thread(partial(_set_sequences, run, plan)) if wants_sequences else None
    stage = CopyStage(run, plan, view.snapshot)
    began = time.monotonic()
    run.progress.step = "copy data"
    log.info("copy data")
    stage.copy()
    if sequences is not None:
        sequences.result()
    copy_seconds = run.progress.copy_seconds or 0.0
    run.add_timing("copy", copy_seconds)
    run.add_timing("indexes, constraints, vacuum", time.monotonic() - began - copy_seconds)
    return stage.copied


def _set_sequences(run: Run, plan: Plan) -> None:
    failpoint.hit("sequences.begin")
    with (
        connect(run.settings.target, run.role("sequences")) as target,
        translated("setting sequences on the target"),
        target.transaction(),
    ):
        set_sequences(target, plan.catalog.sequences)
        record.note_sequences(target, run.run_id)
    failpoint.hit("sequences.done")


def _refresh(run: Run, archive: Archive, lists: RestoreLists, plan: Plan) -> None:
    recorded = run.records.parts()
    if can_refresh(run, lists, plan, recorded, was_finished=run.beginning.was_finished):
        with run.step("materialized views"):
            refresh(run, archive, lists, plan)
    else:
        log.info("materialized views are filled once all rows and post-data are restored")


def _set_properties(run: Run, catalog: SourceCatalog) -> None:
    settings = run.settings
    with (
        run.step("database properties"),
        connect(settings.target, run.role("finish")) as target,
    ):
        failpoint.hit("properties.begin")
        if not settings.skip_vacuum:
            for _, schema, name in catalog.partitioned_tables:
                analyze_partitioned(target, schema, name)
        if not settings.skip_database_properties:
            shared = is_shared(target, run.beginning.schemas)
            set_database_properties(target, settings, is_shared=shared)
        failpoint.hit("properties.done")


def _consistency(settings: CloneSettings) -> str:
    """In words, what the target holds."""
    if not settings.not_consistent:
        return "the target equals the source as of one instant, that of the snapshot"
    return (
        "--not-consistent: parts copied by different processes were read at different "
        "instants; the target equals the source only if nobody wrote to it meanwhile"
    )


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
