"""`millrace tube stats`: what waits in tubes, since when, and how fast it goes.

Invariant: lag is now minus the oldest pod that waits, so a shard that is stuck shows it. Rates come
from the workers themselves, and are known only while somebody watches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import psycopg
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millrace.cli.display import console, render_seconds
from millrace.tube.delivery.traffic import RATE_SECONDS, Traffic, listen, receive
from millrace.tube.install import refused

Connection = psycopg.Connection[tuple[Any, ...]]
Rows = list[dict[str, Any]]

_QUERIES = {
    "partitions": "SELECT *, extract(epoch FROM clock_timestamp() - inc_min_ts)::float"
    " AS inc_lag_seconds FROM tube_stats()",
    "shards": "SELECT * FROM tube_shards()",
    "backfills": "SELECT *, tbl::text AS tbl FROM tube_backfill_progress()",
}


def show_once(connection: Connection, *, as_json: bool) -> None:
    found = read_stats(connection)
    if as_json:
        print(json.dumps(found, default=str))
    else:
        console().print(render_stats(found))


def watch_stats(
    connection: Connection,
    schema: str,
    seconds: float,
    *,
    as_json: bool,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Anew every few seconds, until it is interrupted; JSON as a line for each look."""
    with refused():
        listen(connection)
    traffic = Traffic(is_late=True)
    out = console()
    with Live(console=out, auto_refresh=False, transient=False) as live:
        while not is_over():
            found = read_stats(connection) | {"rates": _rates(connection, schema, traffic)}
            if as_json:
                out.print(Text(json.dumps(found, default=str)), soft_wrap=True)
            elif out.is_terminal:
                live.update(render_stats(found), refresh=True)
            else:
                out.print(render_stats(found))
            _receive(connection, traffic, seconds)


def _receive(connection: Connection, traffic: Traffic, seconds: float) -> None:
    until = time.monotonic() + seconds
    with refused():
        while (left := until - time.monotonic()) > 0:
            receive(connection, traffic, left)


def read_stats(connection: Connection) -> dict[str, Rows]:
    return {name: _read(connection, query) for name, query in _QUERIES.items()}


def _read(connection: Connection, query: str) -> Rows:
    with refused():
        found = connection.execute(query.encode())
        names = [column.name for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found]


def _rates(connection: Connection, schema: str, traffic: Traffic) -> Rows:
    tubes = _read(connection, "SELECT DISTINCT tube FROM tube_list() ORDER BY 1")
    return [
        {
            "tube": one["tube"],
            "partition": partition,
            "ids_per_second": traffic.ids_per_second(schema, one["tube"], partition),
            "ids": counts.ids,
            "errors": counts.errors,
        }
        for one in tubes
        for partition, counts in sorted(traffic.counts(schema, one["tube"]).items())
    ]


def render_stats(found: dict[str, Rows]) -> Group:
    """Tables for people."""
    rates = {(one["tube"], one["partition"]): one for one in found.get("rates", ())}
    shards = Table()
    for title in ("tube", "partition", "shard", "pods", "ids", "lag", "backfill ids", "control"):
        shards.add_column(title, overflow="fold")
    if "rates" in found:
        shards.add_column(f"ids/s of the partition ({RATE_SECONDS:.0f} s)")
    for row in found["shards"]:
        cells = [
            row["tube"],
            str(row["partition"]),
            str(row["shard"]),
            f"{row['pods']:,}",
            f"{row['ids']:,}",
            render_seconds(row["lag_seconds"]) if row["pods"] else "",
            f"{row['backfill_ids']:,}",
            f"{row['control_pods']:,}",
        ]
        if "rates" in found:
            rate = rates.get((row["tube"], row["partition"]))
            cells.append(f"{rate['ids_per_second']:,.1f}" if rate else "")
        shards.add_row(*(Text(cell) for cell in cells))
    tables = [shards]
    open_ones = [one for one in found["backfills"] if one["state"] in ("begun", "running")]
    if open_ones:
        tables.append(_render_backfills(open_ones))
    return Group(*tables)


def _render_backfills(rows: Rows) -> Table:
    table = Table("tube", "backfill of", "state", "ids", "of about", "pages")
    for row in rows:
        cells = (row["tube"], row["tbl"], row["state"], row["ids"], row["approx_size"])
        table.add_row(*(Text(str(cell)) for cell in (*cells, row["pages"])))
    return table
