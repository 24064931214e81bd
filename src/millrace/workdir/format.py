"""The format version of a SQLite file in a work directory: its `user_version`.

Invariant: a file of a format that this program does not know is neither read nor changed. 0 is what
a release before there were versions has made; opening it for writing brings it up to date.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from millrace.postgres.format import newer_format

# Of schema/source.db and of stream.db.
FORMAT: Final = 1


def check_format(database: sqlite3.Connection, path: Path) -> None:
    """Raise, and close it, if a newer release has made the file."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > FORMAT:
        database.close()
        raise newer_format(str(path), version, FORMAT)


def write_format(database: sqlite3.Connection) -> None:
    """Once everything in it is as this release makes it."""
    database.execute(f"PRAGMA user_version = {FORMAT}")
