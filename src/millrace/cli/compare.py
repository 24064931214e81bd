"""`millrace compare ...`: are both sides equal?

Invariant: exit code 0 means that nothing that was compared differs; a difference is exit code 9.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from millrace.cli import options
from millrace.cli.display import console, render_seconds
from millrace.clone.directory import read_naming
from millrace.compare.run import MOST_ROWS, CompareSettings, compare_data, compare_schema
from millrace.compare.schema import (
    ACL_PROPERTIES,
    OWNER_PROPERTIES,
    POSITION_PROPERTIES,
    Difference,
    SchemaComparison,
)
from millrace.compare.task import RowDifference, TableComparison
from millrace.errors import ConfigError, MismatchError
from millrace.log import setup_logging
from millrace.name import Naming, parse_renames
from millrace.postgres.catalog.inventory import read_databases
from millrace.postgres.wire.connect import connect, resolve, translated
from millrace.route import Route
from millrace.spark.session import Engine, default_master, parse_conf

app = typer.Typer(help="Compare source and target.", no_args_is_help=True)

# Of a long value, such as a function's body, the place where the sides part.
VALUE_CHARACTERS = 60
LEAD_CHARACTERS = 15


CopyDirectory = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="PATH",
        help="Take --rename-schema from the copy in this work directory.",
        show_default=False,
    ),
]


AllDatabases = Annotated[
    bool,
    typer.Option(
        "--all-databases",
        help="Compare every database of the source's server with its namesake on the target's.",
    ),
]


@app.command("schema")
def schema(
    source: options.Source = "",
    target: options.Target = "",
    all_databases: AllDatabases = False,
    filters: options.Filters = None,
    rename_schema: options.RenameSchema = [],  # noqa: B006 (typer's way)
    directory: CopyDirectory = None,
    no_owner: Annotated[bool, typer.Option("--no-owner", help="Do not compare owners.")] = False,
    no_acl: Annotated[bool, typer.Option("--no-acl", help="Do not compare grants.")] = False,
    no_positions: Annotated[
        bool, typer.Option("--no-positions", help="Do not compare the values of sequences.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Compare every object of both databases by its properties.

    Definitions that a dump and restore between two versions only rewords are equal. What --filters
    leaves out is ignored on both sides: a filtered clone is equal under the filters of its clone.
    Exit code 9 if an object differs.
    """
    setup_logging(verbose=verbose, quiet=quiet)
    leave_out = (
        (OWNER_PROPERTIES if no_owner else frozenset())
        | (ACL_PROPERTIES if no_acl else frozenset())
        | (POSITION_PROPERTIES if no_positions else frozenset())
    )
    route = Route(
        options.parse_dsn(source, "source"),
        options.parse_dsn(target, "target"),
        filters=options.read_rules(filters),
        naming=_naming(rename_schema, directory),
    )
    everything = {
        name: compare_schema(one, leave_out) for name, one in _routes(route, all_databases).items()
    }
    shown = {name: asdict(found) | {"equal": found.is_equal} for name, found in everything.items()}
    if as_json:
        print(json.dumps(shown if all_databases else shown[""], default=str))
    for name, found in everything.items():
        if not as_json:
            _print_name(name)
            print_schema(found)
    for found in everything.values():
        _raise_objects(found)


def _raise_objects(found: SchemaComparison) -> None:
    if found.differences:
        names = list(dict.fromkeys(f"{one.kind} {one.name}" for one in found.differences))
        raise MismatchError(
            f"{len(names)} objects differ: {', '.join(names[:5])}",
            hint="leave out what may differ: --no-owner, --no-acl, --no-positions",
            is_printed=True,
        )


@app.command("data")
def data(
    source: options.Source = "",
    target: options.Target = "",
    all_databases: AllDatabases = False,
    filters: options.Filters = None,
    rename_schema: options.RenameSchema = [],  # noqa: B006 (typer's way)
    directory: CopyDirectory = None,
    table: Annotated[
        list[str],
        typer.Option("--table", metavar="SCHEMA.NAME", help="Only this table; may be repeated."),
    ] = [],  # noqa: B006 (typer's way)
    rows: Annotated[
        bool, typer.Option("--rows", help="List the rows that differ, by key.")
    ] = False,
    most_rows: Annotated[
        int, typer.Option(min=1, help="Maximum number of rows to list for each table.")
    ] = MOST_ROWS,
    jobs: Annotated[
        int, typer.Option("--jobs", "--table-jobs", min=1, help="Parts compared at once.")
    ] = 4,
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

    Tables that differ are listed; all of them with --verbose or --json. Under the --filters of a
    clone, tables and columns that it left out are ignored, and rows that it left out must
    not be on the target. Exit code 9 if a table differs.
    """
    setup_logging(verbose=verbose, quiet=quiet)
    route = Route(
        options.parse_dsn(source, "source"),
        options.parse_dsn(target, "target"),
        filters=options.read_rules(filters),
        naming=_naming(rename_schema, directory),
    )
    if all_databases and snapshot:
        raise ConfigError(
            "--all-databases and --snapshot cannot be used together",
            hint="a snapshot belongs to one database: compare that database on its own",
        )
    settings = CompareSettings(route, jobs, snapshot or None, rows, most_rows, tuple(table))
    everything: dict[str, list[TableComparison]] = {}
    with Engine(master or default_master(jobs), parse_conf(conf)) as engine:
        engine.start()
        for name, one in _routes(route, all_databases).items():
            began = time.monotonic()
            found = everything[name] = compare_data(replace(settings, route=one), engine)
            if not as_json:
                _print_name(name)
                print_compared(found, every=bool(verbose), with_rows=rows)
                print(_data_summary(found, time.monotonic() - began))
    if as_json:
        shown = {
            name: [asdict(one) | {"equal": one.is_equal} for one in found]
            for name, found in everything.items()
        }
        print(json.dumps(shown if all_databases else shown[""], default=str))
    raise_difference([one for found in everything.values() for one in found])


def _routes(route: Route, all_databases: bool) -> dict[str, Route]:
    """By the name of the database, or the one that is asked for, by no name."""
    if not all_databases:
        return {"": route}
    source, target = resolve(route.source), resolve(route.target)
    with connect(source, "compare") as connection, translated("reading the databases"):
        names = [one.name for one in read_databases(connection)]
    return {
        name: replace(route, source=source.with_(dbname=name), target=target.with_(dbname=name))
        for name in names
    }


def _print_name(name: str) -> None:
    if name:
        print(f"database {name}")


def _naming(renames: list[str], directory: Path | None) -> Naming:
    """The one given, or that of the copy."""
    if renames or directory is None:
        return parse_renames(renames)
    return read_naming(directory)


def raise_difference(found: list[TableComparison], accepted: Collection[str] = ()) -> None:
    """MismatchError if any table differs that may not."""
    different = [o.label for o in found if not o.is_equal and o.label not in accepted]
    if different:
        raise MismatchError(
            f"{len(different)} of {len(found)} tables differ: {', '.join(different[:5])}",
            hint="rows may have changed since: compare under the snapshot of the copy (--snapshot)",
            is_printed=True,
        )


def print_compared(
    found: list[TableComparison], *, every: bool = True, with_rows: bool = False
) -> None:
    """A line for each table, and one for each row that was named."""
    listed = [one for one in found if every or not one.is_equal]
    if not listed:
        return
    listing = Table()
    for name in ("table", "", "rows source", "rows target", "checksum source", "checksum target"):
        listing.add_column(name, justify="left" if name in ("table", "") else "right")
    for one in listed:
        sides = [one.source, one.target]
        listing.add_row(
            Text(one.label),
            "=" if one.is_equal else Text(_verdict(one), style="bold red"),
            *(f"{side.rows:,}" if side else "-" for side in sides),
            *(side.checksum if side else "-" for side in sides),
        )
    console().print(listing)
    if with_rows:
        _print_rows(listed)


def _verdict(one: TableComparison) -> str:
    return one.problem or (one.error.message if one.error else "differs")


def _print_rows(found: list[TableComparison]) -> None:
    if not any(one.rows for one in found):
        return
    listing = Table()
    for name in ("table", "row", "key", "count"):
        listing.add_column(name, justify="right" if name == "count" else "left")
    for one in found:
        for row in one.rows:
            listing.add_row(
                Text(one.label), row.kind, Text(_render_key(one, row)), f"{row.count:,}"
            )
        if one.rows and not one.rows_complete:
            listing.add_row(Text(one.label), "...", "and more: see --most-rows", "")
    console().print(listing)


def _render_key(one: TableComparison, row: RowDifference) -> str:
    if not one.key:
        return f"no key; hash {row.key[0]}"
    return ", ".join(f"{name}={value}" for name, value in zip(one.key, row.key, strict=True))


def _data_summary(found: list[TableComparison], seconds: float) -> str:
    rows = sum(one.source.rows for one in found if one.source)
    different = sum(not one.is_equal for one in found)
    verdict = f"{different} of {len(found)} tables differ" if different else "equal"
    return f"{verdict}: {len(found)} tables, {rows:,} rows in {render_seconds(seconds)}"


def print_schema(found: SchemaComparison) -> None:
    """A line for each difference and each note, then the verdict."""
    for title, differences in (("differences", found.differences), ("notes", found.notes)):
        if not differences:
            continue
        listing = Table(title=title, title_justify="left")
        for name in ("kind", "object", "property", "source", "target"):
            listing.add_column(name, overflow="fold")
        for one in differences:
            listing.add_row(one.kind, Text(one.name), one.property, *map(Text, _excerpts(one)))
        console().print(listing)
    objects = sum(found.objects.values())
    verdict = f"{len(found.differences)} differences" if found.differences else "equal"
    notes = f", {len(found.notes)} notes" if found.notes else ""
    print(f"{verdict}{notes}: {objects:,} objects of {len(found.objects)} kinds")


def _excerpts(one: Difference) -> tuple[str, str]:
    """Both values, short; where they are long, from just before the place where they part."""
    source, target = (_render_value(value) for value in (one.source, one.target))
    if max(len(source), len(target)) <= VALUE_CHARACTERS:
        return source, target
    pairs = enumerate(zip(source, target, strict=False))
    parting = next((at for at, (a, b) in pairs if a != b), min(len(source), len(target)))
    start = max(0, parting - LEAD_CHARACTERS)
    return _excerpt(source, start), _excerpt(target, start)


def _excerpt(text: str, start: int) -> str:
    end = start + VALUE_CHARACTERS
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def _render_value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
