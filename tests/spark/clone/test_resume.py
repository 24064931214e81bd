"""Interrupted and gone on with: nothing lost, nothing twice, one instant."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace.clone import step
from millrace.clone.progress import Progress, Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.clone.step import ALL, Step
from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.demo.shop import create_shop
from millrace.errors import PreflightError, ServerError, SnapshotLost, WorkDirError
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route
from millrace.snapshot.export import open_snapshot
from millrace.snapshot.holder import hold, read_held
from millrace.spark.session import Engine
from millrace.split.plan import SplitSettings


def run_cli(
    source: str, target: str, directory: Path, *options: str, failpoints: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [*MILLRACE, "clone", "--source", source, "--target", target]
    command += ["--dir", str(directory), "--split-tables-larger-than", "500 kB", *options]
    return subprocess.run(
        command,
        env=os.environ | {"MILLRACE_FAILPOINTS": failpoints},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


# All the others are in test_torture.py.
@pytest.mark.parametrize("failpoint", ["index.done", "run.finished"])
def test_killed_run_goes_on_under_the_same_snapshot(
    source_db: str, target_db: str, engine: Engine, tmp_path: Path, failpoint: str
) -> None:
    create_shop(source_db, megabytes=5)
    marker = tmp_path / "marker"
    marker.touch()
    with hold(tmp_path / "work", Dsn.parse(source_db)) as (held, check):
        first = run_cli(
            source_db, target_db, tmp_path / "work", failpoints=f"{failpoint}=kill@{marker}"
        )
        assert first.returncode == -9, first.stderr
        with psycopg.connect(source_db) as connection:
            connection.execute("DELETE FROM shop.payments")
        second = run_cli(source_db, target_db, tmp_path / "work", "--resume")
        assert second.returncode == 0, second.stderr
        settings = CompareSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db)), 4, held.id)
        compared = compare_data(settings, engine)
        assert [one.label for one in compared if not one.is_equal] == []
        check()
    counts = "SELECT (SELECT count(*) FROM pg_indexes WHERE schemaname = 'shop'), (SELECT count(*)"
    counts += " FROM pg_constraint WHERE contype IN ('p', 'u', 'x', 'f')), (SELECT count(*) FROM"
    counts += " pg_trigger WHERE NOT tgisinternal)"
    assert rows(source_db, counts) == rows(target_db, counts)
    assert rows(target_db, "SELECT FROM pg_namespace WHERE nspname = 'millrace'") == []


@pytest.fixture
def stopped(
    source_db: str,
    target_db: str,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> CloneSettings:
    """A run that failed after it was planned, and whose snapshot is gone."""
    create_shop(source_db, megabytes=5)
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))
    monkeypatch.setenv("MILLRACE_FAILPOINTS", "pre-data.done=error")
    with pytest.raises(Exception, match="failpoint"):
        clone(settings, engine, reporter)
    monkeypatch.delenv("MILLRACE_FAILPOINTS")
    return settings


def test_resume_without_its_snapshot_is_refused_with_two_ways_out(
    stopped: CloneSettings, engine: Engine, reporter: Reporter
) -> None:
    with pytest.raises(SnapshotLost) as caught:
        clone(replace(stopped, resume=True), engine, reporter)
    for way in ("--restart", "--resume --not-consistent"):
        assert way in caught.value.hint


def test_directory_of_an_unfinished_run_is_not_taken_for_another(
    stopped: CloneSettings, engine: Engine, reporter: Reporter
) -> None:
    with pytest.raises(WorkDirError, match="unfinished run") as caught:
        clone(stopped, engine, reporter)
    assert "--resume" in caught.value.hint
    other = replace(stopped, resume=True, split=SplitSettings(larger_than_bytes=1000))
    with pytest.raises(WorkDirError, match=r"--split-tables-larger-than 0?.*now it is 1000"):
        clone(other, engine, reporter)


@pytest.mark.parametrize("way", ["restart", "resume"])
def test_both_ways_without_the_snapshot_end_in_an_equal_target(
    stopped: CloneSettings, engine: Engine, reporter: Reporter, way: str
) -> None:
    changes = {"restart": True} if way == "restart" else {"resume": True, "not_consistent": True}
    result = clone(replace(stopped, **changes), engine, reporter)
    assert result.summary is not None
    assert ("different instants" in result.summary.consistency) == (way == "resume")
    compared = compare_data(CompareSettings(Route(stopped.source, stopped.target)), engine)
    assert [one.label for one in compared if not one.is_equal] == []


UNLOGGED = """
CREATE FUNCTION shout() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN NEW.t := NEW.t || '!'; RETURN NEW; END $$;
CREATE UNLOGGED TABLE quick (id int PRIMARY KEY, t text);
INSERT INTO quick SELECT i, 'quiet' FROM generate_series(1, 1000) AS i;
CREATE UNLOGGED SEQUENCE quick_number START 40;
SELECT nextval('quick_number'), nextval('quick_number');
CREATE TABLE slow (id int PRIMARY KEY);
INSERT INTO slow SELECT generate_series(1, 1000);
CREATE VIEW names AS SELECT t FROM quick;
CREATE RULE ignored AS ON INSERT TO names DO INSTEAD NOTHING;
"""
TRIGGER = "CREATE TRIGGER shout BEFORE INSERT ON quick FOR EACH ROW EXECUTE FUNCTION shout();"


class CrashingTarget:
    """A reporter under which the target crashes at the beginning of a step."""

    def __init__(self, cluster: Cluster, step: str) -> None:
        self._cluster = cluster
        self._step = step

    def update(self, progress: Progress) -> None:
        if progress.step == self._step:
            self._step = ""
            self._cluster.restart("immediate")


@pytest.mark.parametrize("trigger", ["", "origin", "always"])
def test_unlogged_rows_lost_by_a_crash_after_the_copy_are_told_and_copied_again(
    source_db: str,
    target_db: str,
    target_cluster: Cluster,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
    trigger: str,
) -> None:
    with psycopg.connect(source_db) as connection:
        connection.execute(UNLOGGED.encode())
        if trigger:
            connection.execute(TRIGGER.encode())
        if trigger == "always":
            connection.execute("ALTER TABLE quick ENABLE ALWAYS TRIGGER shout")
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))
    crashing = CrashingTarget(target_cluster, "database properties")
    with hold(tmp_path / "work", settings.source):
        with pytest.raises(ServerError, match="lost 1 parts") as caught:
            clone(settings, engine, crashing)
        assert "--resume" in caught.value.hint
        assert not (tmp_path / "work" / "summary.json").exists()
        if trigger == "always":
            # The rows would come out changed.
            with pytest.raises(ServerError, match=r"triggers or rules fire always: .*quick"):
                clone(replace(settings, resume=True), engine, reporter)
            with psycopg.connect(target_db) as connection:
                connection.execute("ALTER TABLE quick DISABLE TRIGGER shout")
        clone(replace(settings, resume=True), engine, reporter)
    assert rows(target_db, "SELECT count(*), min(t), max(t) FROM quick") == [
        (1000, "quiet", "quiet")
    ]
    assert rows(target_db, "SELECT count(*) FROM slow") == [(1000,)]


def test_a_target_that_crashes_at_the_very_end_is_not_called_done(
    source_db: str,
    target_db: str,
    target_cluster: Cluster,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with psycopg.connect(source_db) as connection:
        connection.execute(UNLOGGED.encode())
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))

    def crash(name: str) -> None:
        if name == "run.finished":
            monkeypatch.undo()
            target_cluster.restart("immediate")

    monkeypatch.setattr("millrace.clone.run.failpoint.hit", crash)
    with hold(tmp_path / "work", settings.source):
        with pytest.raises(ServerError, match="lost 1 parts"):
            clone(settings, engine, reporter)
        clone(replace(settings, resume=True), engine, reporter)
    assert rows(target_db, "SELECT count(*) FROM quick") == [(1000,)]
    assert rows(target_db, "SELECT nextval('quick_number')") == [(42,)]


GUARDED = """
CREATE TABLE parent (id int PRIMARY KEY, n int);
CREATE TABLE child (id int PRIMARY KEY, parent_id int REFERENCES parent, body text);
CREATE FUNCTION add_one() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN NEW.n := NEW.n + 1; RETURN NEW; END $$;
CREATE TRIGGER add_one BEFORE INSERT ON parent FOR EACH ROW EXECUTE FUNCTION add_one();
INSERT INTO parent SELECT i, i FROM generate_series(1, 2000) AS i;
INSERT INTO child SELECT i, i, repeat('x', 500) FROM generate_series(1, 2000) AS i;
"""


@pytest.mark.parametrize("split", [0, 200_000], ids=["whole", "split"])
def test_data_can_come_after_triggers_and_foreign_keys(
    source_db: str, target_db: str, engine: Engine, reporter: Reporter, tmp_path: Path, split: int
) -> None:
    with psycopg.connect(source_db) as connection:
        connection.execute(GUARDED.encode())
    settings = CloneSettings(
        Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"),
        split=SplitSettings(split),
    )
    with hold(tmp_path / "work", settings.source):
        clone(replace(settings, steps=step.SCHEMA), engine, reporter)
        clone(replace(settings, steps=step.DATA), engine, reporter)
    compared = compare_data(CompareSettings(Route(settings.source, settings.target)), engine)
    assert [one.label for one in compared if not one.is_equal] == []


MATERIALIZED = """
CREATE TABLE counted (id int PRIMARY KEY, n int);
INSERT INTO counted SELECT i, i % 7 FROM generate_series(1, 2000) AS i;
CREATE MATERIALIZED VIEW totals AS SELECT n, count(*) AS many FROM counted GROUP BY n;
CREATE UNIQUE INDEX totals_n ON totals (n);
CREATE MATERIALIZED VIEW a_total AS SELECT sum(many) AS total FROM totals;
CREATE MATERIALIZED VIEW unfilled AS SELECT n FROM totals WITH NO DATA;
-- Made by post-data, after the key it rests on.
CREATE MATERIALIZED VIEW by_key AS SELECT id, n FROM counted GROUP BY id;
CREATE INDEX by_key_n ON by_key (n);
"""
VIEWS = """
SELECT (SELECT array_agg((n, many)::text ORDER BY n) FROM totals), (SELECT total FROM a_total),
    (SELECT count(*) FROM by_key),
    (SELECT array_agg(indexname::text ORDER BY indexname) FROM pg_indexes
     WHERE schemaname = 'public'),
    (SELECT array_agg(relname::text ORDER BY relname) FROM pg_class
     WHERE relkind = 'm' AND relispopulated)"""


@pytest.mark.parametrize(
    "commands",
    [
        [step.SCHEMA, step.DATA],
        [step.SCHEMA, {Step.TABLE_DATA}],
        [{Step.DUMP, Step.PRE_DATA}, step.DATA, {Step.POST_DATA}],
        [step.SCHEMA, ALL],
    ],
    ids=["data last", "rows last", "post-data last", "gone on with"],
)
def test_materialized_views_are_filled_when_the_last_of_rows_and_schema_is_there(
    source_db: str,
    target_db: str,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
    commands: list[Collection[Step]],
) -> None:
    execute(source_db, MATERIALIZED)
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))
    with hold(tmp_path / "work", settings.source):
        for at, steps in enumerate(commands):
            populated = rows(
                target_db, "SELECT FROM pg_class WHERE relkind = 'm' AND relispopulated"
            )
            assert populated == [], commands[:at]
            clone(replace(settings, steps=frozenset(steps), resume=steps == ALL), engine, reporter)
        assert rows(target_db, VIEWS) == rows(source_db, VIEWS)
        clone(replace(settings, resume=True), engine, reporter)
    assert rows(target_db, VIEWS) == rows(source_db, VIEWS)


def test_rows_copied_again_into_a_finished_clone_fill_its_materialized_views(
    source_db: str, target_db: str, engine: Engine, reporter: Reporter, tmp_path: Path
) -> None:
    execute(source_db, MATERIALIZED)
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))
    clone(settings, engine, reporter)
    execute(
        source_db,
        "UPDATE counted SET n = n + 1",
        "REFRESH MATERIALIZED VIEW totals",
        "REFRESH MATERIALIZED VIEW by_key",
    )
    rows_only = frozenset({Step.TABLE_DATA})
    clone(replace(settings, steps=rows_only, not_consistent=True), engine, reporter)
    assert rows(target_db, VIEWS) == rows(source_db, VIEWS)


def test_materialized_view_is_not_filled_from_a_table_that_a_crash_has_emptied(
    source_db: str,
    target_db: str,
    target_cluster: Cluster,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
) -> None:
    execute(source_db, UNLOGGED, "CREATE MATERIALIZED VIEW seen AS SELECT id, t FROM quick")
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))
    crashing = CrashingTarget(target_cluster, "materialized views")
    with hold(tmp_path / "work", settings.source):
        with pytest.raises(ServerError, match="lost unlogged tables"):
            clone(settings, engine, crashing)
        clone(replace(settings, resume=True), engine, reporter)
    assert rows(target_db, "SELECT count(*) FROM seen") == [(1000,)]


def test_restart_never_empties_a_target_that_is_not_its_own(
    stopped: CloneSettings, engine: Engine, reporter: Reporter, target_db: str
) -> None:
    with psycopg.connect(target_db) as connection:
        connection.execute("DROP SCHEMA millrace CASCADE")
    tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'shop'"
    before = rows(target_db, tables)
    with pytest.raises(PreflightError, match="not empty"):
        clone(replace(stopped, restart=True), engine, reporter)
    assert rows(target_db, tables) == before != [(0,)]
    # And the old run can still be gone on with, as far as its directory is concerned.
    assert (stopped.directory / "schema" / "source.db").exists()


def test_holder_that_lost_its_session_says_so(source_db: str, tmp_path: Path) -> None:
    with hold(tmp_path, Dsn.parse(source_db)) as (held, check):
        assert read_held(tmp_path) == held
        with open_snapshot(Dsn.parse(source_db), held.id):
            pass
        rows(
            source_db,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'millrace snapshot' AND datname = current_database()",
        )
        with pytest.raises(SnapshotLost):
            check()
    assert read_held(tmp_path) is None


def test_snapshot_of_a_slot_begins_where_its_changes_begin(source_db: str, tmp_path: Path) -> None:
    with hold(tmp_path, Dsn.parse(source_db), slot="resume_test") as (held, check):
        assert held.start_lsn
        check()
        with open_snapshot(Dsn.parse(source_db), held.id):
            pass
    rows(source_db, "SELECT pg_drop_replication_slot('resume_test')")
