"""`millrace clone --all-databases`.

Invariant: a database whose clone is finished is not touched again by `--resume`; the first that
fails ends the command.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from millrace.cli.command_options import CommandOptions
from millrace.cli.display import console, open_display, print_summary, render_seconds
from millrace.cli.plan import plan_as_dict, print_plan
from millrace.clone.databases import plan_databases, prepare_target, read_missing
from millrace.clone.run import clone, dry_run
from millrace.clone.settings import CloneSettings
from millrace.clone.summary import Summary
from millrace.config.size import render_size
from millrace.errors import ConfigError, MillraceError

log = logging.getLogger(__name__)


def clone_all(asked: CommandOptions, settings: CloneSettings) -> None:
    """One clone after the other, with one Spark; stops at the first that fails."""
    for given, option in ((asked.follow, "--follow"), (asked.snapshot, "--snapshot")):
        if given:
            raise ConfigError(
                f"--all-databases and {option} cannot be used together",
                hint="a slot and a snapshot belong to one database: clone that database on its own",
            )
    databases = plan_databases(settings)
    missing = read_missing(settings, databases)
    if asked.is_dry_run:
        _print_plans(asked, databases, missing)
        return
    prepare_target(settings, missing)
    summaries: dict[str, Summary] = {}
    with asked.engine() as engine:
        for name, of_database in databases.items():
            log.info("database %s", name)
            try:
                with open_display(quiet=asked.quiet) as display:
                    result = clone(of_database, engine, display)
            except MillraceError as error:
                error.message = f"database {name}: {error.message}"
                raise
            if result.summary is not None:
                summaries[name] = result.summary
                if not asked.as_json and not asked.quiet:
                    print_summary(result.summary)
    if asked.as_json:
        print(json.dumps({name: asdict(one) for name, one in summaries.items()}, default=str))
    elif not asked.quiet:
        _print_databases(databases, summaries)


def _print_plans(
    asked: CommandOptions, databases: dict[str, CloneSettings], missing: list[str]
) -> None:
    """A database that is not there yet can't be checked, and has no plan."""
    plans = {name: dry_run(one) for name, one in databases.items() if name not in missing}
    if asked.as_json:
        found = {name: plan_as_dict(one, jobs=asked.table_jobs) for name, one in plans.items()}
        print(json.dumps({"create": missing, "databases": found}, default=str))
        return
    for name, plan in plans.items():
        console().print(Text(f"database {name}"))
        print_plan(plan, jobs=asked.table_jobs, as_json=False)
    for name in missing:
        console().print(Text(f"database {name} would be created"))


def _print_databases(databases: dict[str, CloneSettings], summaries: dict[str, Summary]) -> None:
    table = Table(title="Databases", title_justify="left")
    for heading in ("database", "tables", "rows", "bytes", "time"):
        table.add_column(heading, justify="left" if heading == "database" else "right")
    for name in databases:
        summary = summaries.get(name)
        if summary is None:
            table.add_row(Text(name), "", "", "", "was done")
        else:
            table.add_row(
                Text(name),
                f"{len(summary.tables):,}",
                f"{summary.rows:,}",
                render_size(summary.bytes),
                render_seconds(summary.seconds),
            )
    console().print(table)
