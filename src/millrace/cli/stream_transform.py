"""`millrace stream transform`: print the changes of a range of the spool."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from millrace.cli import options
from millrace.log import setup_logging
from millrace.lsn import parse_lsn
from millrace.postgres.connect import resolve
from millrace.stream.transform_format import OutputFormat


def transform(
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    after: Annotated[
        str,
        typer.Option(
            metavar="LSN",
            help="Transactions that end after this position; by default all the spool holds.",
            show_default=False,
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            metavar="LSN",
            help="Transactions that end at or before this position; by default all there are now.",
            show_default=False,
        ),
    ] = "",
    form: Annotated[
        OutputFormat, typer.Option("--format", help="SQL statements, or a JSON object a line.")
    ] = OutputFormat.SQL,
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCHEMA.TABLE",
            help="Only changes of this table; may be given again.",
            show_default=False,
        ),
    ] = None,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Print the changes in the spool of the work directory, in commit order.

    A statement or a JSON object for each change, between lines for the begin and the commit of each
    transaction, with its xid, its position and its time. Nothing is applied, and nothing is
    removed from the spool. It may be filled, and applied, at the same time. A spool in tables of
    the target needs --target; one in files does not.

    The SQL is UTF-8, and keeps triggers from firing: what they did on the source is among the
    changes. Whoever runs it must be allowed to set session_replication_role.
    """
    # Numba takes half a second: only those who need it wait for it.
    from millrace.stream.change_range import open_change_spool, parse_tables
    from millrace.stream.changes import iter_changes
    from millrace.stream.render import render

    setup_logging(verbose=verbose, quiet=quiet)
    dsn = resolve(options.parse_dsn(target, "target")) if target else None
    spool = open_change_spool(directory, dsn)
    extent = spool.extent()
    after_lsn = parse_lsn(after) if after else extent.oldest_lsn
    until_lsn = parse_lsn(until) if until else extent.last_end_lsn
    tables = parse_tables(",".join(table)) if table else None
    if until:
        spool.check_until(until_lsn)
    with spool.opened() as reader:
        batches = (
            batch
            for range_ in spool.ranges(after_lsn, until_lsn, _RANGE_BYTES)
            for batch in iter_changes(reader, range_, spool.encoding, tables=tables)
        )
        for line in render(batches, form):
            sys.stdout.buffer.write(line.encode() + b"\n")
    sys.stdout.buffer.flush()


# Ranges only bound what is planned at once; chunks of them bound memory.
_RANGE_BYTES = 1 << 30
