"""Tables copied again, without Spark: what goes where, and what is refused."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.stream.followed import Followed, open_followed, writing
from tests.fixtures.stream.syncing import (
    request,
    requested,
    run_sql,
    states_of,
    sync_alone,
    wait_until_done,
)
from tests.fixtures.wait import wait_for

from millrace import failpoint, retry
from millrace.apply.table_state import SyncState
from millrace.compare.run import CompareSettings
from millrace.config.dsn import Dsn
from millrace.errors import ApplyError, ConfigError, MismatchError, ServerError
from millrace.filter.exclusions import Exclusions
from millrace.follow.cutover import cutover
from millrace.follow.table_sync.resync import cancel_tables, queue_tables
from millrace.follow.table_sync.source import find_table, open_sync_snapshot
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.route import Route
from millrace.spool.kind import SpoolKind
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.sync_request import RequestState, read_requests

A = TypeVar("A")
R = TypeVar("R")


@pytest.fixture
def followed(source_db: str, target_db: str, tmp_path: Path) -> Iterator[Followed]:
    with open_followed(source_db, target_db, tmp_path, DirectEngine()) as opened:
        yield opened


@pytest.fixture(params=list(SpoolKind))
def any_followed(
    source_db: str, target_db: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Followed]:
    """With each kind of spool."""
    spool, engine = request.param, DirectEngine()
    with open_followed(source_db, target_db, tmp_path, engine, spool=spool) as opened:
        yield opened


def read(uri: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(uri, autocommit=True) as connection:
        return connection.execute(query).fetchall()


def test_copy_of_a_stream_that_stands_still_is_followed_from_its_own_position(
    any_followed: Followed,
) -> None:
    followed = any_followed
    source, target = followed.source, followed.target
    run_sql(source, "UPDATE account SET balance = balance + 1 WHERE id <= 10")
    followed.follow()
    # Not applied yet when the table is copied, and in the copy.
    run_sql(
        source,
        "DELETE FROM account WHERE id = 1",
        "UPDATE account SET balance = 7 WHERE id = 2",
        "BEGIN; UPDATE account SET balance = 8 WHERE id = 3; INSERT INTO seat VALUES (99); COMMIT",
        'TRUNCATE account, "Loose one"',
        "INSERT INTO account SELECT i, i FROM generate_series(1, 50) i",
        "INSERT INTO \"Loose one\" VALUES (1, '[]', 'kept')",
    )
    # Wrong rows, which would stop the stream: changes would find them, or would not.
    run_sql(target, "DELETE FROM account WHERE id < 100", "INSERT INTO account VALUES (40, 0)")
    followed.set_endpos(None)
    asked = request(followed, "account")
    sync_alone(followed)
    done = requested(followed, asked)
    assert (done.state, done.rows) == (RequestState.DONE, 50)
    state = states_of(followed)["public", "account"]
    assert (state.state, state.copied_lsn) == (SyncState.FOLLOWED, done.copied_lsn)
    assert read(target, "SELECT count(*) FROM seat WHERE id = 99") == [(0,)]
    # And not in the copy.
    run_sql(
        source, "UPDATE account SET balance = 9 WHERE id = 4", "DELETE FROM account WHERE id = 5"
    )
    followed.follow()
    followed.assert_equal()
    assert read(source, "SELECT count(*) FROM pg_replication_slots WHERE temporary") == [(0,)]


def test_servers_that_are_away_for_long_are_waited_for(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the receiver waits for them; and what is done is not done again."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(failpoint, "_hits", Counter())
    monkeypatch.setenv(
        failpoint.VARIABLE,
        "sync.snapshot=error*8,sync.caught_up=error*8",
    )
    followed.set_endpos(None)
    asked = request(followed, "account")
    sync_alone(followed)
    assert requested(followed, asked).state is RequestState.DONE
    # Tried once more than it failed, and not copied for what failed after the copy.
    assert failpoint._hits["sync.snapshot"] == 9
    run_sql(followed.source, "UPDATE account SET balance = 9 WHERE id = 4")
    followed.follow()
    followed.assert_equal()


def test_copy_newer_than_the_end_position_is_no_success(followed: Followed) -> None:
    run_sql(followed.source, "UPDATE account SET balance = 1 WHERE id = 1")
    end = followed.end()
    run_sql(followed.source, "UPDATE account SET balance = 2 WHERE id = 1")
    asked = request(followed, "account")
    # Copied now it would hold what was committed after the end.
    with pytest.raises(MismatchError, match=r"public\.account") as raised:
        followed.follow(end)
    assert raised.value.exit_code == 9
    assert requested(followed, asked).state is RequestState.QUEUED
    assert read(followed.target, "SELECT balance FROM account WHERE id = 1") == [(1,)]
    followed.set_endpos(None)
    sync_alone(followed)
    assert requested(followed, asked).state is RequestState.DONE
    # Nothing else was applied, so the position could still be chosen; the table is beyond it.
    with pytest.raises(MismatchError, match=r"copied at .* after the end position"):
        followed.follow(end)
    followed.follow()
    followed.assert_equal()


def test_table_that_one_side_lacks_stops_the_stream_and_goes_on_later(followed: Followed) -> None:
    run_sql(followed.source, "CREATE TABLE late (id int PRIMARY KEY, note text)")
    run_sql(followed.source, "INSERT INTO late SELECT i, 'x' FROM generate_series(1, 100) i")
    asked = request(followed, "late")
    followed.set_endpos(None)
    with pytest.raises(ApplyError, match=r"public\.late: the target has no such table"):
        sync_alone(followed)
    assert "no such table" in requested(followed, asked).error
    run_sql(followed.target, "CREATE TABLE late (id int PRIMARY KEY, note text)")
    sync_alone(followed)
    run_sql(
        followed.source,
        "UPDATE late SET note = 'y' WHERE id < 10",
        "DELETE FROM late WHERE id > 90",
        "INSERT INTO late VALUES (200, 'z')",
    )
    followed.follow()
    followed.assert_equal()
    request(followed, "gone")
    followed.set_endpos(None)
    with pytest.raises(ApplyError, match=r"public\.gone: the source has no such table") as raised:
        sync_alone(followed)
    assert "--cancel" in raised.value.hint


def test_requests_are_refused_queued_and_taken_back(followed: Followed) -> None:
    settings = followed.settings()
    with pytest.raises(ApplyError, match="gone"):
        queue_tables(settings, [("public", "seat"), ("public", "gone")])
    filtered = followed.settings(left=Exclusions(tables=frozenset({("public", "seat")})))
    with pytest.raises(ConfigError, match="filters"):
        queue_tables(filtered, [("public", "seat")])
    with Sentinel(followed.directory) as sentinel:
        assert not read_requests(sentinel)
        names = [("public", "account"), ("public", "seat")]
        assert {one.state for one in queue_tables(settings, names)} == {RequestState.QUEUED}
        assert [one.name for one in cancel_tables(settings, [("public", "account")])] == ["account"]
        assert [one.name for one in read_requests(sentinel, unfinished=True)] == ["seat"]
    # Dropped on the source after its copy has begun: nobody can copy it, and nobody misses it.
    run_sql(followed.source, "ALTER TABLE seat RENAME TO bench")
    with pytest.raises(ApplyError, match="the source has no such table"):
        sync_alone(followed)
    run_sql(followed.source, "ALTER TABLE bench RENAME TO seat")
    run_sql(followed.target, "ALTER TABLE seat RENAME COLUMN place TO room")
    with pytest.raises(ApplyError, match="the target lacks columns of the source: place"):
        sync_alone(followed)
    run_sql(followed.target, "ALTER TABLE seat RENAME COLUMN room TO place")
    assert states_of(followed)["public", "seat"].state is SyncState.COPYING
    cancel_tables(settings, [("public", "seat")])
    assert states_of(followed)["public", "seat"].state is SyncState.ABANDONED
    with pytest.raises(MismatchError, match=r"public\.seat: its copy was cancelled"):
        followed.follow()
    run_sql(followed.source, "UPDATE seat SET place = -id")
    followed.set_endpos(None)
    queue_tables(settings, [("public", "seat")])
    sync_alone(followed)
    followed.follow()
    followed.assert_equal()


def test_cut_over_copies_first_and_chooses_the_end_then(followed: Followed) -> None:
    run_sql(followed.source, "UPDATE account SET balance = 3 WHERE id < 50")
    run_sql(followed.target, "DELETE FROM account WHERE id = 7")
    asked = request(followed, "account")
    # An end of before, which the copy would be newer than.
    followed.set_endpos(followed.end())
    compare = CompareSettings(Route(Dsn.parse(followed.source), Dsn.parse(followed.target)))
    result = cutover(followed.settings(), compare, followed.engine, followed.reporter)
    assert result.is_equal
    assert requested(followed, asked).state is RequestState.DONE
    assert result.endpos > (requested(followed, asked).copied_lsn or 0)


def test_source_without_a_free_slot_is_told_and_nothing_is_lost(followed: Followed) -> None:
    request(followed, "seat")
    with psycopg.connect(followed.source, autocommit=True) as source:
        made: list[str] = []
        try:
            with suppress(psycopg.errors.ConfigurationLimitExceeded):
                while True:
                    name = f"{followed.slot}_{len(made)}"
                    source.execute("SELECT pg_create_physical_replication_slot(%s)", (name,))
                    made.append(name)
            with pytest.raises(ServerError, match="slots are in use") as raised:
                sync_alone(followed)
            assert "max_replication_slots" in raised.value.hint
        finally:
            for name in made:
                source.execute("SELECT pg_drop_replication_slot(%s)", (name,))
    sync_alone(followed)
    followed.follow()
    followed.assert_equal()


class OnePlace(DirectEngine):
    """Spark with one core: a task waits for the other to end."""

    def __init__(self) -> None:
        super().__init__()
        self._place = threading.Lock()

    def call(self, body: Callable[[A, int], R], argument: A, description: str) -> R:
        with self._place:
            return super().call(body, argument, description)


@pytest.fixture(params=["pgoutput", "test_decoding"])
def source_and_plugin(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The embedded servers have no test_decoding."""
    if request.param == "pgoutput":
        yield request.getfixturevalue("source_db"), request.param
        return
    cluster: Cluster = request.getfixturevalue("system_cluster")
    yield cluster.create_database("one_place"), request.param
    cluster.drop_database("one_place")


def test_one_place_for_tasks_is_enough_and_text_plugins_need_no_publication(
    source_and_plugin: tuple[str, str],
    target_db: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source_db, plugin = source_and_plugin
    monkeypatch.setattr("millrace.follow.table_sync.driver.HAND_OVER_BYTES", 0)
    monkeypatch.setattr("millrace.follow.table_sync.driver.LOCK_PAUSE_SECONDS", 0.2)
    monkeypatch.setattr("millrace.follow.table_sync.publication.LOCK_TIMEOUT", "500ms")
    with open_followed(source_db, target_db, tmp_path, OnePlace(), plugin=plugin) as followed:
        thread = followed.start()
        with writing(source_db, 3, writers=1, pause_seconds=0.05) as count:
            wait_for(lambda: count() > 10)
            run_sql(target_db, "INSERT INTO account VALUES (-1, 5)")
            for uri in (source_db, target_db):
                run_sql(uri, "CREATE TABLE late (id int PRIMARY KEY)")
            with psycopg.connect(source_db) as locker:
                # As VACUUM takes it; to be waited for, however long it takes.
                locker.execute("LOCK TABLE late IN SHARE UPDATE EXCLUSIVE MODE")
                asked = [request(followed, "account"), request(followed, "late")]
                wait_until_done(followed, asked[0])
                if plugin == "pgoutput":
                    wait_for(lambda: "waits for a lock" in requested(followed, asked[1]).step)
            run_sql(source_db, "INSERT INTO late VALUES (1)")
            wait_until_done(followed, asked[1])
            run_sql(source_db, "INSERT INTO late VALUES (2)", "DELETE FROM late WHERE id = 1")
        followed.set_endpos(followed.end())
        thread.join()
        followed.assert_equal()


SHAPES = """
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent, twice int GENERATED ALWAYS AS
    (parent * 2) STORED, serial int GENERATED ALWAYS AS IDENTITY, secret text, note text);
CREATE TABLE log (what text);
CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO log VALUES (TG_OP); RETURN NULL; END $$;
CREATE TABLE measure (at date, value int, PRIMARY KEY (at, value)) PARTITION BY RANGE (at);
"""
ON_SOURCE = """
CREATE TABLE measure_1 PARTITION OF measure FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
CREATE TABLE measure_2 (value int, at date NOT NULL, PRIMARY KEY (at, value));
ALTER TABLE measure ATTACH PARTITION measure_2 FOR VALUES FROM ('2021-01-01') TO ('2022-01-01');
INSERT INTO parent SELECT generate_series(1, 30);
INSERT INTO child (id, parent, secret, note)
    SELECT i, i, 'secret', 'n' FROM generate_series(1, 30) i;
INSERT INTO measure SELECT date '2020-01-01' + i, i FROM generate_series(0, 700) i;
"""
ON_TARGET = """
CREATE TABLE measure_all PARTITION OF measure DEFAULT;
ALTER TABLE child ALTER COLUMN note TYPE varchar(100);
CREATE TRIGGER log AFTER INSERT OR DELETE ON parent FOR EACH ROW EXECUTE FUNCTION log();
ALTER TABLE parent ENABLE ALWAYS TRIGGER log;
INSERT INTO parent VALUES (1), (500);
INSERT INTO child (id, parent) VALUES (1, 1);
TRUNCATE log;
"""


def test_foreign_keys_triggers_partitions_generated_columns_and_filters(
    source_db: str, target_db: str, tmp_path: Path
) -> None:
    left = Exclusions(
        columns={("public", "child"): frozenset({"secret"})},
        where={("public", "child"): "id > 3"},
    )
    run_sql(source_db, SHAPES, ON_SOURCE)
    run_sql(target_db, SHAPES, ON_TARGET)
    with open_followed(source_db, target_db, tmp_path, DirectEngine()) as followed:
        for name in ("parent", "child", "measure"):
            request(followed, name)
        sync_alone(followed, left=left)
        run_sql(
            source_db,
            "DELETE FROM child WHERE id = 10",
            "UPDATE child SET note = 'later' WHERE id = 11",
            "UPDATE measure SET at = at + 365 WHERE value = 2",
            "DELETE FROM measure WHERE value = 400",
            "INSERT INTO parent VALUES (600)",
        )
        followed.follow(left=left)
        columns = "id, parent, twice, serial, note"
        for query in (
            f"SELECT {columns} FROM child WHERE id > 3 ORDER BY 1",
            "SELECT * FROM parent ORDER BY 1",
            "SELECT at, value FROM measure ORDER BY 2",
        ):
            assert read(target_db, query) == read(source_db, query)
        assert read(target_db, "SELECT count(*) FROM child WHERE id <= 3 OR secret <> ''") == [(0,)]
        assert read(target_db, "SELECT * FROM log") == []
        enabled = "SELECT tgenabled::text FROM pg_trigger WHERE tgname = 'log'"
        assert read(target_db, enabled) == [("A",)]
        request(followed, "measure_1")
        followed.set_endpos(None)
        with pytest.raises(ApplyError, match=r"measure_1 is a partition of .*measure"):
            sync_alone(followed)


def test_a_source_that_crashes_under_a_snapshot_that_is_done_with_is_no_error() -> None:
    with open_cluster(16) as cluster:
        source = cluster.create_database("crashing")
        run_sql(source, "CREATE TABLE t (id int PRIMARY KEY)")
        dsn, name = Dsn.parse(source), ("public", "t")
        snapshot = open_sync_snapshot(
            dsn, name, find_table(dsn, name), slot="crashing", encoding="UTF8",
            is_stopped=lambda: False,
        )  # fmt: skip
        with snapshot as found:
            assert [table.name for table in found.tables] == ["t"]
            cluster.restart("immediate")


def test_a_truncate_that_waits_for_the_copy_is_let_through(followed: Followed) -> None:
    """It waits for the session that keeps the snapshot's rows; the copy would wait behind it."""
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'account'::regclass"
    truncates = threading.Thread(
        target=run_sql, args=(followed.source, "TRUNCATE account CASCADE"), daemon=True
    )

    def truncate(description: str) -> None:
        if "account" in description and not truncates.ident:
            truncates.start()
            with psycopg.connect(followed.source, autocommit=True) as looking:
                wait_for(lambda: looking.execute(waiting).fetchone() == (1,))

    assert isinstance(followed.engine, DirectEngine)
    followed.engine.before_task = truncate
    request(followed, "account")
    sync_alone(followed)
    truncates.join()
    followed.follow()
    followed.assert_equal()
