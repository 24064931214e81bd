"""The SQLite catalog of one run: what it was set up for, its plan, its timings.

Invariant: it is the plan and the cache; what is done is recorded on the target.
It holds no password. Any thread may call any method.

`sqlite3 DIR/schema/source.db 'select * from setup'` reads well.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from millrace.errors import WorkDirError
from millrace.relation import LargeObjectRange, Part, SourceCatalog
from millrace.room import writing
from millrace.workdir.format import check_format, write_format
from millrace.workdir.place import make_private

SCHEMA = """
CREATE TABLE IF NOT EXISTS setup (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    run_id TEXT NOT NULL,
    millrace_version TEXT NOT NULL,
    source TEXT NOT NULL,
    target TEXT NOT NULL,
    snapshot TEXT,
    split_tables_larger_than INTEGER NOT NULL,
    split_max_parts INTEGER NOT NULL,
    filters TEXT NOT NULL DEFAULT '',
    -- What schemas are called on the target, as JSON; empty for the same names.
    rename_schema TEXT NOT NULL DEFAULT '',
    -- What of the schema is left out: --no-owner, --skip-extensions and the like.
    schema_options TEXT NOT NULL DEFAULT '',
    -- Of the slot that the snapshot came with, if changes are to be followed.
    plugin TEXT,
    slot_name TEXT,
    started_at TEXT NOT NULL,
    finished_at TEXT,
    -- The names by which pgcopydb's users know them.
    source_pg_uri TEXT AS (source),
    target_pg_uri TEXT AS (target)
);
CREATE TABLE IF NOT EXISTS tables (
    oid INTEGER PRIMARY KEY, schema TEXT, name TEXT, heap_bytes INTEGER, total_bytes INTEGER,
    estimated_rows INTEGER, split_key TEXT, format TEXT, format_reason TEXT
);
CREATE TABLE IF NOT EXISTS parts (
    table_oid INTEGER, number INTEGER, total INTEGER, bounds TEXT, condition TEXT,
    estimated_rows INTEGER, estimated_bytes INTEGER, PRIMARY KEY (table_oid, number)
);
CREATE TABLE IF NOT EXISTS indexes (
    oid INTEGER PRIMARY KEY, table_oid INTEGER, schema TEXT, name TEXT, definition TEXT,
    constraint_name TEXT, constraint_type TEXT
);
CREATE TABLE IF NOT EXISTS foreign_keys (
    oid INTEGER PRIMARY KEY, schema TEXT, table_name TEXT, name TEXT, definition TEXT
);
CREATE TABLE IF NOT EXISTS large_object_ranges (
    number INTEGER PRIMARY KEY, first_oid INTEGER, last_oid INTEGER, count INTEGER
);
-- What was read under the snapshot and is needed after it: once all rows are copied, a run
-- continues without the snapshot.
CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, value TEXT NOT NULL);
-- Schemas the target had before the run: they are not created.
CREATE TABLE IF NOT EXISTS existing_schemas (oid INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS sequences (
    oid INTEGER PRIMARY KEY, schema TEXT, name TEXT, last_value INTEGER, is_called INTEGER
);
CREATE TABLE IF NOT EXISTS timings (
    kind TEXT, oid INTEGER, part INTEGER, label TEXT, started_at TEXT, seconds REAL,
    rows INTEGER, bytes INTEGER, PRIMARY KEY (kind, oid, part, label)
);
"""


class Store:
    """The open catalog of a run.

    With `read_only` nothing is made, written or locked: a run that continues in another process
    does not notice. Each read is over at once, so none is in the way of its checkpoints.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._lock = threading.RLock()
        self._path = path
        if read_only:
            self._database = _connect_read_only(path)
            return
        with writing(path):
            make_private(path.parent)
            self._open(path)

    def _open(self, path: Path) -> None:
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        check_format(self._database, path)
        self._database.execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing; after a power cut the last timings may be missing. What
        # a resumed run depends on is synced by hand.
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.executescript(SCHEMA)
        self._add_missing_columns()
        write_format(self._database)

    def _add_missing_columns(self) -> None:
        """Of runs that began with an older release."""
        found = {row[1] for row in self._database.execute("PRAGMA table_xinfo(setup)")}
        if "rename_schema" not in found:
            self._database.execute(
                "ALTER TABLE setup ADD COLUMN rename_schema TEXT NOT NULL DEFAULT ''"
            )
        for side in ("source", "target"):
            if f"{side}_pg_uri" not in found:
                self._database.execute(f"ALTER TABLE setup ADD COLUMN {side}_pg_uri AS ({side})")

    def close(self) -> None:
        self._database.close()

    def setup(self) -> dict[str, Any] | None:
        """What the directory was set up for; None if it is new."""
        rows = self._rows("SELECT * FROM setup")
        return rows[0] if rows else None

    def write_setup(self, **values: Any) -> None:
        """Pin the run to its source, target and settings; the snapshot follows."""
        self._insert("setup", [{"id": 1, "started_at": _now(), **values}])
        self._sync()

    def write_snapshot(self, snapshot_id: str) -> None:
        """Pin the run to its snapshot: from here on it is planned."""
        with self._lock, writing(self._path):
            self._database.execute("UPDATE setup SET snapshot = ?", (snapshot_id,))
        self._sync()

    def write_finished(self) -> None:
        with self._lock, writing(self._path):
            self._database.execute("UPDATE setup SET finished_at = ?", (_now(),))
        self._sync()

    def write_plan(self, catalog: SourceCatalog, parts: Iterable[Part]) -> None:
        """The whole plan in one transaction."""
        with self._transaction():
            self._insert(
                "tables",
                (
                    {
                        "oid": t.oid,
                        "schema": t.schema,
                        "name": t.name,
                        "heap_bytes": t.heap_bytes,
                        "total_bytes": t.total_bytes,
                        "estimated_rows": t.estimated_rows,
                        "split_key": t.split_key.column if t.split_key else None,
                        "format": "text" if t.text_reason else "binary",
                        "format_reason": t.text_reason or None,
                    }
                    for t in catalog.tables
                ),
            )
            self._insert("parts", (vars(part) for part in parts))
            self._insert(
                "indexes",
                (
                    {
                        "oid": i.oid,
                        "table_oid": i.table_oid,
                        "schema": i.schema,
                        "name": i.name,
                        "definition": i.definition,
                        "constraint_name": i.constraint_name,
                        "constraint_type": i.constraint_type,
                    }
                    for i in catalog.indexes
                ),
            )
            self._insert(
                "foreign_keys",
                (
                    {
                        "oid": k.oid,
                        "schema": k.schema,
                        "table_name": k.table,
                        "name": k.name,
                        "definition": k.definition,
                    }
                    for k in catalog.foreign_keys
                ),
            )
            self._insert("sequences", (vars(sequence) for sequence in catalog.sequences))
            self._insert("large_object_ranges", (vars(r) for r in catalog.large_object_ranges))

    def read_parts(self) -> dict[int, tuple[Part, ...]]:
        """The parts planned by the process that began the run, by table."""
        parts: dict[int, tuple[Part, ...]] = {}
        for row in self._rows("SELECT * FROM parts ORDER BY table_oid, number"):
            part = Part(**row)
            parts[part.table_oid] = (*parts.get(part.table_oid, ()), part)
        return parts

    def read_planned(self, kind: str) -> list[dict[str, Any]]:
        """What was planned, as written: `tables`, `indexes`, `foreign_keys` or `sequences`."""
        return self._rows(f"SELECT * FROM {kind} ORDER BY oid")

    def read_large_object_ranges(self) -> tuple[LargeObjectRange, ...]:
        """The ranges planned by the process that began the run."""
        rows = self._rows("SELECT * FROM large_object_ranges ORDER BY number")
        return tuple(LargeObjectRange(**row) for row in rows)

    def write_kept(self, name: str, value: str) -> None:
        self._insert("kept", [{"name": name, "value": value}])

    def read_kept(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM kept WHERE name = ?", name)
        return rows[0]["value"] if rows else None

    def write_existing_schemas(self, oids: Iterable[int]) -> None:
        self._insert("existing_schemas", ({"oid": oid} for oid in oids))

    def read_existing_schemas(self) -> set[int]:
        return {row["oid"] for row in self._rows("SELECT oid FROM existing_schemas")}

    def write_timing(
        self,
        kind: str,
        label: str,
        seconds: float,
        *,
        oid: int = 0,
        part: int = 0,
        rows: int = 0,
        size: int = 0,
    ) -> None:
        """How long a piece of work took: kind is step, copy, index, constraint or vacuum."""
        self._insert(
            "timings",
            [
                {
                    "kind": kind,
                    "oid": oid,
                    "part": part,
                    "label": label,
                    "started_at": _now(-seconds),
                    "seconds": seconds,
                    "rows": rows,
                    "bytes": size,
                }
            ],
        )

    def read_timings(self, kind: str) -> list[dict[str, Any]]:
        return self._rows(
            "SELECT * FROM timings WHERE kind = ? ORDER BY started_at, oid, part", kind
        )

    def _sync(self) -> None:
        with self._lock, writing(self._path):
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        with self._lock, writing(self._path):
            cursor = self._database.execute(query, parameters)
            names = [d[0] for d in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def _insert(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        with self._lock, writing(self._path):
            for row in rows:
                names = ", ".join(row)
                marks = ", ".join("?" for _ in row)
                self._database.execute(
                    f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})",
                    tuple(row.values()),
                )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, writing(self._path):
            self._database.execute("BEGIN")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # a full disk has ended it
                    self._database.execute("ROLLBACK")
                raise


def _connect_read_only(path: Path) -> sqlite3.Connection:
    """Reads the log beside the file, too. That needs an index we may have to make; where we may
    not, and there is no log, all is in the file."""
    address = f"file:{quote(str(path.resolve()))}?mode=ro"
    has_log = path.with_name(f"{path.name}-wal").exists()
    ways = [address] if has_log else [address, f"{address}&immutable=1"]
    for way in ways:
        database = sqlite3.connect(way, uri=True, check_same_thread=False, isolation_level=None)
        try:
            row = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'setup'").fetchone()
        except sqlite3.DatabaseError as error:
            database.close()
            failure = error
            continue
        check_format(database, path)
        if row is None:
            database.close()
            raise WorkDirError(f"{path} is being made", hint="ask again in a moment")
        return database
    raise WorkDirError(
        f"can't read {path}: {failure}", hint="check --dir, and that you may read it"
    ) from failure


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    draft = path.with_suffix(".tmp")
    with writing(path):
        draft.write_text(json.dumps(value, indent=2, default=str) + "\n")
        draft.replace(path)


def _now(offset_seconds: float = 0.0) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + offset_seconds))
