"""Two source databases in one target database: one run fills its schemas, the other its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.conftest import fresh_database
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.sql import execute, rows
from tests.fixtures.stream.followed import Silent
from tests.fixtures.stream.rerouted import rerouted
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace import failpoint
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data, compare_schema
from millrace.config.dsn import Dsn
from millrace.errors import PreflightError, WorkDirError
from millrace.name import Naming
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route

# The same names in both, but for what has a name in the whole database.
SCHEMA = """
CREATE SCHEMA log;
CREATE EXTENSION vector;
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TABLE account (id int PRIMARY KEY, m mood DEFAULT 'ok', v vector(2), note text);
CREATE INDEX ON account (m) WHERE m = 'sad'::mood;
CREATE TABLE log.entry (id serial PRIMARY KEY, account int REFERENCES account, at date);
CREATE TABLE log.day (at date, n int, PRIMARY KEY (at, n)) PARTITION BY RANGE (at);
CREATE TABLE log.day_1 PARTITION OF log.day FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
CREATE VIEW sad AS SELECT a.id, e.at FROM account a JOIN log.entry e ON e.account = a.id;
CREATE MATERIALIZED VIEW total AS SELECT m, count(*) FROM account GROUP BY 1;
INSERT INTO account SELECT i, 'sad', '[1,2]', '{0} ' || i FROM generate_series(1, 500) i;
INSERT INTO log.entry (account, at) SELECT i, '2026-01-05' FROM generate_series(1, 300) i;
INSERT INTO log.day SELECT '2026-01-06', i FROM generate_series(1, 200) i;
REFRESH MATERIALIZED VIEW total;
CREATE PUBLICATION {0}_news FOR TABLE account;
SELECT lo_from_bytea({1}, '{0}');
ALTER DATABASE {2} SET search_path = public, log;
ALTER DATABASE {2} SET work_mem = '{3}MB';
"""
ONE = Naming({"public": "one", "log": "one_log"})
TWO = Naming({"public": "two", "log": "two_log"})
OUR_SCHEMA = "SELECT count(*) FROM pg_namespace WHERE nspname = 'millrace'"


class Pair:
    """Two sources and the target of both."""

    def __init__(self, sources: tuple[str, str], target: str, folder: Path) -> None:
        self.target = target
        self.one, self.two = (
            CloneSettings(Route(Dsn.parse(uri), Dsn.parse(target), folder / name, naming=naming))
            for uri, name, naming in zip(sources, ("a", "b"), (ONE, TWO), strict=True)
        )

    def differences(self, settings: CloneSettings) -> list[Any]:
        schema = compare_schema(settings.route)
        compared = compare_data(CompareSettings(settings.route), DirectEngine())
        assert len(compared) >= 3
        return [*schema.differences, *(one for one in compared if not one.is_equal)]


@pytest.fixture
def pair(
    source_cluster: Cluster,
    source_db: str,
    target_db: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Pair]:
    for second in fresh_database(source_cluster, "source", request):
        for number, uri in enumerate((source_db, second), start=1):
            name = psycopg.conninfo.conninfo_to_dict(uri)["dbname"]
            values = (f"s{number}", 4_000_000_000 + number, name, number)
            execute(uri, SCHEMA.format(*values))
        yield Pair((source_db, second), target_db, tmp_path)


def run(settings: CloneSettings, **changes: Any) -> None:
    clone(replace(settings, **changes), DirectEngine(), Silent())


def killed_at(point: str, settings: CloneSettings, snapshot: str) -> None:
    """A process of its own begins the run, and dies."""
    command = [sys.executable, "-m", "tests.fixtures.processes.clone_child"]
    command += [settings.source.conninfo(), settings.target.conninfo(), str(settings.directory)]
    ended = subprocess.run(
        [*command, settings.naming.as_json(), snapshot],
        env=os.environ | {failpoint.VARIABLE: f"{point}=kill"},
        timeout=DEADLINE_SECONDS,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


class Beside(threading.Thread):
    """A run in the middle of its copy, until it is let go."""

    def __init__(self, settings: CloneSettings) -> None:
        super().__init__(daemon=True)
        self._settings = settings
        self._reached, self._go = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.start()
        assert self._reached.wait(DEADLINE_SECONDS)
        assert self.error is None, self.error

    def run(self) -> None:
        engine = DirectEngine()
        engine.before_task = self._wait
        try:
            clone(self._settings, engine, Silent())
        except BaseException as error:
            self.error = error
        self._reached.set()

    def _wait(self, description: str) -> None:
        self._reached.set()
        assert self._go.wait(DEADLINE_SECONDS)

    def finish(self) -> None:
        self._go.set()
        self.join(DEADLINE_SECONDS)
        assert not self.is_alive()
        assert self.error is None, self.error


def test_two_runs_fill_one_database_at_once_and_each_is_killed_and_resumed_beside_the_other(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, target = pair.one, pair.two, pair.target
    with psycopg.connect(one.source.conninfo()) as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        ((snapshot,),) = holder.execute("SELECT pg_export_snapshot()").fetchall()
        killed_at("copy.after-commit", one, snapshot)
        with psycopg.connect(two.source.conninfo()) as other_holder:
            other_holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            ((other,),) = other_holder.execute("SELECT pg_export_snapshot()").fetchall()
            killed_at("pre-data.done", two, other)
            # Both are unfinished: whoever wants their schemas is refused, and told whose they are.
            third = rerouted(one, directory=one.directory.with_name("third"))
            with pytest.raises(WorkDirError, match=r"schema one, one_log .* in .*/a on") as refused:
                run(third)
            assert "--resume" in (refused.value.hint or "")
            beside = Beside(replace(one, resume=True, snapshot=snapshot))
            # A living one is named by its process.
            with pytest.raises(WorkDirError, match=f"process {os.getpid()} on .*/a"):
                run(third, drop_if_exists=True)
            run(two, resume=True, snapshot=other)
            assert pair.differences(two) == []
            runs = rows(target, "SELECT schemas FROM millrace.run")
            assert runs == [(["one", "one_log"],)]
            beside.finish()
    assert pair.differences(one) == []
    assert pair.differences(two) == []
    assert rows(target, OUR_SCHEMA) == [(0,)]
    objects = "SELECT convert_from(lo_get(oid), 'UTF8') FROM pg_largeobject_metadata ORDER BY 1"
    assert rows(target, objects) == [("s1",), ("s2",)]


def test_of_two_runs_one_after_the_other_either_can_go_and_come_back(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, target = pair.one, pair.two, pair.target
    execute(target, "CREATE TABLE public.analyst (id int)", "CREATE EXTENSION vector")
    run(one)
    with caplog.at_level(logging.WARNING):
        run(two)
    # What belongs to the whole database is made where it is missing, and stays if it differs.
    assert "work_mem stays as it is" in caplog.text
    caplog.clear()
    values = rows(target, "SELECT setconfig FROM pg_db_role_setting WHERE setrole = 0")
    assert any("work_mem=1MB" in found for (found,) in values)
    with pytest.raises(PreflightError, match=r"one\.account"):
        run(one)
    # Of what is replaced, only what is in its own schemas.
    execute(one.source.conninfo(), "DELETE FROM log.entry", "DELETE FROM account WHERE id > 400")
    run(one, drop_if_exists=True, skip_large_objects=True)
    assert "stays as it is" not in caplog.text
    assert pair.differences(one) == []
    assert pair.differences(two) == []
    execute(target, "DROP SCHEMA one, one_log CASCADE", "DROP PUBLICATION s1_news")
    assert pair.differences(two) == []
    run(one, skip_large_objects=True)
    assert pair.differences(one) == []
    assert rows(target, "SELECT to_regclass('public.analyst')::text") == [("public.analyst",)]


def test_names_of_the_whole_database_that_others_have_are_refused_beforehand(pair: Pair) -> None:
    one, two = pair.one, pair.two
    run(one)
    execute(
        two.source.conninfo(),
        "CREATE PUBLICATION s1_news FOR TABLE account",
        f"SELECT lo_create({4_000_000_001})",
        "CREATE FUNCTION seen() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN NULL; END'",
        "CREATE EVENT TRIGGER watch ON ddl_command_end EXECUTE FUNCTION seen()",
    )
    attempts: list[Callable[[], None]] = [lambda: run(two), lambda: run(two, drop_if_exists=True)]
    for attempt in attempts:
        with pytest.raises(PreflightError) as refused:
            attempt()
        assert "publication s1_news already" in refused.value.message
        assert "1 large objects" in refused.value.message
    execute(two.source.conninfo(), "DROP PUBLICATION s1_news")
    run(two, skip_large_objects=True)
    assert pair.differences(two) == []
    assert pair.differences(one) == []
