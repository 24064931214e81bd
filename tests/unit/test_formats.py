"""Work directories of other releases: an older one is read and brought up to date, a newer one is
left alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from millrace.clone.directory import catalog_path, read_naming, read_setup
from millrace.clone.status import read_run_status
from millrace.errors import WorkDirError
from millrace.workdir.format import FORMAT
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.store import Store
from millrace.workdir.stream_binding import read_binding

# As releases before there were formats made them.
OLD_RUN = """
CREATE TABLE setup (id INTEGER PRIMARY KEY CHECK (id = 1), run_id TEXT NOT NULL,
    millrace_version TEXT NOT NULL, source TEXT NOT NULL, target TEXT NOT NULL, snapshot TEXT,
    split_tables_larger_than INTEGER NOT NULL, split_max_parts INTEGER NOT NULL,
    filters TEXT NOT NULL DEFAULT '', schema_options TEXT NOT NULL DEFAULT '', plugin TEXT,
    slot_name TEXT, started_at TEXT NOT NULL, finished_at TEXT);
CREATE TABLE parts (table_oid INTEGER, number INTEGER, total INTEGER, bounds TEXT, condition TEXT,
    estimated_rows INTEGER, estimated_bytes INTEGER, PRIMARY KEY (table_oid, number));
INSERT INTO setup (id, run_id, millrace_version, source, target, snapshot,
    split_tables_larger_than, split_max_parts, started_at)
    VALUES (1, 'old1', '0.1', 'here', 'there', '0-1', 5, 6, 'then');
INSERT INTO parts VALUES (4711, 1, 1, '', '', 10, 100);
"""
OLD_STREAM = """
CREATE TABLE sentinel (id INTEGER PRIMARY KEY CHECK (id = 1), startpos TEXT, endpos TEXT,
    apply INTEGER NOT NULL DEFAULT 1, prefetch INTEGER NOT NULL DEFAULT 1, received_lsn TEXT,
    received_at REAL, flushed_lsn TEXT, flushed_at REAL, applied_lsn TEXT, applied_at REAL,
    applied_committed_at REAL, transactions INTEGER NOT NULL DEFAULT 0,
    changes INTEGER NOT NULL DEFAULT 0);
CREATE TABLE stream (id INTEGER PRIMARY KEY CHECK (id = 1), source TEXT NOT NULL,
    system_identifier TEXT NOT NULL DEFAULT '', slot_name TEXT NOT NULL, plugin TEXT NOT NULL,
    encoding TEXT NOT NULL, start_lsn TEXT NOT NULL, created_at TEXT NOT NULL);
INSERT INTO sentinel (id, applied_lsn, changes) VALUES (1, '0/99', 12);
INSERT INTO stream VALUES (1, 'here', '', 'shop', 'pgoutput', 'UTF8', '0/10', 'then');
"""


def make(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(script)


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        (found,) = database.execute("PRAGMA user_version").fetchone()
    return int(found)


def test_the_run_of_an_older_release_is_read_as_it_was_left(tmp_path: Path) -> None:
    path = catalog_path(tmp_path)
    make(path, OLD_RUN)
    setup = read_setup(tmp_path)
    assert setup is not None
    assert (setup["run_id"], setup["snapshot"], setup["split_max_parts"]) == ("old1", "0-1", 6)
    assert read_naming(tmp_path).is_identity
    assert version(path) == FORMAT
    with closing(Store(path)) as store:
        assert list(store.read_parts()) == [4711]
    with closing(sqlite3.connect(path)) as shell:
        row = shell.execute("SELECT run_id, source_pg_uri, rename_schema FROM setup").fetchone()
    assert row == ("old1", "here", "")


def test_the_stream_of_an_older_release_continues_where_it_was(tmp_path: Path) -> None:
    make(tmp_path / "stream.db", OLD_STREAM)
    binding = read_binding(tmp_path)
    assert binding is not None
    assert (binding.slot_name, binding.run_id, binding.has_applied) == ("shop", "", True)
    with Sentinel(tmp_path) as sentinel:
        setup, state = sentinel.read_setup(), sentinel.read()
    assert setup is not None
    assert (setup.spool, setup.start_lsn) == ("files", 0x10)
    assert (state.applied_lsn, state.changes) == (0x99, 12)
    assert version(tmp_path / "stream.db") == FORMAT


READERS: dict[str, list[Callable[[Path], object]]] = {
    "schema/source.db": [
        read_setup,
        read_run_status,
        lambda directory: Store(catalog_path(directory), read_only=True),
    ],
    "stream.db": [Sentinel, read_binding],
}


@pytest.mark.parametrize("name", READERS)
def test_a_directory_of_a_newer_release_is_refused_and_left_alone(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    make(path, f"{OLD_RUN if 'source' in name else OLD_STREAM}; PRAGMA user_version = 99")
    before = path.read_bytes()
    for read in READERS[name]:
        with pytest.raises(WorkDirError, match=rf"{name} has format 99.* up to {FORMAT}") as caught:
            read(tmp_path)
        assert caught.value.exit_code == 4
        assert "newer release" in (caught.value.hint or "")
    assert path.read_bytes() == before
