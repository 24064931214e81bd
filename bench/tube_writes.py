"""What a tube costs those who write: the same statements with and without it, and with PgQ.

pgbench repeats one statement with four clients, on a table of each contestant's own that is emptied
before. Rows have 100 bytes of data. After a run of inserts the tube must name every row.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench import pgq
from bench.changes import Place, parse_tps, pgbench_command
from bench.measure import postmaster_pid, quiet, server_cpu_seconds
from bench.report import HIGHER, RIGHT, WRONG, Comparison, Run
from millrace.postgres.program.embedded import Cluster

CLIENTS = 4
TUBE = "writes"
PLAIN, ATTACHED, PGQ = "no queue", "tube", "PgQ"
TABLES = {PLAIN: "plain_item", ATTACHED: "tube_item", PGQ: "pgq_item"}
# The key takes 8 of the 100 bytes, the length of the text 1.
BODY = "repeat('x', 91)"
FILLED_ROWS = 50_000
ONE_ROW_GOAL, MANY_ROWS_GOAL = 0.8, 0.9


@dataclass(frozen=True)
class Write:
    """A statement; `goal` is for commits that wait for the disk."""

    name: str
    rows: int
    script: str
    goal: float | None = None
    is_insert: bool = True

    def data_set(self, sync: str) -> str:
        return f"{self.name}, synchronous_commit {sync}"


def _insert(rows: int, goal: float | None = None) -> Write:
    script = f"INSERT INTO {{table}} (body) SELECT {BODY} FROM generate_series(1, {rows});"
    if rows == 1:
        script = f"INSERT INTO {{table}} (body) VALUES ({BODY});"
    return Write(f"insert {rows:,}", rows, script, goal)


WRITES = (
    _insert(1, ONE_ROW_GOAL),
    Write(
        "update 1",
        1,
        f"\\set id random(1, {FILLED_ROWS})\nUPDATE {{table}} SET body = {BODY} WHERE id = :id;",
        ONE_ROW_GOAL,
        is_insert=False,
    ),
    _insert(100),
    _insert(1_000, MANY_ROWS_GOAL),
    _insert(10_000),
)
SYNCS = ("on", "off")


def comparisons() -> list[Comparison]:
    found = []
    for write in WRITES:
        for sync in SYNCS:
            data_set = write.data_set(sync)
            name = f"{write.name.replace(' ', '_').replace(',', '')}_sync_{sync}"
            goal = write.goal if sync == "on" else None
            found += [
                _compare(f"{name}_tube_vs_none", data_set, ATTACHED, PLAIN, goal),
                _compare(f"{name}_tube_vs_pgq", data_set, ATTACHED, PGQ, None),
            ]
    return found


def _compare(name: str, data_set: str, ours: str, theirs: str, goal: float | None) -> Comparison:
    sides = (data_set, ours), (data_set, theirs)
    return Comparison(name, "rows_per_second", *sides, goal, HIGHER)


def contestants() -> Sequence[str]:
    return (PLAIN, ATTACHED, PGQ) if pgq.is_installed() else (PLAIN, ATTACHED)


def run_script(place: Place, script: str, seconds: float, *options: str, sync: str = "on") -> float:
    """Transactions a second that four clients of pgbench reach with a script."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.sql"
        file.write_text(script + "\n")
        command = pgbench_command(
            place, "-n", "-c", str(CLIENTS), "-j", "2", "-M", "prepared", *options,
            "-T", f"{seconds:.0f}", "-f", str(file),
        )  # fmt: skip
        environment = {**os.environ, "PGOPTIONS": f"-c synchronous_commit={sync}"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return parse_tps(done.stdout)


class Writers:
    """One database with a table for each contestant."""

    def __init__(self, cluster: Cluster, connection: psycopg.Connection, seconds: float) -> None:
        self._cluster = cluster
        self._connection = connection
        self._seconds = seconds
        self._place = Place(cluster.installation.bindir, cluster.uri("bench"), connection)
        for table in (TABLES[one] for one in contestants()):
            self._run(
                f"CREATE TABLE {table} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
                " body text NOT NULL)"
            )
        self._run(f"SELECT tube_ensure_exists('{TUBE}')")
        self._run(f"SELECT tube_table_ensure_attached('{TUBE}', '{TABLES[ATTACHED]}', 0)")
        if pgq.is_installed():
            pgq.install(connection)
            pgq.attach(connection, TABLES[PGQ])

    def run(self, write: Write, sync: str, contestant: str, number: int) -> Run:
        table = TABLES[contestant]
        self._empty(write, table)
        quiet(self._cluster)
        pid = postmaster_pid(self._cluster.data_dir)
        before = server_cpu_seconds(pid)
        rows = (
            write.rows
            * self._seconds
            * run_script(self._place, write.script.format(table=table), self._seconds, sync=sync)
        )
        cpu = server_cpu_seconds(pid) - before
        figures = {
            "rows_per_second": rows / self._seconds,
            "cpu_us_per_row": 1e6 * cpu / max(rows, 1),
        }
        reason = self._check(table) if contestant == ATTACHED and write.is_insert else ""
        outcome = WRONG if reason else RIGHT
        return Run(write.data_set(sync), contestant, number, outcome, reason, figures)

    def _empty(self, write: Write, table: str) -> None:
        self._run(f"TRUNCATE {table} RESTART IDENTITY")
        if not write.is_insert:
            self._run(
                f"INSERT INTO {table} (body) SELECT {BODY} FROM generate_series(1, {FILLED_ROWS})"
            )
            self._run(f"VACUUM ANALYZE {table}")
        self._run(f"TRUNCATE tube.{TUBE}")
        if pgq.is_installed():
            pgq.reset(self._connection)

    def _check(self, table: str) -> str:
        """What is wrong with the tube: it has to name every row, once."""
        rows, ids = (
            self._connection.execute(query.encode()).fetchone()[0]  # type: ignore[index]
            for query in (
                f"SELECT count(*) FROM {table}",
                f"SELECT coalesce(sum(cardinality(ids)), 0) FROM tube.{TUBE}",
            )
        )
        return "" if rows == ids else f"{rows:,} rows were written, {ids:,} ids are in the tube"

    def _run(self, statement: str) -> None:
        self._connection.execute(statement.encode())
