"""The progress of a clone: for the live view, the log and the summary.

Invariant: reading progress changes nothing and needs no channel to the tasks; the
target's own pg_stat_progress views show every running part by application_name.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import psycopg

from millrace.postgres.run_record import PartKey
from millrace.postgres.wire.connect import APPLICATION
from millrace.relation import Part

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class RunningCopy:
    """A part being copied right now."""

    table_oid: int
    part: int
    bytes: int
    rows: int


@dataclass(frozen=True)
class RunningIndex:
    """An index being built right now."""

    name: str
    phase: str
    share: float


@dataclass
class Progress:
    """Counts of the whole run, filled in by its driver."""

    step: str = ""
    tables: int = 0
    tables_done: int = 0
    parts: int = 0
    parts_done: int = 0
    indexes: int = 0
    indexes_done: int = 0
    # In bytes of the source's files, since those are known beforehand.
    estimated_bytes: int = 0
    estimated_bytes_done: float = 0.0
    copied_bytes: int = 0
    copied_rows: int = 0
    running_copies: list[tuple[str, RunningCopy]] = field(default_factory=list)
    running_indexes: list[RunningIndex] = field(default_factory=list)
    copy_started_at: float | None = None
    copy_seconds: float | None = None

    def seconds(self) -> float:
        """Since copying began, or how long it took."""
        if self.copy_started_at is None:
            return 0.0
        return self.copy_seconds or time.monotonic() - self.copy_started_at

    def share(self) -> float:
        """How much of the copying is done, from 0 to 1."""
        if not self.estimated_bytes:
            return 1.0 if self.parts_done == self.parts else 0.0
        return min(1.0, self.estimated_bytes_done / self.estimated_bytes)

    def seconds_left(self) -> float | None:
        """At the rate so far; None while there is nothing to go by."""
        share, spent = self.share(), self.seconds()
        if share < 0.01 or spent < 1:
            return None
        return spent * (1 - share) / share


def part_label(table: str, part: Part) -> str:
    """A part as people see it."""
    return f"{table} [{part.number}/{part.total}]" if part.total > 1 else table


def weigh_copies(
    parts: Mapping[PartKey, Part],
    copied: Collection[PartKey],
    running: Iterable[RunningCopy],
) -> float:
    """How many of the estimated bytes are copied, with the share of those under way."""
    weight = float(sum(part.estimated_bytes for key, part in parts.items() if key in copied))
    for copy in running:
        part = parts[copy.table_oid, copy.part]
        if part.estimated_rows:
            weight += part.estimated_bytes * min(1.0, copy.rows / part.estimated_rows)
    return weight


class Reporter(Protocol):
    """Whoever wants to know: the live view, the log."""

    def update(self, progress: Progress) -> None: ...


def read_running_copies(connection: Connection, run_id: str) -> list[RunningCopy]:
    """Parts being copied, as the target sees them."""
    prefix = f"{APPLICATION} copy {run_id} "
    rows = connection.execute(
        "SELECT a.application_name, p.bytes_processed, p.tuples_processed"
        " FROM pg_stat_progress_copy p JOIN pg_stat_activity a USING (pid)"
        " WHERE a.datname = current_database() AND starts_with(a.application_name, %s)",
        (prefix,),
    )
    running = []
    for name, size, count in rows:
        oid, _, part = name.removeprefix(prefix).partition(".")
        if oid.isdigit() and part.isdigit():
            running.append(RunningCopy(int(oid), int(part), size, count))
    return running


def read_running_indexes(connection: Connection, run_id: str) -> list[RunningIndex]:
    """Indexes being built, with their phase."""
    rows = connection.execute(
        "SELECT coalesce(nullif(p.index_relid, 0), p.relid)::regclass::text, p.phase,"
        " p.blocks_done, p.blocks_total, p.tuples_done, p.tuples_total"
        " FROM pg_stat_progress_create_index p JOIN pg_stat_activity a USING (pid)"
        " WHERE a.datname = current_database() AND a.application_name = %s",
        (f"{APPLICATION} index {run_id}",),
    )
    running = []
    for name, phase, blocks, all_blocks, tuples, all_tuples in rows:
        done, whole = (tuples, all_tuples) if all_tuples else (blocks, all_blocks)
        running.append(RunningIndex(name, phase, done / whole if whole else 0.0))
    return running
