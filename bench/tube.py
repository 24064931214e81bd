"""Tubes: what they cost writers, how fast they are delivered, what a held snapshot does to them.

PgQ takes part in the same run if its extension is installed, on the version of PostgreSQL that it
is packaged for. Contestants take turns, and the order rotates with the rounds. The servers wait for
their disk (fsync), as nobody would run a queue otherwise.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg

from bench import pgq
from bench.clone import Options
from bench.contestants import JDBC_JAR
from bench.machine import machine_facts
from bench.report import (
    HIGHER,
    LOWER,
    RIGHT,
    YARDSTICK,
    Comparison,
    Ratio,
    Run,
    assemble,
    say,
)
from bench.tube_drain import (
    HELD,
    LAG,
    POD_SIZES,
    QUEUE,
    WORKERS,
    Deliverers,
    deliver_set,
    worker_name,
)
from bench.tube_writes import SYNCS, WRITES, Writers, comparisons, contestants
from bench.yardstick import Yardstick
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.spark.session import Engine, default_master
from millrace.tube.install import install

SERVER_VERSION = 18
SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "wal_level": "replica",
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    # As it is on a server, but its work is done where it is measured: a drained queue is not.
    "autovacuum": "off",
}
QUICK_SCALE = 0.1
WRITE_PART, DRAIN_PART, QUEUE_PART, LAG_PART, HELD_PART = PARTS = (
    "writes", "drain", "queue", "lag", "held",
)  # fmt: skip
# Rows of the four tables that are delivered.
ROWS = 400_000
FEWEST_ROWS = 4_000
BEFORE, DURING, AFTER = "before", "while it is held", "after"
IDS_GOAL = 50_000.0
LAG_GOALS_MS = {"delivery_p50_ms": 50.0, "delivery_p99_ms": 1000.0}
HELD_GOAL = 0.9
# One rotation (`tube_rotate`, max_pods).
DEAD_ROWS_GOAL = 30_000.0


@dataclass(frozen=True)
class Seconds:
    """How long each part lasts."""

    write: float
    lag: float
    hold: float


FULL, QUICK = Seconds(5, 20, 600), Seconds(2, 8, 20)


def run(options: Options) -> dict[str, Any]:
    """The whole benchmark; the result is what the JSON file holds."""
    scale = options.scale or (QUICK_SCALE if options.quick else 1.0)
    rounds = options.rounds or (1 if options.quick else 3)
    version = options.server_version or (
        pgq.SERVER_VERSION if pgq.is_installed() else SERVER_VERSION
    )
    parts = options.parts or PARTS
    seconds = QUICK if options.quick else FULL
    rows = max(FEWEST_ROWS, int(ROWS * scale))
    runs: list[Run] = []
    with ExitStack() as stack:
        source, sink = (
            stack.enter_context(open_cluster(version, settings=SETTINGS)) for _ in range(2)
        )
        facts = machine_facts(source.installation.bindir, JDBC_JAR)
        facts["versions"] |= {"PgQ": pgq.read_version()}
        connection = stack.enter_context(_open_source(source))
        if WRITE_PART in parts:
            writers = Writers(source, connection, seconds.write)
            for number in range(1, rounds + 1):
                runs += list(_write(writers, number))
        if set(parts) - {WRITE_PART}:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            master = default_master(max(WORKERS))
            engine = stack.enter_context(Engine(master, {}, folder / "spark.log"))
            engine.wait()
            deliverers = stack.enter_context(
                closing(Deliverers(source, sink, connection, engine, rows))
            )
            for number in range(1, rounds + 1):
                runs += list(_deliver(deliverers, number, seconds, parts))
            if HELD_PART in parts:
                runs += list(_hold(deliverers, rounds, seconds.hold))
    return assemble(
        "tube",
        runs,
        ratios(runs),
        {
            "quick": options.quick,
            "scale": scale,
            "rounds": rounds,
            "server_version": version,
            "server_settings": SETTINGS,
            "rows": rows,
            "hold_seconds": seconds.hold,
            "machine": facts,
            "data_sets": {
                name: {"title": title, "changed_rows": 0}
                for name, title in titles(rows, seconds.hold).items()
            },
        },
    )


def titles(rows: int, hold_seconds: float) -> dict[str, str]:
    """What each data set is, by name."""
    found = {
        write.data_set(sync): f"{write.rows:,} rows of 100 bytes in a transaction, four clients"
        for write in WRITES
        for sync in SYNCS
    }
    return found | {
        **{deliver_set(size): f"{rows:,} ids, enriched, to PostgreSQL" for size in POD_SIZES},
        QUEUE: "pods or events of one id, read and deleted in SQL by one reader",
        LAG: "from commit to delivery, at 500 writes a second",
        HELD: f"a backlog of {rows:,} pods of one id, a snapshot held for {hold_seconds:.0f} s at"
        " 2,000 touches a second",
    }


def ratios(runs: Sequence[Run]) -> dict[str, Ratio]:
    found = {one.name: one.ratio(runs) for one in comparisons()}
    for size in POD_SIZES:
        best = max(
            (_values(runs, deliver_set(size), worker_name(n), "ids_per_second") for n in WORKERS),
            key=lambda values: statistics.median(values or [0.0]),
        )
        goal = IDS_GOAL if size == POD_SIZES[0] else None
        found[f"ids_per_second_pods_of_{size}"] = _plain(best, goal, HIGHER)
    for figure, goal in LAG_GOALS_MS.items():
        found[figure] = _plain(_values(runs, LAG, worker_name(1), figure), goal, LOWER)
    for other, goal in ((BEFORE, HELD_GOAL), (AFTER, None)):
        sides = (HELD, DURING), (HELD, other)
        name = f"held_snapshot_drain_vs_{other}"
        found[name] = Comparison(name, "ids_per_second", *sides, goal, HIGHER).ratio(runs)
    dead = _values(runs, HELD, DURING, "dead_rows")
    found["held_snapshot_dead_rows"] = _plain(dead, DEAD_ROWS_GOAL, LOWER)
    sides = (QUEUE, "tube"), (QUEUE, "PgQ")
    name = "queue_alone_vs_pgq"
    found[name] = Comparison(name, "events_per_second", *sides, None, HIGHER).ratio(runs)
    return found


def _values(runs: Sequence[Run], data_set: str, contestant: str, figure: str) -> list[float]:
    return [
        run.figures[figure]
        for run in runs
        if (run.data_set, run.contestant, run.outcome) == (data_set, contestant, RIGHT)
    ]


def _plain(values: Sequence[float], goal: float | None, better: str) -> Ratio:
    """A figure that is held against a goal by itself."""
    if not values:
        return Ratio(None, goal, better, "no right run")
    return Ratio(statistics.median(values), goal, better, least=min(values), most=max(values))


@contextmanager
def _open_source(cluster: Cluster) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(cluster.create_database("bench"), autocommit=True) as connection:
        install(connection)
        connection.execute("SET search_path = public, tube")
        yield connection


def _write(writers: Writers, number: int) -> Iterator[Run]:
    field = contestants()
    order = [*field[number % len(field) :], *field[: number % len(field)]]
    for write in WRITES:
        for sync in SYNCS:
            for contestant in order:
                with Yardstick() as yardstick:
                    done = writers.run(write, sync, contestant, number)
                yield _told(done, yardstick)


def _deliver(
    deliverers: Deliverers, number: int, seconds: Seconds, parts: Sequence[str]
) -> Iterator[Run]:
    for size in POD_SIZES if DRAIN_PART in parts else ():
        for workers in WORKERS[number % len(WORKERS) :] + WORKERS[: number % len(WORKERS)]:
            with Yardstick() as yardstick:
                done = deliverers.drain(size, workers, number)
            yield _told(done, yardstick)
    if QUEUE_PART in parts:
        for contestant in ("tube", "PgQ") if pgq.is_installed() else ("tube",):
            yield _told(deliverers.read_queue(contestant, number))
    if LAG_PART in parts:
        yield _told(deliverers.lag(number, seconds.lag))


def _hold(deliverers: Deliverers, rounds: int, seconds: float) -> Iterator[Run]:
    """One snapshot: its rounds are at its end, between others before and after it."""
    numbers = range(1, rounds + 1)
    for number in numbers:
        yield _told(deliverers.drain_held(BEFORE, number))
    with deliverers.hold(seconds):
        for number in numbers:
            yield _told(deliverers.drain_held(DURING, number))
    for number in numbers:
        yield _told(deliverers.drain_held(AFTER, number))


def _told(done: Run, yardstick: Yardstick | None = None) -> Run:
    if yardstick is not None:
        done = replace(done, figures={**done.figures, YARDSTICK: yardstick.milliseconds()})
    shown = ", ".join(f"{name} {value:,.1f}" for name, value in done.figures.items())
    say(f"{done.data_set}: {done.contestant}, round {done.round}: {done.reason or shown}")
    return done
