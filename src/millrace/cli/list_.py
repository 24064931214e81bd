"""`millrace list ...`: what the source holds and how it would be cut."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from millrace.cli import options
from millrace.cli.display import console
from millrace.clone.plan import plan_table_parts
from millrace.clone.source import sample_tables
from millrace.clone.split import SplitSettings
from millrace.config.size import parse_size, render_size
from millrace.errors import ConfigError
from millrace.log import setup_logging
from millrace.postgres import catalog
from millrace.postgres.connect import connect, translated
from millrace.relation import Part
from millrace.relation import Table as SourceTable

app = typer.Typer(help="Show what the source holds, and how it would be cut.", no_args_is_help=True)


@app.command("tables")
def tables(source: options.Source = "", as_json: options.AsJson = False) -> None:
    """Tables with rows of their own, the largest first."""
    setup_logging(quiet=True)
    dsn = options.parse_dsn(source, "source")
    with connect(dsn, "list") as connection, translated("reading the source's catalog"):
        found = catalog.read_tables(connection)
    found.sort(key=lambda table: (-table.total_bytes, table.label))
    if as_json:
        print(json.dumps([asdict(table) for table in found]))
        return
    listing = Table()
    for name in ("oid", "table", "bytes", "rows (estimated)", "split by", "format"):
        listing.add_column(name, justify="right" if name in ("oid", "bytes") else "left")
    for table in found:
        listing.add_row(
            str(table.oid),
            Text(table.label),
            render_size(table.total_bytes),
            f"{table.estimated_rows:,}",
            Text(table.split_key.column if table.split_key else "ctid"),
            "text" if table.text_reason else "binary",
        )
    console().print(listing)


@app.command("table-parts")
def table_parts(
    source: options.Source = "",
    schema_name: Annotated[str, typer.Option(help="Only tables of this schema.")] = "",
    table_name: Annotated[str, typer.Option(help="Only tables with this name.")] = "",
    split_tables_larger_than: options.SplitLarger = "0",
    split_max_parts: options.SplitMaxParts = 0,
    skip_split_by_ctid: options.SkipSplitByCtid = False,
    as_json: options.AsJson = False,
) -> None:
    """The parts each table would be copied in, with bounds and estimated rows."""
    setup_logging(quiet=True)
    split = SplitSettings(
        parse_size(split_tables_larger_than), split_max_parts, not skip_split_by_ctid
    )
    dsn = options.parse_dsn(source, "source")
    with connect(dsn, "list") as connection:
        with translated("reading the source's catalog"):
            found = [
                table
                for table in catalog.read_tables(connection)
                if schema_name in ("", table.schema) and table_name in ("", table.name)
            ]
        if table_name and not found:
            raise ConfigError(
                f"there is no table {'.'.join(filter(None, (schema_name, table_name)))}",
                hint="names are taken as they are: no quotes, case matters",
            )
        samples = sample_tables(connection, found, split)
    planned = [
        (table, plan_table_parts(table, samples.get(table.oid, ()), split)) for table in found
    ]
    planned.sort(key=lambda pair: (-pair[0].total_bytes, pair[0].label))
    if as_json:
        print(json.dumps([_as_dict(table, part) for table, parts in planned for part in parts]))
        return
    listing = Table()
    for name in ("table", "part", "bounds", "rows (estimated)", "bytes (estimated)"):
        listing.add_column(name, justify="left" if name in ("table", "bounds") else "right")
    for table, parts in planned:
        for part in parts:
            listing.add_row(
                Text(table.label),
                f"{part.number}/{part.total}",
                Text(part.bounds),
                f"{part.estimated_rows:,}",
                render_size(part.estimated_bytes),
            )
    console().print(listing)


def _as_dict(table: SourceTable, part: Part) -> dict[str, object]:
    return {"schema": table.schema, "table": table.name, **asdict(part)}
