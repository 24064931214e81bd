"""What a user asked of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from millrace.config.dsn import Dsn


class OnConflict(StrEnum):
    """What to do about a change whose row is not there, or whose place is taken."""

    STOP = "stop"
    SKIP = "skip-and-log"
    OVERWRITE = "overwrite"


class SpoolKind(StrEnum):
    """Where received changes wait until they are applied."""

    FILES = "files"
    TABLE = "table"


@dataclass(frozen=True)
class Left:
    """What of the source is left out by the user's filters; tables as (schema, name)."""

    tables: frozenset[tuple[str, str]] = frozenset()
    columns: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    # Conditions that rows must meet to be on the target.
    where: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class LogSettings:
    """How the other process logs."""

    verbose: int = 0
    quiet: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class SlotSettings:
    """The slot of a stream, and where what it sends is kept."""

    name: str = "millrace"
    plugin: str = "pgoutput"
    spool: SpoolKind = SpoolKind.FILES


@dataclass(frozen=True)
class FollowSettings:
    """Flags of `millrace follow`, after environment and defaults."""

    source: Dsn
    target: Dsn
    directory: Path
    apply_jobs: int = 1
    on_conflict: OnConflict = OnConflict.STOP
    max_spool_bytes: int | None = None
    max_slot_lag_bytes: int | None = None
    # 0: no batches.
    batches_from_bytes: int = 16 * 1024 * 1024
    binary: bool = True
    # Keep what is applied in the spool, for others who read it.
    keep_spool: bool = False
    left: Left = field(default_factory=Left)
    log: LogSettings = field(default_factory=LogSettings)
