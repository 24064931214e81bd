"""How people and processes steer a running stream: one row in the work directory.

Invariant: every write is one statement, or one transaction, on one row, so that any process may
read or write at any time. Nothing beyond the end position is applied: whoever applies claims a
batch first, a claim beyond the end position fails, and an end position before a claim is refused.

`sqlite3 DIR/stream.db 'select * from sentinel'` reads well: positions are text as PostgreSQL
prints them.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import WorkDirError
from millrace.lsn import parse_lsn, render_lsn
from millrace.room import AGAIN, CATALOG_BYTES, disk_error
from millrace.workdir.database import open_shared
from millrace.workdir.format import write_format
from millrace.workdir.place import make_private
from millrace.workdir.stream_binding import FILE, add_columns

__all__ = ["FILE", "Sentinel", "SentinelState", "StreamSetup"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS sentinel (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    startpos TEXT,
    endpos TEXT,
    apply INTEGER NOT NULL DEFAULT 1,
    prefetch INTEGER NOT NULL DEFAULT 1,
    received_lsn TEXT, received_at REAL,
    flushed_lsn TEXT, flushed_at REAL,
    applied_lsn TEXT, applied_at REAL,
    -- The source's clock when the last applied transaction committed.
    applied_committed_at REAL,
    -- What ends at or before this may be applied, whatever end position is set from now on.
    claimed_lsn TEXT,
    -- How many workers apply, which a stream keeps; NULL before it has applied anything.
    apply_jobs INTEGER,
    -- What the stream is doing, a StreamState, since when, and the error that ended it.
    state TEXT NOT NULL DEFAULT '',
    state_at REAL,
    error TEXT NOT NULL DEFAULT '',
    -- Since the stream began.
    transactions INTEGER NOT NULL DEFAULT 0,
    changes INTEGER NOT NULL DEFAULT 0
);
INSERT OR IGNORE INTO sentinel (id) VALUES (1);
CREATE TABLE IF NOT EXISTS stream (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    source TEXT NOT NULL,
    system_identifier TEXT NOT NULL DEFAULT '',
    slot_name TEXT NOT NULL,
    plugin TEXT NOT NULL,
    -- The client encoding of everything in the spool; '' until the target is known.
    encoding TEXT NOT NULL,
    start_lsn TEXT NOT NULL,
    spool TEXT NOT NULL,
    created_at TEXT NOT NULL,
    -- The snapshot that came with the slot, and the run that copied under it.
    snapshot TEXT NOT NULL DEFAULT '',
    run_id TEXT NOT NULL DEFAULT '',
    -- Whether DDL is replayed, which a stream keeps; and whether it was captured all the time.
    ddl INTEGER NOT NULL DEFAULT 0,
    all_ddl INTEGER NOT NULL DEFAULT 0
);
-- Tables whose changes are spooled, by the source's OIDs; see millrace.workdir.followed_table.
CREATE TABLE IF NOT EXISTS followed_table (
    oid INTEGER PRIMARY KEY,
    schema TEXT NOT NULL,
    name TEXT NOT NULL,
    is_whole INTEGER NOT NULL,
    root_oid INTEGER,
    -- How a partition got there; NULL if nobody knows, '' if that is still to be decided.
    link TEXT
);
-- Another number after each change of them.
CREATE TABLE IF NOT EXISTS followed_version (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    number INTEGER NOT NULL
);
INSERT OR IGNORE INTO followed_version VALUES (1, 0);
CREATE TRIGGER IF NOT EXISTS followed_table_written AFTER INSERT ON followed_table BEGIN
    UPDATE followed_version SET number = number + 1;
END;
CREATE TRIGGER IF NOT EXISTS followed_table_deleted AFTER DELETE ON followed_table BEGIN
    UPDATE followed_version SET number = number + 1;
END;
-- The server that was received from last, and when it was heard; see millrace.receive.history.
CREATE TABLE IF NOT EXISTS source (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    timeline INTEGER,
    -- When its postmaster started, which no other server shares.
    started_at TEXT,
    -- Nothing is missing up to here.
    complete_lsn TEXT,
    heard_at REAL,
    -- Why nothing is read now; empty if it is.
    held TEXT NOT NULL DEFAULT ''
);
INSERT OR IGNORE INTO source (id) VALUES (1);
-- The source when the stream began; see millrace.follow.audit.baseline.
CREATE TABLE IF NOT EXISTS baseline (
    id INTEGER PRIMARY KEY,
    reset_at TEXT NOT NULL,
    commits INTEGER NOT NULL,
    timeline INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS baseline_table (
    oid INTEGER PRIMARY KEY,
    -- JSON; NULL for what the slot's snapshot does not have.
    facts TEXT,
    -- When these were read, in baseline; NULL if nobody looked in time.
    counted INTEGER,
    inserted INTEGER NOT NULL DEFAULT 0,
    updated INTEGER NOT NULL DEFAULT 0,
    deleted INTEGER NOT NULL DEFAULT 0
);
-- Tables that are to be copied again; see millrace.workdir.sync_request.
CREATE TABLE IF NOT EXISTS table_sync (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    schema TEXT NOT NULL,
    name TEXT NOT NULL,
    reason TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued',
    -- What it does or waits for, for people.
    step TEXT NOT NULL DEFAULT '',
    sync_id TEXT,
    -- The spool is needed from here on.
    floor_lsn TEXT,
    -- The position of the copy.
    copied_lsn TEXT,
    rows INTEGER,
    error TEXT NOT NULL DEFAULT '',
    requested_at REAL NOT NULL,
    ended_at REAL
);
-- A table waits only once.
CREATE UNIQUE INDEX IF NOT EXISTS table_sync_queued ON table_sync (schema, name)
    WHERE state = 'queued';
"""


@dataclass(frozen=True)
class SentinelState:
    """The row: positions that are not known yet are None, times are seconds since 1970."""

    startpos: int | None
    endpos: int | None
    apply: bool
    prefetch: bool
    received_lsn: int | None
    received_at: float | None
    flushed_lsn: int | None
    flushed_at: float | None
    applied_lsn: int | None
    applied_at: float | None
    applied_committed_at: float | None
    # Applied since the stream began.
    transactions: int = 0
    changes: int = 0
    # How many workers apply; None before the first has.
    apply_jobs: int | None = None
    # A StreamState, since when, and the error that ended it; "" for what there is not.
    state: str = ""
    state_at: float | None = None
    error: str = ""


@dataclass(frozen=True)
class SourceRecord:
    """What is known of the server that was received from last; None where nothing is."""

    timeline: int | None = None
    started_at: str | None = None
    complete_lsn: int | None = None
    # When anything came from it, in seconds since 1970.
    heard_at: float | None = None
    # Why nothing is read now; empty if it is.
    held: str = ""


@dataclass(frozen=True)
class StreamSetup:
    """What the stream of a work directory was set up for."""

    source: str
    slot_name: str
    plugin: str
    encoding: str
    start_lsn: int
    system_identifier: str = ""
    # A SpoolKind.
    spool: str = "files"
    # The snapshot that came with the slot; "" if nobody was to copy under it.
    snapshot: str = ""
    # The run whose copy the stream belongs to; "" before one has begun.
    run_id: str = ""
    # Whether DDL is captured on the source and replayed, which a stream keeps; and whether it has
    # been since the slot was made.
    ddl: bool = False
    has_all_ddl: bool = False


class Sentinel:
    """The open row; any thread may call any method."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._lock = threading.Lock()
        with self._translated():
            make_private(directory)
            self._database = open_shared(self._path)
        try:
            self._database.executescript(SCHEMA)
            self._add_missing_columns()
            write_format(self._database)
        except sqlite3.Error as error:
            self._database.close()
            raise self._error(error) from error

    def _add_missing_columns(self) -> None:
        """Of streams that began with an older release; their spool is in files."""
        for table, column, kind in (
            ("stream", "spool", "TEXT DEFAULT 'files'"),
            ("stream", "ddl", "INTEGER NOT NULL DEFAULT 0"),
            ("stream", "all_ddl", "INTEGER NOT NULL DEFAULT 0"),
            ("sentinel", "claimed_lsn", "TEXT"),
            ("sentinel", "apply_jobs", "INTEGER"),
            ("sentinel", "state", "TEXT NOT NULL DEFAULT ''"),
            ("sentinel", "state_at", "REAL"),
            ("sentinel", "error", "TEXT NOT NULL DEFAULT ''"),
            ("followed_table", "link", "TEXT"),
        ):
            found = self._database.execute(f"PRAGMA table_info({table})")
            if column not in [row["name"] for row in found]:
                self._database.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
        add_columns(self._database)

    def __enter__(self) -> Sentinel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def read(self) -> SentinelState:
        row = self._row("SELECT * FROM sentinel")
        assert row is not None
        return SentinelState(
            startpos=_lsn(row["startpos"]),
            endpos=_lsn(row["endpos"]),
            apply=bool(row["apply"]),
            prefetch=bool(row["prefetch"]),
            received_lsn=_lsn(row["received_lsn"]),
            received_at=row["received_at"],
            flushed_lsn=_lsn(row["flushed_lsn"]),
            flushed_at=row["flushed_at"],
            applied_lsn=_lsn(row["applied_lsn"]),
            applied_at=row["applied_at"],
            applied_committed_at=row["applied_committed_at"],
            transactions=row["transactions"],
            changes=row["changes"],
            apply_jobs=row["apply_jobs"],
            state=row["state"],
            state_at=row["state_at"],
            error=row["error"],
        )

    def set_startpos(self, lsn: int) -> None:
        self._write("UPDATE sentinel SET startpos = ?", render_lsn(lsn))

    def set_endpos(self, lsn: int | None) -> None:
        """Where the stream ends; None takes the end away."""
        self._write("UPDATE sentinel SET endpos = ?", None if lsn is None else render_lsn(lsn))

    def choose_endpos(self, lsn: int) -> int:
        """Let the stream end at `lsn`, or right after what is being applied if that is later; the
        position chosen. For whoever wants the end to be now, and not at a place of their own."""
        with self._alone() as database:
            chosen = max(lsn, self._claimed())
            database.execute("UPDATE sentinel SET endpos = ?", (render_lsn(chosen),))
        return chosen

    def try_endpos(self, lsn: int) -> int | None:
        """Let the stream end at `lsn`; if more than that is applied, or is being applied, nothing
        is set, and the result is how far that goes."""
        with self._alone() as database:
            claimed = self._claimed()
            if claimed > lsn:
                return claimed
            database.execute("UPDATE sentinel SET endpos = ?", (render_lsn(lsn),))
        return None

    def claim(self, lsn: int) -> bool:
        """Whether everything up to `lsn` may be applied: not if it is beyond the end position."""
        with self._alone() as database:
            row = database.execute("SELECT endpos FROM sentinel").fetchone()
            endpos = _lsn(row["endpos"])
            if endpos is not None and lsn > endpos:
                return False
            if lsn > self._claimed():
                database.execute("UPDATE sentinel SET claimed_lsn = ?", (render_lsn(lsn),))
        return True

    def reset_claim(self, lsn: int) -> None:
        """Forget the claims of processes that are gone: everything up to `lsn` is applied."""
        self._write("UPDATE sentinel SET claimed_lsn = ?", render_lsn(lsn))

    def write_apply_jobs(self, jobs: int) -> None:
        self._write("UPDATE sentinel SET apply_jobs = ?", jobs)

    def write_state(self, state: str, error: str = "") -> None:
        """What the stream is doing from now on, and what ended it."""
        self._write(
            "UPDATE sentinel SET state = ?, state_at = ?, error = ?", state, time.time(), error
        )

    def set_apply(self, on: bool) -> None:
        self._write("UPDATE sentinel SET apply = ?", int(on))

    def set_prefetch(self, on: bool) -> None:
        self._write("UPDATE sentinel SET prefetch = ?", int(on))

    def write_received(self, lsn: int, flushed_lsn: int) -> None:
        """How far the receiver has come, and how much of it is on disk."""
        now = time.time()
        self._write(
            "UPDATE sentinel SET received_lsn = ?, received_at = ?, flushed_lsn = ?,"
            " flushed_at = ?",
            render_lsn(lsn),
            now,
            render_lsn(flushed_lsn),
            now,
        )

    def write_applied(self, lsn: int, committed_at: float | None = None) -> None:
        """How far the target has come; `committed_at` by the source's clock, since 1970."""
        self._write(
            "UPDATE sentinel SET applied_lsn = ?, applied_at = ?,"
            " applied_committed_at = coalesce(?, applied_committed_at)",
            render_lsn(lsn),
            time.time(),
            committed_at,
        )

    def count_applied(self, transactions: int, changes: int) -> None:
        """So much more was applied."""
        self._write(
            "UPDATE sentinel SET transactions = transactions + ?, changes = changes + ?",
            transactions,
            changes,
        )

    def read_setup(self) -> StreamSetup | None:
        """What the stream was set up for; None before `stream setup`."""
        row = self._row("SELECT * FROM stream")
        if row is None:
            return None
        return StreamSetup(
            source=row["source"],
            slot_name=row["slot_name"],
            plugin=row["plugin"],
            encoding=row["encoding"],
            start_lsn=parse_lsn(row["start_lsn"]),
            system_identifier=row["system_identifier"],
            spool=row["spool"],
            snapshot=row["snapshot"],
            run_id=row["run_id"],
            ddl=bool(row["ddl"]),
            has_all_ddl=bool(row["all_ddl"]),
        )

    def write_setup(self, setup: StreamSetup) -> None:
        self._write(
            "INSERT OR REPLACE INTO stream (id, source, system_identifier, slot_name, plugin,"
            " encoding, start_lsn, spool, created_at, snapshot, run_id, ddl, all_ddl)"
            " VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            setup.source,
            setup.system_identifier,
            setup.slot_name,
            setup.plugin,
            setup.encoding,
            render_lsn(setup.start_lsn),
            setup.spool,
            time.strftime("%Y-%m-%d %H:%M:%S"),
            setup.snapshot,
            setup.run_id,
            int(setup.ddl),
            int(setup.has_all_ddl),
        )

    def begin_ddl(self) -> None:
        """DDL is captured from now on, and was not, and is replayed by whoever continues the
        stream."""
        self._write("UPDATE stream SET ddl = 1, all_ddl = 0")

    def complete_setup(self, encoding: str, spool: str) -> None:
        """The target is known: what was left open when the slot was made."""
        self._write(
            "UPDATE stream SET encoding = ?, spool = ? WHERE encoding = ''", encoding, spool
        )

    def write_system_identifier(self, identifier: str) -> None:
        self._write("UPDATE stream SET system_identifier = ?", identifier)

    def read_source(self) -> SourceRecord:
        row = self._row("SELECT * FROM source")
        return SourceRecord(
            row["timeline"],
            row["started_at"],
            _lsn(row["complete_lsn"]),
            row["heard_at"],
            row["held"],
        )

    def write_source(self, timeline: int, started_at: str) -> None:
        """Which server is received from now."""
        self._write("UPDATE source SET timeline = ?, started_at = ?", timeline, started_at)

    def write_heard(self, complete_lsn: int, heard_at: float, held: str = "") -> None:
        """When the source was heard, up to where nothing is missing, and why nothing is read."""
        self._write(
            "UPDATE source SET complete_lsn = ?, heard_at = ?, held = ?",
            render_lsn(complete_lsn),
            heard_at,
            held,
        )

    def clear(self) -> None:
        """Forget the stream: its slot is gone."""
        self._write("DELETE FROM stream")
        self._write("DELETE FROM table_sync")
        self._write("DELETE FROM followed_table")
        self._write("DELETE FROM baseline")
        self._write("DELETE FROM baseline_table")
        self._write("DELETE FROM sentinel")
        self._write("DELETE FROM source")
        self._write("INSERT OR IGNORE INTO sentinel (id) VALUES (1)")
        self._write("INSERT OR IGNORE INTO source (id) VALUES (1)")

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """For the tables beside the sentinel's own row, which have modules of their own."""
        with self._lock, self._translated():
            return self._database.execute(query, values).fetchall()

    def write(self, statement: str, *values: Any) -> int:
        """One statement on such a table; the number of rows it changed."""
        with self._lock, self._translated():
            return self._database.execute(statement, values).rowcount

    def write_many(
        self, statement: str, rows: Iterable[tuple[Any, ...]], *, after: str | None = None
    ) -> None:
        """One statement for each row of such a table, all or none of them; `after` another one that
        makes room for them."""
        with self._alone() as database:
            if after is not None:
                database.execute(after)
            database.executemany(statement, rows)

    def _row(self, query: str) -> Any:
        with self._lock, self._translated():
            return self._database.execute(query).fetchone()

    def _write(self, statement: str, *values: Any) -> None:
        with self._lock, self._translated():
            self._database.execute(statement, values)

    @contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        """A transaction in which nobody else writes."""
        with self._lock, self._translated():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # a full disk has ended it
                    self._database.execute("ROLLBACK")
                raise

    def _claimed(self) -> int:
        row = self._database.execute("SELECT claimed_lsn FROM sentinel").fetchone()
        return _lsn(row["claimed_lsn"]) or 0

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise self._error(error) from error

    def _error(self, error: sqlite3.Error | OSError) -> WorkDirError:
        return disk_error(self._path, error, needed_bytes=CATALOG_BYTES, then=AGAIN)


def _lsn(text: str | None) -> int | None:
    return None if text is None else parse_lsn(text)
