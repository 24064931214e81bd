"""Following: everything together, steered, killed, and in the end equal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.stream.followed import ACCOUNTS, Followed, lsn_of, open_followed, writing
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.apply.conflict import ApplyCounts
from millrace.apply.position import drop_position, setup_position
from millrace.apply.task import ApplyOutcome
from millrace.compare.run import CompareSettings
from millrace.config.dsn import Dsn
from millrace.errors import ApplyError, ServerError, WorkDirError
from millrace.follow import clone_follow, feed
from millrace.follow.cutover import cutover
from millrace.follow.settings import SlotSettings
from millrace.follow.setup import open_slot_snapshot
from millrace.lsn import render_lsn
from millrace.route import Route
from millrace.snapshot.holder import hold
from millrace.spark.session import Engine
from millrace.spool.kind import SpoolKind
from millrace.workdir.sentinel import Sentinel


@pytest.fixture
def followed(source_db: str, target_db: str, tmp_path: Path, engine: Engine) -> Iterator[Followed]:
    with open_followed(source_db, target_db, tmp_path / "work", engine) as opened:
        yield opened


def test_no_source_transaction_is_ever_seen_in_part(followed: Followed) -> None:
    seen: set[int] = set()
    stop = threading.Event()

    def read() -> None:
        with psycopg.connect(followed.target, autocommit=True) as connection:
            while not stop.is_set():
                row = connection.execute(
                    "SELECT sum(balance), (SELECT count(*) FROM transfer) FROM account"
                ).fetchone()
                assert row is not None
                if row[0] != ACCOUNTS * 1000:
                    torn.append(row[0])
                seen.add(row[1])

    torn: list[int] = []
    reader = threading.Thread(target=read)
    with writing(followed.source, seed=1) as written:
        running = followed.start()
        reader.start()
        wait_for(lambda: written() > 300 and len(seen) > 5)
    followed.set_endpos(followed.end())
    running.join(DEADLINE_SECONDS)
    stop.set()
    reader.join()
    assert not torn
    assert followed.result.reached_endpos
    followed.assert_equal()


def test_end_position_cuts_between_transactions(followed: Followed) -> None:
    start = followed.end()
    first = lsn_of(followed.source, "INSERT INTO seat VALUES (101, 101)")
    with psycopg.connect(followed.source) as open_one:
        open_one.execute("SET synchronous_commit = on")
        open_one.execute("INSERT INTO seat VALUES (102, 102)")
        middle = lsn_of(followed.source, "INSERT INTO seat VALUES (103, 103)")
        open_one.commit()

    def there() -> list[int]:
        with psycopg.connect(followed.target) as connection:
            rows = connection.execute("SELECT id FROM seat WHERE id > 100 ORDER BY 1").fetchall()
        return [row[0] for row in rows]

    # In the past, on a source where nothing happens: it ends, with nothing applied.
    followed.follow(start)
    assert there() == []
    followed.follow(first)
    assert there() == [101]
    # In the middle of a transaction that commits later.
    followed.follow(middle)
    assert there() == [101, 103]
    # Now, with the source idle.
    assert followed.follow().reached_endpos
    assert there() == [101, 102, 103]
    # And again, with nothing new at all.
    assert followed.follow().transactions == 0
    followed.assert_equal()


def test_killed_workers_apply_nothing_twice(followed: Followed, tmp_path: Path) -> None:
    with writing(followed.source, seed=2) as written:
        wait_for(lambda: written() > 100)
    points = []
    for place in ("after_delete", "after_update", "before_commit", "after_commit"):
        marker = tmp_path / place
        marker.touch()
        points.append(f"apply.{place}=kill@{marker}")
    command = [
        sys.executable, "-m", "millrace", "follow", "--quiet",
        "--source", followed.source, "--target", followed.target,
        "--dir", str(followed.directory), "--endpos", render_lsn(followed.end()),
    ]  # fmt: skip
    env = os.environ | {"MILLRACE_FAILPOINTS": ",".join(points)}
    # Four deaths are one too many for a task; the next run goes on.
    subprocess.run(command, env=env, check=False, timeout=DEADLINE_SECONDS, capture_output=True)
    assert not [place for place in tmp_path.glob("*_*") if place.is_file()]
    subprocess.run(command, check=True, timeout=DEADLINE_SECONDS, capture_output=True)
    followed.assert_equal()


def test_killed_receiver_is_started_again(followed: Followed) -> None:
    with writing(followed.source, seed=3) as written:
        running = followed.start()
        for _ in range(2):
            before = written()
            killed = wait_for(lambda before=before: written() > before + 50 and receivers())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda killed=killed: not set(killed) & set(receivers()))
    followed.set_endpos(followed.end())
    running.join(DEADLINE_SECONDS)
    assert followed.result.reached_endpos
    followed.assert_equal()


def receivers() -> list[int]:
    """Living child processes that receive."""
    import multiprocessing

    children = multiprocessing.active_children()
    return [c.pid for c in children if c.name == "millrace receive" and c.pid and c.is_alive()]


def test_several_workers_end_equal(followed: Followed) -> None:
    with writing(followed.source, seed=4) as written:
        wait_for(lambda: written() > 150)
    assert followed.follow(apply_jobs=2).reached_endpos
    followed.assert_equal()


def test_apply_can_be_switched_off_and_on(followed: Followed) -> None:
    with Sentinel(followed.directory) as sentinel:
        sentinel.set_apply(False)
        running = followed.start()
        end = lsn_of(followed.source, "INSERT INTO seat VALUES (50, 50)")
        sentinel.set_endpos(end)
        wait_for(lambda: (sentinel.read().flushed_lsn or 0) >= end)
        with psycopg.connect(followed.target) as connection:
            row = connection.execute("SELECT count(*) FROM seat WHERE id = 50").fetchone()
        assert row == (0,)
        # Nothing was ever applied, and yet it is known how long that waits.
        wait_for(lambda: (followed.reporter.last.lag_seconds or 0) > 0)
        assert running.is_alive()
        sentinel.set_apply(True)
    running.join(DEADLINE_SECONDS)
    followed.assert_equal()


def test_conflict_stops_and_going_on_after_it_ends_equal(followed: Followed) -> None:
    with psycopg.connect(followed.target) as connection:
        connection.execute("DELETE FROM seat WHERE id = 3")
    lsn_of(followed.source, "UPDATE seat SET place = 300 WHERE id = 3")
    with pytest.raises(ApplyError, match=r"public\.seat"):
        followed.follow()
    with psycopg.connect(followed.target) as connection:
        connection.execute("INSERT INTO seat VALUES (3, 3)")
    followed.follow()
    followed.assert_equal()


def test_cutover_switches_on_what_is_off_and_fills_views(followed: Followed) -> None:
    """Of the views, one reads the other; one holds nothing, and one can't be filled."""
    views = (
        "CREATE MATERIALIZED VIEW zone AS SELECT count(*) AS seats FROM seat",
        "CREATE VIEW between AS SELECT seats * 2 AS double FROM zone",
        "CREATE MATERIALIZED VIEW area AS SELECT double + 1 AS more FROM between",
        "CREATE MATERIALIZED VIEW later AS SELECT 1 AS one WITH NO DATA",
        "CREATE MATERIALIZED VIEW odd AS SELECT 1 / (count(*) - 101) FROM seat",
    )
    for uri in (followed.source, followed.target):
        with psycopg.connect(uri, autocommit=True) as connection:
            for view in views:
                connection.execute(view.encode())
    with psycopg.connect(followed.source, autocommit=True) as connection:
        connection.execute("INSERT INTO seat SELECT i, i FROM generate_series(21, 101) i")
    with Sentinel(followed.directory) as sentinel:
        sentinel.set_apply(False)
        sentinel.set_prefetch(False)
    compare = CompareSettings(Route(Dsn.parse(followed.source), Dsn.parse(followed.target)))
    result = cutover(followed.settings(), compare, followed.engine, followed.reporter)
    assert (result.is_equal, result.views) == (True, 2)
    with psycopg.connect(followed.target) as connection:
        assert connection.execute("SELECT more FROM area").fetchone() == (203,)
        row = connection.execute("SELECT relispopulated FROM pg_class WHERE relname = 'later'")
        assert row.fetchone() == (False,)


def test_a_receiver_that_fails_during_a_clone_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter((None, None, ServerError("the slot is gone", hint="make a new clone")))

    class Failing:
        def check(self) -> None:
            error = next(looks)
            if error is not None:
                raise error

    monkeypatch.setattr(feed, "WATCH_SECONDS", 0.01)
    with feed.watched(Failing()):  # type: ignore[arg-type]
        wait_for(lambda: "the slot is gone (make a new clone)" in caplog.text)


def test_a_held_slot_is_not_dropped_by_a_restart(source_db: str, tmp_path: Path) -> None:
    with hold(tmp_path, Dsn.parse(source_db), slot="held_by_test") as (held, _):
        assert held.slot == "held_by_test"
        with pytest.raises(WorkDirError, match="held_by_test, which --restart would drop"):
            clone_follow._end_held(tmp_path)
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot('held_by_test')")


def test_plain_snapshot_is_refused(source_db: str, target_db: str, tmp_path: Path) -> None:
    source, target = Dsn.parse(source_db), Dsn.parse(target_db)
    with (
        hold(tmp_path, source),
        pytest.raises(WorkDirError, match="no replication slot"),
        open_slot_snapshot(Route(source, target, tmp_path), SlotSettings()),
    ):
        pass


def test_another_number_of_workers_is_refused(followed: Followed) -> None:
    lsn_of(followed.source, 'INSERT INTO "Loose one" VALUES (1, NULL, NULL)')
    followed.follow()
    with pytest.raises(WorkDirError, match="started with --apply-jobs 1, not 2"):
        followed.follow(apply_jobs=2)
    followed.assert_equal()


def test_the_position_of_another_stream_of_the_same_slot_name_is_not_ours(
    followed: Followed,
) -> None:
    with psycopg.connect(followed.target, autocommit=True) as connection:
        # As another source, or an earlier migration, may have left it on this server.
        for name in (followed.slot, f"{followed.slot}_00000000_1"):
            setup_position(connection, name, 1 << 60)
        try:
            lsn_of(followed.source, "INSERT INTO seat VALUES (77, 77)")
            followed.follow()
            followed.assert_equal()
        finally:
            for name in (followed.slot, f"{followed.slot}_00000000_1"):
                drop_position(connection, name)


@pytest.fixture
def table_followed(
    source_db: str, target_db: str, tmp_path: Path, engine: Engine
) -> Iterator[Followed]:
    directory = tmp_path / "work"
    with open_followed(source_db, target_db, directory, engine, spool=SpoolKind.TABLE) as opened:
        yield opened


def test_a_spool_on_the_target_ends_equal(table_followed: Followed) -> None:
    followed = table_followed
    with writing(followed.source, seed=5) as written:
        running = followed.start()
        wait_for(lambda: written() > 100)
        with psycopg.connect(followed.target, autocommit=True) as connection:
            # As a target does that goes down, for receiver and worker alike.
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname ="
                " current_database() AND application_name ~ '^millrace (spool|apply|read)'"
            )
        before = written()
        wait_for(lambda: written() > before + 100)
    followed.set_endpos(followed.end())
    running.join(DEADLINE_SECONDS)
    assert followed.result.reached_endpos
    followed.assert_equal()
    assert [file.name for file in (followed.directory / "spool").iterdir()] == ["lock"]


def test_workers_that_do_not_see_the_spool_are_told_of(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    lsn_of(followed.source, "INSERT INTO seat VALUES (60, 60)")
    blind = partial(ApplyOutcome, 0, None, 0, 0, ApplyCounts())
    monkeypatch.setattr("millrace.apply.driver.apply_spool", lambda task, attempt: blind())
    with pytest.raises(WorkDirError, match="find nothing in the spool"):
        followed.follow()
