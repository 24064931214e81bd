"""How people and processes steer a running stream: one row in the work directory.

Invariant: every write is one statement on one row, so that any process may read or write at any
time.

`sqlite3 DIR/stream.db 'select * from sentinel'` reads well: positions are text as PostgreSQL
prints them.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from millrace.errors import WorkDirError
from millrace.lsn import parse_lsn, render_lsn
from millrace.workdir.lock import PRIVATE

FILE: Final = "stream.db"
# How long a write may wait for another process.
BUSY_SECONDS = 30.0

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
    -- The client encoding of everything in the spool.
    encoding TEXT NOT NULL,
    start_lsn TEXT NOT NULL,
    spool TEXT NOT NULL,
    created_at TEXT NOT NULL
);
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


class Sentinel:
    """The open row; any thread may call any method."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(PRIVATE, parents=True, exist_ok=True)
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            self._path, check_same_thread=False, isolation_level=None, timeout=BUSY_SECONDS
        )
        self._database.row_factory = sqlite3.Row
        try:
            self._choose_journal()
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(SCHEMA)
            self._add_missing_column()
        except sqlite3.Error as error:
            self._database.close()
            raise WorkDirError(f"can't use {self._path}: {error}") from error

    def _choose_journal(self) -> None:
        """Where two open a new file at once, SQLite refuses this to one of them without waiting:
        its timeout is not for a lock that is to be raised."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._database.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    def _add_missing_column(self) -> None:
        """Streams that began before there was a choice have their spool in files."""
        columns = [row["name"] for row in self._database.execute("PRAGMA table_info(stream)")]
        if "spool" not in columns:
            self._database.execute("ALTER TABLE stream ADD COLUMN spool TEXT DEFAULT 'files'")

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
        )

    def set_startpos(self, lsn: int) -> None:
        self._write("UPDATE sentinel SET startpos = ?", render_lsn(lsn))

    def set_endpos(self, lsn: int | None) -> None:
        """Where the stream ends; None takes the end away."""
        self._write("UPDATE sentinel SET endpos = ?", None if lsn is None else render_lsn(lsn))

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
        )

    def write_setup(self, setup: StreamSetup) -> None:
        self._write(
            "INSERT OR REPLACE INTO stream (id, source, system_identifier, slot_name, plugin,"
            " encoding, start_lsn, spool, created_at) VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)",
            setup.source,
            setup.system_identifier,
            setup.slot_name,
            setup.plugin,
            setup.encoding,
            render_lsn(setup.start_lsn),
            setup.spool,
            time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def write_system_identifier(self, identifier: str) -> None:
        self._write("UPDATE stream SET system_identifier = ?", identifier)

    def clear(self) -> None:
        """Forget the stream: its slot is gone."""
        self._write("DELETE FROM stream")
        self._write("DELETE FROM sentinel")
        self._write("INSERT OR IGNORE INTO sentinel (id) VALUES (1)")

    def _row(self, query: str) -> Any:
        with self._lock, self._translated():
            return self._database.execute(query).fetchone()

    def _write(self, statement: str, *values: Any) -> None:
        with self._lock, self._translated():
            self._database.execute(statement, values)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise WorkDirError(f"can't use {self._path}: {error}") from error


def _lsn(text: str | None) -> int | None:
    return None if text is None else parse_lsn(text)
