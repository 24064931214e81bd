"""Ten sources into one database: Millrace, and ten native subscriptions, in turn.

Every source is a server of its own, since each walsender decodes all that its server writes.
Subscriptions can't rename schemas, so each has a database of its own on the same target server.

*Catching up*: the changes are made once, behind the slots of both; then one after the other reads
them. A rate counts from the moment the first slot is taken until the last change of the last source
is visible; Spark is up before. Rows are counted and summed on both sides afterwards.

*Lag*: every source commits ten transactions a second. The target is asked every 100 ms for the last
one it has of each, so half of that is the measuring's own.

*Idle*: thirty sources, three databases of each server, that nobody writes to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from bench import subscription
from bench.clone import SETTINGS as CLONE_SETTINGS
from bench.clone import Options
from bench.consolidate_run import READY
from bench.contestants import JDBC_JAR
from bench.lag import percentile
from bench.machine import machine_facts
from bench.measure import postmaster_pid, server_cpu_seconds
from bench.report import HIGHER, RIGHT, WRONG, Comparison, Ratio, Run, assemble, median, say
from millrace.postgres.program.embedded import Cluster, open_cluster

SOURCES, IDLE_SOURCES = 10, 30
ROWS, QUICK_ROWS = 150_000, 50_000
ROWS_PER_TRANSACTION = 100
PACES = (100, 1_000)
LAG_SECONDS, QUICK_LAG_SECONDS = 20.0, 10.0
IDLE_SECONDS, SETTLE_SECONDS = 30.0, 15.0
BEAT_SECONDS = LOOK_SECONDS = 0.1
PATIENCE_SECONDS = 600.0
CATCH_UP, IDLE = "catching up", "idle"
MILLRACE, NATIVE = "millrace consolidate", "ten subscriptions"
SMALL = {"shared_buffers": "48MB", "max_wal_size": "512MB", "wal_level": "logical"}
SETTINGS = CLONE_SETTINGS | {
    "synchronous_commit": "on",
    "max_wal_senders": "20",
    "max_replication_slots": "80",
    "max_active_replication_origins": "80",
    "max_worker_processes": "32",
    "max_logical_replication_workers": "24",
    "max_connections": "300",
}
_TABLES = """
CREATE TABLE account (id int PRIMARY KEY, owner text, balance numeric(12,2), at timestamptz,
                      filler text);
CREATE TABLE mark (id int PRIMARY KEY);
CREATE TABLE beat (id int PRIMARY KEY, n int, filler text);
"""
# Half of the rows are inserted, half updated.
_CHANGES = f"""
DO $$ BEGIN
    FOR batch IN 1 .. {{rows}} / {2 * ROWS_PER_TRANSACTION} LOOP
        INSERT INTO account
        SELECT i, 'owner ' || i, i / 100.0, timestamptz '2024-01-01' + i * interval '1 s',
               repeat('x', 40)
          FROM generate_series({{first}} + (batch - 1) * {ROWS_PER_TRANSACTION},
                               {{first}} + batch * {ROWS_PER_TRANSACTION} - 1) AS i;
        COMMIT;
        UPDATE account SET balance = balance + 1
         WHERE id >= {{first}} + (batch - 1) * {ROWS_PER_TRANSACTION};
        COMMIT;
    END LOOP;
END $$
"""
_SUM = "SELECT count(*), coalesce(sum(hashtextextended(a::text, 0)), 0) FROM {schema}.account a"
GOALS = {"lag_p99_seconds": 5.0, "idle_cpu_share": 0.10, "idle_mb_per_source": 40.0}


@dataclass
class Source:
    """A database of a server of its own, and where its rows go."""

    name: str
    uri: str
    # Of its subscription.
    database: str = ""
    slot: str = ""

    @property
    def schema(self) -> str:
        return f"{self.name}_public"


@dataclass
class Arena:
    """The servers, the file, and both contestants."""

    servers: Sequence[Cluster]
    target: Cluster
    folder: Path
    sources: list[Source] = field(default_factory=list)
    written: int = 0
    marks: int = 0

    @property
    def warehouse(self) -> str:
        return self.target.uri("warehouse")

    @property
    def config(self) -> Path:
        return self.folder / "sources.toml"

    def setup(self) -> None:
        """Databases, subscriptions, and the base copies of the consolidation."""
        self.target.create_database("warehouse")
        for number, server in enumerate(self.servers):
            uri = server.create_database("app")
            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute(_TABLES.encode())
                connection.execute(f"CREATE PUBLICATION {subscription.PUBLICATION} FOR ALL TABLES")
                connection.execute(
                    "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')",
                    (subscription.SLOT,),
                )
            source = Source(f"s{number}", uri, self.target.create_database(f"native{number}"))
            with psycopg.connect(source.database, autocommit=True) as connection:
                connection.execute(_TABLES.encode())
            subscription.create(uri, source.database, subscription.TEXT)
            self.sources.append(source)
        self.write_config(self.sources)

    def write_config(self, sources: Sequence[Source]) -> None:
        lines = [f"target = {json.dumps(self.warehouse)}"]
        for one in sources:
            lines += [f"[source.{one.name}]", f"uri = {json.dumps(one.uri)}"]
        self.config.write_text("\n".join(lines) + "\n")

    def change(self, rows: int) -> None:
        """The same changes on every source, and a mark behind them."""
        self.marks += 1

        def write(source: Source) -> None:
            with psycopg.connect(source.uri, autocommit=True) as connection:
                connection.execute(_CHANGES.format(rows=rows, first=self.written + 1).encode())
                connection.execute("INSERT INTO mark VALUES (%s)", (self.marks,))

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(write, self.sources))
        self.written += rows
        for server in self.servers:
            server.execute("CHECKPOINT")

    def cpu_seconds(self) -> tuple[float, float]:
        sources = sum(server_cpu_seconds(postmaster_pid(one.data_dir)) for one in self.servers)
        return sources, server_cpu_seconds(postmaster_pid(self.target.data_dir))

    def differing(self, contestant: str) -> list[str]:
        found = []
        for source in self.sources:
            here = _row(source.uri, _SUM.format(schema="public"))
            if contestant == MILLRACE:
                there = _row(self.warehouse, _SUM.format(schema=source.schema))
            else:
                there = _row(source.database, _SUM.format(schema="public"))
            if here != there:
                found.append(f"{source.name}: {there} rows, sum; {here} on the source")
        return found


class Looker:
    """Asks the target how far each source is, over connections that stay open."""

    def __init__(self, arena: Arena, contestant: str) -> None:
        self._is_ours = contestant == MILLRACE
        self._sources = arena.sources
        places = [arena.warehouse] if self._is_ours else [one.database for one in arena.sources]
        self._connections = [psycopg.connect(one, autocommit=True) for one in places]

    def last(self, table: str) -> list[int]:
        if not self._is_ours:
            query = f"SELECT coalesce(max(id), 0) FROM {table}".encode()
            return [one.execute(query).fetchone()[0] for one in self._connections]
        columns = ", ".join(
            f"(SELECT coalesce(max(id), 0) FROM {one.schema}.{table})" for one in self._sources
        )
        return list(self._connections[0].execute(f"SELECT {columns}".encode()).fetchone())

    def wait_for(self, table: str, number: int) -> float:
        """When every source's last row was seen."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while min(self.last(table)) < number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{table} {number} is not on the target: {self.last(table)}")
            time.sleep(LOOK_SECONDS / 2)
        return time.monotonic()

    def close(self) -> None:
        for one in self._connections:
            one.close()


class Consolidation:
    """The process, with Spark up and waiting for a word to begin."""

    def __init__(self, arena: Arena) -> None:
        directory = arena.folder / "work"
        directory.mkdir(exist_ok=True)
        self._log = (arena.folder / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.consolidate_run", str(arena.config), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
            text=True,
        )
        assert self.process.stdout is not None
        if READY not in self.process.stdout.readline():
            raise RuntimeError(f"it did not start: {arena.folder / 'log'}")

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def cpu_seconds(self) -> dict[str, float]:
        found = dict.fromkeys(("driver", "jvm", "others"), 0.0)
        for one, kind in self._processes():
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                found[kind] += times.user + times.system
        return found

    def memory_bytes(self) -> dict[str, int]:
        found = dict.fromkeys(("driver", "jvm", "others"), 0)
        for one, kind in self._processes():
            with contextlib.suppress(psutil.Error):
                found[kind] += one.memory_full_info().pss
        return found

    def _processes(self) -> Iterator[tuple[psutil.Process, str]]:
        own = psutil.Process(self.process.pid)
        yield own, "driver"
        for one in own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                yield one, "jvm" if one.name() == "java" else "others"


def run(options: Options) -> dict[str, Any]:
    """The whole benchmark; the result is what the JSON file holds."""
    rounds = options.rounds or (1 if options.quick else 3)
    rows = int((QUICK_ROWS if options.quick else ROWS) * (options.scale or 1.0))
    seconds = QUICK_LAG_SECONDS if options.quick else LAG_SECONDS
    runs: list[Run] = []
    version = options.server_version or 18
    with open_arena(version) as arena:
        facts = machine_facts(arena.target.installation.bindir, JDBC_JAR)
        say("base copies")
        arena.setup()
        with _consolidating(arena):
            _wait_until_copied(arena, len(arena.sources))
        for number in range(rounds):
            say(f"round {number + 1}: changes")
            arena.change(rows)
            order = (_run_native, _run_millrace) if number % 2 else (_run_millrace, _run_native)
            for contestant in order:
                runs += contestant(arena, number + 1, rows, seconds)
        runs.append(_idle(arena))
    titles = {
        CATCH_UP: f"{SOURCES} sources, {rows} changed rows each",
        **{f"{pace} rows/s": f"{SOURCES} sources, {pace} rows/s each" for pace in PACES},
        IDLE: f"{IDLE_SOURCES} sources that nobody writes to",
    }
    sets = {name: {"title": title, "changed_rows": 0} for name, title in titles.items()}
    return assemble(
        "consolidate",
        runs,
        ratios(runs),
        {
            "quick": options.quick,
            "rounds": rounds,
            "rows": rows,
            "server_version": version,
            "server_settings": SETTINGS,
            "machine": facts,
            "data_sets": sets,
        },
    )


def ratios(runs: Sequence[Run]) -> dict[str, Ratio]:
    ours, theirs = (CATCH_UP, MILLRACE), (CATCH_UP, NATIVE)
    caught_up = Comparison(
        "consolidate_vs_ten_subscriptions", "rows_per_second", ours, theirs, 1.5, HIGHER
    )
    found = {caught_up.name: caught_up.ratio(runs)}
    for pace in PACES:
        lag = median(runs, f"{pace} rows/s", MILLRACE, "lag_p99_seconds")
        found[f"lag_p99_seconds_at_{pace}"] = Ratio(lag, GOALS["lag_p99_seconds"])
    for figure in ("idle_cpu_share", "idle_mb_per_source"):
        found[figure] = Ratio(median(runs, IDLE, MILLRACE, figure), GOALS[figure])
    return found


@contextlib.contextmanager
def open_arena(version: int) -> Iterator[Arena]:
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="bench-consolidate-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        servers = [
            stack.enter_context(open_cluster(version, settings=SETTINGS | SMALL))
            for _ in range(SOURCES)
        ]
        target = stack.enter_context(open_cluster(version, settings=SETTINGS))
        yield Arena(servers, target, folder)


@contextlib.contextmanager
def _consolidating(arena: Arena) -> Iterator[Consolidation]:
    process = Consolidation(arena)
    try:
        process.begin()
        yield process
    finally:
        process.stop()


def _wait_until_copied(arena: Arena, sources: int) -> None:
    from millrace.consolidate.registry import SourceState
    from millrace.consolidate.status import read_records

    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        states = [one.state for one in read_records(arena.folder / "work").values()]
        if states.count(SourceState.FOLLOWING) == sources:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all sources are followed: {states}")
        time.sleep(LOOK_SECONDS)


def _run_millrace(arena: Arena, number: int, rows: int, seconds: float) -> list[Run]:
    process = Consolidation(arena)
    looker = Looker(arena, MILLRACE)
    try:
        before = arena.cpu_seconds(), process.cpu_seconds()
        taken = _SlotWatch(arena, "millrace_%")
        process.begin()
        caught_up = looker.wait_for("mark", arena.marks) - taken.wait()
        own = process.cpu_seconds()
        figures = _catch_up_figures(arena, rows, caught_up, before[0]) | {
            "client_cpu_seconds": sum(own.values()) - sum(before[1].values()),
            "peak_beside_jvm_bytes": _beside_jvm(process),
        }
        return [
            _judged(arena, MILLRACE, number, figures),
            *(_lag(arena, looker, MILLRACE, number, pace, seconds) for pace in PACES),
        ]
    finally:
        looker.close()
        process.stop()


def _run_native(arena: Arena, number: int, rows: int, seconds: float) -> list[Run]:
    looker = Looker(arena, NATIVE)
    try:
        before = arena.cpu_seconds()
        taken = _SlotWatch(arena, subscription.SLOT)
        _alter_subscriptions(arena, "ENABLE")
        caught_up = looker.wait_for("mark", arena.marks) - taken.wait()
        figures = _catch_up_figures(arena, rows, caught_up, before)
        return [
            _judged(arena, NATIVE, number, figures),
            *(_lag(arena, looker, NATIVE, number, pace, seconds) for pace in PACES),
        ]
    finally:
        _alter_subscriptions(arena, "DISABLE")
        looker.close()


def _alter_subscriptions(arena: Arena, what: str) -> None:
    for source in arena.sources:
        with psycopg.connect(source.database, autocommit=True) as connection:
            connection.execute(f"ALTER SUBSCRIPTION {subscription.NAME} {what}".encode())


class _SlotWatch:
    """When the first of some slots was taken."""

    def __init__(self, arena: Arena, like: str) -> None:
        self._connections = [psycopg.connect(s.uri, autocommit=True) for s in arena.sources]
        self._like = like
        self._taken_at = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> float:
        self._thread.join()
        return self._taken_at

    def _run(self) -> None:
        query = "SELECT FROM pg_replication_slots WHERE slot_name LIKE %s AND active"
        while not any(one.execute(query, (self._like,)).rowcount for one in self._connections):
            time.sleep(LOOK_SECONDS / 2)
        self._taken_at = time.monotonic()
        for one in self._connections:
            one.close()


def _catch_up_figures(
    arena: Arena, rows: int, seconds: float, before: tuple[float, float]
) -> dict[str, float]:
    source, target = (b - a for a, b in zip(before, arena.cpu_seconds(), strict=True))
    return {
        "timed_seconds": seconds,
        "rows_per_second": len(arena.sources) * rows / seconds,
        "source_cpu_seconds": source,
        "target_cpu_seconds": target,
    }


def _judged(arena: Arena, contestant: str, number: int, figures: dict[str, float]) -> Run:
    wrong = arena.differing(contestant)
    outcome, reason = (WRONG, wrong[0]) if wrong else (RIGHT, "")
    say(f"{contestant}: {figures['rows_per_second']:.0f} rows/s {outcome} {reason}")
    return Run(CATCH_UP, contestant, number, outcome, reason, figures)


def _lag(
    arena: Arena, looker: Looker, contestant: str, number: int, pace: int, seconds: float
) -> Run:
    """Write for so long, and look when each beat is there."""
    first = max(looker.last("beat"))
    committed: list[dict[int, float]] = [{} for _ in arena.sources]
    over = threading.Event()
    rows = max(1, int(pace * BEAT_SECONDS))

    def write(place: int) -> None:
        with psycopg.connect(arena.sources[place].uri, autocommit=True) as connection:
            row = connection.execute("SELECT coalesce(max(id), 0) FROM beat").fetchone()
            assert row is not None
            beat, due = row[0], time.monotonic()
            while not over.is_set():
                connection.execute(
                    "INSERT INTO beat SELECT %s + i, i, repeat('x', 60)"
                    " FROM generate_series(1, %s) i",
                    (beat, rows),
                )
                beat += rows
                committed[place][beat] = time.monotonic()
                due = max(due + BEAT_SECONDS, time.monotonic())
                over.wait(max(0.0, due - time.monotonic()))

    writers = [threading.Thread(target=write, args=(at,)) for at in range(len(arena.sources))]
    looks: list[tuple[float, list[int]]] = []
    began = time.monotonic()
    for one in writers:
        one.start()
    while True:
        last = looker.last("beat")
        looks.append((time.monotonic(), last))
        if not over.is_set() and time.monotonic() - began > seconds:
            over.set()
            for one in writers:
                one.join()
        ends = [max(one, default=first) for one in committed]
        if over.is_set() and all(a >= b for a, b in zip(last, ends, strict=True)):
            break
        if time.monotonic() - began > PATIENCE_SECONDS:
            raise TimeoutError(f"beats are not on the target: {last}, {ends}")
        time.sleep(LOOK_SECONDS)
    lags = [lag for at, beats in enumerate(committed) for lag in _lags_of(beats, looks, at)]
    written = sum(map(len, committed)) * rows
    figures = {
        "load_rows_per_second": written / seconds,
        "lag_p50_seconds": percentile(lags, 0.5),
        "lag_p99_seconds": percentile(lags, 0.99),
        "lag_max_seconds": max(lags),
    }
    say(f"{contestant} at {pace} rows/s each: p99 {figures['lag_p99_seconds']:.2f} s")
    return Run(f"{pace} rows/s", contestant, number, RIGHT, "", figures)


def _lags_of(
    committed: dict[int, float], looks: Sequence[tuple[float, list[int]]], place: int
) -> list[float]:
    seen = iter(looks)
    at, last = next(seen)
    lags = []
    for beat, committed_at in sorted(committed.items()):
        while last[place] < beat:
            at, last = next(seen)
        lags.append(max(0.0, at - committed_at))
    return lags


def _idle(arena: Arena) -> Run:
    say("idle")
    sources = list(arena.sources)
    for copy in range(1, IDLE_SOURCES // SOURCES):
        for number, server in enumerate(arena.servers):
            uri = server.create_database(f"app{copy}")
            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute(_TABLES.encode())
            sources.append(Source(f"s{number}x{copy}", uri))
    arena.write_config(sources)
    with _consolidating(arena) as process:
        _wait_until_copied(arena, len(sources))
        time.sleep(SETTLE_SECONDS)
        before, servers = process.cpu_seconds(), arena.cpu_seconds()
        time.sleep(IDLE_SECONDS)
        spent = {kind: cpu - before[kind] for kind, cpu in process.cpu_seconds().items()}
        after = arena.cpu_seconds()
        memory = process.memory_bytes()
    figures = {
        "idle_cpu_share": sum(spent.values()) / IDLE_SECONDS,
        "idle_cpu_share_of": {kind: cpu / IDLE_SECONDS for kind, cpu in spent.items()},
        "idle_servers_cpu_share": sum(after) / IDLE_SECONDS - sum(servers) / IDLE_SECONDS,
        "idle_mb_per_source": (memory["driver"] + memory["others"]) / len(sources) / 1e6,
        "idle_mb_of": {kind: size / 1e6 for kind, size in memory.items()},
    }
    say(f"idle: {figures}")
    return Run(IDLE, MILLRACE, 1, RIGHT, "", figures)


def _beside_jvm(process: Consolidation) -> int:
    memory = process.memory_bytes()
    return memory["driver"] + memory["others"]


def _row(uri: str, query: str) -> tuple[Any, ...] | None:
    with psycopg.connect(uri) as connection:
        return connection.execute(query.encode()).fetchone()
