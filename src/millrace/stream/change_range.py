"""Which part of a spool to read: from where, how far, in how many pieces, which tables.

Invariant: the ranges of a request cover exactly what was asked for, or there is an error: what was
pruned, and what was not received yet, is never left out silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millrace.errors import ConfigError, WorkDirError
from millrace.lsn import render_lsn
from millrace.postgres.encoding import python_encoding
from millrace.stream.segment import list_segments
from millrace.stream.sentinel import FILE, Sentinel
from millrace.stream.settings import SpoolKind
from millrace.stream.spool import FOLDER, Range
from millrace.stream.spool_index import RELATION, IndexFile
from millrace.stream.spool_reader import SpoolReader

# "schema.table", either part quoted as in SQL.
_PART: Final = r'(?:"(?:[^"]|"")+"|[^".,\s][^".,]*)'
_TABLES: Final = re.compile(rf"\s*({_PART})\.({_PART})\s*(?:,|$)")


@dataclass(frozen=True)
class SpoolExtent:
    """What a spool holds now."""

    # Changes after this position are there.
    oldest_lsn: int
    # The end of its last transaction.
    last_end_lsn: int
    # Nothing is missing up to here.
    complete_lsn: int


@dataclass(frozen=True)
class ChangeSpool:
    """The spool of a work directory, for reading changes; survives pickle."""

    directory: Path
    # Python's name of the encoding of its values.
    encoding: str

    def reader(self) -> SpoolReader:
        return SpoolReader(self.directory, self.encoding)

    def extent(self) -> SpoolExtent:
        files = list_segments(self.directory / FOLDER)
        if not files:
            return SpoolExtent(0, 0, 0)
        first = IndexFile(files[0].index_path)
        first.read()
        # Transactions that began in a segment that is gone.
        torn = first.commits[first.commits["begin"] < files[0].position]
        oldest = int(torn["end_lsn"][-1]) if len(torn) else files[0].lsn
        last = IndexFile(files[-1].index_path).read()
        ends = last["end_lsn"][last["kind"] != RELATION]
        complete = int(ends.max()) if len(ends) else files[-1].lsn
        return SpoolExtent(oldest, self.reader().last_end_lsn(), complete)

    def check_after(self, after_lsn: int) -> None:
        """Refuse a position whose changes are gone."""
        oldest = self.extent().oldest_lsn
        if after_lsn < oldest:
            raise WorkDirError(
                f"changes after {render_lsn(after_lsn)} are asked for, but the spool in "
                f"{self.directory} was pruned and begins after {render_lsn(oldest)}",
                hint="begin there, and follow with --keep-spool so that nothing is pruned",
            )

    def check_until(self, until_lsn: int) -> None:
        """Refuse a position that was not received yet."""
        complete = self.extent().complete_lsn
        if until_lsn > complete:
            raise WorkDirError(
                f"changes until {render_lsn(until_lsn)} are asked for, but the spool in "
                f"{self.directory} has received them up to {render_lsn(complete)} only",
                hint="wait for the receiver, or ask for less",
            )

    def ranges(self, after_lsn: int, until_lsn: int, max_bytes: int) -> list[Range]:
        """The transactions that end after one position and up to another, in pieces."""
        self.check_after(after_lsn)
        reader = self.reader()
        found = []
        while (one := reader.plan(after_lsn, max_bytes, until_lsn)) is not None:
            found.append(one)
            after_lsn = one.end_lsn
        return found


def open_change_spool(directory: Path) -> ChangeSpool:
    """The spool of a work directory, which must be there."""
    if not (directory / FOLDER).is_dir():
        raise WorkDirError(
            f"{directory} holds no spool",
            hint="give the --dir of `millrace follow` or `millrace stream receive`",
        )
    return ChangeSpool(directory, python_encoding(_read_encoding(directory)))


def _read_encoding(directory: Path) -> str:
    if not (directory / FILE).exists():
        return "UTF8"
    with Sentinel(directory) as sentinel:
        setup = sentinel.read_setup()
    if setup is not None and setup.spool == SpoolKind.TABLE:
        raise WorkDirError(
            f"the spool of {directory} is in a table of the target",
            hint="changes can be read from a spool in files: begin a stream with --spool files",
        )
    return setup.encoding if setup is not None else "UTF8"


def parse_tables(text: str) -> frozenset[tuple[str, str]]:
    """(schema, name) of each table in a comma-separated list; quoted as in SQL where needed."""
    tables = set()
    at = 0
    while at < len(text):
        match = _TABLES.match(text, at)
        if match is None:
            raise ConfigError(
                f"not a list of tables: {text!r}",
                hint='write schema.table, separated by commas; quote as in SQL: "My.Schema"."T"',
            )
        tables.add((_unquoted(match[1]), _unquoted(match[2])))
        at = match.end()
    return frozenset(tables)


def _unquoted(name: str) -> str:
    name = name.strip()
    return name[1:-1].replace('""', '"') if name.startswith('"') else name
