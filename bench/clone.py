"""Cloning a database: Millrace, its peers and the floor in turn, on the same two servers.

Every run starts from an empty target database and quiet servers, and its copy is checked against
the source afterwards. The order rotates with the rounds, so that nobody always comes first.

Data sets: A, twelve uneven tables; B, one large table; relay, a narrow one for the client's CPU.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import contestants as who
from bench.contestants import Contestant, Course
from bench.data import SINGLE, UNEVEN, DataSet, build, differences, fingerprint, sizes
from bench.floor import Psql
from bench.machine import machine_facts
from bench.measure import postmaster_pid, quiet, run_measured
from bench.relay_cpu import NARROW
from bench.report import (
    DID_NOT_RUN,
    RIGHT,
    WRONG,
    YARDSTICK,
    Comparison,
    Ratio,
    Run,
    assemble,
    first_of,
    last_words,
    say,
)
from bench.yardstick import Yardstick
from millrace.postgres.program.embedded import Cluster, open_cluster

# The newest first: the bench takes the first that pgcopydb can copy.
SERVER_VERSIONS = (18, 16)
SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    # Else who comes later finds WAL files that others have made, and is faster.
    "wal_recycle": "off",
    "wal_init_zero": "off",
    "checkpoint_timeout": "1h",
    "maintenance_work_mem": "256MB",
    "wal_level": "replica",
    "fsync": "off",
    # It would work for whoever happens to be running.
    "autovacuum": "off",
}
DATABASE = "bench"
QUICK_SCALE = 1 / 3
# Enough to see whether a contestant can copy this version at all.
TRIAL_SCALE = 0.0005

FIELD: tuple[tuple[DataSet, tuple[Contestant, ...]], ...] = (
    (UNEVEN, (who.MILLRACE, who.PGCOPYDB, who.PG_DUMP, who.FLOOR)),
    (SINGLE, (who.MILLRACE, who.MILLRACE_SPLIT, who.FLOOR, who.FLOOR_SPLIT, who.JDBC)),
    (NARROW, (who.PSQL, who.RELAY)),
)

_WALL, _WITHOUT_SPARK = "wall_seconds", "wall_without_spark_seconds"
_A_MILLRACE, _B_MILLRACE = ("A", who.MILLRACE.name), ("B", who.MILLRACE.name)
_A_PGCOPYDB, _A_PG_DUMP = ("A", who.PGCOPYDB.name), ("A", who.PG_DUMP.name)
_A_FLOOR, _B_FLOOR = ("A", who.FLOOR.name), ("B", who.FLOOR.name)
_B_SPLIT, _B_FLOOR_SPLIT = ("B", who.MILLRACE_SPLIT.name), ("B", who.FLOOR_SPLIT.name)
_RELAY, _PSQL = ("relay", who.RELAY.name), ("relay", who.PSQL.name)
COMPARISONS = tuple(
    Comparison(*fields)
    for fields in (
        ("clone_A_vs_pgcopydb_without_spark_start", _WITHOUT_SPARK, _A_MILLRACE, _A_PGCOPYDB, 0.9),
        ("clone_A_vs_pg_dump_without_spark_start", _WITHOUT_SPARK, _A_MILLRACE, _A_PG_DUMP, 0.9),
        ("clone_A_vs_pgcopydb_whole", _WALL, _A_MILLRACE, _A_PGCOPYDB, 1.0),
        ("clone_A_vs_pg_dump_whole", _WALL, _A_MILLRACE, _A_PG_DUMP, 1.0),
        ("clone_A_vs_floor_without_spark_start", _WITHOUT_SPARK, _A_MILLRACE, _A_FLOOR, 1.15),
        ("clone_B_vs_floor_without_spark_start", _WITHOUT_SPARK, _B_MILLRACE, _B_FLOOR, 1.15),
        ("B_split4_vs_unsplit", _WITHOUT_SPARK, _B_SPLIT, _B_MILLRACE, 0.8),
        ("B_floor_split4_vs_unsplit", _WALL, _B_FLOOR_SPLIT, _B_FLOOR),
        ("data_vs_jdbc", "copy_seconds", _B_SPLIT, ("B", who.JDBC.name), 0.4),
        ("relay_cpu_vs_psql", "copy_cpu_seconds", _RELAY, _PSQL, 1.0),
    )
)  # fmt: skip
PEAK_MEMORY_GOAL_GB = 1.5


@dataclass(frozen=True)
class Options:
    """`scale` is the share of the full data; `server_version` None means the newest that works.

    `parts` are those that a benchmark is asked for, all of them if there is none.
    """

    quick: bool = False
    rounds: int | None = None
    scale: float | None = None
    server_version: int | None = None
    parts: tuple[str, ...] = ()


def run(options: Options) -> dict[str, Any]:
    """The whole benchmark; the result is what the JSON file holds."""
    scale = options.scale or (QUICK_SCALE if options.quick else 1.0)
    rounds = options.rounds or (1 if options.quick else 3)
    version, reason = options.server_version, "as asked"
    if version is None:
        version, reason = choose_version()
    runs: list[Run] = []
    built: dict[str, Any] = {}
    with open_arena(version, timeout_seconds=60 + 360 * scale) as arena:
        facts = machine_facts(arena.bindir, who.JDBC_JAR)
        for data_set, field in FIELD:
            built[data_set.name] = arena.load(data_set, scale)
            arena.warm_up()
            for number in range(rounds):
                order = field[number % len(field) :] + field[: number % len(field)]
                runs += [arena.run(contestant, number + 1) for contestant in order]
    return assemble(
        "clone",
        runs,
        ratios(runs),
        {
            "quick": options.quick,
            "scale": scale,
            "rounds": rounds,
            "server_version": version,
            "server_version_reason": reason,
            "server_settings": SETTINGS,
            "machine": facts,
            "data_sets": built,
        },
    )


def ratios(runs: Sequence[Run]) -> dict[str, Ratio]:
    found = {comparison.name: comparison.ratio(runs) for comparison in COMPARISONS}
    ours = (who.MILLRACE.name, who.MILLRACE_SPLIT.name)
    peaks = [
        r.figures["peak_memory_bytes"] for r in runs if r.contestant in ours and r.outcome == RIGHT
    ]
    found["peak_memory_gb"] = Ratio(
        max(peaks) / 1e9 if peaks else None,
        PEAK_MEMORY_GOAL_GB,
        reason="" if peaks else "no right run of millrace",
    )
    return found


def choose_version() -> tuple[int, str]:
    """The newest server version that pgcopydb copies, since all are to meet on the same one."""
    absent = who.PGCOPYDB.missing()
    if absent:
        return SERVER_VERSIONS[0], absent
    reasons: list[str] = []
    for version in SERVER_VERSIONS:
        with open_arena(version, timeout_seconds=60) as arena:
            arena.load(UNEVEN, TRIAL_SCALE)
            trial = arena.run(who.PGCOPYDB, 0)
        if trial.outcome == RIGHT:
            return version, "; ".join([*reasons, f"pgcopydb copies version {version}"])
        reasons.append(f"pgcopydb on version {version}: {trial.outcome}: {trial.reason}")
    return SERVER_VERSIONS[0], "; ".join(reasons)


class Arena:
    """Two servers, and on the source the data set of the moment."""

    def __init__(self, source: Cluster, target: Cluster, folder: Path, timeout_seconds: float):
        self.bindir = source.installation.bindir
        self._source = source
        self._target = target
        self._folder = folder
        self._timeout_seconds = timeout_seconds

    def load(self, data_set: DataSet, scale: float) -> dict[str, Any]:
        """Put the data set in the place of the last one; its sizes are returned."""
        say(f"building data set {data_set.name}")
        self._source.drop_database(DATABASE)
        uri = self._source.create_database(DATABASE)
        build(uri, data_set, scale)
        self._expected = fingerprint(uri)
        self._sizes = sizes(uri)
        self._data_set = data_set
        return {"title": data_set.title, **self._sizes}

    def warm_up(self) -> None:
        """One copy that is not counted: the first on new servers pays for making their WAL files,
        a sixth of its time, and whoever came first would be the slowest."""
        work_dir = Path(tempfile.mkdtemp(dir=self._folder))
        self._run_in(work_dir, who.FLOOR, 0)
        shutil.rmtree(work_dir)

    def run(self, contestant: Contestant, number: int) -> Run:
        reason = contestant.missing()
        if reason:
            return self._record(contestant, number, DID_NOT_RUN, reason)
        work_dir = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            return self._run_in(work_dir, contestant, number)
        finally:
            shutil.rmtree(work_dir)

    def _run_in(self, work_dir: Path, contestant: Contestant, number: int) -> Run:
        course = self._prepare(work_dir, contestant)
        with Yardstick() as yardstick:
            usage = run_measured(
                contestant.command(course),
                work_dir,
                source_pid=postmaster_pid(self._source.data_dir),
                target_pid=postmaster_pid(self._target.data_dir),
                timeout_seconds=self._timeout_seconds,
                env=who.environment(course),
            )
        if usage.exit_code:
            reason = f"exit code {usage.exit_code}: {last_words(work_dir / 'log')}"
            return self._record(contestant, number, DID_NOT_RUN, reason, usage.figures())
        figures = {**usage.figures(), **contestant.figures(work_dir)}
        figures[YARDSTICK] = yardstick.milliseconds()
        waited = figures.get("spark_start_seconds", 0.0)
        figures["wall_without_spark_seconds"] = usage.wall_seconds - waited
        wrong = differences(
            self._expected, fingerprint(course.target), indexes=not contestant.data_only
        )
        outcome = WRONG if wrong else RIGHT
        return self._record(contestant, number, outcome, first_of(wrong), figures)

    def _prepare(self, work_dir: Path, contestant: Contestant) -> Course:
        self._target.drop_database(DATABASE)
        self._target.create_database(DATABASE)
        table, facts = next(iter(self._sizes["tables"].items()))
        course = Course(
            bindir=self.bindir,
            source=self._source.uri(DATABASE),
            target=self._target.uri(DATABASE),
            source_jdbc=_jdbc_url(self._source),
            target_jdbc=_jdbc_url(self._target),
            largest_table=table,
            largest_table_bytes=facts["heap_bytes"],
            work_dir=work_dir,
        )
        if contestant.data_only:
            Psql(course.bindir, course.source, course.target).copy_schema()
        quiet(self._source, self._target)
        return course

    def _record(
        self,
        contestant: Contestant,
        number: int,
        outcome: str,
        reason: str,
        figures: dict[str, Any] | None = None,
    ) -> Run:
        wall = f"{figures['wall_seconds']:.1f} s" if figures else ""
        say(f"{self._data_set.name}, round {number}: {contestant.name} {wall} {outcome} {reason}")
        return Run(self._data_set.name, contestant.name, number, outcome, reason, figures or {})


@contextmanager
def open_arena(version: int, *, timeout_seconds: float) -> Iterator[Arena]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-bench-")))
        source, target = (
            stack.enter_context(open_cluster(version, settings=SETTINGS, tcp=True))
            for _ in range(2)
        )
        yield Arena(source, target, folder, timeout_seconds)


def _jdbc_url(cluster: Cluster) -> str:
    return f"jdbc:postgresql://127.0.0.1:{cluster.port}/{DATABASE}?user=postgres"
