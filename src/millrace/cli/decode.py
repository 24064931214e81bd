"""`millrace decode`: WAL files into changes, without a server.

Invariant: exit code 0 means that every transaction of the range was emitted. What was not is in
the report, and the exit code is 6.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli import options
from millrace.decode.checkpoint import write_checkpoint
from millrace.decode.formats import FORMATS, Destination, open_output
from millrace.decode.prepare import prepare
from millrace.decode.report import Report
from millrace.decode.run import DecodeSettings, Decoding
from millrace.decode.selection import Selection, parse_moment
from millrace.errors import ConfigError
from millrace.log import setup_logging
from millrace.lsn import parse_lsn, render_lsn

app = typer.Typer(
    help="Decode WAL files into changes, without a server and without a slot.",
    invoke_without_command=True,
)


@app.callback(invoke_without_command=True)
def decode(
    context: typer.Context,
    wal: Annotated[
        list[Path],
        typer.Option("--wal", metavar="DIR", help="A folder with WAL files; may be repeated."),
    ] = [],  # noqa: B006 (typer's way)
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="PATH",
            help="A base backup, as folder or tar file, or an image made by `decode prepare`.",
            show_default=False,
        ),
    ] = None,
    database: Annotated[
        str, typer.Option("--database", metavar="NAME", help="The database to decode.")
    ] = "",
    from_lsn: Annotated[
        str, typer.Option("--from", metavar="LSN", help="Emit commits at or after this position.")
    ] = "",
    to_lsn: Annotated[
        str, typer.Option("--to", metavar="LSN", help="Read WAL up to this position.")
    ] = "",
    format_: Annotated[
        str, typer.Option("--format", metavar="NAME", help=f"One of {', '.join(FORMATS)}.")
    ] = "test_decoding",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="PATH",
            help="Where to write: a file, or the folder of a spool. Default: standard output.",
            show_default=False,
        ),
    ] = None,
    table: Annotated[
        list[str],
        typer.Option("--table", metavar="SCHEMA.NAME", help="Only this table; may be repeated."),
    ] = [],  # noqa: B006
    xid: Annotated[
        list[int],
        typer.Option("--xid", metavar="XID", help="Only this transaction; may be repeated."),
    ] = [],  # noqa: B006
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Only commits at or after this time.")
    ] = "",
    until: Annotated[
        str, typer.Option("--until", metavar="TIME", help="Only commits up to this time.")
    ] = "",
    two_phase: Annotated[
        bool,
        typer.Option("--two-phase", help="Emit prepared transactions when they are prepared."),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Do as the server does, also where it is known to be wrong."),
    ] = False,
    unknown_type: Annotated[
        str,
        typer.Option(
            "--unknown-type",
            metavar="error|raw",
            help="What becomes of values of types whose output function is not known.",
        ),
    ] = "error",
    setting: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="DateStyle, TimeZone, IntervalStyle, bytea_output, extra_float_digits or "
            "lc_monetary, where it is not as in the base; may be repeated.",
        ),
    ] = [],  # noqa: B006
    timeline: Annotated[
        int | None,
        typer.Option("--timeline", metavar="TLI", help="The timeline to follow.", min=1),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            metavar="FILE",
            help="Keep the state here; started again, decoding continues from it.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write as JSON what was emitted and what was not.",
            show_default=False,
        ),
    ] = None,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Decode WAL files into changes, without a server and without a slot.

    Reads a base image and the WAL since, and emits whole transactions in commit order, each row as
    the catalog was when it was written. Exit code 6 if something could not be decoded.
    """
    if context.invoked_subcommand is not None:
        return
    setup_logging(verbose=verbose, quiet=quiet)
    if not wal or base is None or not database:
        raise ConfigError("--wal, --base and --database are needed")
    if unknown_type not in ("error", "raw"):
        raise ConfigError("--unknown-type is error or raw")
    settings = DecodeSettings(
        wal=wal,
        base=base,
        database=database,
        from_lsn=parse_lsn(from_lsn) if from_lsn else None,
        to_lsn=parse_lsn(to_lsn) if to_lsn else None,
        timeline=timeline,
        two_phase=two_phase,
        strict=strict,
        unknown_as_raw=unknown_type == "raw",
        given=_parse_settings(setting),
        checkpoint=checkpoint,
        selection=Selection(
            frozenset(table),
            frozenset(xid),
            parse_moment(since) if since else None,
            parse_moment(until) if until else None,
        ),
    )
    destination = Destination(format_, output)
    destination.check(checkpoint=checkpoint is not None)
    decoding = Decoding(settings)
    with open_output(decoding, destination, sys.stdout.buffer) as opened:
        done = decoding.run([opened])
    _write_report(done, report)
    done.require_complete()


@app.command("checkpoint")
def write_state(
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="The checkpoint to write.")
    ],
    wal: Annotated[
        list[Path],
        typer.Option("--wal", metavar="DIR", help="A folder with WAL files; may be repeated."),
    ],
    base: Annotated[
        Path, typer.Option("--base", metavar="PATH", help="A base image or a checkpoint.")
    ],
    database: Annotated[str, typer.Option("--database", metavar="NAME", help="The database.")],
    to_lsn: Annotated[
        str, typer.Option("--to", metavar="LSN", help="Read WAL up to this position.")
    ] = "",
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Carry a base image forward, so that older WAL is not needed any more.

    Reads the WAL up to a position and writes a checkpoint, which takes the place of the base.
    Prints the position from which on WAL has to be kept.
    """
    setup_logging(verbose=verbose, quiet=quiet)
    settings = DecodeSettings(
        wal=wal, base=base, database=database, to_lsn=parse_lsn(to_lsn) if to_lsn else None
    )
    decoding = Decoding(settings)
    decoding.run([])
    found = decoding.checkpoint()
    write_checkpoint(output, found)
    print(render_lsn(found.needed_lsn))


@app.command("prepare")
def prepare_image(
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="The image to write, a tar file.")
    ],
    source: options.Source = "",
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Make a small image of the catalogs, which decoding can start from, without a base backup.

    Needs the extension pageinspect, or the right to read the server's files. No slot is left.
    """
    setup_logging(verbose=verbose, quiet=quiet)
    made = prepare(options.parse_dsn(source, "source"), output)
    print(json.dumps(made.to_dict()))


def _parse_settings(given: list[str]) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ConfigError("--set needs NAME=VALUE", hint="such as --set TimeZone=Europe/Rome")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _write_report(done: Report, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(done.to_dict(), indent=2) + "\n")
