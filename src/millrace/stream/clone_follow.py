"""A clone, and from its snapshot on every change.

Invariant: the receiver starts before the copy and applies nothing; apply starts when the clone is
whole. So nothing of the source is missed and nothing is applied to a table that is not there yet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from millrace.clone.engine import Engine
from millrace.clone.run import CloneResult, clone, is_finished
from millrace.clone.settings import CloneSettings
from millrace.errors import ConfigError, MillraceError
from millrace.postgres.connect import resolve
from millrace.stream.begin import forget_stream, open_slot_snapshot
from millrace.stream.follow import follow, open_receiver, require_setup
from millrace.stream.progress import FollowReporter, FollowResult
from millrace.stream.sentinel import Sentinel
from millrace.stream.settings import FollowSettings, SlotSettings
from millrace.stream.warm_up import warm_up

log = logging.getLogger(__name__)


def clone_and_follow(
    clone_settings: CloneSettings,
    follow_settings: FollowSettings,
    slot: SlotSettings,
    engine: Engine,
    reporter: FollowReporter,
    *,
    on_cloned: Callable[[CloneResult], None],
) -> FollowResult:
    """Clone under the slot's snapshot while changes are received, then apply them."""
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
        forget_stream(directory, source, clone_settings.target)
    if clone_settings.resume and is_finished(directory):
        return follow(follow_settings, engine, reporter)
    with open_slot_snapshot(directory, source, clone_settings.target, slot, clone_settings.filters):
        with Sentinel(directory) as sentinel:
            setup = require_setup(sentinel, directory)
        receiver = open_receiver(follow_settings, setup)
        receiver.start()
        threading.Thread(target=_warm_up, args=(engine,), daemon=True).start()
        try:
            on_cloned(clone(clone_settings, engine, reporter))
        except BaseException:
            receiver.stop()
            raise
    return follow(follow_settings, engine, reporter, receiver=receiver)


def _warm_up(engine: Engine) -> None:
    """The copy leaves time for what apply would wait for."""
    try:
        engine.call(warm_up, 0, "compile")
    except MillraceError as error:
        log.debug("%s", error)  # apply compiles for itself
