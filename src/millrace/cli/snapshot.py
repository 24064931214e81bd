"""`millrace snapshot`: hold one, for as long as a copy may need it."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer

from millrace.cli import options
from millrace.log import setup_logging
from millrace.postgres.connect import resolve
from millrace.snapshot.holder import CHECK_SECONDS, hold, stop_held
from millrace.stream.slot import prepare_source

log = logging.getLogger(__name__)


def snapshot(
    source: options.Source = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    stop: Annotated[
        bool, typer.Option("--stop", help="End the process that holds a snapshot for --dir.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Export the snapshot with a new replication slot, so that changes can be "
            "followed from exactly there.",
        ),
    ] = False,
    slot_name: Annotated[
        str, typer.Option(envvar="MILLRACE_SLOT_NAME", help="Name of the slot, with --follow.")
    ] = "millrace",
    plugin: Annotated[
        str, typer.Option(envvar="MILLRACE_PLUGIN", help="Output plugin, with --follow.")
    ] = "pgoutput",
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Hold an exported snapshot until told to stop.

    Prints its id and records it in the work directory, where `clone` and `copy` find it by
    themselves. A clone that dies can then be resumed under the same snapshot. Ends on Ctrl-C,
    on SIGTERM, or by `millrace snapshot --stop`; if the source drops the session, at once and
    with exit code 5.
    """
    setup_logging(verbose=verbose, quiet=quiet)
    if stop:
        held = stop_held(directory)
        log.info("snapshot %s is no longer held", held.id)
        return
    dsn = resolve(options.parse_dsn(source, "source"))
    slot = slot_name if follow else None

    def prepare() -> None:
        for warning in prepare_source(dsn, slot_name, plugin):
            log.warning("source: %s", warning)

    holding = hold(directory, dsn, slot=slot, plugin=plugin, before_slot=prepare)
    with suppress(KeyboardInterrupt), holding as (held, check):
        print(json.dumps(asdict(held)) if as_json else held.id, flush=True)
        log.info("holding snapshot %s of %s for %s", held.id, held.source, directory)
        while True:
            time.sleep(CHECK_SECONDS)
            check()
