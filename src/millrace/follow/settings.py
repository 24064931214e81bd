"""The settings of a stream, as the user gave them.

Invariant: nothing is imported here that takes long to load; every command reads its options.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from millrace.apply.conflict import OnConflict
from millrace.ddl.settings import DdlSettings
from millrace.filter.exclusions import Exclusions
from millrace.log import LogSettings
from millrace.route import Route, RouteSettings
from millrace.spool.kind import SpoolKind

DEFAULT_SLOT = "millrace"
DEFAULT_PLUGIN = "pgoutput"
# Metrics are nobody else's business unless --metrics-host says so.
LOOPBACK = "127.0.0.1"


class CompareMode(StrEnum):
    """What a cut-over compares."""

    # Every row of every table.
    FULL = "full"
    NONE = "none"


@dataclass(frozen=True)
class SlotSettings:
    """The slot of a stream, and where what it sends is kept; "" for what the work directory knows,
    or else the default."""

    name: str = ""
    plugin: str = ""
    spool: SpoolKind = SpoolKind.FILES
    # How long its creation may wait for open transactions; None for as long as it takes.
    timeout_seconds: float | None = None
    # Set REPLICA IDENTITY FULL on tables that have none.
    identity_full: bool = False
    # Capture DDL on the source, for those who replay it.
    ddl: bool = False


@dataclass(frozen=True)
class FollowSettings(RouteSettings):
    """Flags of `millrace follow`, after environment and defaults."""

    # Its filters are for tables that come later; its names are those of the copy.
    route: Route
    # Where the stream is to end; None leaves that to the sentinel.
    endpos: int | None = None
    # How many workers apply; None for as many as the stream began with, or one.
    apply_jobs: int | None = None
    on_conflict: OnConflict = OnConflict.STOP
    # Stop at the first row that has another shape than the target's table, even if it fits.
    is_strict: bool = False
    max_spool_bytes: int | None = None
    max_slot_lag_bytes: int | None = None
    # 0: no batches.
    batches_from_bytes: int = 16 * 1024 * 1024
    binary: bool = True
    # Keep what is applied in the spool, for others who read it.
    keep_spool: bool = False
    # How often sequences are brought forward; 0: never.
    sequence_seconds: float = 60.0
    # One target transaction for each of the source, so that all before a change that can't be
    # applied is there.
    one_by_one: bool = False
    # So much of the source's time goes into one target transaction at the most; None for any.
    batch_seconds: float | None = None
    # How long a task that has caught up waits for more, before others have its place.
    stay_seconds: float = 2.0
    # The process has many streams: what they can share they share, and none looks for something to
    # do as often as one that is alone.
    is_one_of_many: bool = False
    left: Exclusions = field(default_factory=Exclusions)
    # How captured DDL is replayed; None if it is not.
    ddl: DdlSettings | None = None
    # Tables, as schema.name, that may differ at the end.
    accepted: frozenset[str] = frozenset()
    log: LogSettings = field(default_factory=LogSettings)
