"""The work directory read from outside: nothing is made, nothing is locked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.clone.progress import RunningCopy, part_label, weigh_copies
from millrace.clone.status import Count, read_run_status
from millrace.errors import WorkDirError
from millrace.relation import (
    Column,
    ForeignKey,
    Index,
    LargeObjectRange,
    Part,
    SourceCatalog,
    Table,
)
from millrace.workdir.lock import open_lock, read_holder
from millrace.workdir.store import Store

TABLES = tuple(
    Table(oid, "s", f"t{oid}", (Column("id", "integer"),), size, size, 100)
    for oid, size in ((1, 1000), (2, 3000))
)
INDEXES = (
    Index(11, 1, "s", "t1_pkey", "", True, constraint_name="t1_pkey", constraint_type="p"),
    Index(12, 2, "s", "t2_pkey", "", True, constraint_name="t2_pkey", constraint_type="p"),
    Index(13, 2, "s", "t2_other", "", False),
)
CATALOG = SourceCatalog(
    tables=TABLES,
    indexes=INDEXES,
    foreign_keys=(ForeignKey(21, "fk", "s", "t2", 2, 1, "", False),),
    large_object_ranges=(LargeObjectRange(1, 5, 9, 3), LargeObjectRange(2, 10, 19, 4)),
)
PARTS = [
    Part(1, 1, 1, "", "", 100, 1000),
    Part(2, 1, 2, "", "", 50, 1500),
    Part(2, 2, 2, "", "", 50, 1500),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "schema" / "source.db")
    store.write_setup(
        run_id="abc",
        millrace_version="0",
        source="here",
        target="there",
        split_tables_larger_than=0,
        split_max_parts=0,
    )
    store.write_plan(CATALOG, PARTS)
    return store


def test_run_status_counts_what_is_done(store: Store, tmp_path: Path) -> None:
    begun = read_run_status(tmp_path)
    assert (begun.status, begun.percent, begun.steps) == ("not running", 0.0, ())
    assert begun.tables == Count(0, 2)

    store.write_timing("copy", "s.t1", 0.1, oid=1, part=1, rows=90, size=800)
    store.write_timing("copy", "s.t2", 0.1, oid=2, part=2, rows=40, size=1200)
    store.write_timing("copy", "large objects 2", 0.1, oid=2613, part=2, rows=4, size=10)
    store.write_timing("index", "s.t1_pkey", 0.1, oid=11)
    store.write_timing("constraint", "s.t1", 0.1, oid=1)
    store.write_timing("step", "dump the schema", 0.1)
    found = read_run_status(tmp_path)
    assert found.tables == Count(1, 2)
    assert found.parts == Count(2, 3)
    assert found.indexes == Count(1, 3)
    assert found.constraints == Count(1, 2)
    assert found.foreign_keys == Count(0, 1)
    assert found.large_objects == Count(4, 7)
    assert found.estimated_bytes == Count(2500, 4000)
    assert (found.percent, found.copied_rows, found.copied_bytes) == (62.5, 130, 2010)
    assert found.steps == ("dump the schema",)
    assert json.loads(json.dumps(found.as_dict()))["parts"] == {"done": 2, "total": 3}

    store.write_timing("foreign key", "fk", 0.1, oid=21)
    store.write_finished()
    ended = read_run_status(tmp_path)
    assert (ended.status, ended.foreign_keys) == ("finished", Count(1, 1))
    store.close()


def test_bytes_under_way_count_by_their_share_of_rows() -> None:
    parts = {(part.table_oid, part.number): part for part in PARTS}
    running = [RunningCopy(2, 1, 700, 25), RunningCopy(2, 2, 900, 5000)]
    # An estimate that was too low counts as the whole part, not as more.
    assert weigh_copies(parts, {(1, 1)}, running) == 1000 + 750 + 1500
    assert weigh_copies(parts, set(), running[:1]) == 750
    assert [part_label("s.t", part) for part in PARTS] == ["s.t", "s.t [1/2]", "s.t [2/2]"]


def test_status_is_that_of_the_process_that_holds_the_directory(
    store: Store, tmp_path: Path
) -> None:
    with open_lock(tmp_path):
        assert read_run_status(tmp_path).status == "running"
        # Looking does not take the lock, nor does it let go of it.
        with pytest.raises(WorkDirError, match="another millrace"), open_lock(tmp_path):
            pass
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "millrace.pid").write_text(f"pid {gone.pid} since today\n")
    assert read_holder(tmp_path) is None
    assert read_run_status(tmp_path).status == "not running"
    (tmp_path / "millrace.pid").write_text("")
    assert read_holder(tmp_path) is None
    store.close()


def test_reader_sees_what_is_committed_and_keeps_no_writer_waiting(
    store: Store, tmp_path: Path
) -> None:
    reader = Store(tmp_path / "schema" / "source.db", read_only=True)
    # A read that is not over yet.
    cursor = reader._database.execute("SELECT * FROM parts")
    assert cursor.fetchone() is not None
    store.write_timing("copy", "s.t1", 0.1, oid=1, part=1)
    cursor.close()
    assert [timing["oid"] for timing in reader.read_timings("copy")] == [1]
    with store._transaction():
        store.write_timing("copy", "s.t2", 0.1, oid=2, part=1)
        assert len(reader.read_timings("copy")) == 1
    assert len(reader.read_timings("copy")) == 2
    # All of the log goes into the file: no read is in the way.
    assert store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
    reader.close()
    store.close()


def test_reader_writes_nothing(store: Store, tmp_path: Path) -> None:
    reader = Store(tmp_path / "schema" / "source.db", read_only=True)
    with pytest.raises(Exception, match="readonly"):
        reader.write_finished()
    reader.close()
    store.close()


def test_run_of_a_dead_process_can_be_read(tmp_path: Path) -> None:
    """It left its log behind; the last lines are only there."""
    path = tmp_path / "schema" / "source.db"
    code = (
        "import os, pathlib; from millrace.workdir.store import Store;"
        f" s = Store(pathlib.Path({str(path)!r}));"
        " s.write_setup(run_id='abc', millrace_version='0', source='here', target='there',"
        " split_tables_larger_than=0, split_max_parts=0);"
        " s.write_timing('step', 'the last', 0.1); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    log = path.with_name("source.db-wal")
    assert log.stat().st_size > 0
    before = log.read_bytes()
    assert read_run_status(tmp_path).steps == ("the last",)
    assert log.read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_of_another_user_can_be_read(store: Store, tmp_path: Path) -> None:
    store.close()
    (tmp_path / "schema").chmod(0o555)
    try:
        assert read_run_status(tmp_path).run_id == "abc"
    finally:
        (tmp_path / "schema").chmod(0o755)


def test_directories_that_are_made_are_for_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with open_lock(tmp_path / "work"):
            Store(tmp_path / "work" / "schema" / "source.db").close()
        # One that was there is left as it is.
        Store(tmp_path / "source.db").close()
    finally:
        os.umask(before)
    made = [tmp_path / "work", tmp_path / "work" / "schema"]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o700", "0o700"]


def test_directory_without_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(WorkDirError, match="there is no run"):
        read_run_status(tmp_path)
    assert list(tmp_path.iterdir()) == []
    Store(tmp_path / "schema" / "source.db").close()
    with pytest.raises(WorkDirError, match="not begun"):
        read_run_status(tmp_path)
    (tmp_path / "schema" / "source.db").write_bytes(b"")
    with pytest.raises(WorkDirError, match="being made"):
        read_run_status(tmp_path)
    (tmp_path / "schema" / "source.db").write_bytes(b"not a database, and long enough to be one")
    with pytest.raises(WorkDirError, match="can't read"):
        read_run_status(tmp_path)
