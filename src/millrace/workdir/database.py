"""A SQLite file of a work directory that several processes have open.

Invariant: whoever opens it waits for the others, and none fails because another opens it at the
same moment. A file that a newer release has made is left as it is.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Final

from millrace.workdir.format import check_format

# How long a write may wait for another process.
BUSY_SECONDS: Final = 30.0


def open_shared(path: Path) -> sqlite3.Connection:
    """The file, made if it is missing. One thread at a time may use the connection: between a
    SELECT that is being read and a write of another thread, its view of the file would be stale."""
    database = sqlite3.connect(
        path, check_same_thread=False, isolation_level=None, timeout=BUSY_SECONDS
    )
    database.row_factory = sqlite3.Row
    try:
        check_format(database, path)
        _choose_journal(database)
        database.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error:
        database.close()
        raise
    return database


def _choose_journal(database: sqlite3.Connection) -> None:
    """Where two open a new file at once, SQLite refuses this to one of them without waiting: its
    timeout is not for a lock that is to be raised."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
