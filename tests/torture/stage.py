"""Where a campaign is played: two servers, a proxy before each, a database that is written to.

The source holds the museum (all types, partitions, generated and identity columns, tables without
keys, TOAST, large objects, matviews, foreign keys) and a shop, in which customers order all the
while. A `Play` is one clone of it: a snapshot held by a process of its own, a work directory, a
target database, and as many processes of `millrace clone` as it takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
from tests.fixtures import load_museum
from tests.torture.pair import DATABASE, JOBS, SPLIT, Move, Pair, Verdict
from tests.torture.program import Program

from millrace.compare.run import compare_schema
from millrace.compare.schema import POSITION_PROPERTIES
from millrace.config.dsn import Dsn
from millrace.demo.shop import Writers, create_shop
from millrace.engine import Engine
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.route import Route
from millrace.snapshot.holder import read_held

# One version, so that the schemas must be equal to the letter.
VERSION = 18
# Few enough that the source does not grow much in an hour.
WRITES_PER_SECOND = 25

_LARGE_OBJECTS = """
SELECT m.oid::int8, m.lomacl::text, obj_description(m.oid, 'pg_largeobject'), md5(lo_get(m.oid))
  FROM pg_largeobject_metadata m ORDER BY 1"""
_SEQUENCES = "SELECT schemaname, sequencename, last_value FROM pg_sequences"


class Stage(Pair):
    """Both servers, both proxies, and the source's writers."""

    def __init__(self, source: Cluster, target: Cluster) -> None:
        super().__init__(source, target)
        self.writers = self._start_writers()
        self._number = 0

    def play(
        self, directory: Path, work: Path | None = None, *, prepared: bool = True
    ) -> AbstractContextManager[Play]:
        """One clone, from its snapshot to the comparison; `work` is its --dir. If it is not
        `prepared`, the clone takes its snapshot itself."""
        self._number += 1
        name = f"copy_{self._number}"
        return Play(self, directory, work or directory / "work", name, prepared=prepared).opened()

    def restart_source(self, mode: str = "fast") -> None:
        """Nobody's session survives; new customers come."""
        self.writers.close()
        self.source.restart(mode)
        self.writers = self._start_writers()

    def close(self) -> None:
        """Raises what went wrong in a writer."""
        super().close()
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


class Play(Move):
    """One clone that may be interrupted."""

    def __init__(
        self, stage: Stage, directory: Path, work: Path, name: str, *, prepared: bool
    ) -> None:
        super().__init__(stage, directory, work, name)
        self.stage = stage
        self.positions = self._positions(stage.source_uri)
        self.snapshot = self.hold().id if prepared else ""
        self._adopted: psycopg.Connection[tuple[Any, ...]] | None = None

    def adopt(self) -> None:
        """The snapshot that the clone's own process holds, kept for the comparison."""
        held = read_held(self.work)
        assert held is not None
        assert held.is_of_run
        self.held_by = [held.backend_pid]
        self._adopted = psycopg.connect(self.stage.source_uri, autocommit=True)
        self._adopted.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        self._adopted.execute(f"SET TRANSACTION SNAPSHOT '{held.id}'".encode())
        row = self._adopted.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        self.snapshot = row[0]

    def close(self) -> None:
        super().close()
        if self._adopted is not None:
            self._adopted.close()

    def start(self, *, step: str = "") -> Program:
        """The next process of this clone: goes on with it once there is something to go on with.
        With `step`, only that: `table-data` or `large-objects`."""
        arguments = ["copy", step] if step else ["clone", *JOBS, "--roles"]
        arguments += [*self.ends(), SPLIT]
        if not step and self.is_begun:
            arguments.append("--resume")
        return self.launch(*arguments)

    def committed_parts(self) -> int:
        """How many parts have their record; 0 as long as there are no records."""
        with suppress(psycopg.Error), psycopg.connect(self.target_uri) as connection:
            row = connection.execute(
                "SELECT (SELECT count(*) FROM millrace.copied_part)"
                " + (SELECT count(*) FROM millrace.copied_unlogged_part)"
            ).fetchone()
            return int(row[0]) if row else 0
        return 0

    def compare(self, engine: Engine) -> Verdict:
        """The target against the source as it was under the snapshot."""
        source, target = Dsn.parse(self.stage.source_uri), Dsn.parse(self.target_uri)
        verdict = self.compare_rows(engine, self.snapshot)
        found = list(verdict.differences)
        schema = compare_schema(Route(source, target), POSITION_PROPERTIES)
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
        objects = sum(schema.objects.values())
        return replace(verdict, objects=objects, large_objects=len(ours), differences=tuple(found))

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
