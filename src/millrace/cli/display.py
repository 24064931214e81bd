"""Progress and results for people.

Invariant: a terminal gets a live view; anything else gets plain log lines, a few in a minute.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millrace.clone.progress import Progress, RunningCopy, RunningIndex
from millrace.clone.summary import Summary
from millrace.config.size import render_size
from millrace.follow.progress import FollowProgress, SourceProgress
from millrace.lsn import render_lsn

log = logging.getLogger(__name__)

LINES_EVERY_SECONDS = 5.0
# Running copies and indexes listed one by one; more are counted.
LISTED = 8
# A slot that may be lost sooner, at the present rate, is mentioned.
LOST_SHOWN_SECONDS = 86400.0


def open_display(*, quiet: bool) -> Display:
    """The display that fits where stderr goes."""
    if quiet:
        return Display()
    return LiveDisplay() if sys.stderr.isatty() else LineDisplay()


class Display(AbstractContextManager["Display"]):
    """Shows nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def update(self, progress: Progress) -> None:
        """Take note of the run's progress."""

    def update_follow(self, progress: FollowProgress) -> None:
        """Take note of how far the stream is."""

    def update_line(self, line: str) -> None:
        """Take note of whatever fits into a line."""


class LineDisplay(Display):
    """A log line now and then."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def update(self, progress: Progress) -> None:
        if progress.copy_started_at is None or time.monotonic() - self._last < LINES_EVERY_SECONDS:
            return
        self._last = time.monotonic()
        log.info("%s", render_line(progress))

    def update_follow(self, progress: FollowProgress) -> None:
        if time.monotonic() - self._last < LINES_EVERY_SECONDS:
            return
        self._last = time.monotonic()
        log.info("%s", render_follow(progress))

    def update_line(self, line: str) -> None:
        if time.monotonic() - self._last >= LINES_EVERY_SECONDS:
            self._last = time.monotonic()
            log.info("%s", line)


class LiveDisplay(Display):
    """A block of lines at the bottom of the terminal that changes in place."""

    def __init__(self) -> None:
        self._live = Live(console=Console(stderr=True), refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, progress: Progress) -> None:
        self._live.update(render_block(progress))

    def update_follow(self, progress: FollowProgress) -> None:
        self._live.update(render_follow_block(progress))

    def update_line(self, line: str) -> None:
        self._live.update(Text(line, style="bold"))


def render_line(progress: Progress) -> str:
    """The progress of a run, in one line."""
    seconds = max(progress.seconds(), 0.001)
    moving = sum(copy.bytes for _, copy in progress.running_copies)
    rows = progress.copied_rows + sum(copy.rows for _, copy in progress.running_copies)
    size = progress.copied_bytes + moving
    left = progress.seconds_left()
    parts = [
        f"{progress.step}: {progress.share():.0%}",
        f"{render_size(size)} ({render_size(size / seconds)}/s, {rows / seconds:,.0f} rows/s)",
        f"tables {progress.tables_done}/{progress.tables}",
        f"indexes {progress.indexes_done}/{progress.indexes}",
    ]
    if left is not None and progress.share() < 1:
        parts.append(f"{render_seconds(left)} left")
    return ", ".join(parts)


def render_block(progress: Progress) -> Group:
    """The live view."""
    if progress.copy_started_at is None:
        return Group(Text(f"… {progress.step}", style="bold"))
    lines: list[Text | ProgressBar] = [
        Text(render_line(progress), style="bold"),
        ProgressBar(total=1.0, completed=progress.share(), width=60),
    ]
    lines += running_lines(progress.running_copies, progress.running_indexes)
    return Group(*lines)


def render_follow(progress: FollowProgress) -> str:
    """The progress of a stream, in one line."""
    parts = [
        f"received {render_lsn(progress.received_lsn)}",
        f"spooled {render_lsn(progress.flushed_lsn)}",
        f"applied {render_lsn(progress.applied_lsn)}",
        f"{progress.changes_per_second:,.0f} changes/s",
    ]
    parts += _lag(progress)
    if not progress.is_applying:
        parts.append("apply is off")
    if progress.endpos is not None:
        parts.append(f"ends at {render_lsn(progress.endpos)}")
    return ", ".join(parts)


def _lag(progress: FollowProgress) -> list[str]:
    """How far it is behind the source; silence is said as such."""
    source = progress.source
    if source.held:
        parts = [f"holding back: {source.held}"]
    elif source.is_silent:
        return [source.describe_silence()]
    else:
        parts = []
    if progress.lag_bytes is None:
        return [*parts, "the source's position is not known yet"]
    if progress.lag_bytes:
        behind = render_seconds(progress.lag_seconds or 0.0)
        parts.append(f"{render_size(progress.lag_bytes)} and {behind} behind")
        if progress.seconds_left is not None:
            parts.append(f"{render_seconds(progress.seconds_left)} to catch up")
    elif source.is_out_of_reach:
        parts.append("the source can't be asked for its position")
    else:
        parts.append("nothing to apply")
    lost = source.seconds_until_lost
    if lost is not None and lost < LOST_SHOWN_SECONDS:
        parts.append(f"the slot is lost in {render_seconds(lost)}")
    return parts


def _slot_line(source: SourceProgress) -> str:
    contact = ""
    if source.contact_seconds is not None:
        contact = f", heard {render_seconds(source.contact_seconds)} ago"
    if not source.wal_status:
        return f"  source: not asked yet{contact}"
    text = f"  source: at {render_lsn(source.wal_lsn or 0)}{contact}; slot {source.wal_status}"
    if source.retained_bytes is not None:
        text += f", keeps {render_size(source.retained_bytes)} of WAL"
    if source.safe_wal_bytes is not None:
        text += f", {render_size(source.safe_wal_bytes)} left until it is lost"
    return text


def render_follow_block(progress: FollowProgress) -> Group:
    """The live view of a stream."""
    return Group(
        Text(render_follow(progress), style="bold"),
        Text(
            f"  {progress.transactions:,} transactions, {progress.changes:,} changes applied"
            + (f", {progress.skipped:,} skipped" if progress.skipped else "")
            + (f", {progress.overwritten:,} overwritten" if progress.overwritten else "")
        ),
        Text(_slot_line(progress.source)),
    )


def running_lines(copies: list[tuple[str, RunningCopy]], indexes: list[RunningIndex]) -> list[Text]:
    """A line for each copy and index under way, up to a number of them."""
    lines = [
        Text(f"  copy   {label}  {render_size(copy.bytes)}  {copy.rows:,} rows")
        for label, copy in copies[:LISTED]
    ]
    lines += [
        Text(f"  index  {index.name}  {index.phase}  {index.share:.0%}")
        for index in indexes[:LISTED]
    ]
    hidden = max(0, len(copies) - LISTED) + max(0, len(indexes) - LISTED)
    return [*lines, Text(f"  and {hidden} more")] if hidden else lines


def render_seconds(seconds: float) -> str:
    """`1h 02m`, `3m 20s`, `12 s`, `1.5 s`, `35 ms`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


def console() -> Console:
    """stdout; wide when it is not a terminal, so that no name is folded in a log."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def print_summary(summary: Summary, *, most_tables: int = 25) -> None:
    """The closing tables on stdout."""
    out = console()
    tables = Table(title="Tables", title_justify="left")
    tables.add_column("table", overflow="fold")
    for name in ("parts", "rows", "bytes", "copy", "indexes", "index time", "vacuum"):
        tables.add_column(name, justify="right")
    for table in summary.tables[:most_tables]:
        tables.add_row(
            Text(f"{table.schema}.{table.name}"),
            str(table.parts),
            f"{table.rows:,}",
            render_size(table.bytes),
            render_seconds(table.copy_seconds),
            str(table.indexes),
            render_seconds(table.index_seconds + table.constraint_seconds),
            render_seconds(table.vacuum_seconds),
        )
    out.print(tables)
    if len(summary.tables) > most_tables:
        out.print(f"and {len(summary.tables) - most_tables} more tables")
    steps = Table(title="Steps", title_justify="left")
    steps.add_column("step")
    steps.add_column("time", justify="right")
    for step in summary.steps:
        steps.add_row(str(step["name"]), render_seconds(float(str(step["seconds"]))))
    steps.add_section()
    steps.add_row("whole run", render_seconds(summary.seconds))
    out.print(steps)
    out.print(
        f"{len(summary.tables)} tables, {summary.rows:,} rows, "
        f"{render_size(summary.bytes)} copied; "
        f"{sum(table.indexes for table in summary.tables)} indexes, "
        f"{summary.foreign_keys} foreign keys, {summary.sequences} sequences, "
        f"{summary.large_objects} large objects, in {render_seconds(summary.seconds)}"
    )
