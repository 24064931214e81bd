"""Which part of a spool to read: from where, how far, in how many pieces, which tables.

Invariant: the ranges of a request cover exactly what was asked for, or there is an error: what was
pruned, and what was not received yet, is never left out silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, WorkDirError
from millrace.lsn import render_lsn
from millrace.postgres.origin import stream_name
from millrace.postgres.wire.encoding import python_encoding
from millrace.spool.interface import FOLDER, Range, Reader, SpoolExtent
from millrace.spool.kind import SpoolKind
from millrace.spool.place import SpoolPlace, place_of
from millrace.workdir.sentinel import FILE, Sentinel

# "schema.table", either part quoted as in SQL.
_PART: Final = r'(?:"(?:[^"]|"")+"|[^".,\s][^".,]*)'
_TABLES: Final = re.compile(rf"\s*({_PART})\.({_PART})\s*(?:,|$)")


@dataclass(frozen=True)
class ChangeSpool:
    """The spool of a stream, for reading changes; survives pickle."""

    place: SpoolPlace
    # Which stream the changes are of.
    origin: str = ""

    @property
    def encoding(self) -> str:
        """Python's name of the encoding of its values."""
        return self.place.encoding

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        with closing(self.place.open_reader()) as reader:
            yield reader

    def extent(self) -> SpoolExtent:
        with self.opened() as reader:
            return reader.extent()

    def check_after(self, after_lsn: int) -> None:
        """Refuse a position whose changes are gone."""
        oldest = self.extent().oldest_lsn
        if after_lsn < oldest:
            raise WorkDirError(
                f"changes after {render_lsn(after_lsn)} are requested, but {self.place.label} was "
                f"pruned and begins after {render_lsn(oldest)}",
                hint="begin there, and follow with --keep-spool so that nothing is pruned",
            )

    def check_until(self, until_lsn: int) -> None:
        """Refuse a position that was not received yet."""
        complete = self.extent().complete_lsn
        if until_lsn > complete:
            raise WorkDirError(
                f"changes until {render_lsn(until_lsn)} are requested, but {self.place.label} has "
                f"received them up to {render_lsn(complete)} only",
                hint="wait for the receiver, or ask for less",
            )

    def ranges(self, after_lsn: int, until_lsn: int, max_bytes: int) -> list[Range]:
        """The transactions that end after one position and up to another, in pieces."""
        self.check_after(after_lsn)
        found = []
        with self.opened() as reader:
            while (one := reader.plan(after_lsn, max_bytes, until_lsn)) is not None:
                found.append(one)
                after_lsn = one.end_lsn
        return found


def open_change_spool(directory: Path, target: Dsn | None = None) -> ChangeSpool:
    """The spool of a work directory, which must be there; `target` if it is in tables there."""
    setup = None
    if (directory / FILE).exists():
        with Sentinel(directory) as sentinel:
            setup = sentinel.read_setup()
    origin = f"the spool in {directory.resolve()}"
    if setup is not None:
        origin = f"stream {stream_name(setup.source, setup.slot_name, setup.start_lsn)}"
    if setup is not None and setup.spool == SpoolKind.TABLE:
        return ChangeSpool(place_of(setup, directory, target), origin)
    if not (directory / FOLDER).is_dir():
        raise WorkDirError(
            f"{directory} holds no spool",
            hint="give the --dir of `millrace follow` or `millrace stream receive`",
        )
    encoding = python_encoding(setup.encoding if setup is not None else "UTF8")
    return ChangeSpool(SpoolPlace(directory, encoding, ""), origin)


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
