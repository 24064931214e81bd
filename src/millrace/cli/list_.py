"""`millrace list ...`: what the source holds and how it would be split.

Invariant: it only reads, with the code that a clone plans with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from millrace.cli import list_progress, options
from millrace.cli.display import console
from millrace.clone import listing
from millrace.clone.listing import Connection, TableChoice
from millrace.config.size import render_size
from millrace.filter.rules import FilterRules
from millrace.log import setup_logging
from millrace.postgres.catalog import inventory
from millrace.postgres.wire.connect import connect, translated

app = typer.Typer(
    help="Show what the source contains, and how tables would be split.", no_args_is_help=True
)
app.command("progress")(list_progress.progress)

SchemaName = Annotated[str, typer.Option(help="Only tables of this schema.")]
TableName = Annotated[str, typer.Option(help="Only tables with this name.")]
ListSkipped = Annotated[
    bool, typer.Option("--list-skipped", help="List what --filters leaves out, and why.")
]
Row = dict[str, Any]
NUMBERS = frozenset(
    [
        "oid",
        "bytes",
        "bytes (estimated)",
        "rows (estimated)",
        "part",
        "last value",
        "objects",
        "left out",
    ]
)
# A column's title, and how a row shows it: "" for None.
Columns = dict[str, Callable[[Row], object]]


@app.command("databases")
def databases(source: options.Source = "", as_json: options.AsJson = False) -> None:
    """Databases of the source's server, the largest first.

    All that accept connections, whichever database --source names. Sizes are shown of those that
    the role may connect to.
    """
    with _reading(source) as connection, translated("reading the server's databases"):
        found = inventory.read_databases(connection)
    columns: Columns = {
        "oid": lambda row: row["oid"],
        "database": lambda row: row["name"],
        "bytes": lambda row: _size(row["bytes"]),
        "owner": lambda row: row["owner"],
        "encoding": lambda row: row["encoding"],
        "collation": lambda row: row["collation"],
    }
    _print([asdict(one) for one in found], columns, as_json=as_json)


@app.command("extensions")
def extensions(
    source: options.Source = "",
    target: options.Target = "",
    requirements: Annotated[
        bool,
        typer.Option(
            "--requirements", help="Print names and versions as `clone --requirements` reads them."
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Extensions of the source; with --target, the versions that the target's server offers."""
    with _reading(source) as connection:
        rows = [asdict(one) for one in listing.list_extensions(connection)]
    if requirements:
        print(
            json.dumps([{key: row[key] for key in ("name", "version")} for row in rows], indent=2)
        )
        return
    columns: Columns = {
        "extension": lambda row: row["name"],
        "version": lambda row: row["version"],
        "schema": lambda row: row["schema"],
    }
    if target:
        with _reading(target, "target") as there, translated("reading the target's extensions"):
            offered = inventory.read_available_extensions(there)
        for row in rows:
            known = offered.get(row["name"])
            row["target"] = asdict(known) if known else None
        columns["target offers"] = lambda row: (row["target"] or {}).get("default_version")
        columns["target has"] = lambda row: (row["target"] or {}).get("installed_version")
    _print(rows, columns, as_json=as_json)


@app.command("collations")
def collations(source: options.Source = "", as_json: options.AsJson = False) -> None:
    """Collations that the source database uses or defines.

    The database's own first, which is the default of every column. If a collation has another
    version on the target's system, text may sort in another order there.
    """
    with _reading(source) as connection, translated("reading the source's collations"):
        found = inventory.read_collations(connection)
    columns: Columns = {
        "collation": lambda row: f"{row['schema']}.{row['name']}",
        "provider": lambda row: row["provider"],
        "locale": lambda row: row["locale"],
        "version": lambda row: row["version"],
        "version now": lambda row: row["actual_version"],
        "used by": _users,
    }
    _print([asdict(one) for one in found], columns, as_json=as_json)


@app.command("tables")
def tables(
    source: options.Source = "",
    filters: options.Filters = None,
    list_skipped: ListSkipped = False,
    as_json: options.AsJson = False,
) -> None:
    """Tables with rows of their own, the largest first."""
    rules = options.read_rules(filters)
    if list_skipped:
        _print_skipped(source, rules, "table", as_json=as_json)
        return
    with _reading(source) as connection:
        found = listing.list_tables(connection, rules)
    columns: Columns = {
        "oid": lambda row: row["oid"],
        "table": _label,
        "bytes": lambda row: _size(row["total_bytes"]),
        "rows (estimated)": lambda row: f"{row['estimated_rows']:,}",
        "split by": lambda row: row["split_key"]["column"] if row["split_key"] else "ctid",
        "format": lambda row: "text" if row["text_reason"] else "binary",
    }
    if not rules.is_empty:
        columns["rows that are copied"] = lambda row: row["where"] or "all"
    rows = [{**asdict(one), "text_reason": one.text_reason} for one in found]
    _print(rows, columns, as_json=as_json)


@app.command("table-parts")
def table_parts(
    source: options.Source = "",
    schema_name: SchemaName = "",
    table_name: TableName = "",
    split_tables_larger_than: options.SplitLarger = "0",
    split_max_parts: options.SplitMaxParts = 0,
    skip_split_by_ctid: options.SkipSplitByCtid = False,
    filters: options.Filters = None,
    as_json: options.AsJson = False,
) -> None:
    """The parts each table would be copied in, with bounds and estimated rows."""
    split = options.split_settings(split_tables_larger_than, split_max_parts, skip_split_by_ctid)
    rules = options.read_rules(filters)
    with _reading(source) as connection:
        found = listing.list_parts(connection, rules, TableChoice(schema_name, table_name), split)
    columns: Columns = {
        "table": lambda row: f"{row['schema']}.{row['table']}",
        "part": lambda row: f"{row['number']}/{row['total']}",
        "bounds": lambda row: row["bounds"],
        "rows (estimated)": lambda row: f"{row['estimated_rows']:,}",
        "bytes (estimated)": lambda row: _size(row["estimated_bytes"]),
    }
    rows = [
        {"schema": table.schema, "table": table.name, **asdict(part)}
        for table, parts in found
        for part in parts
    ]
    _print(rows, columns, as_json=as_json)


@app.command("sequences")
def sequences(
    source: options.Source = "",
    filters: options.Filters = None,
    list_skipped: ListSkipped = False,
    as_json: options.AsJson = False,
) -> None:
    """Sequences, their values, and the columns they belong to."""
    rules = options.read_rules(filters)
    if list_skipped:
        _print_skipped(source, rules, "sequence", as_json=as_json)
        return
    with _reading(source) as connection:
        found = listing.list_sequences(connection, rules)
    columns: Columns = {
        "oid": lambda row: row["oid"],
        "sequence": _label,
        "owned by": lambda row: row["owned_by"],
        "last value": lambda row: row["last_value"],
        "is called": lambda row: "yes" if row["is_called"] else "no",
    }
    rows = [{**asdict(one), "owned_by": owner} for one, owner in found]
    _print(rows, columns, as_json=as_json)


@app.command("indexes")
def indexes(
    source: options.Source = "",
    schema_name: SchemaName = "",
    table_name: TableName = "",
    filters: options.Filters = None,
    list_skipped: ListSkipped = False,
    as_json: options.AsJson = False,
) -> None:
    """Indexes of tables with rows, the largest first: those that a clone builds itself."""
    rules = options.read_rules(filters)
    if list_skipped:
        _print_skipped(source, rules, "index", as_json=as_json)
        return
    with _reading(source) as connection:
        found = listing.list_indexes(connection, rules, TableChoice(schema_name, table_name))
    columns: Columns = {
        "table": lambda row: f"{row['schema']}.{row['table']}",
        "index": lambda row: row["name"],
        "bytes": lambda row: _size(row["bytes"]),
        "kind": _index_kind,
        "constraint": lambda row: row["constraint_name"],
        "definition": lambda row: row["definition"],
    }
    rows = [{**asdict(one), "is_primary": one.constraint_type == "p"} for one in found]
    _print(rows, columns, as_json=as_json)


@app.command("depends")
def depends(
    source: options.Source = "",
    filters: options.Filters = None,
    as_json: options.AsJson = False,
) -> None:
    """What is left out because it depends on what --filters leaves out.

    These are the objects that no rule of the filters names, and that can't be on the target
    either: views of a table that is left out, foreign keys to it, functions that take its rows,
    and what depends on those. Parts of a table, such as its indexes, go with it and are not
    listed; nor is what is inside a schema that is left out. Without --filters nothing is left
    out, and the list is empty.
    """
    rules = options.read_rules(filters)
    with _reading(source) as connection:
        found = listing.list_depends(connection, rules)
    columns: Columns = {
        "left out too": lambda row: row["object"],
        "because it": lambda row: row["reason"],
    }
    _print([asdict(one) for one in found], columns, as_json=as_json)


@app.command("schema")
def schema(
    source: options.Source = "",
    split_tables_larger_than: options.SplitLarger = "0",
    split_max_parts: options.SplitMaxParts = 0,
    skip_split_by_ctid: options.SkipSplitByCtid = False,
    filters: options.Filters = None,
    as_json: options.AsJson = False,
) -> None:
    """Everything a clone would create: the number of objects of each kind, or all with --json.

    The JSON has the tables with their columns and parts, indexes, foreign keys, sequences,
    extensions, large objects, then every object of the schema with its properties, and what
    --filters leaves out and keeps, with the reasons.
    """
    split = options.split_settings(split_tables_larger_than, split_max_parts, skip_split_by_ctid)
    rules = options.read_rules(filters)
    with _reading(source) as connection:
        found = listing.list_schema(connection, rules, split)
    if as_json:
        print(json.dumps(found.as_dict(), default=str))
        return
    columns: Columns = {"kind": lambda row: row["kind"], "objects": lambda row: row["objects"]}
    if not rules.is_empty:
        columns["left out"] = lambda row: row["left_out"]
    _print(found.counts(), columns, as_json=False)
    for warning in found.decision.warnings:
        console().print(Text(f"warning: {warning}"))


def _print_skipped(uri: str, rules: FilterRules, kind: str, *, as_json: bool) -> None:
    with _reading(uri) as connection:
        found = listing.list_skipped(connection, rules, kind)
    columns: Columns = {
        "left out": lambda row: row["object"],
        "because it": lambda row: row["reason"],
    }
    _print([asdict(one) for one in found], columns, as_json=as_json)


@contextmanager
def _reading(uri: str, option: str = "source") -> Iterator[Connection]:
    """A session of one server, all of whose reads see the same instant."""
    setup_logging(quiet=True)
    dsn = options.parse_dsn(uri, option)
    with connect(dsn, "list", quote_all_identifiers="off") as connection:
        with translated("beginning to read"):
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield connection


def _print(rows: Sequence[Row], columns: Columns, *, as_json: bool) -> None:
    """Rows as JSON objects, or as a table for people."""
    if as_json:
        print(json.dumps(rows, default=str))
        return
    listing = Table()
    for title in columns:
        justify: Literal["left", "right"] = "right" if title in NUMBERS else "left"
        listing.add_column(title, justify=justify, overflow="fold")
    for row in rows:
        shown = (column(row) for column in columns.values())
        listing.add_row(*(Text("" if value is None else str(value)) for value in shown))
    console().print(listing)


def _label(row: Row) -> str:
    return f"{row['schema']}.{row['name']}"


def _size(size: int | None) -> str | None:
    return None if size is None else render_size(size)


def _index_kind(row: Row) -> str:
    if row["constraint_type"]:
        return {"p": "primary key", "u": "unique", "x": "exclusion"}[row["constraint_type"]]
    return "unique" if row["is_unique"] else ""


def _users(row: Row) -> str:
    """The first that uses a collation, and how many more."""
    if row["is_default"]:
        return "the database"
    users = row["used_by"]
    more = f", and {len(users) - 1} more" if len(users) > 1 else ""
    return f"{users[0]}{more}" if users else "nothing"
