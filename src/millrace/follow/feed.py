"""What fills the spool of a stream: a receiver of its own, another process, or nothing.

Invariant: a feed that says it has ended adds nothing to the spool any more.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

from millrace.clone.directory import read_setup
from millrace.errors import MillraceError, WorkDirError
from millrace.filter.rules import FilterRules
from millrace.follow.background import in_background
from millrace.follow.settings import FollowSettings
from millrace.postgres.wire.slot_batch import sizes_from
from millrace.receive.loop import (
    CONTROL_SECONDS,
    MANY_CONTROL_SECONDS,
    ReceiveResult,
    ReceiveSettings,
)
from millrace.receive.mask import Mask
from millrace.receive.process import Receiver
from millrace.spool.place import place_of
from millrace.workdir.sentinel import Sentinel, StreamSetup

log = logging.getLogger(__name__)

# How often the receiver is looked at while nothing is applied.
WATCH_SECONDS = 1.0


class FeedKind(Enum):
    """Who fills the spool."""

    # A process of our own.
    RECEIVER = auto()
    # `millrace stream receive`.
    OTHER_PROCESS = auto()
    # Nobody: the spool is what it is.
    NOBODY = auto()


class Feed(Protocol):
    """Whoever fills the spool."""

    def check(self) -> ReceiveResult | None:
        """How it ended, once it has."""


class NoFeed:
    """The spool is what it is."""

    def check(self) -> ReceiveResult | None:
        return ReceiveResult(0, 0, False)


class OtherProcess:
    """Another process fills the spool; how far it is, the sentinel says."""

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel = sentinel

    def check(self) -> ReceiveResult | None:
        state = self._sentinel.read()
        flushed = state.flushed_lsn or 0
        if state.endpos is None or flushed < state.endpos:
            return None
        return ReceiveResult(flushed, flushed, True)


def receive_settings(settings: FollowSettings, setup: StreamSetup) -> ReceiveSettings:
    _require_hashes(settings)
    return ReceiveSettings(
        settings.source,
        setup.slot_name,
        setup.plugin,
        setup.encoding,
        max_spool_bytes=settings.max_spool_bytes,
        max_slot_lag_bytes=settings.max_slot_lag_bytes,
        batches=sizes_from(settings.batches_from_bytes),
        binary=settings.binary,
        ddl=settings.ddl is not None,
        control_seconds=MANY_CONTROL_SECONDS if settings.is_one_of_many else CONTROL_SECONDS,
        left_out=settings.left.tables,
        mask=Mask(settings.left.columns, settings.left.hashed),
    )


def _require_hashes(settings: FollowSettings) -> None:
    """Raise if the copy has digests in the place of values that would now be received as they
    are."""
    copy = read_setup(settings.directory)
    if copy is None or settings.left.hashed:
        return
    if FilterRules.from_json(copy["filters"]).of("hash-column"):
        raise WorkDirError(
            f"columns of the copy in {settings.directory} are hashed, and only `millrace "
            "consolidate` can receive them so",
            hint="use the commands of `millrace consolidate`",
        )


def open_receiver(settings: FollowSettings, setup: StreamSetup, stream: str = "") -> Receiver:
    """The receiver of a stream, not started yet; it logs in the stream's name."""
    place = place_of(setup, settings.directory, settings.target)
    return Receiver(
        receive_settings(settings, setup),
        place,
        replace(settings.log, stream=stream),
        is_one_of_many=settings.is_one_of_many,
    )


def watched(receiver: Receiver) -> AbstractContextManager[None]:
    """Meanwhile a receiver that was killed is started again, and one that failed is reported: the
    source keeps its WAL until somebody does something about it."""

    def has_ended() -> bool:
        try:
            return receiver.check() is not None
        except MillraceError as error:
            log.error("changes are no longer received: %s (%s)", error, error.hint or "no hint")
            return True

    return in_background("watch receiver", has_ended, WATCH_SECONDS)
