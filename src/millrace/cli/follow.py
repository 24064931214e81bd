"""`millrace follow` and `millrace cutover`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.cli import options
from millrace.cli.compare import print_compared, raise_difference
from millrace.cli.display import Display, console, open_display, render_seconds
from millrace.clone.compare_run import CompareSettings
from millrace.clone.progress import Progress
from millrace.config.size import parse_size
from millrace.errors import WorkDirError
from millrace.log import setup_logging
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.connect import resolve
from millrace.spark.session import Engine, default_master, parse_conf
from millrace.stream.metrics import Metrics, serve_metrics
from millrace.stream.progress import FollowProgress, FollowResult
from millrace.stream.sentinel import Sentinel
from millrace.stream.settings import FollowSettings, LogSettings, OnConflict

if TYPE_CHECKING:
    from millrace.stream.cutover import CutoverResult

STREAM = "Changes"

ApplyJobs = Annotated[
    int,
    typer.Option(
        envvar="MILLRACE_APPLY_JOBS",
        min=1,
        max=64,
        help="Connections that apply, each with tables of its own. With 1 no source transaction "
        "is ever seen in part; with more, tables may be at different transactions meanwhile. A "
        "stream keeps the number it began with.",
        rich_help_panel=STREAM,
    ),
]
Conflict = Annotated[
    OnConflict,
    typer.Option(
        "--on-conflict",
        envvar="MILLRACE_ON_CONFLICT",
        help="What to do about a change whose row is not there, or whose place is taken.",
        rich_help_panel=STREAM,
    ),
]
MaxSpool = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_MAX_SPOOL",
        metavar="SIZE",
        help="Stop reading from the source while the spool holds more than this; 0: no limit.",
        rich_help_panel=STREAM,
    ),
]
MaxSlotLag = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_MAX_SLOT_LAG",
        metavar="SIZE",
        help="Warn, or stop if the spool is full, when the slot makes the source keep more WAL "
        "than this; 0: no limit.",
        rich_help_panel=STREAM,
    ),
]
EndPos = Annotated[
    str,
    typer.Option(
        "--endpos",
        envvar="MILLRACE_ENDPOS",
        metavar="LSN",
        help="End when everything up to here is applied, and nothing after it.",
        show_default=False,
        rich_help_panel=STREAM,
    ),
]
KeepSpool = Annotated[
    bool,
    typer.Option(
        "--keep-spool",
        help="Do not remove what is applied from the spool.",
        rich_help_panel=STREAM,
    ),
]
NoBinary = Annotated[
    bool,
    typer.Option(
        "--no-binary",
        envvar="MILLRACE_NO_BINARY",
        help="Receive values as text, even where all types could come in binary.",
        rich_help_panel=STREAM,
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        envvar="MILLRACE_METRICS_PORT",
        min=1,
        max=65535,
        help="Serve Prometheus metrics on this port.",
        show_default=False,
        rich_help_panel=STREAM,
    ),
]


def follow(
    source: options.Source = "",
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    filters: options.Filters = None,
    endpos: EndPos = "",
    apply_jobs: ApplyJobs = 1,
    on_conflict: Conflict = OnConflict.STOP,
    max_spool: MaxSpool = "0",
    max_slot_lag: MaxSlotLag = "0",
    keep_spool: KeepSpool = False,
    no_binary: NoBinary = False,
    metrics_port: MetricsPort = None,
    master: options.Master = "",
    conf: options.Conf = [],  # noqa: B006 (typer's way)
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    log_json: options.LogJson = False,
) -> None:
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
    from millrace.stream.follow import follow as run_follow

    setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
    settings = follow_settings(
        source=source,
        target=target,
        directory=directory,
        filters=filters,
        apply_jobs=apply_jobs,
        on_conflict=on_conflict,
        max_spool=max_spool,
        max_slot_lag=max_slot_lag,
        keep_spool=keep_spool,
        no_binary=no_binary,
        log=LogSettings(verbose, quiet, log_json),
    )
    require_stream(directory)
    set_endpos(directory, endpos)
    engine = Engine(
        master or default_master(max(2, apply_jobs)), parse_conf(conf), directory / "spark.log"
    )
    with engine, open_follow_display(quiet=quiet, metrics_port=metrics_port) as display:
        result = run_follow(settings, engine, display)
    print_follow(result, as_json=as_json, quiet=quiet)


def cutover(
    source: options.Source = "",
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    filters: options.Filters = None,
    apply_jobs: ApplyJobs = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Parts compared at once.")] = 4,
    rows: Annotated[
        bool, typer.Option("--rows", help="Name the rows that differ, by their keys.")
    ] = False,
    master: options.Master = "",
    conf: options.Conf = [],  # noqa: B006 (typer's way)
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """End the stream where the source stands now, and prove that both sides are equal.

    Stop the writers of the source first. Sets the end position, waits until a running `follow`
    has applied everything up to it (or follows by itself), sets the target's sequences, and
    compares every table. Exit code 9, and no success, while a table differs: somebody still
    writes, or something is wrong. Run it again as often as you like.

    Afterwards point the applications to the target, and remove slot, publications and
    position with `millrace stream cleanup`.
    """
    from millrace.stream.cutover import cutover as run_cutover

    setup_logging(verbose=verbose, quiet=quiet)
    settings = follow_settings(
        source=source,
        target=target,
        directory=directory,
        filters=filters,
        apply_jobs=apply_jobs,
        log=LogSettings(verbose, quiet),
    )
    require_stream(directory)
    compare = CompareSettings(
        settings.source,
        settings.target,
        jobs,
        rows=rows,
        filters=options.read_rules(filters),
    )
    engine = Engine(
        master or default_master(max(jobs, apply_jobs)), parse_conf(conf), directory / "spark.log"
    )
    with engine, open_follow_display(quiet=quiet, metrics_port=None) as display:
        engine.start()
        result = run_cutover(settings, compare, engine, display)
    _print_cutover(result, as_json=as_json, rows=rows)
    raise_difference(result.compared)


def follow_settings(
    *,
    source: str,
    target: str,
    directory: Path,
    filters: Path | None = None,
    apply_jobs: int = 1,
    on_conflict: OnConflict = OnConflict.STOP,
    max_spool: str = "0",
    max_slot_lag: str = "0",
    keep_spool: bool = False,
    no_binary: bool = False,
    log: LogSettings,
) -> FollowSettings:
    """What the engine has to know; looks up what the filters leave out."""
    from millrace.stream.begin import read_left

    dsn = resolve(options.parse_dsn(source, "source"))
    return FollowSettings(
        source=dsn,
        target=resolve(options.parse_dsn(target, "target")),
        directory=directory,
        apply_jobs=apply_jobs,
        on_conflict=on_conflict,
        max_spool_bytes=parse_size(max_spool) or None,
        max_slot_lag_bytes=parse_size(max_slot_lag) or None,
        binary=not no_binary,
        keep_spool=keep_spool,
        left=read_left(dsn, options.read_rules(filters)),
        log=log,
    )


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
            f"compared, {result.sequences} sequences set, in {render_seconds(result.seconds)}; "
            "point the applications to the target"
        )
