"""Where a stream keeps its spool: files of the work directory, or tables of the target.

Invariant: nobody else asks which of the two it is; both keep what `Writer` and `Reader` promise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.config.dsn import Dsn
from millrace.errors import ConfigError
from millrace.postgres.origin import stream_name
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.encoding import python_encoding
from millrace.spool import reader as spool_reader
from millrace.spool import table as table_spool
from millrace.spool.interface import Reader, Writer
from millrace.spool.kind import SpoolKind
from millrace.spool.reader import SpoolReader
from millrace.spool.table import TableSpoolReader, TableSpoolWriter
from millrace.spool.writer import SpoolWriter, open_spool_lock
from millrace.workdir.place import is_in_memory
from millrace.workdir.sentinel import StreamSetup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpoolPlace:
    """Survives pickle: a task opens the spool where it runs."""

    directory: Path
    # Python's name of the encoding of its values.
    encoding: str
    stream: str
    # Of the database whose tables hold it; None for files.
    target: Dsn | None = None

    @property
    def label(self) -> str:
        """For messages."""
        where = self.directory if self.target is None else "tables of the target"
        return f"the spool in {where}"

    def prepare(self) -> None:
        """Make what a reader must find, if it is not there."""
        if self.target is not None:
            with connect(self.target, "setup") as connection:
                table_spool.install(connection, self.stream)

    @contextmanager
    def open_writer(self) -> Iterator[Writer]:
        """For the one process that receives."""
        if self.target is None:
            with SpoolWriter(self.directory) as writer:
                _warn_of_memory(self.directory)
                yield writer
            return
        with (
            open_spool_lock(self.directory),
            TableSpoolWriter(self.target, self.stream) as table_writer,
        ):
            yield table_writer

    def open_reader(self) -> Reader:
        if self.target is None:
            return SpoolReader(self.directory, self.encoding)
        return TableSpoolReader(self.target, self.stream, self.encoding)

    def prune(self, applied_lsn: int, *, dry_run: bool = False) -> int:
        """Remove what is applied; its bytes."""
        if self.target is None:
            remove = spool_reader.prunable_bytes if dry_run else spool_reader.prune
            return remove(self.directory, applied_lsn)
        with connect(self.target, "prune") as connection:
            return table_spool.prune(connection, self.stream, applied_lsn, dry_run=dry_run)


def _warn_of_memory(directory: Path) -> None:
    if is_in_memory(directory):
        log.warning(
            "%s is in memory (tmpfs): changes that were confirmed to the source are lost"
            " when this machine stops; name a directory on a disk with --dir",
            directory,
        )


def place_of(setup: StreamSetup, directory: Path, target: Dsn | None) -> SpoolPlace:
    """The spool of a stream, as it was set up."""
    is_table = setup.spool == SpoolKind.TABLE
    if is_table and target is None:
        raise ConfigError(
            "the spool of this stream is in tables of the target",
            hint="give --target (or MILLRACE_TARGET)",
        )
    return SpoolPlace(
        directory,
        python_encoding(setup.encoding),
        stream_name(setup.source, setup.slot_name, setup.start_lsn),
        target if is_table else None,
    )
