"""DDL that is replayed: how soon it is on the target, and what its capture costs the source.

*Lag*: ten sources, each a server of its own, commit ten transactions a second of ten rows each. In
turn, columns are added to a table of each source. A lag is the time from the reply to the ALTER
TABLE until the target's catalog has the column, which is asked for every 20 ms.

*Capture*: CREATE TABLE with a primary key, on one session, with and without the event triggers, in
turn, in blocks, on one server. The server writes to disk as servers do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import psycopg

from bench.clone import Options
from bench.consolidate import (
    PATIENCE_SECONDS,
    Arena,
    _consolidating,
    _wait_until_copied,
    open_arena,
)
from bench.lag import percentile
from bench.machine import machine_facts
from bench.report import RIGHT, Ratio, Run, assemble, median, say
from millrace.ddl.capture import TRIGGERS, LeftOut, install
from millrace.follow.publication import create_publications
from millrace.postgres.program.embedded import open_cluster

VERSION = 18
ROWS_PER_SECOND = 100
BEATS_PER_SECOND = 10
STATEMENTS, QUICK_STATEMENTS = 200, 60
BLOCKS, BLOCK_TABLES = 10, 100
LOOK_SECONDS = 0.02
LAG, CAPTURE = "lag", "capture"
PARTS = (LAG, CAPTURE)
MILLRACE, WITHOUT = "millrace", "without event triggers"
GOALS = {"ddl_p99_seconds": 2.0, "create_table": 1.3}
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


def run(options: Options) -> dict[str, object]:
    runs: list[Run] = []
    facts = machine_facts()
    for number in range(1, (options.rounds or (1 if options.quick else 3)) + 1):
        if not options.parts or CAPTURE in options.parts:
            runs += _run_capture(number)
        if not options.parts or LAG in options.parts:
            runs.append(_run_lag(number, QUICK_STATEMENTS if options.quick else STATEMENTS))
    return assemble("ddl", runs, ratios(runs), {"quick": options.quick, "machine": facts})


def ratios(runs: Sequence[Run]) -> dict[str, Ratio]:
    lag = median(runs, LAG, MILLRACE, "ddl_p99_seconds")
    ours = median(runs, CAPTURE, MILLRACE, "create_table_ms")
    theirs = median(runs, CAPTURE, WITHOUT, "create_table_ms")
    cost = ours / theirs if ours and theirs else None
    return {
        "ddl_p99_seconds": Ratio(lag, GOALS["ddl_p99_seconds"]),
        "create_table_with_capture": Ratio(cost, GOALS["create_table"], theirs=WITHOUT),
    }


def _run_lag(number: int, statements: int) -> Run:
    with open_arena(VERSION) as arena:
        arena.setup()
        with _consolidating(arena):
            _wait_until_copied(arena, len(arena.sources))
            with _writing(arena):
                lags = [_one_lag(arena, at) for at in range(statements)]
    figures = {
        "ddl_p50_seconds": percentile(lags, 0.5),
        "ddl_p99_seconds": percentile(lags, 0.99),
        "ddl_max_seconds": max(lags),
    }
    say(f"DDL on the target: p50 {figures['ddl_p50_seconds']:.2f} s, p99"
        f" {figures['ddl_p99_seconds']:.2f} s")  # fmt: skip
    return Run(LAG, MILLRACE, number, RIGHT, "", figures)


def _one_lag(arena: Arena, at: int) -> float:
    source = arena.sources[at % len(arena.sources)]
    with psycopg.connect(source.uri, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE account ADD COLUMN c{at} int DEFAULT {at}".encode())
    committed_at = time.monotonic()
    query = "SELECT FROM pg_attribute WHERE attrelid = %s::regclass AND attname = %s"
    with psycopg.connect(arena.warehouse, autocommit=True) as target:
        while not target.execute(query, (f"{source.schema}.account", f"c{at}")).rowcount:
            if time.monotonic() - committed_at > PATIENCE_SECONDS:
                raise TimeoutError(f"column c{at} of {source.name} is not on the target")
            time.sleep(LOOK_SECONDS)
    return time.monotonic() - committed_at


@contextlib.contextmanager
def _writing(arena: Arena) -> Iterator[None]:
    """Every source commits a steady load meanwhile."""
    over = threading.Event()

    def write(uri: str) -> None:
        rows, first = ROWS_PER_SECOND // BEATS_PER_SECOND, 0
        with psycopg.connect(uri, autocommit=True) as connection:
            while not over.wait(1 / BEATS_PER_SECOND):
                connection.execute(
                    "INSERT INTO beat SELECT %s + i, i, 'x' FROM generate_series(1, %s) i",
                    (first, rows),
                )
                first += rows

    writers = [threading.Thread(target=write, args=(one.uri,)) for one in arena.sources]
    for one in writers:
        one.start()
    try:
        yield
    finally:
        over.set()
        for one in writers:
            one.join()


def _run_capture(number: int) -> list[Run]:
    """Blocks with and without take turns, so that both meet the same machine."""
    seconds: dict[str, list[float]] = {MILLRACE: [], WITHOUT: []}
    with open_cluster(VERSION, settings=DURABLE) as cluster:
        uri = cluster.create_database("app")
        with psycopg.connect(uri, autocommit=True) as connection:
            create_publications(connection, "bench")
            install(connection, "bench", LeftOut())
            for block in range(2 * BLOCKS):
                contestant = WITHOUT if block % 2 else MILLRACE
                _switch(connection, is_on=contestant == MILLRACE)
                began = time.perf_counter()
                for table in range(BLOCK_TABLES):
                    connection.execute(
                        f"CREATE TABLE b{block}_{table} (id int PRIMARY KEY, a text NOT NULL,"
                        " b numeric DEFAULT 0, c timestamptz DEFAULT now())".encode()
                    )
                if block > 1:  # the first of each fills caches
                    seconds[contestant].append((time.perf_counter() - began) / BLOCK_TABLES)
    found = []
    for contestant, values in seconds.items():
        figures = {"create_table_ms": 1000 * percentile(values, 0.5)}
        say(f"CREATE TABLE, {contestant}: {figures['create_table_ms']:.2f} ms")
        found.append(Run(CAPTURE, contestant, number, RIGHT, "", figures))
    return found


def _switch(connection: psycopg.Connection[tuple[object, ...]], *, is_on: bool) -> None:
    how = "ENABLE ALWAYS" if is_on else "DISABLE"
    for trigger in TRIGGERS:
        connection.execute(f"ALTER EVENT TRIGGER {trigger} {how}".encode())
