"""A new slot for a work directory: its publications come before it, and both go if the start fails.

Invariant: what an attempt made on the source stays only if the attempt succeeded; what was there
before stays in any case. A process that is killed in between leaves a record in the directory, by
which the next command finds what it left.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from millrace import failpoint
from millrace.config.dsn import Dsn
from millrace.errors import MillraceError, WorkDirError
from millrace.follow.existing_slot import slot_exists
from millrace.follow.replica_identity import put_back
from millrace.follow.slot import Connection, drop_slot
from millrace.postgres.catalog.schemas import PUBLICATION_COMMENT
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import connect, translated
from millrace.postgres.wire.slot import read_slot
from millrace.workdir.place import make_private
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.stream_binding import has_stream

log = logging.getLogger(__name__)

FILE: Final = "slot.json"
# The server notices within five seconds that whoever was making a slot is gone.
LEFTOVER_SECONDS = 20.0
_DUPLICATE_OBJECT: Final = "42710"


@dataclass(frozen=True)
class SlotRecord:
    """A slot that a process is about to make, or has made, for a directory."""

    source: str
    slot: str
    pid: int
    since: str


class Making:
    """An attempt under way."""

    def __init__(self) -> None:
        self.is_made = False
        self.is_kept = False

    def made(self) -> None:
        """The slot is there: from here on a failure has to drop it."""
        self.is_made = True
        failpoint.hit("slot.made")

    def keep(self) -> None:
        """The slot is somebody's now: a failure leaves it where it is."""
        self.is_kept = True


@contextmanager
def making_slot(
    directory: Path, source: Dsn, slot: str, *, adopts: bool = False
) -> Iterator[Making]:
    """Around everything that makes publications and slot; what fails inside takes them back.

    A slot of that name is refused, unless it `adopts`.
    """
    make_private(directory)
    with (directory / FILE).open("a+") as file:
        _lock(file, directory)
        if (left := _read(file)) is not None:
            _remove_leftover(directory, source, left)
        with connect(source, "setup") as connection:
            state = read_slot(connection, slot)
            if state is not None and not adopts:
                raise slot_exists(connection, state)
            before = _publications(connection, slot)
        making = Making()
        _write(file, SlotRecord(source.identity(), slot, os.getpid(), _now()))
        try:
            yield making
        except BaseException as error:
            if not making.is_kept and not _is_of(directory, slot):
                _undo(source, slot, making, before, error)
            raise
        finally:
            (directory / FILE).unlink(missing_ok=True)


def read_record(directory: Path) -> SlotRecord | None:
    """What a process that was killed may have left on the source."""
    with suppress(FileNotFoundError), (directory / FILE).open() as file:
        return _read(file)
    return None


def forget_record(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)


def _lock(file: IO[str], directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        record = _read(file)
        by = f" by process {record.pid}, since {record.since}" if record else ""
        raise WorkDirError(
            f"a replication slot is being made for {directory}{by}",
            hint="wait for it, stop it, or choose another --dir",
        ) from None


def _read(file: IO[str]) -> SlotRecord | None:
    file.seek(0)
    try:
        return SlotRecord(**json.load(file))
    except (ValueError, TypeError):
        return None  # empty, or torn: it was written before anything was made


def _write(file: IO[str], record: SlotRecord) -> None:
    file.seek(0)
    file.truncate()
    json.dump(asdict(record), file, indent=2)
    file.write("\n")
    file.flush()
    os.fsync(file.fileno())


def _remove_leftover(directory: Path, source: Dsn, left: SlotRecord) -> None:
    """Drop what a process made that was killed before the directory knew of it."""
    if _is_of(directory, left.slot):
        return  # it was killed later
    if left.source != source.identity():
        log.warning(
            "process %d may have left replication slot %s on %s: look with `millrace stream "
            "cleanup --list`",
            left.pid,
            left.slot,
            left.source,
        )
        return
    with connect(source, "cleanup") as connection:
        _wait_until_idle(connection, left.slot)
        if drop_slot(connection, left.slot):
            log.warning(
                "dropped replication slot %s: process %d made it for this directory at %s, and "
                "was killed before it could be used",
                left.slot,
                left.pid,
                left.since,
            )
        _drop_publications(connection, left.slot, set())


def _wait_until_idle(connection: Connection, slot: str) -> None:
    """A server may still be at making it, without knowing that it is alone."""
    until = time.monotonic() + LEFTOVER_SECONDS
    while time.monotonic() < until:
        state = read_slot(connection, slot)
        if state is None or state.active_pid is None:
            return
        time.sleep(0.1)


def _undo(source: Dsn, slot: str, making: Making, before: set[int], error: BaseException) -> None:
    is_anothers = isinstance(error, MillraceError) and (
        error.facts.get("sqlstate") == _DUPLICATE_OBJECT
    )
    if is_anothers and not making.is_made:
        return  # somebody was faster: the slot and its publications are theirs
    try:
        with connect(source, "cleanup") as connection:
            if making.is_made and drop_slot(connection, slot):
                log.warning("dropped replication slot %s again", slot)
            _drop_publications(connection, slot, before)
    except MillraceError as failure:
        log.error(
            "%s; look what is left with: millrace stream cleanup --list --slot-name %s",
            failure,
            slot,
        )


def _publications(connection: Connection, slot: str) -> set[int]:
    return {oid for oid, _ in _read_publications(connection, slot)}


def _drop_publications(connection: Connection, slot: str, kept: set[int]) -> None:
    """Those of the slot that were not there before, and what was done to tables with them."""
    found = _read_publications(connection, slot)
    if any(oid not in kept for oid, _ in found):
        put_back(connection, slot)
    for oid, name in found:
        if oid not in kept:
            with translated(f"dropping publication {name}"):
                connection.execute(f"DROP PUBLICATION IF EXISTS {ident(name)}")


def _read_publications(connection: Connection, slot: str) -> list[tuple[int, str]]:
    with translated("reading publications"):
        return connection.execute(
            "SELECT p.oid::int8, p.pubname FROM pg_publication p"
            " WHERE split_part(obj_description(p.oid, 'pg_publication'), E'\\n', 1) = %s",
            (PUBLICATION_COMMENT + slot,),
        ).fetchall()


def _is_of(directory: Path, slot: str) -> bool:
    """Whether the stream of the directory has this slot."""
    if not has_stream(directory):
        return False
    with Sentinel(directory) as sentinel:
        setup = sentinel.read_setup()
    return setup is not None and setup.slot_name == slot


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
