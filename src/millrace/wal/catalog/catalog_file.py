"""One heap file of a catalog: its row versions, by place and by key.

Invariant: a version stays findable by its keys until it is removed, also after its place was given
to another one. A version knows which transactions made and ended it, and at which command.

Keys are bytes at the head of a row, as `catalog_layout.KEYS` says.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.errors import FormatError
from millrace.wal.catalog.catalog_layout import KEYS
from millrace.wal.catalog.catalog_row import Row
from millrace.wal.row.heap_tuple import HEADER_BYTES, HeapTuple

# (tablespace, database, file number)
Locator = tuple[int, int, int]
# Block number and line pointer: blkno << 16 | offset.
Place = int

FROZEN = 2  # FrozenTransactionId: committed for everybody

_OPEN_END = 1 << 64


@dataclass(slots=True, eq=False)
class Version:
    """A row as one transaction left it."""

    stored: HeapTuple
    xmin: int
    xmax: int = 0
    # The commands that made and ended it, known of transactions that are decoded.
    cmin: int | None = None
    cmax: int | None = None
    row: Row | None = None

    def overwrite(self, values: bytes) -> None:
        """An in-place update: the same columns, the same length."""
        head = self.stored.hoff - HEADER_BYTES
        if len(self.stored.body) - head != len(values):
            raise FormatError("expected an in-place update of the same length")
        body = self.stored.body[:head] + values
        old = self.stored
        self.stored = HeapTuple(old.infomask2, old.infomask, old.hoff, body)
        self.row = None


@dataclass(slots=True)
class CatalogFile:
    """The versions in one file."""

    catalog: int
    places: dict[Place, Version] = field(default_factory=dict)
    index: list[dict[bytes, list[Version]]] = field(default_factory=list)
    # When commits changed what is found by a key.
    events: list[dict[bytes, list[int]]] = field(default_factory=list)
    # Where pages of the base image were: records up to there are in them already.
    page_lsn: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = [{} for _ in KEYS[self.catalog]]
        self.events = [{} for _ in KEYS[self.catalog]]

    def add(self, place: Place, version: Version) -> None:
        self.places[place] = version
        for found, key in zip(self.index, self.keys(version), strict=True):
            found.setdefault(key, []).append(version)

    def remove(self, place: Place, version: Version) -> None:
        """No snapshot needs it any more."""
        if self.places.get(place) is version:
            del self.places[place]
        for found, key in zip(self.index, self.keys(version), strict=True):
            versions = [v for v in found.get(key, ()) if v is not version]
            if versions:
                found[key] = versions
            else:
                found.pop(key, None)

    def keys(self, version: Version) -> Iterator[bytes]:
        head = version.stored.hoff - HEADER_BYTES
        body = version.stored.body
        for at, size in KEYS[self.catalog]:
            yield body[head + at : head + at + size]

    def note_commit(self, version: Version, lsn: int) -> None:
        """A commit made or ended the version."""
        for events, key in zip(self.events, self.keys(version), strict=True):
            times = events.setdefault(key, [])
            if not times or times[-1] != lsn:
                insort(times, lsn)

    def stretch(self, number: int, key: bytes, lsn: int) -> tuple[int, int]:
        """The positions around `lsn` between which no commit changed what the key finds."""
        times = self.events[number].get(key)
        if not times:
            return 0, _OPEN_END
        at = bisect_left(times, lsn)
        begin = times[at - 1] + 1 if at else 0
        end = times[at] + 1 if at < len(times) else _OPEN_END
        return begin, end

    def forget_events(self, horizon: int) -> None:
        """Nobody asks for positions before the horizon any more."""
        for events in self.events:
            for key in [k for k, times in events.items() if times[-1] < horizon]:
                del events[key]
