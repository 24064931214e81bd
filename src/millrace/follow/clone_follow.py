"""A clone, and from its snapshot on every change.

Invariant: the receiver starts before the copy and applies nothing; apply starts when the clone is
whole. So nothing of the source is missed and nothing is applied to a table that is not there yet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from millrace.apply.warm_up import warm_up
from millrace.clone.directory import read_setup
from millrace.clone.progress import Reporter
from millrace.clone.ready import has_every_row, is_finished, require_ready
from millrace.clone.run import CloneResult, clone
from millrace.clone.settings import CloneSettings
from millrace.clone.view import WAYS_OUT_OF_A_STREAM
from millrace.engine import Engine
from millrace.errors import ConfigError, MillraceError, SnapshotLost, WorkDirError
from millrace.follow.bound_copy import (
    choose_slot,
    or_default,
    read_slot_settings,
    read_stream,
)
from millrace.follow.progress import FollowReporter, FollowResult
from millrace.follow.settings import FollowSettings, SlotSettings
from millrace.follow.setup import forget_stream, open_slot_snapshot
from millrace.follow.slot_holding import open_kept_slot_snapshot
from millrace.follow.stream import Stream, follow, run_to_end
from millrace.postgres.wire.connect import resolve
from millrace.snapshot.ended import read_end_of
from millrace.snapshot.holder import read_held, stop_held
from millrace.workdir.lock import require_idle

log = logging.getLogger(__name__)


def clone_and_follow(
    clone_settings: CloneSettings,
    follow_settings: FollowSettings,
    slot: SlotSettings,
    engine: Engine,
    reporter: FollowReporter,
    *,
    on_cloned: Callable[[CloneResult], None],
    stop: threading.Event | None = None,
) -> FollowResult:
    """Clone under the slot's snapshot while changes are received, then apply them, up to the end
    position that was asked for, or the one that the sentinel has, or until another thread sets
    `stop`."""
    _refuse_other_snapshots(clone_settings)
    asked = clone_settings.route
    # What a copy is pinned to, its stream goes by: under the same names.
    route = replace(asked, source=resolve(asked.source), target=resolve(asked.target))
    clone_settings = replace(clone_settings, route=route)
    follow_settings = replace(follow_settings, route=route)
    slot = prepare_clone(clone_settings, slot)
    if _is_resumed(clone_settings):
        return follow(follow_settings, engine, reporter)
    stream = Stream(follow_settings, engine)
    on_cloned(clone_for(stream, clone_settings, slot, engine, reporter))
    return run_to_end(stream, reporter, stop)


def clone_for(
    stream: Stream,
    settings: CloneSettings,
    slot: SlotSettings,
    engine: Engine,
    reporter: Reporter,
) -> CloneResult:
    """Clone under the slot's snapshot, while the stream receives and applies nothing."""
    with _beginning(settings, slot), stream.copying():
        threading.Thread(target=_warm_up, args=(engine,), daemon=True).start()
        return clone(settings, engine, reporter)


def prepare_clone(settings: CloneSettings, slot: SlotSettings) -> SlotSettings:
    """Refuse what can't be cloned before a slot is made for it, and remove the stream of a clone
    that starts over; the slot to make."""
    directory = settings.directory
    if not settings.restart:
        slot = choose_slot(directory, slot)
    if read_held(directory) is None and not _is_resumed(settings):
        require_ready(settings)
    if settings.restart:
        slot = or_default(slot, read_slot_settings(directory))
        _end_held(directory)
        forget_stream(settings.route)
    return slot


def _is_resumed(settings: CloneSettings) -> bool:
    """Whether only the stream is left of it."""
    return settings.resume and is_finished(settings.directory)


def _refuse_other_snapshots(settings: CloneSettings) -> None:
    if settings.not_consistent:
        raise ConfigError(
            "--not-consistent does not go with --follow: rows read under another snapshot than "
            "the slot's would hold some of the changes that are applied to them later",
            hint="continue under the slot's own snapshot, held by `millrace snapshot --follow`, or,"
            " when every row is copied, without any: --follow --resume; else begin again: --follow "
            "--restart",
        )
    if settings.snapshot:
        raise ConfigError(
            "--follow needs the snapshot of its own slot: --snapshot does not go with it",
            hint="hold the slot's snapshot with: millrace snapshot --follow",
        )


def _beginning(settings: CloneSettings, slot: SlotSettings) -> AbstractContextManager[object]:
    """The slot and its snapshot; a copy that continues with every row copied needs only the
    slot, which is there."""
    directory = settings.directory
    run = read_setup(directory) if settings.resume else None
    if run is None or not run["snapshot"] or read_held(directory) is not None:
        if settings.snapshot_keep_seconds is not None:
            return open_kept_slot_snapshot(settings, slot, settings.snapshot_keep_seconds)
        return open_slot_snapshot(settings.route, slot, is_copied=partial(_is_copied, settings))
    if read_stream(directory) is None:
        end = read_end_of(directory, run["snapshot"])
        raise SnapshotLost(
            f"the slot of the copy in {directory} is gone: "
            f"{end or 'it was dropped when the copy failed'}",
            hint=WAYS_OUT_OF_A_STREAM,
        )
    if not has_every_row(settings):
        raise SnapshotLost(
            f"snapshot {run['snapshot']} of slot {slot.name} is gone, and not every row is copied",
            hint=WAYS_OUT_OF_A_STREAM,
        )
    return nullcontext()


def _is_copied(settings: CloneSettings) -> bool:
    try:
        return has_every_row(settings)
    except MillraceError as error:
        log.debug("%s", error)  # not known
        return False


def _end_held(directory: Path) -> None:
    """End the snapshot of the run that starts over; one that is held by hand is its holder's."""
    held = read_held(directory)
    if held is not None and held.is_of_run:
        require_idle(directory)
        stop_held(directory)
    elif held is not None and held.slot is not None:
        raise WorkDirError(
            f"the snapshot held for {directory} came with slot {held.slot}, which --restart would "
            "drop",
            hint="end it first: millrace snapshot --stop",
        )


def _warm_up(engine: Engine) -> None:
    """The copy leaves time for what apply would wait for."""
    try:
        engine.call(warm_up, 0, "compile")
    except MillraceError as error:
        log.debug("%s", error)  # apply compiles for itself
