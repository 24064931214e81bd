"""`millrace clone`."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from millrace.cli.asked import Asked
from millrace.cli.display import console, open_display, print_summary
from millrace.cli.follow import open_follow_display, print_follow, set_endpos
from millrace.clone.plan import Plan, plan_packs
from millrace.clone.run import CloneResult, dry_run
from millrace.clone.run import clone as run_clone
from millrace.clone.settings import CloneSettings
from millrace.config.size import render_size
from millrace.log import setup_logging
from millrace.spark.session import parse_conf
from millrace.stream.settings import SlotSettings


def clone(asked: Asked) -> None:
    """Copy a whole database under one snapshot.

    Schema, rows, indexes, constraints, sequences, large objects: everything the source
    database holds at one instant, while it goes on being written to. The target database must
    exist and be empty.

    Tables are copied by Spark tasks, --table-jobs at once, the largest first. Indexes of a
    table start as soon as it is copied. A table above --split-tables-larger-than is copied in
    several parts at once.

    With --follow the copy is the beginning: changes since its snapshot are received while it
    runs, and applied after it, until the end position.

    Exit codes: 2 wrong option, 3 a server is not ready (preflight), 4 work directory,
    5 a server failed, 7 a change could not be applied, 70 a bug.
    """
    setup_logging(verbose=asked.verbose, quiet=asked.quiet, as_json=asked.log_json)
    settings = asked.settings()
    parse_conf(asked.conf)  # a dry run, too, refuses a wrong one
    if asked.is_dry_run:
        print_plan(dry_run(settings), jobs=asked.table_jobs, as_json=asked.as_json)
        return
    if asked.follow:
        _clone_and_follow(asked, settings)
    else:
        run_and_tell(asked, settings)


def _clone_and_follow(asked: Asked, settings: CloneSettings) -> None:
    # Numba takes half a second: only those who need it wait for it.
    from millrace.stream.clone_follow import clone_and_follow

    def tell(result: CloneResult) -> None:
        if result.summary is not None and not asked.as_json and not asked.quiet:
            print_summary(result.summary)

    slot = SlotSettings(asked.slot_name, asked.plugin, asked.spool)
    follow_settings = asked.follow_settings()
    set_endpos(asked.directory, asked.endpos)
    with (
        asked.engine() as engine,
        open_follow_display(quiet=asked.quiet, metrics_port=asked.metrics_port) as display,
    ):
        result = clone_and_follow(settings, follow_settings, slot, engine, display, on_cloned=tell)
    print_follow(result, as_json=asked.as_json, quiet=asked.quiet)


def run_and_tell(asked: Asked, settings: CloneSettings) -> None:
    """Do it, and print what was done."""
    with asked.engine() as engine, open_display(quiet=asked.quiet) as display:
        result = run_clone(settings, engine, display)
    if result.summary is None:
        return  # resumed, and nothing was left to do
    if asked.as_json:
        print(json.dumps(asdict(result.summary), default=str))
    elif not asked.quiet:
        print_summary(result.summary)


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
