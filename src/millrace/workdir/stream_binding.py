"""The stream of a work directory, and the one copy that it belongs to.

Invariant: a stream is bound to the run that copied under its slot's snapshot. Applied to any other
copy, its changes would be there twice, or be missing; so whoever copies asks here first, and so
does whoever applies.

The row is the stream's own (`millrace.workdir.sentinel`); this is what a copy has to know of it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millrace.errors import WorkDirError
from millrace.workdir.database import BUSY_SECONDS
from millrace.workdir.format import check_format

FILE: Final = "stream.db"
# Streams of older releases lack these columns, and are bound to nothing.
COLUMNS: Final = {"snapshot": "TEXT NOT NULL DEFAULT ''", "run_id": "TEXT NOT NULL DEFAULT ''"}


@dataclass(frozen=True)
class StreamBinding:
    """A stream, as far as a copy is concerned."""

    source: str
    slot_name: str
    plugin: str
    # The snapshot that came with the slot; "" if nobody holds, or held, one.
    snapshot: str
    # The run that copied under it; "" before that.
    run_id: str
    # Whether changes may be on the target already.
    has_applied: bool


def has_stream(directory: Path) -> bool:
    return (directory / FILE).exists()


def read_binding(directory: Path) -> StreamBinding | None:
    """The stream of the directory; None if there is none."""
    if not has_stream(directory):
        return None
    with _open(directory) as database:
        if not add_columns(database):
            return None
        row = database.execute(
            "SELECT source, slot_name, plugin, snapshot, run_id,"
            " EXISTS (SELECT 1 FROM sentinel WHERE applied_lsn IS NOT NULL) FROM stream"
        ).fetchone()
    if row is None:
        return None
    source, slot_name, plugin, snapshot, run_id, has_applied = row
    return StreamBinding(source, slot_name, plugin, snapshot, run_id, bool(has_applied))


def bind_copy(directory: Path, run_id: str, encoding: str) -> None:
    """From now on the stream belongs to this run; its values come in the target's encoding, if
    nobody has chosen one yet."""
    with _open(directory) as database:
        database.execute(
            "UPDATE stream SET run_id = ?,"
            " encoding = CASE encoding WHEN '' THEN ? ELSE encoding END",
            (run_id, encoding),
        )


def add_columns(database: sqlite3.Connection) -> bool:
    """Bring the stream's table up to this release; False if there is no such table yet."""
    found = {row[1] for row in database.execute("PRAGMA table_info(stream)")}
    for name, kind in COLUMNS.items():
        if found and name not in found:
            database.execute(f"ALTER TABLE stream ADD COLUMN {name} {kind}")
    return bool(found)


@contextmanager
def _open(directory: Path) -> Iterator[sqlite3.Connection]:
    path = directory / FILE
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS)) as database:
            check_format(database, path)
            yield database
    except sqlite3.Error as error:
        raise WorkDirError(f"can't use {path}: {error}") from error
