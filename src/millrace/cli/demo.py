"""`millrace demo`: the main job, end to end, on throw-away servers.

Invariant: what it claims it has compared; both servers are gone afterwards, unless
they were asked to stay.
"""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from millrace.cli import options
from millrace.cli.compare import raise_difference
from millrace.cli.display import open_display, print_summary, render_seconds
from millrace.clone.compare_run import CompareSettings, compare_data
from millrace.clone.run import clone as run_clone
from millrace.clone.settings import CloneSettings
from millrace.clone.split import SplitSettings
from millrace.config.dsn import Dsn
from millrace.demo.shop import Writers, create_shop
from millrace.log import setup_logging
from millrace.postgres.embedded import open_cluster
from millrace.snapshot.export import open_snapshot
from millrace.spark.session import Engine, default_master

SOURCE_VERSION = 16
TARGET_VERSION = 18
JOBS = 4
SPLIT_BYTES = 64 * 1024 * 1024


def demo(
    megabytes: Annotated[
        int, typer.Option(min=5, max=100_000, help="Size of the shop database.")
    ] = 300,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the servers up until Ctrl-C.")
    ] = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Clone a busy shop database from PostgreSQL 16 to 18 and prove both sides equal.

    Starts two throw-away servers, fills the source, lets writers loose on it, clones it
    under one snapshot, and compares every table under that snapshot. Needs no PostgreSQL,
    no Docker and no root.
    """
    setup_logging(verbose=verbose, quiet=quiet or not verbose)
    settings = {"max_wal_size": "4GB"}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="millrace-demo-")))
        say(f"starting PostgreSQL {SOURCE_VERSION} (source) and {TARGET_VERSION} (target)")
        source = stack.enter_context(open_cluster(SOURCE_VERSION, settings=settings))
        target = stack.enter_context(open_cluster(TARGET_VERSION, settings=settings))
        uris = source.create_database("shop"), target.create_database("shop")
        say(f"filling the source with a shop of {megabytes} MB")
        create_shop(uris[0], megabytes=megabytes)
        with Writers(uris[0]) as writers:
            say("writers are at work on the source; cloning it under one snapshot")
            _clone_and_compare(*uris, writers, directory, quiet=quiet)
            if keep:
                _wait_for_a_person(*uris)


def _clone_and_compare(
    source_uri: str, target_uri: str, writers: Writers, directory: Path, *, quiet: bool
) -> None:
    source, target = Dsn.parse(source_uri), Dsn.parse(target_uri)
    with open_snapshot(source) as snapshot, Engine(default_master(2 * JOBS)) as engine:
        settings = CloneSettings(
            source,
            target,
            directory,
            table_jobs=JOBS,
            split=SplitSettings(SPLIT_BYTES),
            snapshot=snapshot.id,
        )
        with open_display(quiet=quiet) as display:
            result = run_clone(settings, engine, display)
        written = writers.committed
        assert result.summary is not None
        if not quiet:
            print_summary(result.summary, most_tables=12)
        say("comparing every table on both sides under the same snapshot")
        began = time.monotonic()
        compared = compare_data(CompareSettings(source, target, JOBS, snapshot.id), engine)
        seconds = time.monotonic() - began
    raise_difference(compared)
    rows = sum(one.source.rows for one in compared if one.source)
    say(
        f"equal: {len(compared)} tables, {rows:,} rows, counts and checksums "
        f"(in {render_seconds(seconds)}); meanwhile the writers committed {written:,} "
        "transactions on the source"
    )


def _wait_for_a_person(source_uri: str, target_uri: str) -> None:
    say("both servers stay up, and so do the writers, until Ctrl-C; connect with:")
    say(f"  psql '{source_uri}'")
    say(f"  psql '{target_uri}'")
    with suppress(KeyboardInterrupt):
        signal.pause()


def say(text: str) -> None:
    """Tell the story on stdout."""
    print(text, flush=True)
