"""`millrace snapshot`: hold one, for as long as a copy may need it.

Invariant: the id is printed once the snapshot can be used, and the process ends with the session
that holds it.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli import options
from millrace.errors import WorkDirError
from millrace.follow.audit.baseline import note_counters
from millrace.follow.bound_copy import read_stream, require_no_stream, write_stream
from millrace.follow.membership import has_all
from millrace.follow.settings import DEFAULT_PLUGIN, DEFAULT_SLOT
from millrace.follow.slot import prepare_source
from millrace.follow.slot_making import Making, making_slot
from millrace.log import setup_logging
from millrace.postgres.wire.connect import resolve
from millrace.snapshot.ended import read_end_of
from millrace.snapshot.holder import CHECK_SECONDS, hold, read_held, stop_held
from millrace.spool.kind import SpoolKind
from millrace.workdir.lock import read_holder

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
    ] = DEFAULT_SLOT,
    slot_timeout: options.SlotTimeout = 0,
    replica_identity_full: options.IdentityFull = False,
    plugin: Annotated[
        str, typer.Option(envvar="MILLRACE_PLUGIN", help="Output plugin, with --follow.")
    ] = DEFAULT_PLUGIN,
    spool: Annotated[
        SpoolKind,
        typer.Option(
            envvar="MILLRACE_SPOOL",
            metavar="[files|table]",
            help="Where the stream keeps received changes, with --follow.",
        ),
    ] = SpoolKind.FILES,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Hold an exported snapshot until it is stopped.

    Prints its id and records it in the work directory, where `clone` and `copy` find
    it: several commands then see the source at the same instant. `millrace clone` needs none: it
    holds its own in a process like this. Ends on Ctrl-C,
    SIGTERM or SIGHUP, or by `millrace snapshot --stop`; if the source drops the session, at once
    and with exit code 5.

    --stop ends the snapshot process of a stopped clone, too: its copy can't be resumed then, and
    the slot and publications of `clone --follow` are dropped.

    With --follow it is the beginning of a stream: when the clone is done, end this process and
    continue with `millrace follow` in the same work directory. The slot stays.
    """
    setup_logging(verbose=verbose, quiet=quiet)
    if stop:
        _stop(directory)
        return
    dsn = resolve(options.parse_dsn(source, "source"))
    slot = slot_name if follow else None

    def prepare() -> None:
        require_no_stream(directory)
        note_counters(directory, dsn)
        for warning in prepare_source(dsn, slot_name, plugin, identity_full=replica_identity_full):
            log.warning("source: %s", warning)

    holding = hold(
        directory,
        dsn,
        slot=slot,
        plugin=plugin,
        before_slot=prepare,
        is_slot_whole=lambda exported: has_all(dsn, slot_name, plugin, None, exported),
        slot_timeout_seconds=slot_timeout or None,
    )
    making = making_slot(directory, dsn, slot_name) if follow else nullcontext(Making())
    with suppress(KeyboardInterrupt), making as made, holding as (held, check):
        made.made()
        if follow:
            write_stream(directory, held, dsn, spool)
        print(json.dumps(asdict(held)) if as_json else held.id, flush=True)
        log.info("holding snapshot %s of %s for %s", held.id, held.source, directory)
        try:
            while True:
                time.sleep(CHECK_SECONDS)
                check()
        except KeyboardInterrupt:
            made.keep()  # the changes since the snapshot are for whoever has copied it
            if follow:
                _tell_of_slot(directory, slot_name)
            raise


def _stop(directory: Path) -> None:
    held = read_held(directory)
    if held is not None and held.is_of_run and (pid := read_holder(directory)) is not None:
        raise WorkDirError(
            f"process {pid} copies under snapshot {held.id}",
            hint=f"stop that first: kill {pid}",
        )
    held = stop_held(directory)
    log.info("snapshot %s is no longer held", held.id)
    end = read_end_of(directory, held.id)
    if end is not None:
        log.warning("%s", end)


def _tell_of_slot(directory: Path, slot: str) -> None:
    stream = read_stream(directory)
    is_copied = stream is not None and bool(stream.encoding)
    log.warning(
        "replication slot %s stays, and the source keeps WAL for it: %s, or remove it with "
        "`millrace stream cleanup --slot-name %s`",
        slot,
        "continue with `millrace follow`"
        if is_copied
        else "nothing was copied under its snapshot; if the target has its rows already, "
        "continue with `millrace stream setup`",
        slot,
    )
