"""Two servers with a proxy before each, and one move of a database between them.

Invariant: whatever happens in a move, its processes and sessions are known here, and what failed
leaves its logs behind.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from tests.fixtures.leaks import end_snapshot_processes
from tests.fixtures.wait import wait_for
from tests.torture.program import WITH_SPARK, Program
from tests.torture.proxy import Proxy

from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.engine import Engine
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route
from millrace.snapshot.holder import SnapshotHolder, read_held

DATABASE = "original"
JOBS = ("--table-jobs=2", "--index-jobs=2", "--restore-jobs=2", "--large-objects-jobs=1")
# Small enough that tables of both kinds are split: by their key, and by ctid.
SPLIT = "--split-tables-larger-than=100 kB"

_SESSIONS = """
SELECT application_name, pid FROM pg_stat_activity WHERE datname = current_database()
   AND application_name ~ '^millrace ' AND application_name !~ '^millrace shop'
   AND pid <> ALL (%s)"""


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    tables: int
    rows: int
    differences: tuple[str, ...]
    objects: int = 0
    large_objects: int = 0


class Pair:
    """Both servers and both proxies."""

    def __init__(self, source: Cluster, target: Cluster) -> None:
        self.source = source
        self.target = target
        self.source_uri = source.uri(DATABASE)
        # For the process that holds a snapshot, which is never cut off.
        self.holder_uri = self.source_uri
        self.proxies = {"source": Proxy(source.port), "target": Proxy(target.port)}

    def proxied(self, side: str, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.proxies[side].port}/{database}"

    def restart_target(self) -> None:
        """As after a power cut of the server's process; the machine stays."""
        self.target.restart("immediate")

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()


M = TypeVar("M", bound="Move")


class Move:
    """One move: a work directory, a target database, and as many processes as it takes."""

    def __init__(self, pair: Pair, directory: Path, work: Path, name: str) -> None:
        self.directory = directory
        self.work = work
        self.name = name
        self.target_uri = pair.target.create_database(name)
        self.programs: list[Program] = []
        # How the program is called from now on.
        self.command = WITH_SPARK
        self.holder: Program | None = None
        # Backends of the holder.
        self.held_by: list[int] = []
        self._pair = pair
        self._logs = directory / "logs"
        self._logs.mkdir(parents=True)

    @contextmanager
    def opened(self: M) -> Iterator[M]:
        """Ended at the end, with the servers' logs kept after a failure."""
        try:
            yield self
        except BaseException:
            for role, cluster in (("source", self._pair.source), ("target", self._pair.target)):
                shutil.copy(cluster.log_file, self.directory / f"{role}-server.log")
            raise
        finally:
            self.close()
        self._pair.target.drop_database(self.name)

    def ends(self) -> list[str]:
        """Options for both sides, by way of the proxies, and the work directory."""
        source = self._pair.proxied("source", DATABASE)
        target = self._pair.proxied("target", self.name)
        return ["--source", source, "--target", target, "--dir", str(self.work)]

    def launch(self, *arguments: str) -> Program:
        """The next process."""
        number = len(self.programs) + 1
        log = self._logs / f"{number:03d}.log"
        marks = self.directory / f"marks-{number}"
        program = Program(log, *arguments, marks=marks, command=self.command)
        self.programs.append(program)
        return program

    def hold(self, *options: str) -> SnapshotHolder:
        """A process of its own holds a snapshot from now on."""
        self.holder = Program(
            self._logs / "holder.log",
            "snapshot", "--source", self._pair.holder_uri, "--dir", str(self.work), *options,
        )  # fmt: skip
        held: SnapshotHolder = wait_for(self._held, "a snapshot is held")
        # Nobody else of ours is there yet.
        with psycopg.connect(self._pair.source_uri) as connection:
            self.held_by = [pid for _, pid in connection.execute(_SESSIONS, ([],))]
        return held

    @property
    def is_begun(self) -> bool:
        """Whether a clone can be gone on with."""
        return (self.work / "schema" / "source.db").exists()

    def sessions(self) -> list[str]:
        """Sessions of the move on either server; the holder's is none of them."""
        found = []
        for uri in (self._pair.source_uri, self.target_uri):
            with psycopg.connect(uri) as connection:
                rows = connection.execute(_SESSIONS, (self.held_by,))
                found += [name for name, _ in rows]
        return found

    def assert_nothing_runs(self) -> None:
        """No process of any tree, and no session of theirs, outlives its driver for long."""
        for program in self.programs:
            wait_for(
                lambda program=program: not program.left_behind(),  # type: ignore[misc]
                f"processes of {program.log.name} are gone",
            )
        wait_for(lambda: not self.sessions(), "sessions are gone")

    def compare_rows(self, engine: Engine, snapshot: str | None = None) -> Verdict:
        """Every row of every table."""
        source, target = Dsn.parse(self._pair.source_uri), Dsn.parse(self.target_uri)
        compared = compare_data(
            CompareSettings(Route(source, target), 2, snapshot, rows=True), engine
        )
        found = [
            f"table {one.label}: {one.problem or one.error or one.rows[:3]}"
            for one in compared
            if not one.is_equal
        ]
        rows = sum(one.source.rows for one in compared if one.source)
        return Verdict(len(compared), rows, tuple(found))

    def last_words(self) -> str:
        return self.programs[-1].printed()[-2000:] if self.programs else ""

    def close(self) -> None:
        for program in self.programs:
            program.close()
        self.release()
        end_snapshot_processes(self.work)

    def release(self) -> None:
        """The snapshot is held no longer."""
        if self.holder is not None:
            self.holder.process.send_signal(signal.SIGTERM)
            self.holder.close()
            self.holder = None

    def _held(self) -> Any:
        assert self.holder is not None
        assert self.holder.exit_code is None, self.holder.printed()
        try:
            return read_held(self.work)
        except Exception:  # it is being written
            return None
