"""How fast a tube is delivered: backlogs by worker count, single touches, under a held snapshot.

Millrace's own delivery with enrichment, workers as Spark tasks that were up before, into a second
server. A backlog counts from the call to the return, which is after a second look at an empty tube.
Four tables, one in each partition. Every document must have got a newer version than before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg

from bench import pgq
from bench.changes import Place
from bench.lag import Beats, percentile
from bench.measure import postmaster_pid, quiet, server_cpu_seconds
from bench.millrace_stream import CpuOf
from bench.report import RIGHT, WRONG, Run
from bench.tube_writes import BODY, run_script
from millrace.config.dsn import Dsn
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import resolve
from millrace.spark.session import Engine
from millrace.tube.delivery.plan import Delivery, TableDelivery
from millrace.tube.delivery.run import check_delivery, run_delivery

TUBE, PARTITIONS = "delivery", 4
TABLES = tuple(f"item_{n}" for n in range(PARTITIONS))
QUEUE, LAG, HELD = "queue", "single touches", "held snapshot"
WORKERS = (1, 2, 4)
POD_SIZES = (250, 1)
WRITES_PER_SECOND, TOUCHES_PER_SECOND = 500, 2_000
# How long a delivery may take to begin.
START_SECONDS = 60.0
# What a reader of the queue alone takes at once.
READ_PODS = 500


def deliver_set(pod_size: int) -> str:
    return f"pods of {pod_size}"


def worker_name(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


class Deliverers:
    """A source with a tube, and a sink."""

    def __init__(
        self,
        source: Cluster,
        sink: Cluster,
        connection: psycopg.Connection,
        engine: Engine,
        rows: int,
    ) -> None:
        self._source, self._sink = source, sink
        self._connection = connection
        self._engine = engine
        self._rows = rows
        self._place = Place(source.installation.bindir, source.uri("bench"), connection)
        self._documents = psycopg.connect(sink.create_database("bench"), autocommit=True)
        self._build()
        self._deliver(PARTITIONS)  # the first documents; Spark's workers have their imports

    def close(self) -> None:
        self._documents.close()

    def drain(self, pod_size: int, workers: int, number: int) -> Run:
        """Touch every row, then deliver."""
        return self._drain(deliver_set(pod_size), worker_name(workers), number, pod_size, workers)

    def drain_held(self, contestant: str, number: int) -> Run:
        run = self._drain(HELD, contestant, number, 1, 1)
        dead, slots = self._scalars(
            "SELECT sum(pg_stat_get_dead_tuples(inhrelid)), count(*) FROM pg_inherits"
            f" WHERE inhparent = 'tube.{TUBE}'::regclass"
        )
        figures = dict(run.figures) | {"dead_rows": float(dead), "slots": slots}
        return Run(HELD, contestant, number, run.outcome, run.reason, figures)

    @contextmanager
    def hold(self, seconds: float) -> Iterator[None]:
        """A snapshot that has been held for so long, with touches and their delivery meanwhile."""
        with psycopg.connect(self._place.uri) as holder:
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT count(*) FROM pg_class")
            with self._serving():
                self._pgbench(
                    f"\\set id random(1, {self._rows // PARTITIONS})\n"
                    f"SELECT {TABLES[0]}_touch(ARRAY[:id]::bigint[]);",
                    TOUCHES_PER_SECOND,
                    seconds,
                )
            yield

    def lag(self, number: int, seconds: float) -> Run:
        """From the commit of a row until its document is seen, while others are written."""
        with self._serving(), Beats(self._place.uri, self._sink.uri("bench")) as beats:
            reached = self._pgbench(
                f"\\set id random(1, {self._rows // PARTITIONS})\n"
                f"UPDATE {TABLES[1]} SET body = {BODY} WHERE id = :id;",
                WRITES_PER_SECOND,
                seconds,
            )
        lags = beats.lags()
        figures = {
            "load_rows_per_second": reached,
            "load_share": reached / WRITES_PER_SECOND,
            "delivery_p50_ms": 1000 * percentile(lags, 0.5),
            "delivery_p99_ms": 1000 * percentile(lags, 0.99),
        }
        return Run(LAG, worker_name(1), number, RIGHT, "", figures)

    def read_queue(self, contestant: str, number: int) -> Run:
        """The queue alone: pods, or events, of one id are read and deleted by one reader in SQL."""
        events = self._rows // 2
        if contestant == "PgQ":
            pgq.install(self._connection)
            pgq.fill(self._connection, events)
        else:
            self._touch(1, TABLES[:1], touches=events)
        quiet(self._source)
        began = time.monotonic()
        found = pgq.drain(self._connection) if contestant == "PgQ" else self._read_pods()
        figures = {"events_per_second": found / (time.monotonic() - began)}
        reason = "" if found == events else f"{found:,} of {events:,} events came back"
        return Run(QUEUE, contestant, number, WRONG if reason else RIGHT, reason, figures)

    def _read_pods(self) -> int:
        sql, total = self._scalars(f"SELECT tube_pods_sql('{TUBE}', {PARTITIONS}, 0), 0")
        for way in ("sort", "seqscan", "bitmapscan"):  # as readers of pg-tube do
            self._run(f"SET enable_{way} = off")
        while True:
            rows = self._connection.execute(f"{sql} LIMIT {READ_PODS}".encode()).fetchall()
            if not rows:
                self._run("RESET enable_sort; RESET enable_seqscan; RESET enable_bitmapscan")
                return total
            self._connection.execute(
                "SELECT tube_pods_delete(%s, %s, 0, %s)",
                (TUBE, PARTITIONS, [row[0] for row in rows]),
            )
            total += len(rows)

    def _drain(
        self, data_set: str, contestant: str, number: int, pod_size: int, workers: int
    ) -> Run:
        before = self._scalars("SELECT last_value FROM tube.tube_seq")[0]
        self._touch(pod_size)
        pods = self._scalars(f"SELECT count(*) FROM tube.{TUBE}")[0]
        quiet(self._source, self._sink)
        pids = [postmaster_pid(one.data_dir) for one in (self._source, self._sink)]
        servers = [server_cpu_seconds(pid) for pid in pids]
        client, began = CpuOf(), time.monotonic()
        self._deliver(workers)
        seconds = time.monotonic() - began
        source, sink = (
            server_cpu_seconds(pid) - cpu for pid, cpu in zip(pids, servers, strict=True)
        )
        spent = client.figures()["run_cpu_seconds"]
        figures = {
            "ids_per_second": self._rows / seconds,
            "pods_per_second": pods / seconds,
            "cpu_us_per_row": 1e6 * (source + sink + spent) / self._rows,
            "run_cpu_seconds": spent,
            "source_cpu_seconds": source,
            "target_cpu_seconds": sink,
        }
        reason = self._check(before)
        return Run(data_set, contestant, number, WRONG if reason else RIGHT, reason, figures)

    def _check(self, before: int) -> str:
        newer = self._count_newer(before)
        if newer == self._rows:
            return ""
        return f"{newer:,} of {self._rows:,} documents were delivered"

    def _count_newer(self, before: int) -> int:
        row = self._documents.execute(
            "SELECT count(*) FROM millrace_tube.version WHERE number > %s AND NOT deleted",
            (before,),
        ).fetchone()
        assert row is not None
        return int(row[0])

    def _build(self) -> None:
        self._run(f"SELECT tube_ensure_exists('{TUBE}', {PARTITIONS})")
        self._run("CREATE SCHEMA bench; CREATE TABLE bench.beat (id int PRIMARY KEY)")
        self._documents.execute("CREATE SCHEMA bench; CREATE TABLE bench.beat (id int PRIMARY KEY)")
        for shard, table in enumerate(TABLES):
            columns = f"{table} (id bigint PRIMARY KEY, body text)"
            self._documents.execute(f"CREATE TABLE {columns}".encode())
            self._run(f"CREATE TABLE {columns}")
            self._run(
                f"INSERT INTO {table} SELECT i, {BODY}"
                f" FROM generate_series(1, {self._rows // PARTITIONS}) i"
            )
            self._run(f"VACUUM ANALYZE {table}")
            self._run(f"SELECT tube_table_ensure_attached('{TUBE}', '{table}', {shard})")
        self._run(f"SELECT tube_table_ensure_attached('{TUBE}', 'bench.beat', 1)")
        self._touch(POD_SIZES[0])

    def _touch(
        self, pod_size: int, tables: tuple[str, ...] = TABLES, touches: int | None = None
    ) -> None:
        """Every row of these tables, or so many touches of each."""
        rows = self._rows // PARTITIONS
        for table in tables:
            self._run(
                f"SELECT {table}_touch(ARRAY(SELECT (i - 1) % {rows} + 1 FROM"
                f" generate_series(1, {touches or rows}) i)::bigint[], chunk_size => {pod_size})"
            )

    def _delivery(self, *, until_empty: bool) -> Delivery:
        uri = self._sink.uri("bench")
        plans = {
            f"public.{table}": TableDelivery(
                f"SELECT id, body FROM {table} WHERE id = ANY($1)", f"{uri}&table={table}"
            )
            for table in TABLES
        }
        plans["bench.beat"] = TableDelivery(
            "SELECT id FROM bench.beat WHERE id = ANY($1)", f"{uri}&table=bench.beat"
        )
        source = resolve(Dsn.parse(self._place.uri, what="source"))
        return Delivery(source, "tube", TUBE, plans, until_empty=until_empty)

    def _deliver(self, workers: int) -> None:
        delivery = check_delivery(self._delivery(until_empty=True), workers)
        run_delivery(delivery, workers, self._engine, stop=threading.Event())

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """A delivery by one worker, at work when the block begins, stopped at its end."""
        delivery = check_delivery(self._delivery(until_empty=False), 1)
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(run_delivery, delivery, 1, self._engine, stop=stop)
            try:
                before = self._scalars("SELECT last_value FROM tube.tube_seq")[0]
                self._run(f"SELECT {TABLES[0]}_touch(ARRAY[1]::bigint[])")
                self._wait_for_version(before)
                yield
            finally:
                stop.set()
                self._engine.cancel()
            serving.result()
        self._deliver(PARTITIONS)  # what is left; and Spark's workers are warm again

    def _wait_for_version(self, before: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._count_newer(before):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was delivered for {START_SECONDS:.0f} s")
            time.sleep(0.02)

    def _pgbench(self, script: str, per_second: int, seconds: float) -> float:
        return run_script(self._place, script, seconds, "-R", str(per_second))

    def _scalars(self, query: str) -> tuple[Any, ...]:
        row = self._connection.execute(query.encode()).fetchone()
        assert row is not None
        return row

    def _run(self, statement: str) -> None:
        self._connection.execute(statement.encode())
