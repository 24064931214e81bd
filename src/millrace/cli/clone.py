"""`millrace clone`.

Invariant: results go to stdout, progress and log to stderr; what a stream would refuse later is
refused before the first row is copied.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from millrace.cli.again import telling_how_to_continue
from millrace.cli.clone_all import clone_all
from millrace.cli.command_options import CommandOptions, command
from millrace.cli.display import open_display, print_summary
from millrace.cli.follow import open_follow_display, print_follow
from millrace.cli.plan import print_plan
from millrace.clone.run import CloneResult, dry_run
from millrace.clone.run import clone as run_clone
from millrace.clone.settings import CloneSettings
from millrace.follow.settings import SlotSettings
from millrace.log import setup_logging
from millrace.snapshot.holder import read_held
from millrace.spark.session import parse_conf
from millrace.spool.kind import SpoolKind


@command
def clone(asked: CommandOptions) -> None:
    """Copy a whole database under one snapshot.

    Schema, rows, indexes, constraints, sequences, large objects: everything the source
    database holds at one instant, while it stays in use. The target database must
    exist and be empty.

    Tables are copied by Spark tasks, --table-jobs at once, the largest first. Indexes of a
    table start as soon as it is copied. A table above --split-tables-larger-than is copied in
    several parts at once.

    Stopped by Ctrl-C, a crash or a failed step, it loses nothing that is committed: a process of
    its own holds the snapshot for --snapshot-keep, and the same command with --resume continues.

    With --all-databases every database of the source's server is copied; the two URIs name any
    database that accepts connections, and each has its work directory in --dir.

    With --follow the copy is the beginning: changes since its snapshot are received while it
    runs, and applied after it, until the end position.

    Exit codes: 2 wrong option, 3 a server is not ready (preflight), 4 work directory,
    5 a server failed, 7 a change could not be applied, 9 (with --follow) tables are not proved to
    be equal at the end, 70 a bug.
    """
    setup_logging(verbose=asked.verbose, quiet=asked.quiet, as_json=asked.log_json)
    settings = asked.settings()
    parse_conf(asked.conf)  # a dry run, too, refuses a wrong one
    if asked.all_databases:
        clone_all(asked, settings)
    elif asked.is_dry_run:
        print_plan(dry_run(settings), jobs=asked.table_jobs, as_json=asked.as_json)
    else:
        with telling_how_to_continue(settings):
            (_clone_and_follow if asked.follow else run_and_tell)(asked, settings)


def _clone_and_follow(asked: CommandOptions, settings: CloneSettings) -> None:
    # Numba takes half a second: only those who need it wait for it.
    from millrace.follow.clone_follow import clone_and_follow

    def tell(result: CloneResult) -> None:
        if result.summary is not None and not asked.as_json and not asked.quiet:
            print_summary(result.summary)

    slot = SlotSettings(
        asked.slot_name,
        asked.plugin,
        asked.spool,
        timeout_seconds=asked.slot_timeout or None,
        identity_full=asked.replica_identity_full,
        ddl=asked.ddl,
    )
    follow_settings = asked.follow_settings()
    with (
        asked.engine() as engine,
        open_follow_display(
            quiet=asked.quiet, metrics_port=asked.metrics_port, metrics_host=asked.metrics_host
        ) as display,
    ):
        result = clone_and_follow(settings, follow_settings, slot, engine, display, on_cloned=tell)
    print_follow(result, as_json=asked.as_json, quiet=asked.quiet)


def run_and_tell(asked: CommandOptions, settings: CloneSettings) -> None:
    """Do it, and print what was done."""
    _check_stream(settings)
    with asked.engine() as engine, open_display(quiet=asked.quiet) as display:
        result = run_clone(settings, engine, display)
    if result.summary is None:
        if asked.as_json:
            print(json.dumps({"finished": True, "directory": str(settings.directory)}))
        return  # resumed, and nothing was left to do
    if asked.as_json:
        print(json.dumps(asdict(result.summary), default=str))
    elif not asked.quiet:
        print_summary(result.summary)


def _check_stream(settings: CloneSettings) -> None:
    """A copy under the snapshot of a slot is to be followed: what would prevent that is reported
    now, and not after hours of copying."""
    held = read_held(settings.directory)
    if held is not None and held.slot is not None:
        # Numba takes half a second: only those who need it wait for it.
        from millrace.follow.setup import require_place, require_silence

        require_silence(settings.target)
        # Where the spool will be is not known yet.
        require_place(settings.route, SpoolKind.TABLE)
