"""What a consolidation knows of its sources: `consolidate.db` in the work directory.

Invariant: the row of a source is written by the process that runs it, but for what others ask of it
(`paused`, `retry`, `removed`), which only they set and only it takes back. Who asks for a removal
touches nothing of the source before that process has said that it has let go of it (`released`). A
source that is gone stays known until the file no longer has it, or it would be copied again.
A reader needs no lock. Credentials are not in it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from millrace.consolidate.plan import SourcePlan
from millrace.errors import WorkDirError
from millrace.name import Naming
from millrace.room import AGAIN, disk_error
from millrace.workdir.database import open_shared
from millrace.workdir.format import write_format
from millrace.workdir.place import make_private

FILE: Final = "consolidate.db"
_FOLDER: Final = "sources"
_BYTES: Final = 1 << 20
_SETUP: Final = """
CREATE TABLE IF NOT EXISTS source (
    name TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    plan TEXT NOT NULL,
    state TEXT NOT NULL,
    since REAL NOT NULL,
    error TEXT NOT NULL DEFAULT '',
    hint TEXT NOT NULL DEFAULT '',
    progress TEXT NOT NULL DEFAULT '{}',
    paused INTEGER NOT NULL DEFAULT 0,
    retry INTEGER NOT NULL DEFAULT 0,
    removed INTEGER NOT NULL DEFAULT 0,
    released INTEGER NOT NULL DEFAULT 0
)
"""


class SourceState(StrEnum):
    """What a source is doing.

    copying ──► following ◄──► paused
       │            │
       ▼            ▼
     failed ◄──► halted

    `resume` brings a source that is paused or halted back; one that failed is tried again by every
    new `consolidate run`, and by `resume`.
    """

    # Its base copy is made, or waits for its turn. Changes are received, none is applied.
    COPYING = "copying"
    # Changes are applied.
    FOLLOWING = "following"
    # Somebody has paused it: changes are received, none is applied.
    PAUSED = "paused"
    # A change can't be applied, and everything before it is: changes are received, none is applied.
    HALTED = "halted"
    # It can be neither copied nor received, or its target is away.
    FAILED = "failed"
    # Nothing is left of it, and it is still in the file: as long as it is there, it is not begun
    # again.
    REMOVED = "removed"

    @property
    def is_well(self) -> bool:
        """Whether it comes nearer to its source by itself."""
        return self in (SourceState.COPYING, SourceState.FOLLOWING)


@dataclass(frozen=True)
class SourceRecord:
    """A source as the registry has it."""

    name: str
    # The database, without a password.
    source: str
    plan: SourcePlan
    state: SourceState
    # In seconds since 1970.
    since: float
    error: str = ""
    hint: str = ""
    # Lag and rates, as the process that runs it saw them last.
    progress: dict[str, Any] = field(default_factory=dict)
    is_paused: bool = False
    is_retried: bool = False
    is_removed: bool = False
    # Whether nothing of a process runs for it any more.
    is_released: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left."""
        return self.state is SourceState.REMOVED

    @property
    def is_planned(self) -> bool:
        """Whether its server was ever reached, and it was decided what is copied of it."""
        return bool(self.source)


def source_directory(directory: Path, name: str) -> Path:
    """The work directory of one source: copy, stream and spool."""
    return directory / _FOLDER / quote(name, safe="")


class Registry:
    """Open, until it is closed; any thread may use it."""

    def __init__(self, directory: Path) -> None:
        make_private(directory)
        self.directory = directory
        self._path = directory / FILE
        self._lock = threading.Lock()
        with self._translated():
            self._database = open_shared(self._path)
            self._database.execute(_SETUP)
            write_format(self._database)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def read(self) -> dict[str, SourceRecord]:
        """All sources that were ever begun, by name."""
        with self._translated():
            rows = self._database.execute("SELECT * FROM source ORDER BY name").fetchall()
        return {row["name"]: _record(row) for row in rows}

    def find(self, name: str) -> SourceRecord | None:
        with self._translated():
            row = self._database.execute("SELECT * FROM source WHERE name = ?", (name,)).fetchone()
        return None if row is None else _record(row)

    def require(self, name: str) -> SourceRecord:
        found = self.find(name)
        if found is None:
            raise WorkDirError(
                f"source {name} was not begun in {self._path.parent}",
                hint="check --dir; `millrace consolidate run` begins every source of the file",
            )
        return found

    def begin(self, name: str) -> None:
        """Note a source that is about to be planned and copied, unless it is known."""
        self._write(
            "INSERT OR IGNORE INTO source (name, source, plan, state, since)"
            " VALUES (?, '', '', ?, ?)",
            name,
            SourceState.COPYING,
            time.time(),
        )

    def write_plan(self, name: str, source: str, plan: SourcePlan) -> None:
        """What is decided for a source, of the database `source`."""
        query = "UPDATE source SET source = ?, plan = ? WHERE name = ?"
        self._write(query, source, plan.as_json(), name)

    def forget_plan(self, name: str) -> None:
        """Of a source of which nothing is on the target."""
        self._write("UPDATE source SET source = '', plan = '' WHERE name = ?", name)

    def enter(self, name: str, state: SourceState, error: str = "", hint: str = "") -> None:
        """The source is in this state from now on, or still."""
        self._write(
            "UPDATE source SET since = CASE state WHEN ? THEN since ELSE ? END, state = ?,"
            " error = ?, hint = ? WHERE name = ?",
            state,
            time.time(),
            state,
            error,
            hint,
            name,
        )

    def note_progress(self, name: str, progress: dict[str, Any]) -> None:
        self._write("UPDATE source SET progress = ? WHERE name = ?", json.dumps(progress), name)

    def set_paused(self, name: str, paused: bool) -> None:
        self._write("UPDATE source SET paused = ? WHERE name = ?", int(paused), name)

    def ask_retry(self, name: str) -> None:
        """Whatever stopped the source is mended: it is to go on."""
        self._write("UPDATE source SET retry = 1 WHERE name = ?", name)

    def take_retry(self, name: str, state: SourceState) -> bool:
        """Whether that was asked since the last time; the source is in this state then."""
        query = (
            "UPDATE source SET retry = 0, state = ?, since = ?, error = '', hint = ''"
            " WHERE name = ? AND retry = 1"
        )
        return self._write(query, state, time.time(), name) > 0

    def set_removed(self, name: str) -> None:
        """The source is to be given up, by the process that runs it."""
        self._write("UPDATE source SET removed = 1 WHERE name = ?", name)

    def release(self, name: str) -> None:
        """Nothing of this process runs for a source that is removed, nor will."""
        self._write("UPDATE source SET released = 1 WHERE name = ?", name)

    def bury(self, name: str) -> None:
        """Nothing is left of a source that was removed."""
        query = "UPDATE source SET source = '', plan = '', progress = '{}', paused = 0"
        self._write(f"{query} WHERE name = ?", name)
        self.enter(name, SourceState.REMOVED)

    def forget(self, name: str) -> None:
        self._write("DELETE FROM source WHERE name = ?", name)

    def _write(self, statement: str, *values: Any) -> int:
        with self._translated():
            return self._database.execute(statement, values).rowcount

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            raise disk_error(self._path, error, needed_bytes=_BYTES, then=AGAIN) from error


@lru_cache(maxsize=1024)
def _plan_of(text: str) -> SourcePlan:
    """It is asked for many times a second, and never changes."""
    return SourcePlan.from_json(text) if text else SourcePlan(Naming())


def _record(row: sqlite3.Row) -> SourceRecord:
    return SourceRecord(
        row["name"],
        row["source"],
        _plan_of(row["plan"]),
        SourceState(row["state"]),
        row["since"],
        row["error"],
        row["hint"],
        json.loads(row["progress"]),
        bool(row["paused"]),
        bool(row["retry"]),
        bool(row["removed"]),
        bool(row["released"]),
    )
