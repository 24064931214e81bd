"""`compare data` from beginning to end.

Invariant: equal is said only of tables whose every part was summed on both sides.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from millrace.clone.compare import (
    PART_BYTES,
    Compared,
    ComparePart,
    CompareTask,
    compare_parts,
    merge_parts,
    plan_compare,
)
from millrace.clone.engine import Engine
from millrace.clone.source import sample_tables
from millrace.clone.split import SplitSettings
from millrace.config.dsn import Dsn
from millrace.postgres import catalog
from millrace.postgres.connect import connect, resolve, server_encoding, translated
from millrace.snapshot.export import open_snapshot

# Small tables share a task.
PACK_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class CompareSettings:
    """Flags of `millrace compare data`."""

    source: Dsn
    target: Dsn
    jobs: int = 4
    snapshot: str | None = None


def compare_data(settings: CompareSettings, engine: Engine) -> list[Compared]:
    """Every table of the source, on both sides, under one snapshot of the source."""
    source, target = resolve(settings.source), resolve(settings.target)
    with open_snapshot(source, settings.snapshot) as snapshot:
        with translated("reading the source's catalog"):
            with connect(target, "compare") as connection:
                same = server_encoding(connection) == server_encoding(snapshot.connection)
            tables = catalog.read_tables(snapshot.connection, same_encoding=same)
        split = SplitSettings(larger_than_bytes=PART_BYTES, by_ctid=False)
        samples = sample_tables(snapshot.connection, tables, split)
        parts = plan_compare(tables, samples)
        tasks = [
            CompareTask(source, target, snapshot.id, same, pack)
            for pack in _packs(parts, {t.label: t.total_bytes for t in tables})
        ]
        with ThreadPoolExecutor(settings.jobs) as threads:
            results = threads.map(
                lambda task: engine.call(compare_parts, task, f"compare {task.parts[0].label}"),
                tasks,
            )
            return merge_parts([one for result in results for one in result])


def _packs(parts: list[ComparePart], sizes: dict[str, int]) -> list[tuple[ComparePart, ...]]:
    packs: list[tuple[ComparePart, ...]] = []
    pending: list[ComparePart] = []
    size = 0
    for part in parts:
        pending.append(part)
        size += sizes.get(part.label, PACK_BYTES) if not part.condition else PACK_BYTES
        if size >= PACK_BYTES or len(pending) >= 200:
            packs.append(tuple(pending))
            pending, size = [], 0
    return [*packs, tuple(pending)] if pending else packs
