"""`millrace clone`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from millrace.cli import options
from millrace.cli.display import console, open_display, print_summary
from millrace.clone.filter import FilterRules, read_filters
from millrace.clone.plan import Plan, plan_packs
from millrace.clone.run import CloneResult, dry_run
from millrace.clone.run import clone as run_clone
from millrace.clone.schema import SchemaSettings
from millrace.clone.settings import CloneSettings
from millrace.clone.split import SplitSettings
from millrace.config.size import parse_size, render_size
from millrace.errors import ConfigError
from millrace.log import setup_logging
from millrace.spark.session import Engine, default_master, parse_conf

COPY = "Copy"
WHAT = "What is copied"
SPARK = "Spark"


def _jobs(name: str, text: str) -> Any:
    return typer.Option(
        f"--{name}",
        envvar=f"MILLRACE_{name.upper().replace('-', '_')}",
        min=1,
        max=512,
        help=text,
        rich_help_panel=COPY,
    )


def _flag(name: str, text: str, *aliases: str) -> Any:
    return typer.Option(
        f"--{name}",
        *aliases,
        envvar=f"MILLRACE_{name.upper().replace('-', '_')}",
        help=text,
        rich_help_panel=WHAT,
    )


def clone(
    source: options.Source = "",
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    table_jobs: Annotated[
        int, _jobs("table-jobs", "Parts copied at once, and tables vacuumed.")
    ] = 4,
    index_jobs: Annotated[int, _jobs("index-jobs", "Indexes built at once, over all tables.")] = 4,
    restore_jobs: Annotated[
        int, _jobs("restore-jobs", "Foreign keys added at once; no two that share a table.")
    ] = 4,
    large_objects_jobs: Annotated[
        int, _jobs("large-objects-jobs", "Ranges of large objects copied at once.")
    ] = 4,
    split_tables_larger_than: options.SplitLarger = "0",
    split_max_parts: options.SplitMaxParts = 0,
    skip_split_by_ctid: options.SkipSplitByCtid = False,
    filters: Annotated[
        Path | None,
        typer.Option(
            "--filters",
            "--filter",
            envvar="MILLRACE_FILTERS",
            metavar="FILE",
            help="Leave out schemas, tables, rows, columns, indexes, extensions: pgcopydb's INI "
            "file, with [table-where] and [exclude-column] besides.",
            rich_help_panel=WHAT,
            show_default=False,
        ),
    ] = None,
    drop_if_exists: Annotated[
        bool, _flag("drop-if-exists", "First drop from the target what the source has too.")
    ] = False,
    roles: Annotated[bool, _flag("roles", "Copy roles that the target lacks.")] = False,
    no_role_passwords: Annotated[
        bool, _flag("no-role-passwords", "Copy roles without passwords (needs no superuser).")
    ] = False,
    no_owner: Annotated[
        bool, _flag("no-owner", "Leave everything to the connecting role.")
    ] = False,
    no_acl: Annotated[bool, _flag("no-acl", "Leave out GRANT and REVOKE.")] = False,
    no_comments: Annotated[bool, _flag("no-comments", "Leave out comments.")] = False,
    no_tablespaces: Annotated[
        bool, _flag("no-tablespaces", "Put everything into the default tablespace.")
    ] = False,
    skip_large_objects: Annotated[
        bool, _flag("skip-large-objects", "Leave out large objects.", "--skip-blobs")
    ] = False,
    skip_extensions: Annotated[bool, _flag("skip-extensions", "Do not create extensions.")] = False,
    skip_ext_comments: Annotated[
        bool, _flag("skip-ext-comments", "Leave out comments on extensions.")
    ] = False,
    skip_collations: Annotated[bool, _flag("skip-collations", "Do not create collations.")] = False,
    skip_vacuum: Annotated[bool, _flag("skip-vacuum", "Do not VACUUM ANALYZE.")] = False,
    skip_db_properties: Annotated[
        bool, _flag("skip-db-properties", "Leave out ALTER DATABASE ... SET.")
    ] = False,
    fail_fast: Annotated[
        bool,
        typer.Option(
            "--fail-fast",
            envvar="MILLRACE_FAIL_FAST",
            help="Stop everything at the first error; otherwise other tables are finished first.",
        ),
    ] = False,
    maintenance_work_mem: Annotated[
        str,
        typer.Option(
            envvar="MILLRACE_MAINTENANCE_WORK_MEM",
            metavar="SIZE",
            help="Memory on the target for each index build.",
            rich_help_panel=COPY,
        ),
    ] = "1GB",
    snapshot: Annotated[
        str,
        typer.Option(
            envvar="MILLRACE_SNAPSHOT",
            metavar="ID",
            help="Use a snapshot that another session of the source has exported and holds.",
            show_default=False,
        ),
    ] = "",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in the work directory: what is committed stays. Needs its "
            "snapshot, held by `millrace snapshot`, or --not-consistent.",
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Empty the target of the run in the work directory, and start anew."
        ),
    ] = False,
    not_consistent: Annotated[
        bool,
        typer.Option(
            "--not-consistent",
            help="Nobody writes to the source: resume under another snapshot than before.",
        ),
    ] = False,
    master: options.Master = "",
    conf: options.Conf = [],  # noqa: B006 (typer's way)
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; change nothing anywhere.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    log_json: options.LogJson = False,
) -> None:
    """Copy a whole database under one snapshot.

    Schema, rows, indexes, constraints, sequences, large objects: everything the source
    database holds at one instant, while it goes on being written to. The target database must
    exist and be empty.

    Tables are copied by Spark tasks, --table-jobs at once, the largest first. Indexes of a
    table start as soon as it is copied. A table above --split-tables-larger-than is copied in
    several parts at once.

    Exit codes: 2 wrong option, 3 a server is not ready (preflight), 4 work directory,
    5 a server failed, 70 a bug.
    """
    setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
    settings = CloneSettings(
        source=options.parse_dsn(source, "source"),
        target=options.parse_dsn(target, "target"),
        directory=directory,
        table_jobs=table_jobs,
        index_jobs=index_jobs,
        restore_jobs=restore_jobs,
        large_objects_jobs=large_objects_jobs,
        split=SplitSettings(
            parse_size(split_tables_larger_than), split_max_parts, not skip_split_by_ctid
        ),
        schema=SchemaSettings(
            no_owner=no_owner,
            no_acl=no_acl,
            no_comments=no_comments,
            no_tablespaces=no_tablespaces,
            skip_extensions=skip_extensions,
            skip_extension_comments=skip_ext_comments,
            skip_collations=skip_collations,
        ),
        filters=read_filters(filters) if filters else FilterRules(),
        drop_if_exists=drop_if_exists,
        roles=roles,
        role_passwords=not no_role_passwords,
        skip_large_objects=skip_large_objects,
        skip_vacuum=skip_vacuum,
        skip_database_properties=skip_db_properties,
        fail_fast=fail_fast,
        snapshot=snapshot or None,
        maintenance_work_mem=checked_memory(maintenance_work_mem),
        resume=resume,
        restart=restart,
        not_consistent=not_consistent,
    )
    if skip_extensions and settings.filters.of("include-only-extension"):
        raise ConfigError("--skip-extensions and [include-only-extension] exclude each other")
    spark_conf = parse_conf(conf)
    if is_dry_run:
        print_plan(dry_run(settings), jobs=table_jobs, as_json=as_json)
        return
    slots = table_jobs + (0 if skip_large_objects else large_objects_jobs)
    engine = Engine(master or default_master(slots), spark_conf, directory / "spark.log")
    with engine, open_display(quiet=quiet) as display:
        result = run_clone(settings, engine, display)
    if result.summary is None:
        return  # resumed, and nothing was left to do
    if as_json:
        print(json.dumps(asdict(result.summary), default=str))
    elif not quiet:
        print_summary(result.summary)


def checked_memory(text: str) -> str:
    """A size in PostgreSQL's own notation, in kilobytes."""
    return f"{max(1024, parse_size(text) // 1024)}kB"


def print_plan(result: CloneResult, *, jobs: int, as_json: bool) -> None:
    """What a clone would do."""
    plan = result.plan
    if as_json:
        print(json.dumps(plan_as_dict(result, jobs=jobs), default=str))
        return
    out = console()
    tables = Table(title="Plan", title_justify="left")
    for name in ("table", "bytes", "rows (estimated)", "parts", "format", "indexes"):
        tables.add_column(name, justify="left" if name in ("table", "format") else "right")
    for table in sorted(plan.catalog.tables, key=lambda t: (-t.total_bytes, t.label)):
        tables.add_row(
            Text(table.label),
            render_size(table.total_bytes),
            f"{table.estimated_rows:,}",
            str(len(plan.parts[table.oid])),
            f"text ({table.text_reason})" if table.text_reason else "binary",
            str(len(plan.indexes.get(table.oid, ()))),
        )
    out.print(tables)
    catalog = plan.catalog
    packs = plan_packs(plan.every_part, jobs=jobs)
    out.print(
        f"{len(catalog.tables)} tables in {len(packs)} Spark tasks, "
        f"{len(catalog.indexes)} indexes, {len(catalog.foreign_keys)} foreign keys, "
        f"{len(catalog.sequences)} sequences, "
        f"{sum(r.count for r in catalog.large_object_ranges)} large objects; nothing was changed"
    )
    for warning in result.warnings:
        out.print(Text(f"warning: {warning.side}: {warning.what}"))


def plan_as_dict(result: CloneResult, *, jobs: int) -> dict[str, object]:
    """The plan as JSON has it."""
    plan: Plan = result.plan
    return {
        "tables": [
            {
                "oid": table.oid,
                "schema": table.schema,
                "name": table.name,
                "bytes": table.total_bytes,
                "estimated_rows": table.estimated_rows,
                "format": "text" if table.text_reason else "binary",
                "format_reason": table.text_reason,
                "parts": [asdict(part) for part in plan.parts[table.oid]],
                "indexes": [index.name for index in plan.indexes.get(table.oid, ())],
            }
            for table in plan.catalog.tables
        ],
        "tasks": len(plan_packs(plan.every_part, jobs=jobs)),
        "foreign_keys": len(plan.catalog.foreign_keys),
        "sequences": len(plan.catalog.sequences),
        "large_objects": sum(r.count for r in plan.catalog.large_object_ranges),
        "warnings": [asdict(warning) for warning in result.warnings],
    }
