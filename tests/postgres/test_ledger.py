"""The records of a run on its target: when they may go, and what it means if they don't."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.fixtures.sql import execute, rows

from millrace.clone.ledger import Ledger
from millrace.clone.plan import Plan
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import MillraceError, ServerError
from millrace.postgres import record
from millrace.relation import SourceCatalog
from millrace.workdir.store import Store

NOTHING = Plan(SourceCatalog(), {}, {})
RECORDS = "SELECT count(*) FROM pg_namespace WHERE nspname = 'millrace'"


@pytest.fixture
def ledger(source_db: str, target_db: str, tmp_path: Path) -> Ledger:
    settings = CloneSettings(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work")
    opened = Ledger(settings, "run1")
    opened.open(takes_over=False, is_new=True)
    return opened


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "source.db")


def drop_that_does(statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "drop_records", lambda target: target.execute(statement))


def test_records_go_when_the_run_is_closed(ledger: Ledger, target_db: str) -> None:
    assert ledger.exists()
    ledger.close(NOTHING, (), ())
    assert not ledger.exists()
    assert rows(target_db, RECORDS) == [(0,)]


def test_part_without_its_record_keeps_the_run_open(ledger: Ledger) -> None:
    with pytest.raises(ServerError, match="lost 1 parts"):
        ledger.close(NOTHING, [(4711, 1)], ())
    assert ledger.exists()


def test_target_that_dies_at_the_end_is_no_success(
    ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_that_does("SELECT pg_terminate_backend(pg_backend_pid())", monkeypatch)
    with pytest.raises(MillraceError):
        ledger.close(NOTHING, (), ())
    monkeypatch.undo()
    assert ledger.exists()
    # Unlogged sequences may be gone as well: nothing says that they were set.
    assert not ledger.settle(store)


def test_drop_that_the_target_forbids_is_told_and_no_failure(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drop_that_does("DO $$ BEGIN RAISE EXCEPTION 'not here'; END $$", monkeypatch)
    with caplog.at_level(logging.WARNING):
        ledger.close(NOTHING, (), ())
    assert "our records stay on the target (not here" in caplog.text
    assert ledger.exists()


def test_run_that_is_complete_is_settled_and_one_that_is_not_stays(
    ledger: Ledger, store: Store, target_db: str
) -> None:
    assert not ledger.settle(store)
    assert ledger.exists()
    execute(target_db, "INSERT INTO millrace.sequences_set VALUES ('run1')")
    assert ledger.settle(store)
    assert not ledger.exists()
    assert ledger.settle(store)
