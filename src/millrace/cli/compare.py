"""`millrace compare ...`: are both sides equal?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from millrace.cli import options
from millrace.cli.display import console
from millrace.clone.compare import Compared
from millrace.clone.compare_run import CompareSettings, compare_data
from millrace.errors import MismatchError
from millrace.log import setup_logging
from millrace.spark.session import Engine, default_master, parse_conf

app = typer.Typer(help="Compare source and target.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `data` a sub-command while it is the only one."""


@app.command("data")
def data(
    source: options.Source = "",
    target: options.Target = "",
    jobs: Annotated[int, typer.Option(min=1, help="Parts compared at once.")] = 4,
    snapshot: Annotated[
        str, typer.Option(metavar="ID", help="Read the source under this exported snapshot.")
    ] = "",
    master: options.Master = "",
    conf: options.Conf = [],  # noqa: B006 (typer's way)
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Count and checksum every table on both sides, inside the servers.

    Exit code 9 if a table differs.
    """
    setup_logging(verbose=verbose, quiet=quiet)
    settings = CompareSettings(
        options.parse_dsn(source, "source"),
        options.parse_dsn(target, "target"),
        jobs,
        snapshot or None,
    )
    with Engine(master or default_master(jobs), parse_conf(conf)) as engine:
        found = compare_data(settings, engine)
    if as_json:
        print(json.dumps([asdict(one) | {"equal": one.is_equal} for one in found], default=str))
    else:
        print_compared(found)
    raise_difference(found)


def raise_difference(found: list[Compared]) -> None:
    """MismatchError if any table differs."""
    different = [one.label for one in found if not one.is_equal]
    if different:
        raise MismatchError(
            f"{len(different)} of {len(found)} tables differ: {', '.join(different[:5])}",
            hint="rows may have changed since: compare under the snapshot of the copy (--snapshot)",
        )


def print_compared(found: list[Compared]) -> None:
    """A line for each table."""
    listing = Table()
    for name in ("table", "", "rows source", "rows target", "checksum source", "checksum target"):
        listing.add_column(name, justify="left" if name in ("table", "") else "right")
    for one in found:
        sides = [one.source, one.target]
        listing.add_row(
            Text(one.label),
            "=" if one.is_equal else Text("differs", style="bold red"),
            *(f"{side.rows:,}" if side else "-" for side in sides),
            *(side.checksum if side else "-" for side in sides),
        )
    console().print(listing)
