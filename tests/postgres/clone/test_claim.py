"""One living process copies into a database; a dead one is in nobody's way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace.clone import claim, run_record
from millrace.clone.claim import claim_target
from millrace.clone.plan import Plan
from millrace.clone.run_record import RunRecords
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
from millrace.postgres.stream_record import (
    Follower,
    read_followers,
    remove_follower,
    write_follower,
)
from millrace.postgres.wire.connect import connect
from millrace.relation import SourceCatalog
from millrace.route import Route

PUBLIC = frozenset({"public"})
NOTHING = Plan(SourceCatalog(), {}, {})
# As the release before made them.
OLD_RECORDS = """
CREATE SCHEMA millrace;
COMMENT ON SCHEMA millrace IS 'records of a running millrace; dropped when it is done';
CREATE TABLE millrace.run (run_id text PRIMARY KEY, epoch int NOT NULL DEFAULT 1,
    source text NOT NULL, started_at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE millrace.copied_part (id bigserial, run_id text NOT NULL REFERENCES millrace.run,
    table_oid oid NOT NULL, part int NOT NULL, rows bigint NOT NULL, bytes bigint NOT NULL,
    seconds float8 NOT NULL, attempt int NOT NULL, PRIMARY KEY (run_id, table_oid, part));
CREATE UNLOGGED TABLE millrace.copied_unlogged_part
    (LIKE millrace.copied_part INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE UNLOGGED TABLE millrace.sequences_set (run_id text PRIMARY KEY);
CREATE TABLE millrace.done_step (run_id text NOT NULL REFERENCES millrace.run, step text NOT NULL,
    PRIMARY KEY (run_id, step));
INSERT INTO millrace.run (run_id, epoch, source) VALUES ('old1', 3, 'somewhere');
INSERT INTO millrace.copied_part VALUES (1, 'old1', 16385, 1, 10, 100, 0.1, 0);
INSERT INTO millrace.done_step VALUES ('old1', 'pre-data 1/1');
"""
CLAIM = """
import sys
from pathlib import Path
from millrace.clone.claim import claim_target
from millrace.config.dsn import Dsn
with claim_target(Dsn.parse(sys.argv[1]), "run1", Path("/some/* place"), ["a", "b"]):
    print("claimed", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(run_record, "LINGER_SECONDS", 0.3)


def test_the_other_one_is_named_and_a_killed_one_holds_nothing(
    target_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Dsn.parse(target_db)
    other = subprocess.Popen(
        [sys.executable, "-c", CLAIM, target_db],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        with (
            pytest.raises(WorkDirError) as refused,
            claim_target(target, "run2", tmp_path, ["b", "c"]),
        ):
            pass
        assert refused.value.exit_code == 4
        with claim_target(target, "run2", tmp_path, ["c", "d"]):
            pass
        for word in (f"process {other.pid}", socket.gethostname(), "/some/ * place"):
            assert word in refused.value.message
        other.kill()
    monkeypatch.setattr(claim, "GRACE_SECONDS", DEADLINE_SECONDS)
    with claim_target(target, "run2", tmp_path, ["b", "c"]):
        pass


def test_what_a_dead_process_of_the_same_run_left_is_taken_over(
    target_db: str, tmp_path: Path
) -> None:
    target = Dsn.parse(target_db)
    # Its work directory is locked by us, so it can't be alive, whatever the server thinks.
    with connect(target, "claim:run1") as left:
        assert not claim._try_lock(left, "whoever", ["a"])
        with claim_target(target, "run1", tmp_path, ["a"]):
            assert not is_alive(left)


def is_alive(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    try:
        connection.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def settings(source_db: str, target_db: str, tmp_path: Path) -> CloneSettings:
    return CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))


def test_sessions_of_a_living_run_that_lost_its_claim_are_not_ended(
    settings: CloneSettings, target_db: str
) -> None:
    RunRecords(settings, "run1").open(schemas=PUBLIC, takes_over=False, is_new=True)
    mine = RunRecords(settings, "run2")
    with connect(settings.target, "copy run1 16384.1") as at_work:
        with pytest.raises(WorkDirError, match=r"run1, is at work .* millrace copy run1"):
            mine.open(schemas=PUBLIC, takes_over=True, is_new=True)
        assert is_alive(at_work)
        # One that this directory restarts is dead.
        mine.open(schemas=PUBLIC, takes_over=True, is_new=True, former="run1")
        assert not is_alive(at_work)
    assert rows(target_db, "SELECT run_id FROM millrace.run") == [("run2",)]


def test_a_run_owns_the_schemas_that_it_fills_and_no_others(
    settings: CloneSettings, target_db: str
) -> None:
    one, other = RunRecords(settings, "run1"), RunRecords(settings, "run2")
    opened = {"takes_over": False, "is_new": True}
    one.open(schemas=frozenset({"a", "b"}), **opened)
    for refuse in (other.check_owner, partial(other.open, **opened)):
        with pytest.raises(
            WorkDirError, match=r"schema b of the target is being filled .* run1"
        ) as e:
            refuse(schemas=frozenset({"b", "c"}))
        assert "--resume" in (e.value.hint or "")
    other.open(schemas=frozenset({"c"}), **opened)
    one.close(NOTHING, (), ())
    assert (one.exists(), other.exists()) == (False, True)
    other.close(NOTHING, (), ())
    assert rows(target_db, "SELECT FROM pg_namespace WHERE nspname = 'millrace'") == []


def test_records_of_an_older_release_are_read_and_brought_up_to_date(
    settings: CloneSettings, target_db: str
) -> None:
    """Such a run has the whole database, until it is continued."""
    execute(target_db, OLD_RECORDS)
    own, other = RunRecords(settings, "old1"), RunRecords(settings, "new1")
    assert own.parts() == {(16385, 1)}
    with pytest.raises(WorkDirError, match="the target is being filled"):
        other.open(schemas=frozenset({"c"}), takes_over=False, is_new=True)
    assert own.open(schemas=PUBLIC, takes_over=False, is_new=False) == (4, {"pre-data 1/1"})
    assert own.parts() == {(16385, 1)}
    other.open(schemas=frozenset({"c"}), takes_over=False, is_new=True)
    execute(target_db, "COMMENT ON TABLE millrace.run IS 'millrace format 99'")
    for use in (own.parts, own.exists, partial(own.settle, None)):
        with pytest.raises(WorkDirError, match=r"millrace.run .* format 99.* up to 3"):
            use()


def test_tables_that_a_stream_follows_are_not_replaced(
    settings: CloneSettings, source_db: str, target_db: str
) -> None:
    for uri in (source_db, target_db):
        execute(uri, "CREATE TABLE t (id int)")
    other = Follower("postgresql://elsewhere/db", "shop", "run0", "host9", "/srv/shop")
    with connect(settings.target, "test") as target:
        write_follower(target, other)
        assert read_followers(target) == [other]
        with pytest.raises(WorkDirError, match=r"slot shop .* /srv/shop on host9.*public\.t"):
            RunRecords(settings, "run1").open(schemas=PUBLIC, takes_over=True, is_new=True)
        assert rows(target_db, "SELECT count(*) FROM pg_tables WHERE tablename = 't'") == [(1,)]
        # Other tables than its own are no concern of the stream.
        execute(target_db, "ALTER TABLE t RENAME TO u")
        RunRecords(settings, "run1").open(schemas=PUBLIC, takes_over=True, is_new=True)
        assert remove_follower(target, other.source, "shop")
        assert not remove_follower(target, other.source, "shop")
        assert read_followers(target) == []
    assert rows(target_db, "SELECT FROM pg_namespace WHERE nspname = 'replication'") == []


def test_a_role_that_may_only_write_rows_follows_without_a_note(target_db: str) -> None:
    role = f"writer_{os.getpid()}"
    execute(target_db, f"CREATE ROLE {role}")
    try:
        with connect(Dsn.parse(target_db), "test") as target:
            target.execute(f"SET ROLE {role}".encode())
            write_follower(target, Follower("s", "slot", "", "h", "/d"))
            assert read_followers(target) == []
    finally:
        execute(target_db, f"DROP ROLE {role}")
