"""`millrace list progress`: the progress of a run, shown in another terminal.

Invariant: it reads only; a running process does not notice.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from millrace.cli import options
from millrace.cli.display import console, print_summary, running_lines
from millrace.clone.status import Count, RunStatus, read_run_status
from millrace.clone.summary import read_summary
from millrace.config.size import render_size
from millrace.errors import WorkDirError
from millrace.log import setup_logging
from millrace.lsn import render_lsn
from millrace.workdir.stream_state import StreamStatus, read_stream_status


def progress(
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    target: options.Target = "",
    summary: Annotated[
        bool, typer.Option("--summary", help="Print the summary of a run that is done.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """The progress of the run in a work directory: running, stopped or done.

    Without --target it shows what the work directory knows; with the target of the run also
    what is running right now, and every part that is committed. The run is not disturbed.
    The percentage is that of the tables' bytes; indexes, constraints and foreign keys are
    counted separately. If the run has a stream, its state is shown as well.
    """
    setup_logging(quiet=True)
    if summary:
        _print_summary(directory, as_json=as_json)
        return
    dsn = options.parse_dsn(target, "target") if target else None
    found = read_run_status(directory, dsn)
    stream = read_stream_status(directory)
    if as_json:
        shown = None if stream is None else asdict(stream)
        print(json.dumps(found.as_dict() | {"stream": shown}, default=str))
        return
    print_run_status(found)
    if stream is not None:
        print_stream(stream)


def _print_summary(directory: Path, *, as_json: bool) -> None:
    found = read_summary(directory / "summary.json")
    if found is None:
        raise WorkDirError(
            f"{directory} has no run that is done",
            hint="without --summary, the progress of a running one is shown",
        )
    if as_json:
        print(json.dumps(asdict(found), default=str))
    else:
        print_summary(found)


def print_run_status(found: RunStatus) -> None:
    """A line on the run, a table of what is done, a line for each thing that is running."""
    out = console()
    ended = f", finished {found.finished_at}" if found.finished_at else ""
    out.print(Text(f"run {found.run_id}: {found.status}, started {found.started_at}{ended}"))
    out.print(Text(f"{found.source} to {found.target}"))
    if found.snapshot_state:
        out.print(Text(f"snapshot {found.snapshot}: {found.snapshot_state}"))
    listing = Table()
    listing.add_column("")
    for title in ("done", "total"):
        listing.add_column(title, justify="right")
    for name, count in _counts(found).items():
        listing.add_row(name, f"{count.done:,}", f"{count.total:,}")
    size = found.estimated_bytes
    listing.add_row("bytes (estimated)", render_size(size.done), render_size(size.total))
    out.print(listing)
    copied = f"{found.copied_rows:,} rows, {render_size(found.copied_bytes)} copied"
    out.print(Text(f"{found.percent:.1f}% of the tables' bytes; {copied}"))
    if found.steps:
        out.print(Text(f"last step done: {found.steps[-1]}"))
    for line in running_lines(list(found.running_copies), list(found.running_indexes)):
        out.print(line)
    if found.status == "running" and not found.is_watched:
        out.print(Text("what is running right now is known to the target: give --target"))


def print_stream(found: StreamStatus) -> None:
    """A line on the stream of the run."""
    applied = render_lsn(found.applied_lsn) if found.applied_lsn else "nothing yet"
    error = f": {found.error}" if found.error else ""
    console().print(
        Text(f"stream of slot {found.slot_name}: {found.label}{error}; applied up to {applied}")
    )


def _counts(found: RunStatus) -> dict[str, Count]:
    return {
        "tables": found.tables,
        "parts": found.parts,
        "indexes": found.indexes,
        "constraints": found.constraints,
        "foreign keys": found.foreign_keys,
        "large objects": found.large_objects,
        "tables vacuumed": found.vacuumed,
    }
