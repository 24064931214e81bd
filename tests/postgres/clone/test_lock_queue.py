"""A TRUNCATE of the application waits for a clone's locks, and whoever reads waits behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.gate import sessions
from tests.fixtures.sql import execute, rows
from tests.fixtures.stream.followed import Silent
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace import failpoint, retry
from millrace.clone import copy_task
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.postgres.program import dump
from millrace.route import Route

WAITING = """
SELECT pid FROM pg_stat_activity WHERE application_name = 'shop' AND wait_event_type = 'Lock'
   AND datname = current_database()"""
# Between the clone's locks and pg_dump's; and before the first row is read.
STAGES = ("dump", "copy")


class Truncation:
    """The application's statement, begun at a stage of the clone."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._thread = threading.Thread(target=self._run)
        self.pid = 0
        self.error: BaseException | None = None

    def begin(self, *_: object) -> None:
        if not self.pid:
            self._thread.start()
            [(self.pid,)] = wait_for(lambda: rows(self._source, WAITING))

    def wait(self) -> None:
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        # A clone that hangs must not do so for ever.
        limit = f"-c statement_timeout={DEADLINE_SECONDS:.0f}s"
        try:
            with psycopg.connect(self._source, application_name="shop", options=limit) as shop:
                shop.execute("TRUNCATE item")
        except psycopg.Error as error:
            self.error = error


class Locked:
    """A clone whose source is truncated on the way."""

    def __init__(self, source: str, target: str, directory: Path) -> None:
        self.truncation = Truncation(source)
        self.engine = DirectEngine()
        self._route = Route(Dsn.parse(source), Dsn.parse(target), directory)

    def run(self) -> None:
        clone(CloneSettings(self._route), self.engine, Silent())


@pytest.fixture(params=STAGES)
def locked(
    request: pytest.FixtureRequest,
    source_db: str,
    target_db: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Locked]:
    execute(
        source_db,
        "CREATE TABLE item (id int PRIMARY KEY)",
        "INSERT INTO item SELECT generate_series(1, 1000)",
        "CREATE TABLE other AS SELECT generate_series(1, 10) AS id",
    )
    monkeypatch.setattr(copy_task, "LOCK_TIMEOUT", "200ms")
    monkeypatch.setattr(dump, "LOCK_TIMEOUT", "200ms")
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.01)
    made = Locked(source_db, target_db, tmp_path / "work")
    if request.param == "copy":
        made.engine.before_task = made.truncation.begin
        yield made
    else:
        with _at("snapshot.opened", made.truncation, monkeypatch):
            yield made
    made.truncation.wait()


@contextmanager
def _at(point: str, truncation: Truncation, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def hit(name: str) -> None:
        if name == point:
            truncation.begin()

    monkeypatch.setattr(failpoint, "hit", hit)
    yield


def test_a_clone_behind_a_truncate_that_waits_for_it_ends_and_says_so(
    locked: Locked, source_db: str, target_db: str
) -> None:
    with pytest.raises(ServerError, match="lock") as raised:
        locked.run()
    assert raised.value.exit_code == 5
    assert raised.value.facts["sqlstate"] == "55P03"
    pid, hint = locked.truncation.pid, raised.value.hint
    assert f"process {pid} (shop) on public.item: TRUNCATE item" in hint
    assert f"pg_cancel_backend({pid})" in hint
    # The application goes on, and nothing of ours is left.
    locked.truncation.wait()
    assert locked.truncation.error is None
    assert rows(source_db, "SELECT count(*) FROM item") == [(0,)]
    wait_for(lambda: not sessions(source_db, target_db))


def test_a_clone_goes_on_when_the_truncate_in_its_way_is_cancelled(
    locked: Locked, source_db: str, target_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def cancel(text: str, *values: object) -> None:
        told.append(text % values)
        execute(source_db, f"SELECT pg_cancel_backend({locked.truncation.pid})")
        locked.truncation.wait()

    for module in (copy_task, dump):
        monkeypatch.setattr(module.log, "warning", cancel)
    locked.run()
    assert f"pg_cancel_backend({locked.truncation.pid})" in told[0]
    assert isinstance(locked.truncation.error, psycopg.errors.QueryCanceled)
    for table, count in (("item", 1000), ("other", 10)):
        assert rows(target_db, f"SELECT count(*) FROM {table}") == [(count,)]
