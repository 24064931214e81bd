"""The records of a run on its target: when they may go, and what it means if they don't."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.fixtures.sql import execute, rows

from millrace.clone.plan import Plan
from millrace.clone.run_record import RunRecords
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import MillraceError, ServerError
from millrace.postgres import run_record as record
from millrace.relation import SourceCatalog
from millrace.route import Route
from millrace.workdir.store import Store

NOTHING = Plan(SourceCatalog(), {}, {})
RECORDS = "SELECT count(*) FROM pg_namespace WHERE nspname = 'millrace'"


@pytest.fixture
def records(source_db: str, target_db: str, tmp_path: Path) -> RunRecords:
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))
    opened = RunRecords(settings, "run1")
    opened.open(schemas=frozenset({"public"}), takes_over=False, is_new=True)
    return opened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "source.db")) as opened:
        yield opened


def drop_that_does(statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "drop_records", lambda target, run_id: target.execute(statement))


def test_records_go_when_the_run_is_closed(records: RunRecords, target_db: str) -> None:
    assert records.exists()
    records.close(NOTHING, (), ())
    assert not records.exists()
    assert rows(target_db, RECORDS) == [(0,)]


def test_part_without_its_record_keeps_the_run_open(records: RunRecords) -> None:
    with pytest.raises(ServerError, match="lost 1 parts"):
        records.close(NOTHING, [(4711, 1)], ())
    assert records.exists()


def test_target_that_dies_at_the_end_is_no_success(
    records: RunRecords, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_that_does("SELECT pg_terminate_backend(pg_backend_pid())", monkeypatch)
    with pytest.raises(MillraceError):
        records.close(NOTHING, (), ())
    monkeypatch.undo()
    assert records.exists()
    # Unlogged sequences may be gone as well: nothing says that they were set.
    assert not records.settle(store)


def test_drop_that_the_target_forbids_is_told_and_no_failure(
    records: RunRecords, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drop_that_does("DO $$ BEGIN RAISE EXCEPTION 'not here'; END $$", monkeypatch)
    with caplog.at_level(logging.WARNING):
        records.close(NOTHING, (), ())
    assert "our records stay on the target (not here" in caplog.text
    assert records.exists()


def test_run_that_is_complete_is_settled_and_one_that_is_not_stays(
    records: RunRecords, store: Store, target_db: str
) -> None:
    assert not records.settle(store)
    assert records.exists()
    execute(target_db, "INSERT INTO millrace.sequences_set VALUES ('run1')")
    assert records.settle(store)
    assert not records.exists()
    assert records.settle(store)
