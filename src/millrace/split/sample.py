"""Sampled rows of the tables that will be split into parts.

Invariant: only tables that get more than one part are sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from millrace.postgres.catalog import relations as catalog
from millrace.postgres.wire.connect import translated
from millrace.relation import Table
from millrace.split.plan import SampledRow, SplitSettings, plan_part_count, plan_sample_percent

Connection = psycopg.Connection[tuple[Any, ...]]


def sample_tables(
    connection: Connection, tables: Iterable[Table], split: SplitSettings
) -> dict[int, list[SampledRow]]:
    """Samples of the tables that will be split."""
    samples = {}
    for table in tables:
        if plan_part_count(table, split) > 1:
            with translated(f"sampling {table.label}"):
                rows = catalog.sample_keys(connection, table, plan_sample_percent(table))
            samples[table.oid] = [SampledRow(key, weight) for key, weight in rows]
    return samples
