"""The states of a stream, as its work directory records them.

Invariant: the state in the sentinel was written by the process that ran the stream last; a reader
holds up nobody, and takes no state of a dead process for that of a living one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from millrace.workdir.lock import read_holder
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.stream_binding import has_stream


class StreamState(StrEnum):
    """What a stream is doing.

    [copying ──►] setting up ──► catching up ◄──► following
                                      ▲               ▲
                                      └───► held ◄────┘

    Every one of them may become `ended` or `failed`, from where `setting up` continues the stream.
    """

    # Nothing is applied yet: the directory is locked, the source is checked, positions are made or
    # found on the target.
    SETTING_UP = "setting up"
    # The copy that the stream begins with is made. Changes are received, none is applied.
    COPYING = "copying"
    # Changes are applied, and the source is further ahead than a few seconds, or cannot be asked.
    CATCHING_UP = "catching up"
    # Changes are applied within seconds of their commit on the source.
    FOLLOWING = "following"
    # Somebody holds it back: apply is switched off, or receiving is held back and everything that
    # was received is applied.
    HELD = "held"
    # Nothing of it runs: it is at its end position, or at the end of the spool if that was asked
    # for, or was stopped.
    ENDED = "ended"
    # Nothing of it runs: an error ended it.
    FAILED = "failed"

    @property
    def is_running(self) -> bool:
        return self not in (StreamState.ENDED, StreamState.FAILED)


@dataclass(frozen=True)
class StreamStatus:
    """A stream as its work directory shows it."""

    slot_name: str
    # The last one written; "" for a stream of an older release, or one that was never opened.
    state: str
    # Whether a process is there that could change it.
    is_running: bool
    # In seconds since 1970.
    since: float | None
    error: str
    received_lsn: int | None
    applied_lsn: int | None

    @property
    def label(self) -> str:
        """The state for people."""
        if self.is_running or self.state in (StreamState.ENDED, StreamState.FAILED):
            return self.state or "running"
        return f"not running (was {self.state})" if self.state else "not running"


def read_stream_status(directory: Path) -> StreamStatus | None:
    """The stream of the directory; None if there is none."""
    if not has_stream(directory):
        return None
    with Sentinel(directory) as sentinel:
        setup, state = sentinel.read_setup(), sentinel.read()
    if setup is None:
        return None
    return StreamStatus(
        setup.slot_name,
        state.state,
        read_holder(directory) is not None,
        state.state_at,
        state.error,
        state.received_lsn,
        state.applied_lsn,
    )
