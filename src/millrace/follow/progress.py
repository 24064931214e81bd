"""The progress of a stream: for the live view, the log and the metrics.

Invariant: a lag is shown only if the source was asked for its position just now; otherwise that it
could not be asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from millrace.apply.conflict import ApplyCounts
from millrace.clone.progress import Reporter
from millrace.config.size import render_size
from millrace.follow.audit.finding import Finding
from millrace.workdir.stream_state import StreamState

# A source that is not heard for so long is silent: it is asked for a word every two seconds, but
# may need longer to decode a batch.
SILENT_SECONDS = 15.0
# A stream that is no further behind has caught up.
NEAR_SECONDS = 10.0


@dataclass(frozen=True)
class SourceProgress:
    """What is known of the source beside the stream; None where it could not be asked."""

    # Its position, and how long ago it was asked.
    wal_lsn: int | None = None
    age_seconds: float | None = None
    # How much of that is not on the target.
    lag_bytes: int | None = None
    # Since anything came from it by the stream, while this process looked.
    contact_seconds: float | None = None
    # Why nothing is read from it; empty if it is.
    held: str = ""
    # The slot: its state, the WAL that is kept for it, and what is left until it is lost.
    wal_status: str = ""
    retained_bytes: int | None = None
    safe_wal_bytes: int | None = None
    seconds_until_lost: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether nothing comes although it should."""
        return not self.held and (self.contact_seconds or 0.0) > SILENT_SECONDS

    @property
    def is_out_of_reach(self) -> bool:
        return self.age_seconds is None or self.age_seconds > SILENT_SECONDS

    def describe_silence(self) -> str:
        text = f"nothing received from the source for {self.contact_seconds or 0:.0f} s"
        if self.is_out_of_reach:
            return f"{text}; it can't be reached"
        if not self.lag_bytes:
            return f"{text}; it has nothing to send"
        return f"{text}; it is {render_size(self.lag_bytes)} ahead"


@dataclass
class FollowProgress:
    """The progress of a stream."""

    received_lsn: int = 0
    flushed_lsn: int = 0
    applied_lsn: int = 0
    endpos: int | None = None
    # What the source has written and the target does not have; None while the source was not asked.
    lag_bytes: int | None = None
    # How long the oldest of that waits: since its commit by the source's clock, or since the source
    # was first seen to be ahead. 0 when there is nothing, None while the source was not asked.
    lag_seconds: float | None = None
    is_applying: bool = True
    # Applied since the stream began.
    transactions: int = 0
    changes: int = 0
    # By this process, for conflicts.
    skipped: int = 0
    overwritten: int = 0
    changes_per_second: float = 0.0
    # At the present rates; None when it does not get nearer.
    seconds_left: float | None = None
    # Spooled and not applied.
    waiting_bytes: int = 0
    source: SourceProgress = field(default_factory=SourceProgress)
    # Which stream it is: its name, or that of its slot.
    stream: str = ""
    state: StreamState = StreamState.SETTING_UP


def state_of(progress: FollowProgress) -> StreamState:
    """What a stream that runs and applies is doing."""
    source = progress.source
    if not progress.is_applying or (source.held and not progress.waiting_bytes):
        return StreamState.HELD
    if source.is_out_of_reach or progress.lag_seconds is None:
        return StreamState.CATCHING_UP
    is_near = progress.lag_seconds <= NEAR_SECONDS
    return StreamState.FOLLOWING if is_near else StreamState.CATCHING_UP


class FollowReporter(Reporter, Protocol):
    """Shows the progress of a stream, and of a clone before it."""

    def update_follow(self, progress: FollowProgress) -> None: ...


@dataclass(frozen=True)
class FollowResult:
    """How a stream ended."""

    position: int
    reached_endpos: bool
    transactions: int
    applied: ApplyCounts
    # Set as on the source; None where no end was reached.
    sequences: int | None = None
    # Tables that may differ from the source, for what is not followed.
    unfollowed: tuple[Finding, ...] = ()

    @property
    def refused(self) -> tuple[Finding, ...]:
        """Those that nobody has accepted."""
        return tuple(one for one in self.unfollowed if not one.is_accepted)
