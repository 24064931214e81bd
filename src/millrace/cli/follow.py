"""`millrace follow`, `millrace cutover`, and the last step of a stream on its own.

Invariant: an end at which tables are not proved to be equal is exit code 9, after it is printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from millrace.cli.command_options import CommandOptions, command
from millrace.cli.compare import print_compared, raise_difference
from millrace.cli.display import Display, console, open_display, render_seconds
from millrace.clone.progress import Progress
from millrace.compare.run import CompareSettings
from millrace.errors import MismatchError, WorkDirError
from millrace.follow.audit.finding import LARGE_OBJECTS, Finding
from millrace.follow.metrics import StreamMetrics, serve_metrics
from millrace.follow.pause import PauseSettings
from millrace.follow.progress import FollowProgress, FollowResult
from millrace.follow.settings import LOOPBACK
from millrace.log import setup_logging
from millrace.lsn import render_lsn
from millrace.spark.session import Engine

if TYPE_CHECKING:
    from millrace.follow.cutover import CutoverResult

_ENDS = (
    "source", "target", "directory", "filters", "apply_jobs", "master", "conf",
    "accept_unfollowed", "as_json", "verbose", "quiet", "log_json",
)  # fmt: skip
_APPLY_OPTIONS = (
    *_ENDS, "endpos", "on_conflict", "keep_spool", "sequence_interval", "metrics_port",
    "metrics_host",
)  # fmt: skip
_FOLLOW_OPTIONS = (*_APPLY_OPTIONS, "ddl", "max_spool", "max_slot_lag", "batches_from", "no_binary")
_CUTOVER_OPTIONS = (
    *_ENDS, "compare_jobs", "rows", "compare", "pause", "pause_command", "resume_command",
    "pgbouncer", "pgbouncer_database",
)  # fmt: skip


@partial(command, names=_FOLLOW_OPTIONS)
def follow(asked: CommandOptions) -> None:
    """Apply every change of the source since the snapshot, until the end position.

    Continues the stream of the work directory, which `millrace clone --follow`, `millrace
    snapshot --follow` or `millrace stream setup` began. Changes are received into a spool in that
    directory and applied from it. Stop it with Ctrl-C and start it again as often as you like:
    nothing is lost and nothing applied twice.

    Steer it from another terminal with `millrace stream sentinel`; end it with `millrace
    cutover`. At the end position the target's sequences are set to the source's values.

    Exit codes: 2 wrong option, 4 work directory, 5 a server failed or the slot is lost, 7 a change
    could not be applied, 9 the target is past the end position, or tables are not proved to be
    equal, because not all of their changes are followed.
    """
    # Numba takes half a second: only those who need it wait for it.
    from millrace.follow.stream import follow as run

    with _opened(asked) as (engine, display):
        result = run(asked.follow_settings(), engine, display)
    print_follow(result, as_json=asked.as_json, quiet=asked.quiet)


@partial(command, names=_APPLY_OPTIONS)
def apply(asked: CommandOptions) -> None:
    """Apply the spool as it grows, until the end position.

    `millrace stream receive` fills the spool, in a process of its own. Without an end position it
    runs until it is stopped. The source must be reachable only for an end position and for
    `--filters`.
    """
    _apply(asked, waits=True)


@partial(command, names=_APPLY_OPTIONS)
def catchup(asked: CommandOptions) -> None:
    """Apply what is in the spool now, then end.

    With an end position it is an error if the spool does not reach it. Sequences are set only at
    an end position. The source must be reachable only for an end position and for `--filters`.
    """
    _apply(asked, waits=False)


def _apply(asked: CommandOptions, *, waits: bool) -> None:
    from millrace.follow.stream import apply_spooled

    with _opened(asked) as (engine, display):
        settings = asked.follow_settings(needs_source=False)
        result = apply_spooled(settings, engine, display, waits=waits)
    print_follow(result, as_json=asked.as_json, quiet=asked.quiet)


@partial(command, names=_CUTOVER_OPTIONS)
def cutover(asked: CommandOptions) -> None:
    """End the stream at the source's current position, and prove that both sides are equal.

    Stop the writers of the source first, or let --pause do it. Sets the end position, waits until
    a running `follow` has applied everything up to it (or applies it itself), sets the target's
    sequences, compares every table, looks whether anything was written to the source meanwhile, and
    refreshes materialized views. Exit code 9 if a table
    differs, or something still writes to the source. Then the end position is removed, so
    that `millrace follow` continues, and a source that was paused is given back as it was. Run it
    again as often as you like.

    Afterwards point the applications to the target, and remove slot, publications and
    position with `millrace stream cleanup`.
    """
    from millrace.follow.cutover import cutover as run

    with _opened(asked) as (engine, display):
        settings = asked.follow_settings()
        compare = CompareSettings(
            settings.route,
            asked.compare_jobs,
            rows=asked.rows,
        )
        pause = PauseSettings(
            asked.pause,
            asked.pause_command,
            asked.resume_command,
            asked.pgbouncer,
            asked.pgbouncer_database,
        )
        result = run(settings, compare, engine, display, pause, asked.compare)
    _print_cutover(result, as_json=asked.as_json, rows=asked.rows)
    raise_difference(result.compared, result.accepted)
    raise_refused(result.refused)


@contextmanager
def _opened(asked: CommandOptions) -> Iterator[tuple[Engine, FollowDisplay]]:
    """Spark, starting, and a view."""
    setup_logging(verbose=asked.verbose, quiet=asked.quiet, as_json=asked.log_json)
    require_stream(asked.directory)
    # One more, for tables that are copied again meanwhile.
    slots = max(asked.apply_workers() + 1, asked.compare_jobs)
    with (
        asked.engine(slots, streams=True) as engine,
        open_follow_display(
            quiet=asked.quiet, metrics_port=asked.metrics_port, metrics_host=asked.metrics_host
        ) as display,
    ):
        engine.start()
        yield engine, display


def require_stream(directory: Path) -> None:
    """Say what to do when nothing was ever begun here, and make nothing."""
    if not directory.exists():
        raise WorkDirError(
            f"there is no work directory {directory}",
            hint="check --dir; begin with `millrace clone --follow`",
        )


class FollowDisplay:
    """Passes progress on to the view and to the metrics."""

    def __init__(self, display: Display, metrics: StreamMetrics) -> None:
        self._display = display
        self._metrics = metrics

    def update(self, progress: Progress) -> None:
        self._display.update(progress)

    def update_follow(self, progress: FollowProgress) -> None:
        self._metrics.update(progress)
        self._display.update_follow(progress)


@contextmanager
def open_follow_display(
    *, quiet: bool, metrics_port: int | None, metrics_host: str = LOOPBACK
) -> Iterator[FollowDisplay]:
    with (
        serve_metrics(metrics_port, metrics_host) as metrics,
        open_display(quiet=quiet) as display,
    ):
        yield FollowDisplay(display, metrics)


def print_follow(result: FollowResult, *, as_json: bool, quiet: bool) -> None:
    """How the stream ended; raises if tables may differ."""
    if as_json:
        print(json.dumps(asdict(result) | {"position": render_lsn(result.position)}))
    elif not quiet:
        done = result.applied
        console().print(
            f"applied {result.transactions:,} transactions, {done.changes:,} changes, up to "
            f"{render_lsn(result.position)}"
            + (f"; {done.skipped:,} changes skipped for conflicts" if done.skipped else "")
            + (f"; {done.overwritten:,} rows overwritten" if done.overwritten else "")
            + (
                "; sequences were left as they are"
                if result.sequences is None
                else f"; {result.sequences:,} sequences set"
            )
        )
        print_unfollowed(result.unfollowed)
    raise_refused(result.refused)


def raise_refused(refused: tuple[Finding, ...]) -> None:
    """MismatchError if a table may differ that was not accepted; it is printed by then."""
    if not refused:
        return
    names = ", ".join(one.table for one in refused[:5])
    raise MismatchError(
        f"{len(refused)} tables are not proved to be equal: {names}",
        hint=_how_to_prove(refused),
        is_printed=True,
    )


def _how_to_prove(refused: tuple[Finding, ...]) -> str:
    ways = []
    if any(one.table != LARGE_OBJECTS for one in refused):
        ways.append("compare them (millrace compare data --table NAME) and copy again what differs")
    if any(one.table == LARGE_OBJECTS for one in refused):
        ways.append(
            "copy large objects again when nobody writes them: SELECT lo_unlink(oid) FROM "
            "pg_largeobject_metadata on the target, then millrace copy large-objects with another "
            "--dir; cutover compares them"
        )
    return "; ".join(ways) + "; or accept them: --accept-unfollowed NAME"


def print_unfollowed(found: tuple[Finding, ...]) -> None:
    """A line for each."""
    for one in found:
        accepted = " (accepted)" if one.is_accepted else ""
        console().print(Text(f"{one.kind}: {one.table}: {one.reason}{accepted}"))


def _print_cutover(result: CutoverResult, *, as_json: bool, rows: bool) -> None:
    if as_json:
        compared = [asdict(one) | {"equal": one.is_equal} for one in result.compared]
        print(
            json.dumps(
                {
                    "endpos": render_lsn(result.endpos),
                    "sequences": result.sequences,
                    "materialized_views": result.views,
                    "equal": result.is_equal,
                    "unfollowed": [asdict(one) for one in result.unfollowed],
                    "accepted": sorted(result.accepted),
                    "seconds": result.seconds,
                    "pause_seconds": result.pause_seconds,
                    "is_compared": result.is_compared,
                    "compared": compared,
                },
                default=str,
            )
        )
        return
    print_compared(result.compared, every=False, with_rows=rows)
    print_unfollowed(result.unfollowed)
    if result.is_good:
        but = "" if result.is_equal else " but for what was accepted"
        state = f"both sides are equal{but}" if result.is_compared else "everything is applied"
        console().print(
            f"{state} at {render_lsn(result.endpos)}: "
            f"{len(result.compared) if result.is_compared else 'no'} tables "
            f"compared, {result.sequences} sequences set, {result.views} materialized views "
            f"refreshed, in {render_seconds(result.seconds)}, writers paused for "
            f"{render_seconds(result.pause_seconds)}; point the applications to the target"
        )
