"""Where a campaign is played: two servers, a proxy before each, a database that is written to.

The source holds the museum (all types, partitions, generated and identity columns, tables without
keys, TOAST, large objects, matviews, foreign keys) and a shop, in which customers order all the
while. A `Play` is one clone of it: a snapshot held by a process of its own, a work directory, a
target database, and as many processes of `millrace clone` as it takes.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from tests.fixtures import load_museum
from tests.torture.program import Program, wait_for
from tests.torture.proxy import Proxy

from millrace.clone.compare_run import CompareSettings, compare_data, compare_schema
from millrace.clone.compare_schema import POSITION_PROPERTIES
from millrace.clone.engine import Engine
from millrace.config.dsn import Dsn
from millrace.demo.shop import Writers, create_shop
from millrace.postgres.embedded import Cluster, open_cluster
from millrace.snapshot.holder import read_held

# One version, so that the schemas must be equal to the letter.
VERSION = 18
DATABASE = "original"
JOBS = ("--table-jobs=2", "--index-jobs=2", "--restore-jobs=2", "--large-objects-jobs=1")
# Small enough that tables of both kinds are split: by their key, and by ctid.
SPLIT = "--split-tables-larger-than=100 kB"
# Few enough that the source does not grow much in an hour.
WRITES_PER_SECOND = 25
# The backend of a killed client that is busy looks for it every five seconds.
SESSIONS_SECONDS = 60

_LARGE_OBJECTS = """
SELECT m.oid::int8, m.lomacl::text, obj_description(m.oid, 'pg_largeobject'), md5(lo_get(m.oid))
  FROM pg_largeobject_metadata m ORDER BY 1"""
_SEQUENCES = "SELECT schemaname, sequencename, last_value FROM pg_sequences"
_SESSIONS = """
SELECT application_name FROM pg_stat_activity WHERE datname = current_database()
   AND application_name ~ '^millrace ' AND application_name !~ '^millrace shop'
   AND pid <> ALL (%s)"""


class Stage:
    """Both servers, both proxies, and the source's writers."""

    def __init__(self, source: Cluster, target: Cluster) -> None:
        self.source = source
        self.target = target
        self.source_uri = source.uri(DATABASE)
        self.proxies = {"source": Proxy(source.port), "target": Proxy(target.port)}
        self.writers = self._start_writers()
        self._number = 0

    @contextmanager
    def play(self, directory: Path, work: Path | None = None) -> Iterator[Play]:
        """One clone, from its snapshot to the comparison; `work` is its --dir."""
        self._number += 1
        name = f"copy_{self._number}"
        target_uri = self.target.create_database(name)
        play = Play(self, directory, work or directory / "work", name, target_uri)
        try:
            yield play
        except BaseException:
            for cluster in (self.source, self.target):
                role = "source" if cluster is self.source else "target"
                shutil.copy(cluster.log_file, directory / f"{role}-server.log")
            raise
        finally:
            play.close()
        self.target.drop_database(name)

    def restart_source(self) -> None:
        """Nobody's session survives; new customers come."""
        self.writers.close()
        self.source.restart("fast")
        self.writers = self._start_writers()

    def restart_target(self) -> None:
        """As after a power cut of the server's process; the machine stays."""
        self.target.restart("immediate")

    def close(self) -> None:
        """Raises what went wrong in a writer."""
        for proxy in self.proxies.values():
            proxy.close()
        self.writers.close()

    def _start_writers(self) -> Writers:
        return Writers(self.source_uri, per_second=WRITES_PER_SECOND).__enter__()


@contextmanager
def open_stage(*, megabytes: int) -> Iterator[Stage]:
    """Servers with a filled source, and writers at work."""
    with open_cluster(VERSION, tcp=True) as source, open_cluster(VERSION, tcp=True) as target:
        uri = source.create_database(DATABASE)
        create_shop(uri, megabytes=megabytes)
        load_museum(uri)
        with closing(Stage(source, target)) as stage:
            yield stage


@dataclass(frozen=True)
class Verdict:
    """What the comparison at the end of a clone found."""

    tables: int
    rows: int
    objects: int
    large_objects: int
    differences: tuple[str, ...]


class Play:
    """One clone that may be interrupted."""

    def __init__(
        self, stage: Stage, directory: Path, work: Path, name: str, target_uri: str
    ) -> None:
        self.stage = stage
        self.directory = directory
        self.work = work
        self.target_uri = target_uri
        self._name = name
        self._logs = directory / "logs"
        self._logs.mkdir(parents=True)
        self.programs: list[Program] = []
        self.positions = self._positions(stage.source_uri)
        self.holder = Program(
            self._logs / "holder.log",
            "snapshot", "--source", stage.source_uri, "--dir", str(self.work),
        )  # fmt: skip
        self.snapshot = wait_for(self._held, "a snapshot is held").id
        self.holder_pid = self._holder_backend()

    def start(self, *, step: str = "") -> Program:
        """The next process of this clone: goes on with it once there is something to go on with.
        With `step`, only that: `table-data` or `large-objects`."""
        number = len(self.programs) + 1
        uris = [
            self._proxied(side, name)
            for side, name in (("source", DATABASE), ("target", self._name))
        ]
        arguments = ["copy", step] if step else ["clone", *JOBS, "--roles"]
        arguments += ["--source", uris[0], "--target", uris[1], "--dir", str(self.work), SPLIT]
        if not step and (self.work / "schema" / "source.db").exists():
            arguments.append("--resume")
        log = self._logs / f"{number:03d}.log"
        program = Program(log, *arguments, marks=self.directory / f"marks-{number}")
        self.programs.append(program)
        return program

    def committed_parts(self) -> int:
        """How many parts have their record; 0 as long as there are no records."""
        with suppress(psycopg.Error), psycopg.connect(self.target_uri) as connection:
            row = connection.execute(
                "SELECT (SELECT count(*) FROM millrace.copied_part)"
                " + (SELECT count(*) FROM millrace.copied_unlogged_part)"
            ).fetchone()
            return int(row[0]) if row else 0
        return 0

    def sessions(self) -> list[str]:
        """Sessions of the clone on either server; the holder's is none of them."""
        found = []
        for uri in (self.stage.source_uri, self.target_uri):
            with psycopg.connect(uri) as connection:
                rows = connection.execute(_SESSIONS, ([self.holder_pid],))
                found += [name for (name,) in rows]
        return found

    def assert_nothing_runs(self) -> None:
        """No process of any tree, and no session of theirs, outlives its driver for long."""
        for program in self.programs:
            wait_for(
                lambda program=program: not program.left_behind(),  # type: ignore[misc]
                f"processes of {program.log.name} are gone",
                SESSIONS_SECONDS,
            )
        wait_for(lambda: not self.sessions(), "sessions are gone", SESSIONS_SECONDS)

    def compare(self, engine: Engine) -> Verdict:
        """The target against the source as it was under the snapshot."""
        source, target = Dsn.parse(self.stage.source_uri), Dsn.parse(self.target_uri)
        settings = CompareSettings(source, target, 2, self.snapshot, rows=True)
        found: list[str] = []
        compared = compare_data(settings, engine)
        for one in compared:
            if not one.is_equal:
                found.append(f"table {one.label}: {one.problem or one.error or one.rows[:3]}")
        schema = compare_schema(source, target, POSITION_PROPERTIES)
        for difference in schema.differences:
            found.append(f"schema: {difference}")
        theirs = self._under_snapshot(_LARGE_OBJECTS)
        ours = _rows(self.target_uri, _LARGE_OBJECTS)
        found += [f"large object {one[0]}" for one in set(theirs) ^ set(ours)]
        found += self._wrong_positions()
        if _rows(self.target_uri, "SELECT FROM pg_namespace WHERE nspname = 'millrace'"):
            found.append("our schema is left on the target")
        if "one instant" not in json.loads((self.work / "summary.json").read_text())["consistency"]:
            found.append("the summary does not say that this is one instant")
        rows = sum(one.source.rows for one in compared if one.source)
        objects = sum(schema.objects.values())
        return Verdict(len(compared), rows, objects, len(ours), tuple(found))

    def close(self) -> None:
        for program in self.programs:
            program.close()
        self.holder.process.send_signal(signal.SIGTERM)
        self.holder.close()

    def _held(self) -> Any:
        assert self.holder.exit_code is None, self.holder.printed()
        with suppress(Exception):  # it is being written
            return read_held(self.work)
        return None

    def _holder_backend(self) -> int:
        """The backend that exported the snapshot; its name is no other's now."""
        rows = _rows(
            self.stage.source_uri,
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'millrace snapshot'"
            " AND datname = current_database() ORDER BY backend_start DESC LIMIT 1",
        )
        return int(rows[0][0])

    def _proxied(self, side: str, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.stage.proxies[side].port}/{database}"

    def _under_snapshot(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.stage.source_uri, autocommit=True) as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(f"SET TRANSACTION SNAPSHOT '{self.snapshot}'".encode())
            return connection.execute(query.encode()).fetchall()

    def _positions(self, uri: str) -> dict[tuple[str, str], int]:
        return {(schema, name): value or 0 for schema, name, value in _rows(uri, _SEQUENCES)}

    def _wrong_positions(self) -> list[str]:
        """Sequences know no snapshot: one stands somewhere between the snapshot and now."""
        now, there = self._positions(self.stage.source_uri), self._positions(self.target_uri)
        return [
            f"sequence {schema}.{name} stands at {there.get((schema, name))}"
            for (schema, name), before in self.positions.items()
            if not _between(before, there.get((schema, name)), now[schema, name])
        ]


def _between(before: int, value: int | None, now: int) -> bool:
    # A museum's sequence may count downwards; nobody uses that one.
    return value is not None and min(before, now) <= value <= max(before, now)


def _rows(uri: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(uri) as connection:
        return connection.execute(query.encode()).fetchall()
