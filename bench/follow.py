"""Following a source: Millrace and native logical replication in turn, on the same two servers.

For each load the changes are made once, behind a slot. Every run reads a copy of that slot, so all
read the same WAL, and begins with a target that holds the rows from before; both sides are compared
afterwards. The order rotates with the rounds.

A rate counts from the moment the slot is taken until the last change is visible on the
target. Start-up, of Spark as of an apply worker, lies before it; "with start" counts from the
command. Only `millrace cold` is the command as a user types it, rated with all of its start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg

from bench import changes, subscription
from bench import followers as who
from bench.changes import Load, Place
from bench.clone import SETTINGS as CLONE_SETTINGS
from bench.clone import Options
from bench.contestants import JDBC_JAR, environment
from bench.data import differences, fingerprint
from bench.followers import Course, Follower
from bench.lag import Pace, measure_lag
from bench.machine import machine_facts
from bench.measure import Usage, postmaster_pid, quiet, run_measured
from bench.report import (
    DID_NOT_RUN,
    HIGHER,
    LOWER,
    RIGHT,
    WRONG,
    YARDSTICK,
    Comparison,
    Ratio,
    Run,
    assemble,
    first_of,
    last_words,
    median,
    say,
)
from bench.watch import Watch
from bench.yardstick import Yardstick
from millrace.lsn import parse_lsn
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.workdir.sentinel import Sentinel

SERVER_VERSION = 18
SETTINGS = CLONE_SETTINGS | {
    "wal_level": "logical",
    "synchronous_commit": "on",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_worker_processes": "16",
    "max_logical_replication_workers": "8",
}
DATABASE = "bench"
# On the target: the rows from before the changes, copied for each run.
START = "start"
# Never read itself.
BASE_SLOT = "base"
QUICK_SCALE = 0.3
WARM_UP_SCALE = 0.02
# For the lag of others, when Millrace itself could not catch up.
FALLBACK_ROWS_PER_SECOND = 20_000.0
LAGS = (changes.LAG_BULK, changes.LAG_OLTP)
LAG_SECONDS, QUICK_LAG_SECONDS = 20.0, 10.0

FIELD: tuple[tuple[Load, tuple[Follower, ...]], ...] = (
    (
        changes.BULK,
        (
            who.SUBSCRIPTION,
            who.MILLRACE,
            who.MILLRACE_APPLY,
            who.PG_RECVLOGICAL,
            who.MILLRACE_RECEIVE,
            who.MILLRACE_COLD,
            who.SUBSCRIPTION_BINARY,
        ),
    ),
    (
        changes.UPDATES,
        (who.SUBSCRIPTION, who.MILLRACE, who.MILLRACE_APPLY, who.SUBSCRIPTION_BINARY),
    ),
    (
        changes.OLTP,
        (who.SUBSCRIPTION, who.MILLRACE, who.PG_RECVLOGICAL, who.MILLRACE_RECEIVE),
    ),
    (changes.ONE, (who.SUBSCRIPTION, who.MILLRACE)),
    (changes.FEW, (who.SUBSCRIPTION, who.MILLRACE, who.PG_RECVLOGICAL)),
)
WARM_UPS = (changes.BULK, changes.UPDATES, changes.OLTP)
LAG_FIELD = (who.SUBSCRIPTION, who.MILLRACE)

_NATIVE, _OURS, _APPLY = who.SUBSCRIPTION.name, who.MILLRACE.name, who.MILLRACE_APPLY.name


def _compare(name: str, load: Load, ours: str, theirs: str, goal: float | None) -> Comparison:
    sides = (load.name, ours), (load.name, theirs)
    return Comparison(name, "rows_per_second", *sides, goal, HIGHER)


COMPARISONS = (
    *(
        _compare(f"receive_{load.name}_vs_pg_recvlogical", load, ours, theirs, 0.95)
        for load in (changes.BULK, changes.OLTP)
        for ours, theirs in [(who.MILLRACE_RECEIVE.name, who.PG_RECVLOGICAL.name)]
    ),
    _compare("bulk_from_slot_vs_subscription", changes.BULK, _OURS, _NATIVE, 1.0),
    _compare("oltp_from_slot_vs_subscription", changes.OLTP, _OURS, _NATIVE, 1.0),
    _compare("updates_from_slot_vs_subscription", changes.UPDATES, _OURS, _NATIVE, 1.3),
    _compare("few_keys_from_slot_vs_subscription", changes.FEW, _OURS, _NATIVE, 3.0),
    # Over the replication protocol nobody is faster than who only takes what the server sends.
    _compare(
        "few_keys_pg_recvlogical_vs_subscription",
        changes.FEW,
        who.PG_RECVLOGICAL.name,
        _NATIVE,
        None,
    ),
    _compare("one_from_slot_vs_subscription", changes.ONE, _OURS, _NATIVE, None),
    _compare("bulk_apply_alone_vs_subscription", changes.BULK, _APPLY, _NATIVE, 1.8),
    _compare("updates_apply_alone_vs_subscription", changes.UPDATES, _APPLY, _NATIVE, 1.8),
)
# Seconds.
LAG_GOALS = {"lag_p50_seconds": 1.0, "lag_p99_seconds": 3.0}
# Of half the rate of catching up: with less, the lag says little.
LOAD_SHARE_GOAL = 0.9
# A run during which others took more than this share of the machine is told of.
DISTURBED_SHARE = 0.1
BESIDE_JVM_GOAL_GB = 1.0


def run(options: Options) -> dict[str, Any]:
    """The whole benchmark; the result is what the JSON file holds."""
    scale = options.scale or (QUICK_SCALE if options.quick else 1.0)
    rounds = options.rounds or (1 if options.quick else 3)
    version = options.server_version or SERVER_VERSION
    runs: list[Run] = []
    made: dict[str, Any] = {}
    with open_arena(version, timeout_seconds=60 + 600 * scale) as arena:
        facts = machine_facts(arena.bindir, JDBC_JAR)
        arena.warm_up()
        for load, field in FIELD:
            made[load.name] = arena.load(load, scale)
            if not runs:
                # Not counted: the first on new servers pays for making their WAL files.
                arena.run(field[0], 0)
            for number in range(rounds):
                order = field[number % len(field) :] + field[: number % len(field)]
                runs += [arena.run(contestant, number + 1) for contestant in order]
        seconds = QUICK_LAG_SECONDS if options.quick else LAG_SECONDS
        caught_up = median(runs, changes.BULK.name, _OURS, "rows_per_second")
        written = made[changes.OLTP.name]["changed_rows"] / made[changes.OLTP.name]["seconds"]
        for load, whole in zip(LAGS, (caught_up or FALLBACK_ROWS_PER_SECOND, written), strict=True):
            made[load.name] = arena.load(load, scale)
            pace = Pace(load, whole / 2, seconds)
            for number in range(rounds):
                order = LAG_FIELD[number % 2 :] + LAG_FIELD[: number % 2]
                runs += [arena.run_lag(contestant, number + 1, pace) for contestant in order]
    return assemble(
        "follow",
        runs,
        ratios(runs),
        {
            "quick": options.quick,
            "scale": scale,
            "rounds": rounds,
            "server_version": version,
            "server_settings": SETTINGS,
            "lag_seconds": seconds,
            "machine": facts,
            "disturbed_runs": disturbed(runs),
            "data_sets": made,
        },
    )


def ratios(runs: Sequence[Run]) -> dict[str, Ratio]:
    found = {comparison.name: comparison.ratio(runs) for comparison in COMPARISONS}
    for load in LAGS:
        found |= lag_ratios(runs, load)
    peaks = [
        r.figures["peak_beside_jvm_bytes"]
        for r in runs
        if r.contestant.startswith(_OURS) and r.outcome == RIGHT
    ]
    found["peak_beside_jvm_gb"] = Ratio(
        max(peaks) / 1e9 if peaks else None,
        BESIDE_JVM_GOAL_GB,
        reason="" if peaks else "no right run of millrace",
    )
    return found


def lag_ratios(runs: Sequence[Run], load: Load) -> dict[str, Ratio]:
    """A lag under less than the wanted load is shown, but held against no goal."""

    def ratio(figure: str, goal: float | None, better: str) -> Ratio:
        value = median(runs, load.name, _OURS, figure)
        return Ratio(value, goal, better, "" if value is not None else f"no {figure} of {_OURS}")

    share = ratio("load_share", LOAD_SHARE_GOAL, HIGHER)
    goals = LAG_GOALS if share.met else dict.fromkeys(LAG_GOALS)
    name = load.name.replace(" ", "_")
    return {
        f"{name}_load_share": share,
        **{
            figure.replace("lag", name): ratio(figure, goal, LOWER)
            for figure, goal in goals.items()
        },
    }


def disturbed(runs: Sequence[Run]) -> int:
    """How many runs had to share the machine. In those of the lag, the writers are the others."""
    lags = {load.name for load in LAGS}
    shares = [r.figures.get("other_cpu_share", 0.0) for r in runs if r.data_set not in lags]
    return sum(share > DISTURBED_SHARE for share in shares)


class Arena:
    """Two servers; on the source the load of the moment behind a slot, on the target its start."""

    def __init__(self, source: Cluster, target: Cluster, folder: Path, timeout_seconds: float):
        self.bindir = source.installation.bindir
        self._source = source
        self._target = target
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._mark = 1

    def warm_up(self) -> None:
        """Short runs that are not counted, for Millrace's kernels: these are compiled once for each
        kind of change and then found on disk."""
        for load in WARM_UPS:
            self.load(load, WARM_UP_SCALE)
            self.run(who.MILLRACE, 0)

    def load(self, load: Load, scale: float) -> dict[str, Any]:
        """Put the load in the place of the last one; what it holds is returned."""
        say(f"making load {load.name}")
        self._load, self._mark = load, 1
        self._clear()
        uri = self._source.create_database(DATABASE)
        rows = changes.scaled_rows(load, scale)
        with psycopg.connect(uri, autocommit=True) as connection:
            place = Place(self.bindir, uri, connection)
            changes.build_start(place, load, rows)
            self._copy_start()
            begin_lsn = self._create_base_slot(connection)
            self._changed, seconds = _timed(lambda: load.change(place, rows))
            self._endpos = changes.write_mark(connection)
            wal_bytes = parse_lsn(self._endpos) - parse_lsn(begin_lsn)
        self._expected = fingerprint(uri)
        return {
            "title": load.title,
            "changed_rows": self._changed,
            "wal_bytes": wal_bytes,
            "seconds": seconds,
        }

    def run(self, contestant: Follower, number: int) -> Run:
        """Let the contestant catch up with what its slot holds."""
        with self._open_course(contestant) as course:
            with (
                Watch(course.source, course.target, contestant.slot) as watch,
                Yardstick() as yardstick,
            ):
                usage = self._measure(contestant, course)
            own = who.own_figures(course.work_dir)
            windows = watch.seen.windows(usage.ended_at) | own.pop("windows", {})
            figures = _figures(usage) | own | seconds_of(windows)
            figures[YARDSTICK] = yardstick.milliseconds(windows.get(contestant.timed))
            return self._judge(contestant, number, course, usage, figures)

    def run_lag(self, contestant: Follower, number: int, pace: Pace) -> Run:
        """Let the contestant follow while others write."""
        with self._open_course(contestant) as opened, ThreadPoolExecutor(1) as pool:
            self._mark += 2
            course = replace(opened, endpos=who.NO_END, mark=self._mark)
            writing = pool.submit(self._write_steadily, course, pace)
            usage = self._measure(contestant, course)
            if error := writing.exception():
                reason = f"{type(error).__name__}: {error}"
                return self._record(contestant, number, DID_NOT_RUN, reason)
            self._expected = fingerprint(course.source)
            figures = _figures(usage) | writing.result()
            return self._judge(contestant, number, course, usage, figures)

    def _write_steadily(self, course: Course, pace: Pace) -> dict[str, float]:
        """Begin when the contestant is up with everything before; tell it where the end is."""
        with (
            psycopg.connect(course.source, autocommit=True) as source,
            psycopg.connect(course.target, autocommit=True) as target,
        ):
            endpos = changes.write_mark(source, course.mark - 1)
            try:
                changes.wait_for_mark(target, course.mark - 1, course.seconds)
                place = Place(course.bindir, course.source, source)
                steady = measure_lag(place, course.target, pace, course.work_dir)
            finally:
                endpos = changes.write_mark(source, course.mark)
                with Sentinel(course.directory) as sentinel:
                    sentinel.set_endpos(parse_lsn(endpos))
        return steady.figures()

    def _measure(self, contestant: Follower, course: Course) -> Usage:
        return run_measured(
            contestant.command(course),
            course.work_dir,
            source_pid=postmaster_pid(self._source.data_dir),
            target_pid=postmaster_pid(self._target.data_dir),
            timeout_seconds=self._timeout_seconds,
            env=environment(course),
        )

    def _judge(
        self,
        contestant: Follower,
        number: int,
        course: Course,
        usage: Usage,
        figures: dict[str, Any],
    ) -> Run:
        if usage.exit_code:
            reason = f"exit code {usage.exit_code}: {last_words(course.work_dir / 'log')}"
            return self._record(contestant, number, DID_NOT_RUN, reason, figures)
        figures |= rate(self._changed, figures.get(contestant.timed))
        if contestant.is_receiver:
            figures.pop("whole_seconds", None)
            return self._record(contestant, number, RIGHT, "", figures)
        wrong = differences(self._expected, fingerprint(course.target))
        outcome = WRONG if wrong else RIGHT
        return self._record(contestant, number, outcome, first_of(wrong), figures)

    @contextmanager
    def _open_course(self, contestant: Follower) -> Iterator[Course]:
        """A slot with the changes, a target with the rows from before them, quiet servers."""
        work_dir = Path(tempfile.mkdtemp(dir=self._folder))
        course = Course(
            bindir=self.bindir,
            source=self._source.uri(DATABASE),
            target=self._target.uri(DATABASE),
            endpos=self._endpos,
            mark=1,
            seconds=self._timeout_seconds,
            work_dir=work_dir,
        )
        self._drop_slots(contestant.slot)
        self._source.execute(
            f"SELECT pg_copy_logical_replication_slot('{BASE_SLOT}', '{contestant.slot}')",
            DATABASE,  # the copy belongs to the database it is made in
        )
        self._target.drop_database(DATABASE)
        self._drop_origins()
        self._target.execute(f"CREATE DATABASE {DATABASE} TEMPLATE {START} STRATEGY file_copy")
        contestant.prepare(course)
        quiet(self._source, self._target)
        try:
            yield course
        finally:
            subscription.drop(course.target)
            self._drop_slots(contestant.slot)
            shutil.rmtree(work_dir)

    def _clear(self) -> None:
        self._drop_slots()
        self._drop_origins()
        for cluster, name in (
            (self._source, DATABASE),
            (self._target, DATABASE),
            (self._target, START),
        ):
            cluster.drop_database(name)

    def _copy_start(self) -> None:
        """The starting rows, on the target; vacuumed there as on the source."""
        uri = self._target.create_database(START)
        dump = [str(self.bindir / "pg_dump"), "-d", self._source.uri(DATABASE)]
        psql = [str(self.bindir / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", uri]
        with subprocess.Popen(dump, stdout=subprocess.PIPE) as process:
            subprocess.run(psql, stdin=process.stdout, stdout=subprocess.DEVNULL, check=True)
        if process.returncode:
            raise RuntimeError("pg_dump failed")
        self._target.execute("VACUUM (FREEZE, ANALYZE)", START)

    def _create_base_slot(self, connection: changes.Connection) -> str:
        """Publications first: a slot does not know those that are made after it."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            uris = self._source.uri(DATABASE), self._target.uri(START)
            who.setup_millrace(Course(self.bindir, *uris, "", 1, 0.0, Path(folder)))
        self._drop_slots(who.MILLRACE_SLOT)
        connection.execute(f"CREATE PUBLICATION {subscription.PUBLICATION} FOR ALL TABLES".encode())
        row = connection.execute(
            "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')",
            (BASE_SLOT,),
        ).fetchone()
        assert row is not None
        return str(row[0])

    def _drop_slots(self, name: str = "%") -> None:
        with psycopg.connect(self._source.uri(), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots"
                " WHERE slot_name LIKE %s AND active",
                (name,),
            )
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name LIKE %s",
                (name,),
            )

    def _drop_origins(self) -> None:
        self._target.execute("SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin")

    def _record(
        self,
        contestant: Follower,
        number: int,
        outcome: str,
        reason: str,
        figures: dict[str, Any] | None = None,
    ) -> Run:
        figures = figures or {}
        shown = [
            f"{figures[name]:{form}}"
            for name, form in (
                ("timed_seconds", ".1f"),
                ("rows_per_second", ",.0f"),
                ("lag_p50_seconds", ".2f"),
                ("lag_p99_seconds", ".2f"),
            )
            if name in figures
        ]
        words = " ".join([contestant.name, *shown, outcome, reason])
        say(f"{self._load.name}, round {number}: {words}")
        return Run(self._load.name, contestant.name, number, outcome, reason, figures)


@contextmanager
def open_arena(version: int, *, timeout_seconds: float) -> Iterator[Arena]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-bench-")))
        source, target = (
            stack.enter_context(open_cluster(version, settings=SETTINGS)) for _ in range(2)
        )
        yield Arena(source, target, folder, timeout_seconds)


def seconds_of(windows: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    return {name: end - begin for name, (begin, end) in windows.items()}


def rate(rows: int, seconds: float | None) -> dict[str, float]:
    """Nothing of what was not timed, or had no rows to change."""
    if not rows or not seconds:
        return {}
    return {"timed_seconds": seconds, "rows_per_second": rows / seconds}


def _figures(usage: Usage) -> dict[str, Any]:
    """The wall time of the process is that of its start and its end as well: not for the tables."""
    figures = usage.figures()
    seconds = figures["process_seconds"] = figures.pop("wall_seconds")
    figures["other_cpu_share"] = usage.other_cpu_seconds / seconds / (os.cpu_count() or 1)
    return figures


def _timed(body: Any) -> tuple[Any, float]:
    began = time.monotonic()
    result = body()
    return result, time.monotonic() - began
