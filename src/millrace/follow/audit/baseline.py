"""What the source was when a stream began: rows in the work directory, for the audit at its end.

Invariant: the counters are read before the slot is made, the tables in the slot's snapshot. So
a change that the copy does not hold moves a counter; one that it holds may move it too, which
accuses a table without need, and never acquits one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final

import psycopg

from millrace.config.dsn import Dsn
from millrace.follow.audit.source_state import (
    SourceCounters,
    SourceTable,
    TableCounters,
    as_columns,
    read_counters,
    read_source_tables,
)
from millrace.postgres.wire.connect import connect
from millrace.snapshot.export import open_snapshot
from millrace.workdir.sentinel import Sentinel, StreamSetup

# Stands for tables that no counters were read of, in place of an OID.
STREAM: Final = 0
# The reading before the stream's own slot.
_FIRST: Final = 1


@dataclass(frozen=True)
class Baseline:
    """The source when the stream began; of a table that was copied again, when that was done."""

    tables: dict[int, SourceTable]
    # By table: the counters of that moment. If nobody looked at them before the slot was made,
    # all that was ever counted accuses.
    counters: Mapping[int, SourceCounters] = field(default_factory=dict)

    def moved(self, now: SourceCounters, oid: int) -> TableCounters | None:
        """What a table's counters have counted since; None if they were reset."""
        before = self.counters.get(oid) or self.counters.get(STREAM)
        if before is None:
            return now.of(oid) if now.timeline else None
        moved = now.of(oid).since(before.of(oid))
        return None if moved.is_less or not now.continues(before) else moved


def note_counters(directory: Path, source: Dsn) -> None:
    """Before the slot is made. A stream that is set up already keeps what it began with."""
    with Sentinel(directory) as sentinel:
        if sentinel.read_setup() is not None:
            return
        with connect(source, "setup") as connection:
            counters = read_counters(connection)
        sentinel.write("DELETE FROM baseline")
        sentinel.write("DELETE FROM baseline_table")
        _write_counters(sentinel, _FIRST, counters, counters.tables)


def note_tables(directory: Path, source: Dsn, setup: StreamSetup, snapshot: str | None) -> None:
    """In the slot's snapshot, if it has one, or right after the slot is made."""
    tables = _read_tables(source, setup, snapshot)
    with Sentinel(directory) as sentinel:
        _write_tables(sentinel, tables.values())


def forget_counters(directory: Path) -> None:
    """Of a slot that was there before: what its stream lacks, they may have counted already."""
    with Sentinel(directory) as sentinel:
        sentinel.write("DELETE FROM baseline")
        sentinel.write("UPDATE baseline_table SET counted = NULL")


@contextmanager
def renewing_baseline(
    sentinel: Sentinel, source: Dsn, setup: StreamSetup, root_oid: int
) -> Iterator[Callable[[str], None]]:
    """Around the copy of a table that is made again, from before its snapshot is taken until it is
    committed; yields what is to be told the snapshot."""
    with connect(source, "sync") as connection:
        counters = read_counters(connection)
    found: list[SourceTable] = []

    def look(snapshot: str) -> None:
        tables = _read_tables(source, setup, snapshot).values()
        found.extend(table for table in tables if table.root_oid == root_oid)

    yield look
    _write_tables(sentinel, found)
    last = sentinel.rows("SELECT coalesce(max(id), ?) AS id FROM baseline", _FIRST)[0]["id"]
    _write_counters(sentinel, last + 1, counters, [table.oid for table in found])


def read_baseline(sentinel: Sentinel) -> Baseline | None:
    """None of a stream that began with an older release."""
    rows = sentinel.rows("SELECT * FROM baseline_table")
    tables = [_table(row["facts"]) for row in rows if row["facts"] is not None]
    if not tables:
        return None
    counted: dict[int, dict[int, TableCounters]] = {}
    for row in rows:
        counts = TableCounters(row["inserted"], row["updated"], row["deleted"])
        counted.setdefault(row["counted"], {})[row["oid"]] = counts
    counters: dict[int, SourceCounters] = {}
    for row in sentinel.rows("SELECT * FROM baseline"):
        of_tables = counted.get(row["id"], {})
        read = SourceCounters(row["reset_at"], row["commits"], row["timeline"], of_tables)
        counters |= dict.fromkeys(of_tables, read)
        if row["id"] == _FIRST:  # a table that came between this and the slot had counted nothing
            counters[STREAM] = read
    return Baseline({table.oid: table for table in tables}, counters)


def _read_tables(source: Dsn, setup: StreamSetup, snapshot: str | None) -> dict[int, SourceTable]:
    opened = connect(source, "setup") if snapshot is None else open_snapshot(source, snapshot)
    with opened as one:
        connection = one if isinstance(one, psycopg.Connection) else one.connection
        return read_source_tables(connection, setup.slot_name, setup.plugin)


def _write_counters(
    sentinel: Sentinel, number: int, counters: SourceCounters, oids: Iterable[int]
) -> None:
    """Those of some tables, by the number of the reading."""
    sentinel.write(
        "INSERT INTO baseline (id, reset_at, commits, timeline) VALUES (?, ?, ?, ?)",
        number,
        counters.reset_at,
        counters.commits,
        counters.timeline,
    )
    counts = [(oid, counters.of(oid)) for oid in oids]
    sentinel.write_many(
        "INSERT INTO baseline_table (oid, counted, inserted, updated, deleted)"
        " VALUES (?, ?, ?, ?, ?) ON CONFLICT (oid) DO UPDATE SET counted = excluded.counted,"
        " inserted = excluded.inserted, updated = excluded.updated, deleted = excluded.deleted",
        [(oid, number, one.inserted, one.updated, one.deleted) for oid, one in counts],
    )


def _write_tables(sentinel: Sentinel, tables: Iterable[SourceTable]) -> None:
    sentinel.write_many(
        "INSERT INTO baseline_table (oid, facts) VALUES (?, ?)"
        " ON CONFLICT (oid) DO UPDATE SET facts = excluded.facts",
        [(table.oid, _facts(table)) for table in tables],
    )


def _facts(table: SourceTable) -> str:
    return json.dumps(asdict(table))


def _table(facts: str) -> SourceTable:
    found = json.loads(facts)
    known = {one.name for one in fields(SourceTable)}
    values = {name: value for name, value in found.items() if name in known}
    # An older release has written down the numbers of columns only.
    columns = [one if isinstance(one, list) else (one, "", "") for one in found["columns"]]
    return SourceTable(**values | {"columns": as_columns(columns)})
