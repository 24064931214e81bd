"""The sink `parquet:DIR`: a file of changes for each commit.

Invariant: a file that has its name is whole and durable, and holds exactly the changes after one
position up to another, both in its name; files follow each other without gap or overlap. The
position of the sink is the end of its newest file, so file and position are one rename.

    changes-<after>-<end>.parquet      two positions, 16 hexadecimal digits each
    .changes.tmp                       what is written and not committed
    .origin                            which changes these are; durable before the first file

A commit without changes writes a file without rows if its position is new: else a consumer whose
tables are quiet would fall behind what the spool keeps. The newest file must stay; others may be
moved away.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace import failpoint
from millrace.change import SCHEMA, check_schema
from millrace.errors import ConfigError, SinkError
from millrace.sink.failure import FailureGuard
from millrace.sink.protocol import Capabilities

_NAME: Final = re.compile(r"changes-[0-9A-F]{16}-([0-9A-F]{16})\.parquet")
_TEMPORARY: Final = ".changes.tmp"
_ORIGIN: Final = ".origin"


def open_sink(address: str) -> ParquetSink:
    if not address:
        raise ConfigError("the sink parquet needs a directory", hint="write parquet:DIR")
    return ParquetSink(Path(address))


class ParquetSink:
    """The one writer of a directory."""

    capabilities = Capabilities(commits_with_position=True)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._guard = FailureGuard(str(folder))
        self._file: BinaryIO | None = None
        self._writer: pq.ParquetWriter | None = None
        with self._guard.step("opening"):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = _lock(folder)
        try:
            with self._guard.step("opening"):
                (folder / _TEMPORARY).unlink(missing_ok=True)
                self.position = _newest_end(folder)
        except BaseException:
            os.close(self._descriptor)
            raise

    def begin(self, origin: str) -> None:
        with self._guard.step("opening"):
            record = self._folder / _ORIGIN
            held = record.read_text() if record.exists() else ""
            if held == origin:
                return
            if held or self.position:
                theirs = held or "an unknown origin"
                raise ConfigError(
                    f"{self._folder} holds changes of {theirs}, not of {origin}",
                    hint="write to another directory",
                )
            self._write_durably(record, origin)

    def _write_durably(self, path: Path, text: str) -> None:
        temporary = self._folder / _TEMPORARY
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        os.fsync(self._descriptor)

    def write_changes(self, batch: pa.RecordBatch) -> None:
        with self._guard.step("writing to"):
            check_schema(batch.schema)
            fresh = batch.filter(pc.greater(batch["end_lsn"], self.position))
            if fresh.num_rows:
                self._open_writer().write_batch(fresh)

    def commit(self, position: int) -> None:
        with self._guard.step("writing to"):
            if position <= self.position:
                return
            self._open_writer().close()
            assert self._file is not None
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._writer = self._file = None
            failpoint.hit("sink.before_commit")
            name = f"changes-{self.position:016X}-{position:016X}.parquet"
            (self._folder / _TEMPORARY).rename(self._folder / name)
            os.fsync(self._descriptor)
            failpoint.hit("sink.after_commit")
            self.position = position

    def close(self) -> None:
        try:
            if self._file is not None:
                self._give_up(self._file)
        finally:
            self._file = self._writer = None
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _give_up(self, file: BinaryIO) -> None:
        # What Arrow or the disk still has to say concerns a file that goes.
        with suppress(OSError, pa.ArrowException):
            if self._writer is not None:
                self._writer.close()
        with suppress(OSError):
            file.close()
        (self._folder / _TEMPORARY).unlink(missing_ok=True)

    def _open_writer(self) -> pq.ParquetWriter:
        if self._writer is None:
            self._file = (self._folder / _TEMPORARY).open("wb")
            self._writer = pq.ParquetWriter(self._file, SCHEMA, compression="zstd")
        return self._writer


def _newest_end(folder: Path) -> int:
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return max((int(match[1], 16) for match in names if match), default=0)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SinkError(
            f"another process writes to {folder}",
            hint="stop it, or choose another directory",
        ) from None
    return descriptor
