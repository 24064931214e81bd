"""A table, its tube and its documents, and `millrace tube run` that delivers them.

Invariant: at rest every transaction is over, the sink is whole, a run with `--until-empty` has
ended with 0, and then the documents are the rows that are shown, and no document was ever in flight
twice. Only a worker that has lost its session without knowing may write beside its successor.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
import psycopg
from tests.fixtures.wait import wait_for
from tests.torture.checked_sink import CONFLICTS, install_sink, read_conflicts
from tests.torture.interrupt import CampaignFailed
from tests.torture.pair import Verdict
from tests.torture.program import Program
from tests.torture.tube_tables import (
    MOOD,
    OF_WRITE,
    Connection,
    Subject,
    TubeIngredient,
    choose_write,
)

from millrace.tube.delivery.dead import retry_dead
from millrace.tube.delivery.tube import find_tube
from millrace.tube.install import install

WORKERS = 2
REST_SECONDS = 300
# Nobody here waits for another one for long.
PATIENCE = "-c lock_timeout=200ms -c statement_timeout=5s"
# What a statement may fail with that meets others, or a server that is away.
ORDINARY = (psycopg.OperationalError, psycopg.IntegrityError, psycopg.errors.ObjectInUse)
# Two clients create the same partition.
BESIDE_ANOTHER = (psycopg.errors.DuplicateTable, psycopg.errors.InvalidObjectDefinition)
# What people do to a tube.
ACTS = (
    TubeIngredient.ONE_BACKFILL,
    TubeIngredient.PAGES,
    TubeIngredient.SCHEDULED,
    TubeIngredient.SHARDS,
    TubeIngredient.DETACHED,
    TubeIngredient.REPARTITIONS,
    TubeIngredient.ROTATIONS,
    TubeIngredient.SNAPSHOTS,
    TubeIngredient.REFUSALS,
    TubeIngredient.SINK_AWAY,
)
_TUBE_SESSIONS = (
    "FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ '^millrace'"
)


class TubePlay:
    """One tube, from its first table to its last comparison."""

    def __init__(
        self,
        subject: Subject,
        source_uri: str,
        target_uri: str,
        directory: Path,
        command: tuple[str, ...],
        *,
        proxied: tuple[str, str] | None = None,
    ) -> None:
        self.subject = subject
        self.source_uri, self.target_uri = source_uri, target_uri
        self.directory = directory
        self.command = command
        self.counts: Counter[str] = Counter()
        self.programs: list[Program] = []
        # Processes whose sessions were ended without their knowledge.
        self.excused: set[int] = set()
        self._proxied = proxied or (source_uri, target_uri)
        self._open: list[Connection] = []
        self._snapshots: list[Connection] = []
        self._prepared: list[str] = []
        self._prepared_numbers = itertools.count(1)
        # Several clients write.
        self._lock = threading.RLock()
        directory.mkdir(parents=True)
        self._path = install_sink(directory / "path")
        self._make()

    def _make(self) -> None:
        with self.connect() as connection:
            install(connection)
            if "mood" in self.subject.types:
                connection.execute(MOOD)
            connection.execute(self.subject.tables.encode())
            name = self.subject.name
            connection.execute("SELECT tube.tube_ensure_exists(%s, 2, 'shown')", (name,))
            connection.execute("SELECT tube.tube_table_attach(%s, %s, 1)", (name, name))
        with psycopg.connect(self.target_uri) as connection:
            connection.execute(self.subject.documents.encode())
            connection.execute(CONFLICTS)

    def connect(self, *, autocommit: bool = True) -> Connection:
        return psycopg.connect(self.source_uri, autocommit=autocommit, options=PATIENCE)

    # Its processes

    def start(self, *more: str) -> Program:
        source, target = self._proxied
        number = len(self.programs) + 1
        options = {
            "--source": source,
            "--tube": self.subject.name,
            "--enrich": self.subject.enrich,
            "--sink": f"checked:{target}{'&' if '?' in target else '?'}table=docs",
            "--workers": str(WORKERS),
            "--batch": "40",
            "--tries": "1",
            "--dir": str(self.directory / f"work-{number}"),
        }
        program = Program(
            self.directory / f"run-{number}.log",
            *("tube", "run", *(word for pair in options.items() for word in pair), *more),
            marks=self.directory / f"marks-{number}",
            command=self.command,
            more_environment={"PYTHONPATH": os.pathsep.join(map(str, self._import_path()))},
        )
        self.programs.append(program)
        return program

    def _import_path(self) -> tuple[Path | str, ...]:
        """The sink that watches, the tests, and the program that is tested: that of this tree."""
        return self._path, Path.cwd(), Path.cwd() / "src"

    def workers(self, program: Program) -> list[psutil.Process]:
        return program.forked() or program.workers()

    def delivered(self) -> int:
        """The newest version in the sink."""
        with suppress(psycopg.Error), psycopg.connect(self.target_uri) as connection:
            row = connection.execute(
                "SELECT coalesce(max(number), 0) FROM millrace_tube.version"
            ).fetchone()
            assert row is not None
            return int(row[0])
        return 0

    def pods(self) -> int:
        with self.connect() as connection:
            row = connection.execute(
                f"SELECT count(*) FROM tube.{self.subject.name}".encode()
            ).fetchone()
        assert row is not None
        return int(row[0])

    def excuse(self) -> None:
        """Every process that there is may lose its session on the source without knowing."""
        for program in self.programs:
            self.excused |= {process.pid for process in program.family()}

    def lose_sessions(self) -> None:
        """End the sessions on the source of every process there is, as if the wire had gone."""
        self.excuse()
        with self.connect() as connection:
            connection.execute(f"SELECT pg_terminate_backend(pid) {_TUBE_SESSIONS}".encode())

    # What applications do

    def write(self, dice: random.Random) -> None:
        """One to three statements in a transaction: committed at once, later, or in two steps."""
        how = dice.choice(("now",) * 10 + ("asynchronous", "late", "prepared", "rolled back"))
        connection = self.connect(autocommit=False)
        done: Counter[str] = Counter()
        try:
            if how == "asynchronous":
                connection.execute("SET LOCAL synchronous_commit = off")
            for _ in range(dice.choice((1, 1, 3))):
                write = choose_write(dice)
                done[OF_WRITE[write]] += write(connection, self.subject, dice)
        except (*ORDINARY, *BESIDE_ANOTHER):
            connection.close()
            return
        if how == "late":
            done[TubeIngredient.LATE_COMMITS] += 1
            with self._lock:
                self._open.append(connection)
        else:
            self._end(connection, how)
        if how != "rolled back":
            with self._lock:
                self.counts.update(done)

    def _end(self, connection: Connection, how: str) -> None:
        with closing(connection), suppress(psycopg.OperationalError):
            if how == "rolled back":
                connection.rollback()
            elif how == "prepared" and self._may_prepare(connection):
                name = f"{self.subject.name}_{next(self._prepared_numbers)}"
                connection.execute(f"PREPARE TRANSACTION '{name}'".encode())
                connection.commit()
                with self._lock:
                    self._prepared.append(name)
                    self.counts[TubeIngredient.PREPARED] += 1
            else:
                connection.commit()
                if how == "asynchronous":
                    with self._lock:
                        self.counts[TubeIngredient.ASYNCHRONOUS] += 1

    def _may_prepare(self, connection: Connection) -> bool:
        row = connection.execute("SELECT current_setting('max_prepared_transactions')").fetchone()
        return row is not None and int(row[0]) > len(self._prepared)

    def end_transactions(self) -> None:
        """What is still open, in the order in which it was begun."""
        with self._lock:
            late, prepared, snapshots = self._open, self._prepared, self._snapshots
            self._open, self._prepared, self._snapshots = [], [], []
        for connection in late:
            with closing(connection), suppress(psycopg.OperationalError):
                connection.commit()
        for name in prepared:
            # One that a crash took before it was on disk is gone.
            with self.connect() as connection, suppress(psycopg.errors.UndefinedObject):
                connection.execute(f"COMMIT PREPARED '{name}'".encode())
        for connection in snapshots:
            connection.close()

    # What people do to a tube

    def administer(self, what: TubeIngredient, dice: random.Random) -> bool:
        """Whether it was done; locks may be taken, or the server away."""
        acts: dict[TubeIngredient, Callable[[Connection, random.Random], None]] = {
            TubeIngredient.ONE_BACKFILL: self._backfill,
            TubeIngredient.PAGES: self._backfill_pages,
            TubeIngredient.SCHEDULED: self._schedule,
            TubeIngredient.SHARDS: self._attach,
            TubeIngredient.DETACHED: self._detach_and_attach,
            TubeIngredient.REPARTITIONS: self._repartition,
            TubeIngredient.ROTATIONS: self._rotate,
            TubeIngredient.SNAPSHOTS: self._hold_snapshot,
            TubeIngredient.REFUSALS: self._refuse,
            TubeIngredient.SINK_AWAY: self._take_sink_away,
        }
        try:
            with self.connect() as connection:
                acts[what](connection, dice)
        except ORDINARY:
            return False
        with self._lock:
            self.counts[what] += 1
        return True

    def _backfill(self, connection: Connection, dice: random.Random) -> None:
        name, first = self.subject.name, self.subject.key[0]
        row = connection.execute("SELECT tube.tube_backfill_step1()").fetchone()
        assert row is not None
        connection.execute("SELECT tube.tube_backfill_step2('1 second')")
        connection.execute(
            "SELECT tube.tube_backfill_step3(%s, %s, %s, %s)", (row[0], name, name, first)
        )

    def _backfill_pages(self, connection: Connection, dice: random.Random) -> None:
        name = self.subject.name
        order = dice.choice((None, "n", self.subject.key[0]))
        row = connection.execute(
            "SELECT tube.tube_backfill_begin(%s, %s, %s)", (name, name, order)
        ).fetchone()
        assert row is not None
        connection.execute("SELECT tube.tube_backfill_step2('1 second')")
        rows = dice.choice((3, 20, 1000))
        for _ in range(200):
            page = connection.execute("SELECT tube.tube_backfill_page(%s, %s)", (row[0], rows))
            if page.fetchone() == (True,):
                return

    def _schedule(self, connection: Connection, dice: random.Random) -> None:
        connection.execute(
            "SELECT tube.tube_backfill_schedule(%s, %s, -1000, 1000)",
            (self.subject.name, self.subject.key[0]),
        )

    def _attach(self, connection: Connection, dice: random.Random) -> None:
        routing = dice.choice((None, "region", "region * 3"))
        connection.execute(
            "SELECT tube.tube_table_attach(%s, %s, %s, routing => %s)",
            (self.subject.name, self.subject.name, dice.randrange(-3, 5), routing),
        )

    def _detach_and_attach(self, connection: Connection, dice: random.Random) -> None:
        name = self.subject.name
        with connection.transaction():
            connection.execute("SELECT tube.tube_table_ensure_detached(%s, %s)", (name, name))
            with suppress(psycopg.IntegrityError), connection.transaction():
                choose_write(dice)(connection, self.subject, dice)
            self._attach(connection, dice)
            self._schedule(connection, dice)

    def _repartition(self, connection: Connection, dice: random.Random) -> None:
        connection.execute(
            "SELECT tube.tube_ensure_exists(%s, %s, 'shown')",
            (self.subject.name, dice.randrange(WORKERS, 5)),
        )

    def _rotate(self, connection: Connection, dice: random.Random) -> None:
        connection.execute("SELECT tube.tube_rotate(%s, max_age => '0')", (self.subject.name,))

    def _hold_snapshot(self, connection: Connection, dice: random.Random) -> None:
        held = psycopg.connect(self.source_uri)
        held.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        held.execute("SELECT count(*) FROM pg_class")
        with self._lock:
            self._snapshots.append(held)

    def _refuse(self, connection: Connection, dice: random.Random) -> None:
        refused = f"n % 11 <> {dice.randrange(11)}"
        self._change_sink(f"ALTER TABLE docs ADD CONSTRAINT refuses CHECK ({refused}) NOT VALID")

    def _take_sink_away(self, connection: Connection, dice: random.Random) -> None:
        self._change_sink("ALTER TABLE docs RENAME TO docs_away")

    def heal_sink(self) -> None:
        def is_healed() -> bool:
            with suppress(psycopg.OperationalError):
                self._change_sink(
                    "ALTER TABLE IF EXISTS docs_away RENAME TO docs;"
                    " ALTER TABLE docs DROP CONSTRAINT IF EXISTS refuses"
                )
                return True
            return False

        wait_for(is_healed, "the sink is whole")

    def _change_sink(self, statements: str) -> None:
        with psycopg.connect(self.target_uri, autocommit=True, options=PATIENCE) as connection:
            try:
                connection.execute(statements.encode())
            except (psycopg.errors.UndefinedTable, psycopg.errors.DuplicateObject) as error:
                raise psycopg.OperationalError("it is so already") from error

    # At rest

    def rest(self) -> Verdict:
        """Everything ends, everything is delivered, everything is compared."""
        self.end_transactions()
        self.heal_sink()
        wait_for(self._finish_pages, "backfills are finished")
        for program in self.programs:
            self.end(program)
        self._retry()
        program = self.start("--until-empty")
        code = program.wait(REST_SECONDS)
        if code != 0 or "Traceback" in program.printed():
            raise CampaignFailed(
                f"exit code {code}; see {program.log}: {program.printed()[-2000:]}"
            )
        return self.compare()

    def _finish_pages(self) -> bool:
        """Those that were begun by hand and are not done."""
        with self.connect() as connection:
            found = connection.execute(
                "SELECT backfill FROM tube.tube_backfill_progress() WHERE state IN ('begun',"
                " 'running')"
            ).fetchall()
            for (number,) in found:
                with suppress(*ORDINARY):
                    connection.execute("SELECT tube.tube_backfill_step2('1 second')")
                    connection.execute("SELECT tube.tube_backfill_page(%s)", (number,))
        return not found

    def _retry(self) -> None:
        with self.connect() as connection:
            retry_dead(connection, find_tube(connection, self.subject.name), None)

    def end(self, program: Program) -> None:
        """As a supervisor does it; a process that is stopped is woken first."""
        program.disarm()
        program.go_on()
        if program.exit_code is None:
            program.process.send_signal(signal.SIGTERM)
        code = program.wait()
        if "Traceback" in program.printed():
            raise CampaignFailed(f"exit code {code}; see {program.log}")
        wait_for(lambda: not program.left_behind(), f"processes of {program.log.name} are gone")

    def compare(self) -> Verdict:
        names = ", ".join(f"{one}::text" for one in self.subject.key)
        query = f"SELECT {names}, n, v FROM {{}} ORDER BY {names}"
        with self.connect() as connection:
            shown = connection.execute(
                query.format(f"{self.subject.name} WHERE shown").encode()
            ).fetchall()
        with psycopg.connect(self.target_uri) as connection:
            documents = connection.execute(query.format("docs").encode()).fetchall()
        differences = [f"only in {self.subject.name}: {row}" for row in set(shown) - set(documents)]
        differences += [f"only in docs: {row}" for row in set(documents) - set(shown)]
        if self.pods():
            differences.append(f"{self.pods()} pods are left")
        differences += [
            f"{id_} was in flight in processes {mine} and {other}"
            for id_, mine, other in read_conflicts(self.target_uri)
            if not {mine, other} & self.excused
        ]
        return Verdict(1, len(shown), tuple(sorted(differences)))

    def close(self) -> None:
        with suppress(psycopg.Error, AssertionError):
            self.end_transactions()
        for program in self.programs:
            program.close()
