"""The status of a run, seen from outside: from its work directory and its target.

Invariant: looking changes nothing and blocks nobody, whether the run is running, has stopped or
has finished. What is copied is what the target has records of; without them, what the work
directory says.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from millrace.clone.directory import catalog_path
from millrace.clone.kept_view import GIVEN_BACK_AT
from millrace.clone.progress import (
    Progress,
    RunningCopy,
    RunningIndex,
    part_label,
    read_running_copies,
    read_running_indexes,
    weigh_copies,
)
from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
from millrace.postgres import run_record as record
from millrace.postgres.wire.connect import connect, resolve, translated
from millrace.relation import LargeObjectRange, Part
from millrace.snapshot.ended import read_end_of
from millrace.snapshot.holder import read_held
from millrace.workdir.lock import read_holder
from millrace.workdir.store import Store

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class Count:
    """A number done, out of a total."""

    done: int
    total: int


@dataclass(frozen=True)
class RunStatus:
    """A run, as far as it has come."""

    run_id: str
    source: str
    target: str
    snapshot: str | None
    # Who holds the snapshot, when it was given back, or how it ended; "" if nobody knows.
    snapshot_state: str
    started_at: str
    finished_at: str | None
    # running, not running or finished; one that is not running can be continued.
    status: str
    # Steps that are done, in their order.
    steps: tuple[str, ...]
    tables: Count
    parts: Count
    indexes: Count
    constraints: Count
    foreign_keys: Count
    large_objects: Count
    vacuumed: Count
    # Bytes of the source's files, which are known beforehand.
    estimated_bytes: Count
    # Bytes and rows that went through.
    copied_bytes: int
    copied_rows: int
    # Of the tables' bytes.
    percent: float
    # Whether the target was asked: if not, nobody knows what is running.
    is_watched: bool = False
    running_copies: tuple[tuple[str, RunningCopy], ...] = ()
    running_indexes: tuple[RunningIndex, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        copies = [{"label": label, **asdict(copy)} for label, copy in self.running_copies]
        return asdict(self) | {"running_copies": copies}


@dataclass(frozen=True)
class _Written:
    """What the work directory says."""

    setup: dict[str, Any]
    snapshot_state: str
    is_held: bool
    tables: dict[int, str]
    parts: dict[record.PartKey, Part]
    indexes: list[dict[str, Any]]
    foreign_keys: list[dict[str, Any]]
    large_objects: tuple[LargeObjectRange, ...]
    # By kind: the OIDs whose work of this kind is done.
    done: dict[str, set[int]]
    copied: dict[record.PartKey, record.CopiedPart]
    steps: tuple[str, ...]


@dataclass(frozen=True)
class _Seen:
    """What the target says; `copied` is None if it has no records of the run."""

    copied: dict[record.PartKey, record.CopiedPart] | None = None
    copies: list[RunningCopy] = field(default_factory=list)
    indexes: list[RunningIndex] = field(default_factory=list)


def read_run_status(directory: Path, target: Dsn | None = None) -> RunStatus:
    """The status of the run in a directory; what is running right now only with its target."""
    written = _read_written(directory)
    return _run_status(written, None if target is None else _look(target, written.setup))


def _read_written(directory: Path) -> _Written:
    path = catalog_path(directory)
    if not path.exists():
        raise WorkDirError(f"there is no run in {directory}", hint="check --dir")
    store = Store(path, read_only=True)
    try:
        setup = store.setup()
        if setup is None:
            raise WorkDirError(
                f"the run in {directory} has not begun yet", hint="ask again in a moment"
            )
        return _Written(
            setup=setup,
            snapshot_state=_snapshot_state(directory, store, setup["snapshot"]),
            is_held=read_holder(directory) is not None,
            tables={t["oid"]: f"{t['schema']}.{t['name']}" for t in store.read_planned("tables")},
            parts={(p.table_oid, p.number): p for ps in store.read_parts().values() for p in ps},
            indexes=store.read_planned("indexes"),
            foreign_keys=store.read_planned("foreign_keys"),
            large_objects=store.read_large_object_ranges(),
            done={
                kind: {timing["oid"] for timing in store.read_timings(kind)}
                for kind in ("index", "constraint", "foreign key", "vacuum")
            },
            copied={
                (t["oid"], t["part"]): record.CopiedPart(
                    t["oid"], t["part"], t["rows"], t["bytes"], t["seconds"]
                )
                for t in store.read_timings("copy")
            },
            steps=tuple(timing["label"] for timing in store.read_timings("step")),
        )
    finally:
        store.close()


def _look(target: Dsn, setup: dict[str, Any]) -> _Seen:
    dsn = resolve(target)
    if dsn.identity() != setup["target"]:
        raise WorkDirError(
            f"the run copies to {setup['target']}, --target is {dsn.identity()}",
            hint="give the target of the run, or leave --target out",
            field="target",
        )
    with connect(dsn, "list") as connection, translated("asking the target"):
        return _Seen(
            _read_records(connection, setup["run_id"]),
            read_running_copies(connection, setup["run_id"]),
            read_running_indexes(connection, setup["run_id"]),
        )


def _read_records(
    connection: Connection, run_id: str
) -> dict[record.PartKey, record.CopiedPart] | None:
    try:
        if run_id not in [known.run_id for known in record.read_runs(connection)]:
            return None
        found = record.read_copied_parts(connection, run_id)
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None  # the run has ended between the two questions
    return {(part.table_oid, part.part): part for _, part in found}


def _run_status(written: _Written, seen: _Seen | None) -> RunStatus:
    setup = written.setup
    copied = written.copied
    if seen is not None and seen.copied is not None:
        copied = seen.copied
    running = [] if seen is None else [c for c in seen.copies if _is_open(c, written, copied)]
    progress = _progress(written, copied, running)
    return RunStatus(
        run_id=setup["run_id"],
        source=setup["source"],
        target=setup["target"],
        snapshot=setup["snapshot"],
        snapshot_state=written.snapshot_state,
        started_at=setup["started_at"],
        finished_at=setup["finished_at"],
        status=_status(written),
        steps=written.steps,
        tables=Count(progress.tables_done, progress.tables),
        parts=Count(progress.parts_done, progress.parts),
        indexes=Count(progress.indexes_done, progress.indexes),
        constraints=_constraints(written),
        foreign_keys=Count(
            len(written.done["foreign key"] & {key["oid"] for key in written.foreign_keys}),
            len(written.foreign_keys),
        ),
        large_objects=_large_objects(written, copied),
        vacuumed=Count(len(written.done["vacuum"] & set(written.tables)), len(written.tables)),
        estimated_bytes=Count(int(progress.estimated_bytes_done), progress.estimated_bytes),
        copied_bytes=progress.copied_bytes,
        copied_rows=progress.copied_rows,
        percent=round(100 * progress.share(), 1),
        is_watched=seen is not None,
        running_copies=tuple(progress.running_copies),
        running_indexes=tuple(seen.indexes if seen else ()),
    )


def _is_open(
    copy: RunningCopy, written: _Written, copied: dict[record.PartKey, record.CopiedPart]
) -> bool:
    key = copy.table_oid, copy.part
    return key in written.parts and key not in copied


def _progress(
    written: _Written, copied: dict[record.PartKey, record.CopiedPart], running: list[RunningCopy]
) -> Progress:
    """The counts that a run keeps of itself, from outside."""
    parts = written.parts
    unfinished = {oid for oid, number in parts if (oid, number) not in copied}
    return Progress(
        tables=len(written.tables),
        tables_done=len(set(written.tables) - unfinished),
        parts=len(parts),
        parts_done=sum(key in copied for key in parts),
        indexes=len(written.indexes),
        indexes_done=sum(index["oid"] in written.done["index"] for index in written.indexes),
        estimated_bytes=sum(part.estimated_bytes for part in parts.values()),
        estimated_bytes_done=weigh_copies(parts, copied, running),
        copied_bytes=sum(part.bytes for part in copied.values()),
        copied_rows=sum(part.rows for key, part in copied.items() if key in parts),
        running_copies=[
            (part_label(written.tables[c.table_oid], parts[c.table_oid, c.part]), c)
            for c in running
        ],
    )


def _constraints(written: _Written) -> Count:
    """Keys and exclusions; those of a table are added together."""
    resting = [index for index in written.indexes if index["constraint_name"]]
    done = written.done["constraint"]
    return Count(sum(index["table_oid"] in done for index in resting), len(resting))


def _large_objects(written: _Written, copied: dict[record.PartKey, record.CopiedPart]) -> Count:
    ranges = written.large_objects
    return Count(
        sum(r.count for r in ranges if (record.LARGE_OBJECTS_OID, r.number) in copied),
        sum(r.count for r in ranges),
    )


def _snapshot_state(directory: Path, store: Store, snapshot: str | None) -> str:
    try:
        held = read_held(directory)
    except WorkDirError:
        return "being taken"
    if held is not None and snapshot in (None, held.id):
        return f"held by process {held.pid} since {held.since}"
    if at := store.read_kept(GIVEN_BACK_AT):
        return f"given back at {at}, when every row was copied"
    end = read_end_of(directory, snapshot)
    return "" if end is None else str(end)


def _status(written: _Written) -> str:
    if written.setup["finished_at"]:
        return "finished"
    return "running" if written.is_held else "not running"
