"""`millrace follow`, `millrace cutover`, and the last step of a stream by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cli import options
from millrace.cli.asked import Asked
from millrace.cli.compare import print_compared, raise_difference
from millrace.cli.display import Display, console, open_display, render_seconds
from millrace.clone.compare_run import CompareSettings
from millrace.clone.progress import Progress
from millrace.errors import WorkDirError
from millrace.log import setup_logging
from millrace.lsn import parse_lsn, render_lsn
from millrace.spark.session import Engine
from millrace.stream.metrics import Metrics, serve_metrics
from millrace.stream.progress import FollowProgress, FollowResult
from millrace.stream.sentinel import Sentinel

if TYPE_CHECKING:
    from millrace.stream.cutover import CutoverResult

_ENDS = (
    "source", "target", "directory", "filters", "apply_jobs", "master", "conf",
    "as_json", "verbose", "quiet", "log_json",
)  # fmt: skip
APPLY_OPTIONS = (*_ENDS, "endpos", "on_conflict", "keep_spool", "metrics_port")
FOLLOW_OPTIONS = (*APPLY_OPTIONS, "max_spool", "max_slot_lag", "batches_from", "no_binary")
CUTOVER_OPTIONS = (*_ENDS, "compare_jobs", "rows")


def follow(asked: Asked) -> None:
    """Apply every change of the source since the snapshot, until the end position.

    Goes on with the stream of the work directory, which `millrace clone --follow`, `millrace
    snapshot --follow` or `millrace stream setup` began. Changes are received into a spool in that
    directory and applied from it. Stop it with Ctrl-C and start it again as often as you like:
    nothing is lost and nothing applied twice.

    Steer it from another terminal with `millrace stream sentinel`; end it with `millrace
    cutover`.

    Exit codes: 2 wrong option, 4 work directory, 5 a server failed or the slot is lost, 7 a change
    could not be applied.
    """
    # Numba takes half a second: only those who need it wait for it.
    from millrace.stream.follow import follow as run

    with _opened(asked) as (engine, display):
        result = run(asked.follow_settings(), engine, display)
    print_follow(result, as_json=asked.as_json, quiet=asked.quiet)


def apply(asked: Asked) -> None:
    """Apply the spool as it grows, until the end position.

    `millrace stream receive` fills the spool, in a process of its own. Without an end position it
    goes on until it is stopped.
    """
    _apply(asked, waits=True)


def catchup(asked: Asked) -> None:
    """Apply what is in the spool now, then end."""
    _apply(asked, waits=False)


def _apply(asked: Asked, *, waits: bool) -> None:
    from millrace.stream.follow import apply_spooled

    with _opened(asked) as (engine, display):
        result = apply_spooled(asked.follow_settings(), engine, display, waits=waits)
    print_follow(result, as_json=asked.as_json, quiet=asked.quiet)


def cutover(asked: Asked) -> None:
    """End the stream where the source stands now, and prove that both sides are equal.

    Stop the writers of the source first. Sets the end position, waits until a running `follow`
    has applied everything up to it (or follows by itself), sets the target's sequences, compares
    every table, and refreshes materialized views. Exit code 9, and no success, while a table
    differs: somebody still writes, or something is wrong. Run it again as often as you like.

    Afterwards point the applications to the target, and remove slot, publications and
    position with `millrace stream cleanup`.
    """
    from millrace.stream.cutover import cutover as run

    with _opened(asked) as (engine, display):
        settings = asked.follow_settings()
        compare = CompareSettings(
            settings.source,
            settings.target,
            asked.compare_jobs,
            rows=asked.rows,
            filters=options.read_rules(asked.filters),
        )
        result = run(settings, compare, engine, display)
    _print_cutover(result, as_json=asked.as_json, rows=asked.rows)
    raise_difference(result.compared)


@contextmanager
def _opened(asked: Asked) -> Iterator[tuple[Engine, FollowDisplay]]:
    """Spark, starting, and a view; the end position is in its place."""
    setup_logging(verbose=asked.verbose, quiet=asked.quiet, as_json=asked.log_json)
    require_stream(asked.directory)
    set_endpos(asked.directory, asked.endpos)
    slots = max(asked.apply_jobs, asked.compare_jobs)
    with (
        asked.engine(slots, streams=True) as engine,
        open_follow_display(quiet=asked.quiet, metrics_port=asked.metrics_port) as display,
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


def set_endpos(directory: Path, endpos: str) -> None:
    """The end position given on the command line; without one, the sentinel's stays."""
    if endpos:
        with Sentinel(directory) as sentinel:
            sentinel.set_endpos(parse_lsn(endpos))


class FollowDisplay:
    """Passes progress on to the view and to the metrics."""

    def __init__(self, display: Display, metrics: Metrics) -> None:
        self._display = display
        self._metrics = metrics

    def update(self, progress: Progress) -> None:
        self._display.update(progress)

    def update_follow(self, progress: FollowProgress) -> None:
        self._metrics.progress = progress
        self._display.update_follow(progress)


@contextmanager
def open_follow_display(*, quiet: bool, metrics_port: int | None) -> Iterator[FollowDisplay]:
    with serve_metrics(metrics_port) as metrics, open_display(quiet=quiet) as display:
        yield FollowDisplay(display, metrics)


def print_follow(result: FollowResult, *, as_json: bool, quiet: bool) -> None:
    """How the stream ended."""
    if as_json:
        print(json.dumps(asdict(result) | {"position": render_lsn(result.position)}))
    elif not quiet:
        done = result.applied
        console().print(
            f"applied {result.transactions:,} transactions, {done.changes:,} changes, up to "
            f"{render_lsn(result.position)}"
            + (f"; {done.skipped:,} changes skipped for conflicts" if done.skipped else "")
            + (f"; {done.overwritten:,} rows overwritten" if done.overwritten else "")
        )


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
                    "seconds": result.seconds,
                    "compared": compared,
                },
                default=str,
            )
        )
        return
    print_compared(result.compared, every=False, with_rows=rows)
    if result.is_equal:
        console().print(
            f"both sides are equal at {render_lsn(result.endpos)}: {len(result.compared)} tables "
            f"compared, {result.sequences} sequences set, {result.views} materialized views "
            f"refreshed, in {render_seconds(result.seconds)}; point the applications to the target"
        )
