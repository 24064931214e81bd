"""What a clone did, in numbers.

Invariant: built from the records of the target and the timings of the work
directory, never from estimates.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from millrace import __version__
from millrace.clone.plan import Plan
from millrace.postgres.run_record import CopiedPart, PartKey
from millrace.workdir.store import Store, write_json


@dataclass(frozen=True)
class TableSummary:
    """One table: what was copied and how long each kind of work took, in seconds."""

    oid: int
    schema: str
    name: str
    parts: int
    rows: int
    bytes: int
    copy_seconds: float
    indexes: int
    index_seconds: float
    constraint_seconds: float
    vacuum_seconds: float
    format: str


@dataclass(frozen=True)
class Summary:
    """The whole run."""

    millrace_version: str
    run_id: str
    snapshot: str
    # In words, what the target holds.
    consistency: str
    seconds: float
    # How long the copy had to wait for Spark, beyond what overlapped with other steps.
    spark_start_seconds: float
    jvm_start_seconds: float
    rows: int
    bytes: int
    large_objects: int
    sequences: int
    foreign_keys: int
    # Tables whose statistics came from the source; all others were analyzed.
    statistics_carried: int
    steps: list[dict[str, object]]
    tables: list[TableSummary]

    @classmethod
    def build(
        cls,
        plan: Plan,
        copied: Mapping[PartKey, CopiedPart],
        store: Store,
        *,
        steps: Sequence[tuple[str, float]],
        seconds: float,
        spark_start_seconds: float,
        jvm_start_seconds: float,
        snapshot: str,
        run_id: str,
        consistency: str,
        statistics_carried: int,
    ) -> Summary:
        by_table: dict[int, list[CopiedPart]] = defaultdict(list)
        for part in copied.values():
            by_table[part.table_oid].append(part)
        index_seconds = {t["oid"]: t["seconds"] for t in store.read_timings("index")}
        constraint_seconds = {t["oid"]: t["seconds"] for t in store.read_timings("constraint")}
        vacuum_seconds = {t["oid"]: t["seconds"] for t in store.read_timings("vacuum")}
        tables = [
            TableSummary(
                oid=table.oid,
                schema=table.schema,
                name=table.name,
                parts=len(plan.parts[table.oid]),
                rows=sum(part.rows for part in by_table[table.oid]),
                bytes=sum(part.bytes for part in by_table[table.oid]),
                copy_seconds=sum(part.seconds for part in by_table[table.oid]),
                indexes=len(plan.indexes.get(table.oid, ())),
                index_seconds=sum(
                    index_seconds.get(index.oid, 0.0) for index in plan.indexes.get(table.oid, ())
                ),
                constraint_seconds=constraint_seconds.get(table.oid, 0.0),
                vacuum_seconds=vacuum_seconds.get(table.oid, 0.0),
                format="text" if table.text_reason else "binary",
            )
            for table in plan.catalog.tables
        ]
        return cls(
            millrace_version=__version__,
            run_id=run_id,
            snapshot=snapshot,
            consistency=consistency,
            seconds=seconds,
            spark_start_seconds=spark_start_seconds,
            jvm_start_seconds=jvm_start_seconds,
            rows=sum(table.rows for table in tables),
            bytes=sum(part.bytes for part in copied.values()),
            large_objects=sum(r.count for r in plan.catalog.large_object_ranges),
            sequences=len(plan.catalog.sequences),
            foreign_keys=len(plan.catalog.foreign_keys),
            statistics_carried=statistics_carried,
            steps=[{"name": name, "seconds": spent} for name, spent in steps],
            tables=sorted(tables, key=lambda table: -table.bytes),
        )


def read_summary(path: Path) -> Summary | None:
    """What `write_summary` wrote; None where no run has ended."""
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return Summary(**found | {"tables": [TableSummary(**one) for one in found["tables"]]})


def write_summary(path: Path, summary: Summary) -> None:
    """summary.json in the work directory."""
    write_json(path, asdict(summary))
