"""A clone, and from its snapshot on every change.

Invariant: the receiver starts before the copy and applies nothing; apply starts when the clone is
whole. So nothing of the source is missed and nothing is applied to a table that is not there yet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from millrace.clone.engine import Engine
from millrace.clone.run import CloneResult, clone, is_finished
from millrace.clone.settings import CloneSettings
from millrace.errors import ConfigError, MillraceError, WorkDirError
from millrace.postgres.connect import resolve
from millrace.snapshot.holder import read_held
from millrace.stream.begin import forget_stream, open_slot_snapshot
from millrace.stream.follow import follow, open_receiver, require_setup
from millrace.stream.progress import FollowReporter, FollowResult
from millrace.stream.receiver import Receiver
from millrace.stream.sentinel import Sentinel
from millrace.stream.settings import FollowSettings, SlotSettings
from millrace.stream.warm_up import warm_up

log = logging.getLogger(__name__)

# How often the receiver is looked at during a clone.
WATCH_SECONDS = 1.0


def clone_and_follow(
    clone_settings: CloneSettings,
    follow_settings: FollowSettings,
    slot: SlotSettings,
    engine: Engine,
    reporter: FollowReporter,
    *,
    on_cloned: Callable[[CloneResult], None],
    endpos: int | None = None,
) -> FollowResult:
    """Clone under the slot's snapshot while changes are received, then apply them, up to `endpos`
    or the one that the sentinel has."""
    if clone_settings.not_consistent or clone_settings.snapshot:
        raise ConfigError(
            "--follow needs the snapshot of its own slot: neither --snapshot nor --not-consistent "
            "go with it",
            hint="hold the slot's snapshot with: millrace snapshot --follow",
        )
    clone_settings = replace(
        clone_settings,
        source=resolve(clone_settings.source),
        target=resolve(clone_settings.target),
    )
    directory, source = clone_settings.directory, clone_settings.source
    if clone_settings.restart:
        _refuse_held(directory)
        forget_stream(directory, source, clone_settings.target)
    if endpos is not None:
        with Sentinel(directory) as sentinel:
            sentinel.set_endpos(endpos)
    if clone_settings.resume and is_finished(directory):
        return follow(follow_settings, engine, reporter)
    with open_slot_snapshot(directory, source, clone_settings.target, slot, clone_settings.filters):
        with Sentinel(directory) as sentinel:
            setup = require_setup(sentinel, directory)
        receiver = open_receiver(follow_settings, setup)
        receiver.start()
        threading.Thread(target=_warm_up, args=(engine,), daemon=True).start()
        try:
            with _watched(receiver):
                result = clone(clone_settings, engine, reporter)
            on_cloned(result)
        except BaseException:
            receiver.stop()
            raise
    return follow(follow_settings, engine, reporter, receiver=receiver)


def _refuse_held(directory: Path) -> None:
    held = read_held(directory)
    if held is not None and held.slot is not None:
        raise WorkDirError(
            f"the snapshot held for {directory} came with slot {held.slot}, which --restart would "
            "drop",
            hint="end it first: millrace snapshot --stop",
        )


@contextmanager
def _watched(receiver: Receiver) -> Iterator[None]:
    """Meanwhile a receiver that was killed is started again, and one that failed is told of: the
    source keeps its WAL until somebody does something about it."""
    done = threading.Event()

    def watch() -> None:
        try:
            while not done.wait(WATCH_SECONDS) and receiver.check() is None:
                pass
        except MillraceError as error:
            log.error("changes are no longer received: %s (%s)", error, error.hint or "no hint")

    thread = threading.Thread(target=watch, name="watch receiver", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _warm_up(engine: Engine) -> None:
    """The copy leaves time for what apply would wait for."""
    try:
        engine.call(warm_up, 0, "compile")
    except MillraceError as error:
        log.debug("%s", error)  # apply compiles for itself
