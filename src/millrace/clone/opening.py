"""From settings to an open run: its directory, its claim on the target, what is left to read.

Invariant: what the directory refuses is refused before a server is asked, and what a server refuses
before the directory or the target is changed; nothing of a run that is restarted is thrown away
before it is certain that the new one can start.
"""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import ExitStack

from millrace import __version__, failpoint
from millrace.clone.copy_guard import check_more_rows, check_new_copy, check_slot
from millrace.clone.directory import open_directory, pinned, read_setup, require_usable
from millrace.clone.kept_view import keep_skipped_large_objects
from millrace.clone.problem import Problem
from millrace.clone.progress import Reporter
from millrace.clone.ready import check_servers, claim, owns_target, read_schemas
from millrace.clone.run_record import RunRecords, rows_left
from millrace.clone.run_state import Beginning, Run
from millrace.clone.schema.restore import archive_path
from millrace.clone.settings import CloneSettings
from millrace.clone.step import Step
from millrace.engine import Engine
from millrace.errors import WorkDirError
from millrace.filter.decide import Decision
from millrace.snapshot.holder import read_held, stop_held
from millrace.workdir.stream_binding import bind_copy, read_binding

log = logging.getLogger(__name__)

# What goes through Spark.
MOVING = frozenset({Step.TABLE_DATA, Step.LARGE_OBJECTS})


def read_beginning(settings: CloneSettings) -> Beginning:
    """What the run begins from; raises if its directory can't be used for it."""
    began_at = time.monotonic()
    held = read_held(settings.directory)
    stream = read_binding(settings.directory)
    if settings.resume and settings.restart:
        raise WorkDirError("--resume and --restart cannot be used together")
    before = read_setup(settings.directory)
    # Single steps share a directory, and so a run, one after the other.
    continues = settings.resume or settings.steps != CloneSettings.steps
    setup = require_usable(settings, continues=continues)
    check_slot(settings, setup, held)
    if setup is None:
        check_new_copy(settings, stream, settings.snapshot or (held.id if held else None))
    return Beginning(
        run_id=setup["run_id"] if setup else secrets.token_hex(4),
        setup=setup,
        former=before["run_id"] if before and settings.restart else "",
        owns_target=settings.restart and owns_target(settings),
        schemas=read_schemas(settings),
        held=held,
        stream=stream,
        began_at=began_at,
    )


def open_run(
    settings: CloneSettings, engine: Engine, reporter: Reporter, stack: ExitStack
) -> tuple[Run, list[Problem]] | None:
    """The run, with its directory open and its target claimed as long as `stack` is open, and the
    servers' warnings; None if it is finished."""
    beginning = read_beginning(settings)
    owned, run_id = beginning.owns_target, beginning.run_id
    stack.enter_context(claim(settings, run_id, beginning.schemas, takes_over=owned))
    records = RunRecords(settings, run_id)
    checked = None
    if beginning.setup is None:
        # What is refused leaves the files of an earlier run alone.
        checked = check_servers(settings, continues=owned)
        if owned or settings.drop_if_exists:
            records.check_followed(beginning.stream)
        _end_former_snapshot(settings, beginning)
    store = open_directory(settings, beginning.setup)
    stack.callback(store.close)
    if settings.resume and beginning.was_finished:
        if records.settle(store):
            return None
        log.warning("the target crashed at the end of the run: what it lost is copied again")
    warnings, tools, encoding = checked or check_servers(settings, continues=True)
    engine = engine.group(f"clone {run_id}")
    run = Run(settings, beginning, engine, reporter, store, records, tools, encoding)
    if not _is_former(beginning):
        run.held = beginning.held
    if beginning.setup is None:
        _pin(run)
        failpoint.hit("run.pinned")
    if Step.LARGE_OBJECTS in settings.steps:
        keep_skipped_large_objects(store, is_skipped=settings.skip_large_objects)
    run.add_timing("connect and check", time.monotonic() - beginning.began_at)
    return run, warnings


def _is_former(beginning: Beginning) -> bool:
    """Whether the held snapshot is of an earlier run: one with a slot is made before its run."""
    held = beginning.held
    return beginning.setup is None and held is not None and held.is_of_run and held.slot is None


def _end_former_snapshot(settings: CloneSettings, beginning: Beginning) -> None:
    if _is_former(beginning):
        stop_held(settings.directory)


def look_for_rows(run: Run) -> None:
    """See what of the source's rows is still to be read: only that takes Spark and a snapshot.
    If rows are lost again meanwhile, the first task starts Spark."""
    settings, beginning = run.settings, run.beginning
    run.needs_rows = bool(settings.steps & MOVING)
    if not beginning.is_planned:
        return
    run.records.require(run.store)
    run.needs_rows = bool(rows_left(run.store, run.records.parts(), settings))
    check_more_rows(
        settings,
        beginning.stream,
        rows_left=run.needs_rows,
        # Without records, nothing says that the schema is there.
        makes_tables=Step.PRE_DATA in settings.steps and not run.records.exists(),
    )
    run.is_released = not run.needs_rows and archive_path(settings.directory).exists()


def own_target(run: Run, decision: Decision) -> None:
    """Take over what earlier processes of this run left on the target, or make sure that
    it is this directory's target that is about to be emptied."""
    beginning = run.beginning
    if beginning.setup is not None:
        run.stop_sessions()
    run.epoch, run.done = run.records.open(
        schemas=beginning.schemas,
        takes_over=beginning.owns_target or run.settings.drop_if_exists,
        is_new=beginning.setup is None,
        excluded=decision.excluded,
        former=beginning.former,
        stream=beginning.stream,
    )
    failpoint.hit("run.opened")


def _pin(run: Run) -> None:
    """From here on the directory is this run's, and its stream, if there is one, too."""
    held = run.beginning.held
    run.store.write_setup(
        run_id=run.run_id,
        millrace_version=__version__,
        slot_name=held.slot if held else None,
        plugin=held.plugin if held and held.slot else None,
        **pinned(run.settings),
    )
    if run.beginning.stream is not None:
        bind_copy(run.settings.directory, run.run_id, run.target_encoding)
