"""Where many sources are consolidated: servers of two versions, a target, and clients everywhere.

A `Source` is a database with clients of its own. `ConsolidateStage` is all of them, with a proxy
before each server, the configuration file, and the processes of `millrace consolidate`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
from tests.torture.follow_stage import MOODS, SOURCE_SETTINGS, SYNCED
from tests.torture.interrupt import CampaignFailed
from tests.torture.program import Program
from tests.torture.proxy import Proxy
from tests.torture.workload import Workload, create_tables, patiently

from millrace.consolidate.config import Consolidation, read_config
from millrace.consolidate.status import SourceStatus, read_status
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.postgres.quote import ident

VERSIONS = (16, 18)
TARGET_VERSION = 18
SOURCES = 10
TARGET = "warehouse"
# One client for each source, so slow that two cores have time for everybody.
PER_SECOND = 2.0
SERVER_SETTINGS = {
    **SOURCE_SETTINGS,
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    "max_connections": "300",
}
TARGET_SETTINGS = {
    **SYNCED,
    "max_connections": "300",
    "max_replication_slots": "40",
    "max_active_replication_origins": "40",
}
# Written to by incidents alone.
EXTRA = f"""
DROP TABLE moody;
{MOODS}
CREATE TABLE poisoned (id int PRIMARY KEY, turns int NOT NULL);
INSERT INTO poisoned SELECT i, 0 FROM generate_series(1, 10) i;
CREATE TABLE reshaped (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text);
CREATE VIEW rich AS SELECT id FROM account WHERE balance > 1000;
"""


@dataclass
class Source:
    """One database, on one of the servers."""

    name: str
    server: str
    database: str
    uri: str
    workload: Workload
    # Columns and tables that it got.
    changes: int = 0

    @property
    def schema(self) -> str:
        """Of the target."""
        return ident(f"{self.name}_public")

    def written(self) -> int:
        """Transactions that it has committed."""
        self.workload.check()
        return _count(self.uri, "counter")


class ConsolidateStage:
    """All servers, proxies, sources and processes."""

    def __init__(
        self, servers: Mapping[str, Cluster], target: Cluster, directory: Path, seed: int
    ) -> None:
        self.servers = servers
        self.target = target
        self.target_uri = target.uri(TARGET)
        self.directory = directory
        self.work = directory / "work"
        self.path = directory / "sources.toml"
        self.programs: list[Program] = []
        self.proxies = {
            name: Proxy(cluster.port) for name, cluster in {**servers, "target": target}.items()
        }
        self.sources: dict[str, Source] = {}
        self._seed = seed
        (directory / "logs").mkdir(parents=True)

    @property
    def config(self) -> Consolidation:
        return read_config(self.path)

    def add(self, name: str, server: str, database: str) -> Source:
        """A source with tables and clients; not yet in the file."""
        uri = self.servers[server].create_database(database)
        create_tables(uri)
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(EXTRA.encode())
        seed = self._seed * 100 + len(self.sources)
        workload = Workload(uri, seed, clients=1, per_second=PER_SECOND)
        found = self.sources[name] = Source(name, server, database, uri, workload)
        return found

    def write_config(self, names: list[str]) -> None:
        lines = [f"target = {json.dumps(self._proxied('target', TARGET))}"]
        for name in names:
            source = self.sources[name]
            lines.append(f"[source.{json.dumps(name)}]")
            lines.append(f"uri = {json.dumps(self._proxied(source.server, source.database))}")
        other = self.path.with_suffix(".new")
        other.write_text("\n".join(lines) + "\n")
        other.replace(self.path)

    def launch(self, command: str, *arguments: str) -> Program:
        """`millrace consolidate`."""
        number = len(self.programs) + 1
        log = self.directory / "logs" / f"{number:03d}-{command}.log"
        ends = ("--config", str(self.path), "--dir", str(self.work))
        program = Program(log, "consolidate", command, *arguments, *ends)
        self.programs.append(program)
        return program

    def command(self, command: str, *arguments: str) -> None:
        """One that must succeed."""
        program = self.launch(command, *arguments)
        if program.wait() != 0 or "Traceback" in program.printed():
            raise CampaignFailed(f"{command} {' '.join(arguments)}: {program.printed()[-2000:]}")

    def status(self, name: str) -> SourceStatus:
        return next(one for one in read_status(self.work, self.config) if one.name == name)

    def applied(self, name: str) -> int:
        """Transactions of a source that the target shows; 0 before it is copied."""
        with suppress(psycopg.Error):
            return _count(self.target_uri, f"{self.sources[name].schema}.counter")
        return 0

    def close(self) -> None:
        with ExitStack() as stack:
            for proxy in self.proxies.values():
                stack.callback(proxy.close)
            for source in self.sources.values():
                stack.callback(source.workload.close)
            for program in self.programs:
                stack.callback(program.close)

    def keep_logs(self) -> None:
        for name, cluster in {**self.servers, "target": self.target}.items():
            shutil.copy(cluster.log_file, self.directory / f"{name}-server.log")

    def _proxied(self, server: str, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.proxies[server].port}/{database}"


def _count(uri: str, table: str) -> int:
    with patiently(uri) as connection:
        query = f"SELECT coalesce(sum(transactions), 0)::int8 FROM {table}"
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def open_consolidate_stage(
    seed: int, directory: Path, *, sources: int = SOURCES
) -> Iterator[ConsolidateStage]:
    """Servers with all sources; databases of different servers have the same names."""
    with ExitStack() as stack:
        servers = {
            f"server{version}": stack.enter_context(
                open_cluster(version, tcp=True, settings=SERVER_SETTINGS)
            )
            for version in VERSIONS
        }
        target = stack.enter_context(
            open_cluster(TARGET_VERSION, tcp=True, settings=TARGET_SETTINGS)
        )
        target.create_database(TARGET)
        stage = ConsolidateStage(servers, target, directory, seed)
        stack.callback(stage.close)
        for number in range(sources):
            server = f"server{VERSIONS[number % len(VERSIONS)]}"
            stage.add(f"source {number}", server, f"shop_{number // len(VERSIONS)}")
        try:
            yield stage
        except BaseException:
            stage.keep_logs()
            raise
