"""A stream and the copy it belongs to: how they are bound, and that nothing else is followed.

Invariant: what a stream applies its changes to is the copy that was made under its slot's
snapshot, whole, on the target that it was made on; or a target of which somebody said so by
`stream setup`. Anything else is refused before the first change.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from millrace.apply.position import read_worker_positions
from millrace.clone.directory import read_setup
from millrace.clone.status import read_run_status
from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
from millrace.follow.audit.baseline import note_tables
from millrace.follow.membership import write_beginning
from millrace.follow.settings import DEFAULT_PLUGIN, DEFAULT_SLOT, SlotSettings
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.origin import stream_name
from millrace.postgres.stream_record import Follower, read_followers, write_follower
from millrace.postgres.wire.connect import connect
from millrace.snapshot.holder import SnapshotHolder, read_held
from millrace.spool.kind import SpoolKind
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.stream_binding import has_stream


def choose_slot(directory: Path, asked: SlotSettings) -> SlotSettings:
    """The slot asked for, or else the directory's own; raises if they are two."""
    known = read_slot_settings(directory)
    for option, now, before in (
        ("--slot-name", asked.name, known.name),
        ("--plugin", asked.plugin, known.plugin),
    ):
        if now and before and now != before:
            raise WorkDirError(
                f"{directory} was set up for {option} {before}, now it is {now}",
                hint=f"leave out {option}, or give {before}; or choose another --dir",
                field=option.removeprefix("--").replace("-", "_"),
                before=before,
                now=now,
            )
    return or_default(asked, known)


def or_default(asked: SlotSettings, known: SlotSettings) -> SlotSettings:
    return replace(
        asked,
        name=asked.name or known.name or DEFAULT_SLOT,
        plugin=asked.plugin or known.plugin or DEFAULT_PLUGIN,
    )


def read_slot_settings(directory: Path) -> SlotSettings:
    """The slot of the held snapshot, of the stream, or of the run in the directory."""
    held = read_held(directory)
    if held is not None and held.slot is not None:
        return SlotSettings(held.slot, held.plugin or "")
    setup = read_stream(directory)
    if setup is not None:
        return SlotSettings(setup.slot_name, setup.plugin)
    return SlotSettings()


def read_stream(directory: Path) -> StreamSetup | None:
    """The stream of a directory; a wrong one must not be made by looking."""
    if not has_stream(directory):
        return None
    with Sentinel(directory) as sentinel:
        return sentinel.read_setup()


def require_no_stream(directory: Path) -> None:
    """Raise if the directory has a stream; before a slot is made for another one."""
    found = read_stream(directory)
    if found is not None:
        raise WorkDirError(
            f"{directory} holds the stream of slot {found.slot_name}",
            hint="continue it: clone --follow --resume, or follow; start over: clone "
            "--follow --restart; end it: millrace stream cleanup; or choose another --dir",
            slot=found.slot_name,
        )


def write_stream(
    directory: Path,
    held: SnapshotHolder,
    source: Dsn,
    spool: SpoolKind,
    encoding: str = "",
    *,
    ddl: bool = False,
) -> None:
    """Note the stream of a slot that was made with its snapshot; without an encoding, that is
    still to be known from the target. `ddl`: it has been captured since before the slot."""
    assert held.slot is not None
    assert held.start_lsn is not None
    setup = StreamSetup(
        held.source,
        held.slot,
        held.plugin or DEFAULT_PLUGIN,
        encoding,
        parse_lsn(held.start_lsn),
        spool=spool,
        snapshot=held.id,
        ddl=ddl,
        has_all_ddl=ddl,
    )
    with Sentinel(directory) as sentinel:
        found = sentinel.read_setup()
        if found is None:
            note_tables(directory, source, setup, held.id)
            # In this order: a stream that is written down has its tables.
            write_beginning(source, sentinel, setup, held.id)
            sentinel.write_setup(setup)
        elif (found.slot_name, found.start_lsn) != (setup.slot_name, setup.start_lsn):
            raise WorkDirError(
                f"{directory} holds the stream of another slot, {found.slot_name}",
                hint="choose another --dir, or start over with --restart",
            )
        elif encoding:
            sentinel.complete_setup(encoding, spool)


def require_bound(setup: StreamSetup) -> StreamSetup:
    """The setup, of a stream whose target is known."""
    if not setup.encoding:
        raise WorkDirError(
            f"nothing is copied yet under the snapshot of slot {setup.slot_name}",
            hint="copy first: millrace clone with the same --dir, while `millrace snapshot "
            "--follow` holds the snapshot; if the target has its rows already, use "
            "`millrace stream setup`",
            slot=setup.slot_name,
        )
    return setup


def require_copied(directory: Path, target: Dsn, setup: StreamSetup) -> None:
    """Refuse to apply to half a copy, whose missing rows would be missing with exit code 0, and to
    a copy of another snapshot, which holds some of the changes already."""
    run = read_setup(directory)
    if run is None:
        return
    is_own = run["run_id"] == setup.run_id
    if not is_own and (setup.run_id or setup.snapshot != run["snapshot"]) and _is_bound(setup):
        raise WorkDirError(
            f"the copy in {directory}, under snapshot {run['snapshot']}, is not the one that the "
            f"stream of slot {setup.slot_name} belongs to",
            hint="its changes can't be applied to this copy: start over with "
            "clone --follow --restart",
            slot=setup.slot_name,
        )
    if run["finished_at"]:
        return
    # Single steps never say that all is done; the rows are what matters.
    parts = read_run_status(directory, target).parts
    if parts.done < parts.total or not parts.total:
        raise WorkDirError(
            f"the copy in {directory} is not done: {parts.done} of {parts.total} parts of tables",
            hint="continue with `millrace clone --follow --resume`, if its snapshot is held, or"
            " begin again with `millrace clone --follow --restart`",
        )


def _is_bound(setup: StreamSetup) -> bool:
    """Streams of older releases, and of `stream setup` in an empty directory, are not."""
    return bool(setup.run_id or setup.snapshot)


def require_target(
    directory: Path, target: Dsn, setup: StreamSetup, applied_lsn: int | None
) -> None:
    """Refuse a target that is not the one of the copy, and note the stream on one that is. A
    target that was failed over has another address, and the stream's position all the same."""
    name = stream_name(setup.source, setup.slot_name, setup.start_lsn)
    run = read_setup(directory)
    with connect(target, "setup") as connection:
        if not read_worker_positions(connection, name):
            if run is not None and run["target"] != target.identity():
                raise WorkDirError(
                    f"the copy in {directory} went to {run['target']}, --target is "
                    f"{target.identity()}",
                    hint="give the target of the copy",
                    field="target",
                )
            if applied_lsn is not None and applied_lsn > setup.start_lsn:
                raise WorkDirError(
                    f"the target has no position of the stream of slot {setup.slot_name}, although "
                    f"changes were applied up to {render_lsn(applied_lsn)}: it is another one, or "
                    "an older state of it",
                    hint="give the target that was followed, or start over with "
                    "clone --follow --restart",
                    slot=setup.slot_name,
                )
        own = Follower(
            setup.source, setup.slot_name, setup.run_id, socket.gethostname(), str(directory)
        )
        for other in read_followers(connection):
            if (other.source, other.slot) == (own.source, own.slot):
                _refuse_other(other, own)
        write_follower(connection, own)


def _refuse_other(other: Follower, own: Follower) -> None:
    if other.run_id and own.run_id and other.run_id != own.run_id:
        raise WorkDirError(
            f"the target holds another copy than that of {own.directory}: the one of "
            f"{other.directory} on {other.host}, which the stream of slot {own.slot} belongs to",
            hint="follow in that directory; or start over with clone --follow --restart",
            slot=own.slot,
        )
