"""When every row is on the target, the source's snapshot is needed no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.sql import execute, rows
from tests.fixtures.stream.followed import SCHEMA, Silent

from millrace.clone.progress import Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.clone.step import Step
from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, MillraceError, SnapshotLost, WorkDirError
from millrace.follow.clone_follow import clone_and_follow
from millrace.follow.cutover import read_end
from millrace.follow.settings import FollowSettings, SlotSettings
from millrace.follow.slot import cleanup
from millrace.postgres.wire.connect import connect
from millrace.route import Route
from millrace.snapshot.holder import hold
from millrace.spark.session import Engine
from millrace.workdir.sentinel import Sentinel

SHOP = """
CREATE TABLE parent (id serial PRIMARY KEY, n int);
INSERT INTO parent (n) SELECT i % 7 FROM generate_series(1, 500) i;
CREATE TABLE child (id int PRIMARY KEY, parent_id int REFERENCES parent);
INSERT INTO child SELECT i, i FROM generate_series(1, 500) i;
CREATE INDEX parent_n ON parent (n);
CREATE MATERIALIZED VIEW totals AS SELECT n, count(*) AS many FROM parent GROUP BY n;
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE TRIGGER quiet BEFORE INSERT ON child FOR EACH ROW EXECUTE FUNCTION nothing();
SELECT lo_from_bytea(0, 'large');
"""
# What a source does while nobody holds the snapshot.
MEANWHILE = """
INSERT INTO parent (n) SELECT 8 FROM generate_series(1, 100);
DELETE FROM child WHERE id < 10;
ALTER TABLE parent ADD COLUMN extra int;
CREATE INDEX parent_extra ON parent (extra);
DROP INDEX parent_n;
DROP TRIGGER quiet ON child;
"""
HELD = """
SELECT (SELECT count(*) FROM parent), (SELECT count(*) FROM child), (SELECT sum(many) FROM totals),
    (SELECT array_agg(indexname::text ORDER BY indexname) FROM pg_indexes
      WHERE schemaname = 'public'),
    (SELECT array_agg(conname::text ORDER BY conname) FROM pg_constraint
      WHERE contype IN ('p', 'f') AND connamespace = 'public'::regnamespace),
    (SELECT array_agg(tgname::text) FROM pg_trigger WHERE NOT tgisinternal),
    (SELECT count(*) FROM pg_largeobject_metadata)"""


@pytest.fixture
def settings(source_db: str, target_db: str, tmp_path: Path) -> CloneSettings:
    execute(source_db, SHOP)
    return CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))


def fail_at(
    failpoint: str,
    settings: CloneSettings,
    engine: Engine,
    reporter: Reporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLRACE_FAILPOINTS", f"{failpoint}=error")
    with pytest.raises(MillraceError, match=f"failpoint {failpoint}"):
        clone(settings, engine, reporter)
    monkeypatch.delenv("MILLRACE_FAILPOINTS")


def test_failures_after_the_last_row_are_resumed_without_the_snapshot(
    settings: CloneSettings,
    source_db: str,
    target_db: str,
    engine: Engine,
    reporter: Reporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = rows(source_db, HELD)
    resumed = replace(settings, resume=True)
    fail_at("copy.checked", settings, engine, reporter, monkeypatch)
    execute(source_db, MEANWHILE)
    for failpoint in ("foreign-key.begin", "post-data.begin", "properties.begin"):
        fail_at(failpoint, resumed, engine, reporter, monkeypatch)
    result = clone(resumed, engine, reporter)
    assert result.summary is not None
    assert "one instant" in result.summary.consistency
    assert rows(target_db, HELD) == before
    # Not behind the rows, and as it stands now.
    assert rows(target_db, "SELECT nextval('parent_id_seq')") == [(601,)]
    clone(resumed, engine, reporter)


def test_steps_that_read_no_rows_need_no_snapshot(
    settings: CloneSettings, source_db: str, target_db: str, engine: Engine, reporter: Reporter
) -> None:
    before = rows(source_db, HELD)
    with hold(settings.directory, settings.source):
        for steps in ({Step.DUMP, Step.PRE_DATA}, {Step.TABLE_DATA, Step.LARGE_OBJECTS}):
            clone(replace(settings, steps=frozenset(steps)), engine, reporter)
    execute(source_db, MEANWHILE)
    for step in (Step.SEQUENCES, Step.INDEXES, Step.CONSTRAINTS, Step.POST_DATA, Step.VACUUM):
        clone(replace(settings, steps=frozenset({step})), engine, reporter)
    assert rows(target_db, HELD) == before
    clone(replace(settings, resume=True), engine, reporter)
    assert rows(target_db, HELD) == before
    # Rows again would need it.
    with pytest.raises(SnapshotLost):
        clone(replace(settings, steps=frozenset({Step.TABLE_DATA})), engine, reporter)


def test_not_consistent_asks_nothing_of_a_snapshot(
    settings: CloneSettings,
    engine: Engine,
    reporter: Reporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither that the one given is still there, nor that it is the same."""
    with hold(settings.directory, settings.source) as (held, _):
        given = replace(settings, snapshot=held.id)
        fail_at("pre-data.done", given, engine, reporter, monkeypatch)
    resumed = replace(given, resume=True)
    with pytest.raises(SnapshotLost):
        clone(resumed, engine, reporter)
    with hold(settings.directory, settings.source), pytest.raises(WorkDirError, match="snapshot"):
        clone(replace(resumed, snapshot=None), engine, reporter)
    result = clone(replace(resumed, not_consistent=True), engine, reporter)
    assert result.summary is not None
    assert "different instants" in result.summary.consistency
    compared = compare_data(CompareSettings(Route(settings.source, settings.target)), engine)
    assert [one.label for one in compared if not one.is_equal] == []


SLOTS = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"


class Migration:
    """A clone that is followed, in this process."""

    def __init__(self, source: str, target: str, directory: Path, engine: Engine) -> None:
        self.source, self.target, self.engine = source, target, engine
        self.slot = "resumed_" + source.partition("?")[0].rpartition("/")[2]
        self.clone = CloneSettings(Route(Dsn.parse(source), Dsn.parse(target), directory))

    def run(self, **changes: object) -> None:
        """Up to where the source stands when it is copied."""
        clone_and_follow(
            replace(self.clone, **changes),  # type: ignore[arg-type]
            FollowSettings(Route(self.clone.source, self.clone.target, self.clone.directory)),
            SlotSettings(self.slot),
            self.engine,
            Silent(),
            on_cloned=lambda result: self._end(),
        )

    def _end(self) -> None:
        with (
            connect(self.clone.source, "test") as connection,
            Sentinel(self.clone.directory) as sentinel,
        ):
            sentinel.set_endpos(read_end(connection))


@pytest.fixture
def migration(
    source_db: str, target_db: str, tmp_path: Path, engine: Engine
) -> Iterator[Migration]:
    execute(source_db, SCHEMA)
    opened = Migration(source_db, target_db, tmp_path / "work", engine)
    yield opened
    with (
        connect(opened.clone.source, "test") as here,
        connect(opened.clone.target, "test") as there,
    ):
        cleanup(here, there, opened.slot, opened.clone.source.identity())


def test_a_followed_clone_that_has_every_row_keeps_its_slot_and_goes_on(
    migration: Migration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_FAILPOINTS", "properties.begin=error")
    with pytest.raises(MillraceError, match="failpoint"):
        migration.run()
    monkeypatch.delenv("MILLRACE_FAILPOINTS")
    assert rows(migration.source, SLOTS) == [(1,)]
    execute(
        migration.source,
        "INSERT INTO seat SELECT i, i FROM generate_series(21, 40) i",
        "DELETE FROM account WHERE id < 5",
    )
    with pytest.raises(ConfigError, match="another snapshot than the slot's") as refused:
        migration.run(resume=True, not_consistent=True)
    assert "--restart" in refused.value.hint
    migration.run(resume=True)
    compared = compare_data(
        CompareSettings(Route(migration.clone.source, migration.clone.target)), migration.engine
    )
    assert [one.label for one in compared if not one.is_equal] == []


def test_a_followed_clone_that_lacks_rows_leaves_no_slot_and_is_not_resumed(
    migration: Migration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_FAILPOINTS", "pre-data.done=error")
    with pytest.raises(MillraceError, match="failpoint"):
        migration.run()
    monkeypatch.delenv("MILLRACE_FAILPOINTS")
    assert rows(migration.source, SLOTS) == [(0,)]
    with pytest.raises(SnapshotLost, match="slot of the copy") as refused:
        migration.run(resume=True)
    assert "--restart" in refused.value.hint
    assert rows(migration.source, SLOTS) == [(0,)]
    migration.run(restart=True)
    with psycopg.connect(migration.target) as target:
        assert target.execute("SELECT count(*) FROM seat").fetchone() == (20,)
