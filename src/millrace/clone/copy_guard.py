"""Whether this command may copy in this directory, given the stream that is set up there.

Invariant: in the directory of a stream, rows are read under the snapshot of its slot and under no
other, and none after changes were applied. Everything else would be on the target twice, or not
at all, once the stream is followed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.clone.settings import CloneSettings
from millrace.errors import WorkDirError
from millrace.snapshot.holder import SnapshotHolder
from millrace.workdir.stream_binding import StreamBinding

Setup = dict[str, Any]


def check_slot(settings: CloneSettings, setup: Setup | None, held: SnapshotHolder | None) -> None:
    """The slot asked for, that of the held snapshot and that of the run must be the same."""
    for option, field, asked, of_held in (
        ("--slot-name", "slot_name", settings.slot_name, held.slot if held else None),
        ("--plugin", "plugin", settings.plugin, held.plugin if held and held.slot else None),
    ):
        before = setup[field] if setup else None
        if of_held and before and before != of_held:
            raise _mismatch(settings.directory, option, field, before, of_held)
        known = of_held or before
        if asked and known and asked != known:
            raise _mismatch(settings.directory, option, field, known, asked)


def _mismatch(directory: Path, option: str, field: str, before: str, now: str) -> WorkDirError:
    return WorkDirError(
        f"{directory} was set up for {option} {before}, now it is {now}",
        hint=f"leave out {option}, or give {before}; or choose another --dir",
        field=field,
        before=before,
        now=now,
    )


def check_new_copy(
    settings: CloneSettings, stream: StreamBinding | None, snapshot: str | None
) -> None:
    """Raise if a run that begins now would copy beside the stream; `snapshot` is what it would
    read under, None for one of its own."""
    if stream is None:
        return
    if not snapshot or snapshot != stream.snapshot or settings.not_consistent:
        raise WorkDirError(
            f"{settings.directory} belongs to the stream of slot {stream.slot_name}: what a copy "
            "under another snapshot holds already, the stream would apply again",
            hint="choose another --dir; or start over: clone --follow --restart; or end "
            "the stream first: millrace stream cleanup",
            slot=stream.slot_name,
        )
    if stream.has_applied:
        raise _applied(settings.directory, stream)


def check_more_rows(
    settings: CloneSettings,
    stream: StreamBinding | None,
    *,
    rows_left: bool,
    makes_tables: bool = False,
) -> None:
    """Raise if a run that is continued must not read the rows that it still lacks, or must not make
    tables anew that have theirs."""
    if stream is None or not (rows_left or makes_tables):
        return
    if settings.not_consistent or makes_tables:
        raise WorkDirError(
            f"{settings.directory} belongs to the stream of slot {stream.slot_name}: rows read "
            "under another snapshot would hold changes that the stream applies again",
            hint="leave out --not-consistent if the snapshot is still held; else begin again with "
            "clone --follow --restart"
            if rows_left
            else "its copy is complete: begin again with clone --follow --restart",
            slot=stream.slot_name,
        )
    if stream.has_applied:
        raise _applied(settings.directory, stream)


def _applied(directory: Path, stream: StreamBinding) -> WorkDirError:
    return WorkDirError(
        f"the stream of slot {stream.slot_name} in {directory} has begun to apply changes: rows "
        "copied now would lack them",
        hint="copy a single table again with `millrace stream resync`; or begin again with "
        "clone --follow --restart",
        slot=stream.slot_name,
    )
