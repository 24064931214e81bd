"""`millrace stream transform`: the changes of a range of the spool, printed or into a sink.

Invariant: it applies nothing and removes nothing; transactions come whole and in commit order.
"""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from millrace.cli import options
from millrace.errors import ConfigError
from millrace.log import setup_logging
from millrace.lsn import parse_lsn
from millrace.postgres.wire.connect import resolve
from millrace.sink.print_format import OutputFormat


def transform(
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    after: Annotated[
        str,
        typer.Option(
            metavar="LSN",
            help="Transactions that end after this position; by default after the sink's own, or "
            "all the spool holds.",
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
    to: Annotated[
        str,
        typer.Option(
            metavar="SINK",
            help="Where the changes go: print, parquet:DIR, or a sink of another package.",
        ),
    ] = "print",
    form: Annotated[
        OutputFormat | None,
        typer.Option(
            "--format",
            help="Of --to print: SQL statements, which is the default, or a JSON object a line.",
            show_default=False,
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCHEMA.TABLE",
            help="Only changes of this table; may be repeated.",
            show_default=False,
        ),
    ] = None,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Print the changes in the spool of the work directory, or deliver them to another sink.

    The changes come in commit order: a statement or a JSON object for each, between lines for the
    begin and the commit of each transaction, with its xid, its position and its time. Nothing is
    applied, and nothing is removed from the spool. It may be filled, and applied, at the same time.
    A spool in tables of the target needs --target; one in files does not.

    The SQL is UTF-8, and keeps triggers from firing, except those that are enabled ALWAYS or
    REPLICA: what they did on the source is among the changes. The role that runs it must be allowed
    to set session_replication_role.

    With --to parquet:DIR each file in DIR holds the changes between two positions, which are in its
    name. The same command, run again, continues after the newest file; DIR takes the changes of one
    stream and one choice of tables.
    """
    # Numba takes half a second: only those who need it wait for it.
    from millrace.sink.delivery import choose_start, deliver
    from millrace.sink.registry import open_change_sink
    from millrace.spool.change_batch import iter_changes
    from millrace.spool.selection import open_change_spool, parse_tables

    setup_logging(verbose=verbose, quiet=quiet)
    dsn = resolve(options.parse_dsn(target, "target")) if target else None
    spool = open_change_spool(directory, dsn)
    extent = spool.extent()
    until_lsn = parse_lsn(until) if until else extent.last_end_lsn
    tables = parse_tables(",".join(table)) if table else None
    if until:
        spool.check_until(until_lsn)
    with closing(open_change_sink(_name_sink(to, form))) as sink, spool.opened() as reader:
        sink.begin(_origin(spool.origin, table))
        after_lsn = choose_start(sink, parse_lsn(after) if after else None, extent.oldest_lsn)
        deliver(
            sink,
            (
                (range_.end_lsn, iter_changes(reader, range_, spool.encoding, tables=tables))
                for range_ in spool.ranges(after_lsn, until_lsn, _RANGE_BYTES)
            ),
        )


# A range is one commit of the sink, so for a sink of files the size of a file; chunks of it bound
# memory.
_RANGE_BYTES = 256 << 20


def _origin(stream: str, tables: list[str] | None) -> str:
    """Of other tables, a position says nothing either."""
    return f"{stream}, {'all tables' if not tables else ', '.join(sorted(tables))}"


def _name_sink(to: str, form: OutputFormat | None) -> str:
    if form is None:
        return to
    if to != "print":
        raise ConfigError(f"--format is for --to print, not for --to {to}")
    return f"{to}:{form}"
