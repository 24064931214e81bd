"""`millrace tube apply`, and what `tube run --config` reads.

Invariant: a dry run prints the steps that would be done, from the same code; with nothing to do
nothing is changed.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli import options
from millrace.cli.tube.options import Schema, Source
from millrace.config.dsn import Dsn
from millrace.log import setup_logging
from millrace.postgres.wire.connect import connect, resolve
from millrace.tube.apply import Changes, apply_changes, plan_changes
from millrace.tube.config import TubeFile, read_tube_file
from millrace.tube.config_watch import ConfigWatch
from millrace.tube.difference import Step

log = logging.getLogger(__name__)


def apply(
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="The TOML file.", show_default=False)
    ],
    source: Source = "",
    schema: Schema = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be changed, and change nothing.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Make tubes and attached tables as a file says.

    Creates tubes, changes their partitions and predicates, attaches tables, changes how they are
    attached, and detaches those that the file does not name. Everything is checked first; then each
    step is a transaction of its own. Tubes that the file does not name stay as they are. Applied
    again, it changes nothing.
    """
    setup_logging(verbose=verbose, quiet=quiet)
    file = read_tube_file(config)
    done: list[Step] = []

    def note(step: Step) -> None:
        done.append(step)
        if not as_json:
            print(_line(step))

    with connect(_address(file, source), "tube") as session:
        changes = plan_changes(session, file, schema or None)
        if dry_run:
            for step in changes.steps:
                note(step)
        else:
            apply_changes(session, changes, note)
    _print(changes, done, as_json=as_json, dry_run=dry_run)


def open_config(config: Path, source: str, schema: str, *, until_empty: bool) -> ConfigWatch:
    """What a file plans."""
    file = read_tube_file(config)
    return ConfigWatch(file, resolve(_address(file, source)), schema, until_empty=until_empty)


def _address(file: TubeFile, source: str) -> Dsn:
    """--source and MILLRACE_SOURCE go before the file."""
    if not source and file.source is not None:
        return file.source
    return options.parse_dsn(source, "source")


def _print(changes: Changes, done: list[Step], *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        value = {
            "dry_run": dry_run,
            "steps": [step.as_value() for step in done],
            "left_alone": list(changes.left_alone),
        }
        print(json.dumps(value))
        return
    if not done:
        print("nothing to change")
    for tube in changes.left_alone:
        log.info("tube %s is not in the file, and stays as it is", tube)
    waiting = dict.fromkeys((step.tube, table) for step in done for table in step.backfill)
    for tube, table in waiting:
        print(f"to deliver the rows that are there: millrace tube backfill {tube} {table}")


def _line(step: Step) -> str:
    place = f"tube {step.tube}, {step.table}" if step.table else f"tube {step.tube}"
    return f"{place}: {step.words}"
