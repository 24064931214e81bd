"""What a clone would do, for `--dry-run`.

Invariant: it prints the plan that the clone itself would make.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from millrace.cli.display import console
from millrace.clone.plan import Plan, plan_packs
from millrace.clone.run import CloneResult
from millrace.config.size import render_size


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
