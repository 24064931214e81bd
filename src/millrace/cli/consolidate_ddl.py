"""`millrace consolidate ddl`: what became of a source's DDL, and the ways on where it failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.table import Table
from rich.text import Text

from millrace.cli import options
from millrace.cli.consolidate_options import DEFAULT_CONFIG, Config, SourceName
from millrace.cli.display import console
from millrace.consolidate.config import Consolidation, read_config
from millrace.errors import ApplyError, ConfigError

app = typer.Typer(
    no_args_is_help=True,
    help="Show what became of a source's DDL; edit, skip or retry the statement it is halted at.",
)

_SHOWN = 60


@app.command("list")
def list_(
    source: SourceName,
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    last: Annotated[
        int, typer.Option(metavar="N", min=1, help="Only so many of them, the newest first.")
    ] = 100,
    as_json: options.AsJson = False,
) -> None:
    """List the captured statements of a source: when, what, and what became of each.

    Statuses: replayed, edited (another text ran), skipped (by a person), left out (it means nothing
    on the target), failed (the source is halted there), blocked (it waits for a lock).
    """
    from millrace.consolidate.ddl_control import read_ddl

    found = read_ddl(_read(config, source), directory, source, limit=last)
    if as_json:
        print(json.dumps([one.to_dict() for one in found]))
        return
    table = Table("position", "committed", "statement", "status", "by")
    for one in found:
        text = " ".join((one.statement or f"{one.tag} {one.object}").split())
        short = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
        cells = (one.lsn, one.committed_at[:19], short, one.status, one.action_by or "")
        table.add_row(*(Text(cell) for cell in cells))
    console().print(table)


@app.command("show")
def show(
    source: SourceName,
    lsn: Annotated[
        str, typer.Argument(metavar="[POSITION]", help="Without it, where the source is halted.")
    ] = "",
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    as_json: options.AsJson = False,
) -> None:
    """Show one captured statement whole: its text, its error, and who decided what about it."""
    from millrace.consolidate.ddl_control import read_ddl, read_pending

    consolidation = _read(config, source)
    if lsn:
        found = [one for one in read_ddl(consolidation, directory, source) if one.lsn == lsn]
        if not found:
            raise ConfigError(
                f"source {source} has no captured statement at {lsn}",
                hint=f"millrace consolidate ddl list {source}",
            )
        record = found[0]
    else:
        record = read_pending(consolidation, directory, source)
    if as_json:
        print(json.dumps(record.to_dict()))
        return
    for label, value in record.to_dict().items():
        if value:
            console().print(Text(f"{label.replace('_', ' ')}: {value}"), soft_wrap=True)


@app.command("edit")
def edit(
    source: SourceName,
    statement: Annotated[
        str | None,
        typer.Option(
            "--text", metavar="SQL", help="The text to run in its place; without it, $EDITOR opens."
        ),
    ] = None,
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Run another text in place of the statement that the source is halted at, and go on.

    It is written in the source's names. The text runs, with all rows of its transaction, in the
    transaction that moves the source's position past the statement; if it fails, the source is
    halted there again. Exit code 7 if it fails.
    """
    from millrace.consolidate.ddl_control import read_pending
    from millrace.ddl.history import Action

    pending = read_pending(_read(config, source), directory, source)
    text = statement
    if text is None:
        text = click.edit(pending.statement or pending.query, extension=".sql")
    if text is None or not text.strip():
        raise ConfigError("the text is empty", hint="`ddl skip` runs nothing in its place")
    _decide(config, directory, source, Action.EDIT, lsn=pending.lsn, text=text.strip())


@app.command("skip")
def skip(
    source: SourceName,
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Run nothing in place of the statement that the source is halted at, and go on.

    What it did on the source must be on the target already, or rows that need it halt the source
    later. Exit code 7 if the source is halted again.
    """
    from millrace.ddl.history import Action

    _decide(config, directory, source, Action.SKIP)


@app.command("retry")
def retry(
    source: SourceName,
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Try the statement that the source is halted at again, as it is.

    For what was mended on the target. Exit code 7 if it fails again.
    """
    from millrace.consolidate.control import resume
    from millrace.consolidate.ddl_control import read_pending

    consolidation = _read(config, source)
    pending = read_pending(consolidation, directory, source)
    resume(directory, source)
    _report(consolidation, directory, source, pending)


def _read(config: Path, source: str) -> Consolidation:
    consolidation = read_config(config)
    consolidation.require(source)
    return consolidation


def _decide(
    config: Path, directory: Path, source: str, action: str, *, lsn: str = "", text: str = ""
) -> None:
    from millrace.consolidate.ddl_control import decide_ddl
    from millrace.ddl.history import Action

    consolidation = _read(config, source)
    pending = decide_ddl(consolidation, directory, source, Action(action), lsn=lsn, text=text)
    _report(consolidation, directory, source, pending)


def _report(consolidation: Consolidation, directory: Path, source: str, pending: object) -> None:
    from millrace.consolidate.ddl_control import await_ddl
    from millrace.ddl.history import DdlRecord

    assert isinstance(pending, DdlRecord)
    found = await_ddl(consolidation, directory, source, pending)
    if found is None:
        console().print(
            Text(f"{pending.lsn}: noted; a process that runs (millrace consolidate run) does it")
        )
    elif found.status.is_pending:
        raise ApplyError(
            f"source {source} is halted at {found.lsn} again: {found.reason}",
            hint=f"millrace consolidate ddl show {source}",
        )
    else:
        console().print(Text(f"{found.lsn}: {found.status}"))
