"""`millrace tube ...`: tubes in a database, through their SQL functions.

Invariant: a command is one call of a function that SQL has too; what it prints with --json is what
the function returned.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import psycopg
import typer
from rich.table import Table
from rich.text import Text

from millrace.cli import options
from millrace.cli.display import console
from millrace.cli.tube.config import apply
from millrace.cli.tube.dead import dead, discard, retry
from millrace.cli.tube.options import Schema, Source, TubeArgument
from millrace.cli.tube.run import run
from millrace.cli.tube.stats import show_once, watch_stats
from millrace.cli.tube.verify import verify
from millrace.config.dsn import Dsn
from millrace.log import setup_logging
from millrace.postgres.wire.connect import connect
from millrace.tube import backfill as backfills
from millrace.tube.delivery.session import require_session
from millrace.tube.install import (
    DEFAULT_SCHEMA,
    find_schema,
    install,
    refused,
    render_sql,
    require_primary,
    uninstall,
    use_schema,
)

log = logging.getLogger(__name__)

app = typer.Typer(
    help="Record which rows of tables are touched, in queues, and deliver them.",
    no_args_is_help=True,
)
app.command("run")(run)
app.command("verify")(verify)
app.command("apply")(apply)
app.command("dead")(dead)
app.command("retry")(retry)
app.command("discard")(discard)

Connection = psycopg.Connection[tuple[Any, ...]]
Row = dict[str, Any]

TableName = Annotated[
    str, typer.Argument(metavar="TABLE", help="The table, as in SQL: schema.name.")
]
Shard = Annotated[
    int | None,
    typer.Option(
        "--shard",
        help="Number of the shard. Without it, the number at the end of the table's schema.",
        show_default=False,
    ),
]


@app.command("install")
def install_command(
    source: Source = "",
    schema: Annotated[
        str, typer.Option("--schema", help="Schema to install into; made if it is not there.")
    ] = DEFAULT_SCHEMA,
    print_sql: Annotated[
        bool,
        typer.Option("--print", help="Print the SQL instead: for psql, or a migration of yours."),
    ] = False,
) -> None:
    """Install the SQL functions of tubes, or upgrade them in place, in one transaction.

    An installation of pg-tube is taken over with its tubes, tables and pods. What is printed by
    --print goes into the first schema of the search path.
    """
    if print_sql:
        print(render_sql())
        return
    with _opened(source) as connection:
        install(connection, schema)
    log.info("tubes are installed in schema %s", schema)


@app.command("uninstall")
def uninstall_command(
    source: Source = "",
    schema: Schema = "",
    drop_tubes: Annotated[
        bool, typer.Option("--drop-tubes", help="Also drop tubes, with the pods in them.")
    ] = False,
) -> None:
    """Remove the SQL functions of tubes. The schema stays."""
    with _opened(source) as connection:
        uninstall(connection, find_schema(connection, schema or None), drop_tubes=drop_tubes)


@app.command("list")
def list_command(source: Source = "", schema: Schema = "", as_json: options.AsJson = False) -> None:
    """Tubes, and the tables that are attached to them."""
    with _using(source, schema) as connection:
        rows = _rows(
            connection,
            "SELECT l.tube, l.predicate, l.partitions, l.tbl::text AS tbl, l.shard, t.key,"
            " t.routing, t.uncovered_partitions FROM tube_list() l"
            " LEFT JOIN tube_tables() t ON t.tube = l.tube AND t.tbl = l.tbl",
        )
    _print(rows, as_json=as_json)


@app.command("stats")
def stats(
    source: Source = "",
    schema: Schema = "",
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, with the rates of workers.")
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How often to look, with --watch.")
    ] = 2.0,
    as_json: options.AsJson = False,
) -> None:
    """What waits in each shard of each tube, and since when.

    Lag is now minus the oldest pod that waits. With --watch it is shown anew every few seconds,
    with the rates that running workers report; with --json, a line for each look.
    """
    with _using(source, schema) as connection:
        if watch:
            place = find_schema(connection, schema or None)
            watch_stats(connection, place, interval, as_json=as_json)
        else:
            show_once(connection, as_json=as_json)


@app.command("epoch")
def epoch(
    source: Source = "",
    schema: Schema = "",
    is_raised: Annotated[
        bool,
        typer.Option("--raise", help="Raise it: the source was restored from an older copy."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the epoch of the versions of documents, or raise it.

    It rises by itself, before the first delivery, when the source is another server or on another
    timeline. Raise it by hand if the source was put back to an earlier state in another way, such
    as by a snapshot of its disk.
    """
    with _using(source, schema) as connection:
        (row,) = _rows(connection, f"SELECT tube_epoch({str(is_raised).lower()}) AS epoch")
    print(json.dumps(row) if as_json else row["epoch"])


@app.command("create")
def create(
    tube: TubeArgument,
    source: Source = "",
    schema: Schema = "",
    partitions: Annotated[
        int, typer.Option(help="How many workers can share it.", min=1, max=100)
    ] = 1,
    predicate: Annotated[
        str, typer.Option(help="SQL over the row: others are not recorded.", show_default=False)
    ] = "",
) -> None:
    """Create a tube, or change its partitions and its predicate."""
    with _using(source, schema) as connection:
        _call(connection, "SELECT tube_ensure_exists(%s, %s, %s)", tube, partitions, predicate)


@app.command("drop")
def drop(tube: TubeArgument, source: Source = "", schema: Schema = "") -> None:
    """Drop a tube with the pods in it, and detach its tables."""
    with _using(source, schema, tube) as connection:
        _call(connection, "SELECT (_tube_find(%s)).id", tube)
        _call(connection, "SELECT tube_ensure_absent(%s)", tube)


@app.command("attach")
def attach(
    tube: TubeArgument,
    table: TableName,
    source: Source = "",
    schema: Schema = "",
    shard: Shard = None,
    key: Annotated[
        str,
        typer.Option(
            metavar="COLUMN,...",
            help="The key. By default the column id, or the primary key.",
            show_default=False,
        ),
    ] = "",
    routing: Annotated[
        str,
        typer.Option(help="SQL over the row: the number of its shard.", show_default=False),
    ] = "",
    predicate: Annotated[
        str,
        typer.Option(
            help="SQL over the row: others of this table are not recorded.", show_default=False
        ),
    ] = "",
) -> None:
    """Attach a table to a tube, or change how it is attached."""
    with _using(source, schema, tube) as connection:
        _call(
            connection,
            "SELECT tube_table_attach(%s, %s::regclass, %s, %s, %s, %s)",
            tube,
            table,
            shard,
            key.split(",") if key else None,
            routing or None,
            predicate or None,
        )


@app.command("detach")
def detach(tube: TubeArgument, table: TableName, source: Source = "", schema: Schema = "") -> None:
    """Detach a table from a tube. Pods that are there stay."""
    with _using(source, schema, tube) as connection:
        _call(connection, "SELECT (_tube_find_table(%s, %s::regclass)).id", tube, table)
        _call(connection, "SELECT tube_table_ensure_detached(%s, %s::regclass)", tube, table)


@app.command("backfill")
def backfill(
    tube: TubeArgument,
    table: TableName,
    source: Source = "",
    schema: Schema = "",
    order: Annotated[
        str,
        typer.Option(
            metavar="COLUMN", help="Order of the rows; by default the key.", show_default=False
        ),
    ] = "",
    page_seconds: Annotated[
        float, typer.Option(help="How long one page may take; their size is adapted.", min=0.01)
    ] = 1.0,
    pause_seconds: Annotated[float, typer.Option(help="Pause after each page.", min=0)] = 0.0,
    timeout: Annotated[
        float, typer.Option(help="How many seconds to wait for open transactions.", min=0)
    ] = 60.0,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel the backfill of this table.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Put all rows of a table into a tube, page by page.

    The same command continues a backfill that was interrupted.
    """
    setup_logging(verbose=verbose, quiet=quiet)
    with _using(source, schema, tube) as connection:
        if cancel:
            done = backfills.cancel(connection, tube, table)
        else:
            pace = backfills.Pace(page_seconds, pause_seconds, timeout)
            done = backfills.run(connection, tube, table, order or None, pace)
    if as_json:
        print(json.dumps(done, default=str))


@app.command("touch")
def touch(
    tube: TubeArgument,
    table: TableName,
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY...", help="Keys as text; composite: JSON arrays.")
    ],
    source: Source = "",
    schema: Schema = "",
) -> None:
    """Record rows as touched, without a change of theirs."""
    with _using(source, schema, tube) as connection:
        _call(connection, "SELECT tube_touch(%s, %s::regclass, %s)", tube, table, keys)


@app.command("pods-insert")
def pods_insert(
    tubes: Annotated[str, typer.Argument(metavar="TUBE,...", help="One tube, or several.")],
    query: Annotated[
        str, typer.Option(help="SQL that returns ids, or ids and their numbers from 1 on.")
    ],
    shard: Annotated[int, typer.Option(help="Number of the shard.")],
    source: Source = "",
    schema: Schema = "",
) -> None:
    """Put the ids that a query returns into tubes, in one transaction."""
    with _using(source, schema) as connection, refused():
        columns = connection.execute(f"SELECT * FROM ({query}) AS q LIMIT 0".encode()).description
        if columns is not None and len(columns) == 1:
            query = f"SELECT q.id, row_number() OVER () FROM ({query}) AS q (id)"
        _call(connection, "SELECT tube_pods_insert(%s, %s, %s)", tubes, query, shard)


@contextmanager
def _opened(source: str) -> Iterator[Connection]:
    dsn: Dsn = options.parse_dsn(source, "source")
    with connect(dsn, "tube") as connection:
        connection.add_notice_handler(_show_notice)
        require_primary(connection)
        require_session(connection, dsn)
        yield connection


@contextmanager
def _using(source: str, schema: str, tube: str | None = None) -> Iterator[Connection]:
    with _opened(source) as connection:
        use_schema(connection, find_schema(connection, schema or None, tube))
        yield connection


def _show_notice(notice: psycopg.errors.Diagnostic) -> None:
    print(notice.message_primary, file=sys.stderr)


def _call(connection: Connection, statement: str, *values: Any) -> None:
    with refused():
        connection.execute(statement.encode(), values)


def _rows(connection: Connection, query: str) -> list[Row]:
    with refused():
        found = connection.execute(query.encode())
        names = [column.name for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found]


def _print(rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, default=str))
        return
    listing = Table()
    for title in rows[0] if rows else ("tube",):
        listing.add_column(title, overflow="fold")
    for row in rows:
        listing.add_row(*(Text("" if value is None else str(value)) for value in row.values()))
    console().print(listing)
