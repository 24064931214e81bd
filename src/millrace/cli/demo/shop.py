"""`millrace demo`: the main job, end to end, on throw-away servers.

Invariant: what it claims it has compared; both servers are gone afterwards, unless
they were asked to stay.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from millrace.cli import options
from millrace.cli.compare import raise_difference
from millrace.cli.display import print_summary, render_seconds
from millrace.cli.follow import open_follow_display, raise_refused
from millrace.clone.run import CloneResult, in_thread
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings
from millrace.config.dsn import Dsn
from millrace.demo.shop import Writers, create_shop
from millrace.follow.settings import FollowSettings, SlotSettings
from millrace.log import LogSettings, setup_logging
from millrace.lsn import render_lsn
from millrace.postgres.program.embedded import open_cluster
from millrace.postgres.wire.connect import resolve
from millrace.route import Route
from millrace.spark.session import Engine, default_master
from millrace.split.plan import SplitSettings

SOURCE_VERSION = 16
TARGET_VERSION = 18
JOBS = 4
SPLIT_BYTES = 64 * 1024 * 1024
# How long changes are followed before the cut-over.
FOLLOW_SECONDS = 8.0
# How long following may take to end, once it is stopped or Spark is gone: to stop the receiver,
# above all.
END_SECONDS = 60.0

app = typer.Typer()


@app.callback(invoke_without_command=True)
def demo(
    context: typer.Context,
    megabytes: Annotated[
        int, typer.Option(min=5, max=100_000, help="Size of the shop database.")
    ] = 300,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the servers running until Ctrl-C.")
    ] = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Move a busy shop database from PostgreSQL 16 to 18 and prove both sides equal.

    Starts two throw-away servers, fills the source, starts writers on it, clones it under one
    snapshot, applies what the writers change meanwhile, then stops them, cuts over and compares
    every table. Needs no PostgreSQL, no Docker and no root.
    """
    if context.invoked_subcommand is not None:
        return
    setup_logging(verbose=verbose, quiet=quiet or not verbose)
    settings = {"max_wal_size": "4GB"}
    with ExitStack() as stack:
        # What was left running when it is stopped may still write there.
        folder = TemporaryDirectory(prefix="millrace-demo-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(folder))
        say(f"starting PostgreSQL {SOURCE_VERSION} (source) and {TARGET_VERSION} (target)")
        source = stack.enter_context(open_cluster(SOURCE_VERSION, settings=settings))
        target = stack.enter_context(open_cluster(TARGET_VERSION, settings=settings))
        uris = source.create_database("shop"), target.create_database("shop")
        say(f"filling the source with a shop of {megabytes} MB")
        create_shop(uris[0], megabytes=megabytes)
        with Writers(uris[0]) as writers:
            say("writers are at work on the source; cloning it under the snapshot of a slot")
            _migrate(*uris, writers, directory, quiet=quiet)
            if keep:
                _wait_for_a_person(*uris)


def _migrate(
    source_uri: str, target_uri: str, writers: Writers, directory: Path, *, quiet: bool
) -> None:
    """Clone, follow, cut over."""
    # Numba takes half a second: only those who need it wait for it.
    from millrace.follow.clone_follow import clone_and_follow
    from millrace.follow.cutover import cutover

    source, target = resolve(Dsn.parse(source_uri)), resolve(Dsn.parse(target_uri))
    clone_settings = CloneSettings(
        Route(source, target, directory), table_jobs=JOBS, split=SplitSettings(SPLIT_BYTES)
    )
    settings = FollowSettings(Route(source, target, directory), log=LogSettings(quiet=True))
    cloned: Future[CloneResult] = Future()
    stop = threading.Event()
    with (
        _ended_after() as threads,
        Engine(default_master(2 * JOBS), log_path=directory / "spark.log", streams=True) as engine,
        open_follow_display(quiet=quiet, metrics_port=None) as display,
        ExitStack() as leaving,
    ):
        following = in_thread(
            partial(
                clone_and_follow,
                clone_settings,
                settings,
                SlotSettings("millrace_demo"),
                engine,
                display,
                on_cloned=cloned.set_result,
                stop=stop,
            )
        )
        threads.append(following)
        leaving.callback(_stop_stream, stop, cloned, following)
        either: list[Future[Any]] = [cloned, following]
        wait(either, return_when=FIRST_COMPLETED)
        if not cloned.done():
            following.result()
        summary = cloned.result().summary
        if summary is not None and not quiet:
            print_summary(summary, most_tables=12)
        say("cloned; the writers continue, and their changes are applied")
        wait([following], timeout=FOLLOW_SECONDS)
        writers.close()
        say(f"writers stopped after {writers.committed:,} transactions; cutting over")
        compare = CompareSettings(Route(source, target), JOBS)
        result = cutover(settings, compare, engine, display)
        followed = following.result()
    raise_difference(result.compared)
    raise_refused(result.refused + followed.refused)
    rows = sum(one.source.rows for one in result.compared if one.source)
    say(
        f"equal at {render_lsn(result.endpos)}: {len(result.compared)} tables, {rows:,} rows, "
        f"counts and checksums; {followed.transactions:,} transactions with "
        f"{followed.applied.changes:,} changes were applied after the snapshot; the cut-over took "
        f"{render_seconds(result.seconds)}"
    )


def _stop_stream(stop: threading.Event, cloned: Future[Any], following: Future[Any]) -> None:
    """If we leave early: what it applies needs Spark, so it ends first. A copy does not look at
    `stop`; it ends when Spark does."""
    stop.set()
    if cloned.done():
        wait([following], timeout=END_SECONDS)


@contextmanager
def _ended_after() -> Iterator[list[Future[Any]]]:
    """Wait for these at the end: when we leave early Spark goes, which stops a copy, and they clean
    up on servers that are still there."""
    threads: list[Future[Any]] = []
    try:
        yield threads
    finally:
        wait(threads, timeout=END_SECONDS)


def _wait_for_a_person(source_uri: str, target_uri: str) -> None:
    say("both servers stay up until Ctrl-C; connect with:")
    say(f"  psql '{source_uri}'")
    say(f"  psql '{target_uri}'")
    with suppress(KeyboardInterrupt):
        signal.pause()


def say(text: str) -> None:
    """Tell the story on stdout."""
    print(text, flush=True)
