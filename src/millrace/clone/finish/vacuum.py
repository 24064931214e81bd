"""VACUUM ANALYZE of copied tables.

Invariant: runs after the last index and constraint of its table, outside any transaction.
"""

from __future__ import annotations

import logging
from typing import Any

import psycopg

from millrace import failpoint
from millrace.postgres.quote import qualified
from millrace.postgres.wire.connect import translated
from millrace.relation import Table

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]


def vacuum_table(connection: Connection, table: Table, *, analyzes: bool = True) -> None:
    """VACUUM and ANALYZE one table; a type that can't be analyzed is no reason to fail."""
    name = qualified(*table.target)
    options = " (ANALYZE)" if analyzes else ""
    failpoint.hit("vacuum.begin")
    with translated(f"vacuuming {table.label}"):
        try:
            connection.execute(f"VACUUM{options} {name}")
        except psycopg.errors.IndeterminateCollation as error:
            log.warning("%s can't be analyzed: %s", table.label, error.diag.message_primary)
            connection.execute(f"VACUUM {name}")
    failpoint.hit("vacuum.done")


def analyze_partitioned(connection: Connection, schema: str, name: str) -> None:
    """Statistics of a partitioned table as a whole; its partitions have theirs already."""
    only = "ONLY " if connection.info.server_version >= 180000 else ""
    with translated(f"analyzing {schema}.{name}"):
        connection.execute(f"ANALYZE {only}{qualified(schema, name)}")
