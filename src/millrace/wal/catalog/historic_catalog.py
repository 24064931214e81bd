"""The catalogs of one database with a time axis: all row versions a snapshot may still ask for.

Invariant: a lookup under a snapshot finds the row that the transaction itself saw. A version is
dropped only if no transaction that is still open can see it.

A snapshot is a position, and, for a transaction that changed catalogs itself, its own transaction
ids and the command it is at. A version is visible if

    its maker  is one of ours and made it at an earlier command, or committed before the position
    its ender  is not one of ours at an earlier command, and has not committed before the position

Heap records of catalogs arrive here in WAL order. VACUUM, pruning and freezing have no logical
effect and never arrive. VACUUM FULL and CLUSTER write another file; since when it counts is in
`_files` (by a relation map, or by the commit of the row in pg_class that names it).

Facts: heapam_visibility.c, HeapTupleSatisfiesHistoricMVCC(); snapbuild.c; relmapper.c.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from millrace.errors import FormatError
from millrace.wal.catalog.catalog_file import FROZEN, CatalogFile, Locator, Place, Version
from millrace.wal.catalog.catalog_layout import (
    KEYS,
    PG_ATTRIBUTE,
    PG_CLASS,
    SHARED,
    CatalogColumns,
    attribute_columns,
)
from millrace.wal.catalog.catalog_row import Row, decode_row
from millrace.wal.row.descriptor import ColumnDescriptor
from millrace.wal.row.heap_tuple import HeapTuple

log = logging.getLogger(__name__)

_END_OF_TIME = 1 << 64


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is visible: commits before `lsn`, and of our own what earlier commands did."""

    lsn: int
    own: frozenset[int] = frozenset()
    command_id: int = 0
    # Commits that count as not made: what `strict` takes over from the server.
    hidden: frozenset[int] = frozenset()


@dataclass(slots=True)
class Lookups:
    """What was looked up to answer a question, and between which positions the answer holds."""

    lsn: int
    begin: int = 0
    end: int = _END_OF_TIME
    keys: set[tuple[int, int, bytes]] = field(default_factory=set)


@dataclass(slots=True)
class _Written:
    """The versions one transaction id has made and ended."""

    made: list[tuple[CatalogFile, Place, Version]] = field(default_factory=list)
    ended: list[tuple[CatalogFile, Place, Version]] = field(default_factory=list)


class HistoricCatalog:
    """Row versions of the catalogs of a database, and of the shared ones."""

    def __init__(
        self,
        version: int,
        database: int,
        tablespace: int,
        was_committed: Callable[[int], bool],
    ) -> None:
        self.version = version
        self.database = database
        self.tablespace = tablespace
        # The fate of transactions from before the WAL that is read.
        self._was_committed = was_committed
        self.files: dict[Locator, CatalogFile] = {}
        # By catalog: since which position which file counts.
        self._files: dict[int, list[tuple[int, Locator]]] = {}
        self._columns: dict[int, CatalogColumns] = {PG_ATTRIBUTE: attribute_columns(version)}
        self._written: dict[int, _Written] = {}
        self._commit_lsn: dict[int, int] = {}
        self._cids: dict[tuple[Locator, Place], tuple[int, int]] = {}
        self._finished: deque[tuple[int, int]] = deque()
        self._finished_by_xid: dict[int, _Written] = {}
        # Where commits changed catalogs, or maps their files.
        self.epochs: list[int] = []
        # Who wants to know which keys a commit has changed.
        self.on_change: Callable[[int, int, bytes, int], None] | None = None

    # Files

    def locate(self, catalog: int, file_number: int) -> Locator:
        """Where a catalog's file is."""
        if catalog in SHARED:
            return (1664, 0, file_number)
        return (self.tablespace, self.database, file_number)

    def use_file(self, catalog: int, file_number: int, since: int) -> CatalogFile:
        """From this position on the catalog is in that file."""
        locator = self.locate(catalog, file_number)
        timeline = self._files.setdefault(catalog, [])
        if not timeline or timeline[-1][1] != locator:
            timeline.append((since, locator))
        return self.watch_file(catalog, locator)

    def use_mapped_file(self, catalog: int, file_number: int, since: int) -> None:
        """A relation map that was written; it names all mapped catalogs, changed or not."""
        timeline = self._files.get(catalog)
        if timeline and timeline[-1][1] != self.locate(catalog, file_number):
            self.use_file(catalog, file_number, since)
            self.epochs.append(since)

    def watch_file(self, catalog: int, locator: Locator) -> CatalogFile:
        """Keep what is written to the file."""
        if locator not in self.files:
            self.files[locator] = CatalogFile(catalog)
        return self.files[locator]

    def current_file(self, catalog: int, lsn: int) -> CatalogFile | None:
        timeline = self._files.get(catalog)
        if not timeline:
            return None
        at = bisect_right(timeline, lsn, key=lambda entry: entry[0]) - 1
        return self.files.get(timeline[max(at, 0)][1])

    def set_columns(self, catalog: int, columns: CatalogColumns) -> None:
        self._columns[catalog] = columns

    def has_columns(self, catalog: int) -> bool:
        return catalog in self._columns

    # What records do

    def note_cids(self, locator: Locator, place: Place, cmin: int, cmax: int) -> None:
        """NEW_CID: the commands of the change that the next record makes at this place."""
        self._cids[locator, place] = (cmin, cmax)

    def insert(
        self, locator: Locator, place: Place, stored: HeapTuple, xid: int, end_lsn: int
    ) -> None:
        file = self.files[locator]
        cmin, _ = self._cids.pop((locator, place), (None, None))
        version = file.places.get(place)
        if self._is_in_base(file, place, end_lsn):
            if version is not None and version.xmin == xid:
                version.cmin = cmin
            return
        version = Version(stored, xid, cmin=cmin)
        file.add(place, version)
        self._of(xid).made.append((file, place, version))
        if file.catalog == PG_CLASS:
            self._watch_rewrite(version)

    def delete(self, locator: Locator, place: Place, xid: int, end_lsn: int) -> Version | None:
        """End the version at the place; returns it."""
        file = self.files[locator]
        _, cmax = self._cids.pop((locator, place), (None, None))
        version = file.places.get(place)
        if version is None:
            return None
        if self._is_in_base(file, place, end_lsn):
            if version.xmax == xid:
                version.cmax = cmax
            return version
        version.xmax, version.cmax = xid, cmax
        self._of(xid).ended.append((file, place, version))
        return version

    def overwrite(self, locator: Locator, place: Place, values: bytes, end_lsn: int) -> None:
        """An in-place update, which counts at once and for everybody."""
        file = self.files[locator]
        version = file.places.get(place)
        if version is not None and not self._is_in_base(file, place, end_lsn):
            version.overwrite(values)
            for number, key in enumerate(file.keys(version)):
                self._tell(file, number, key, end_lsn)

    def add_rewritten(self, locator: Locator, place: Place, version: Version) -> None:
        """A version in a page image of a file that a catalog was rewritten to."""
        file = self.files[locator]
        if place in file.places:
            return
        made, ended = self._traced(version.xmin), self._traced(version.xmax)
        # Dead rows are not copied, so a maker that has been forgotten had committed.
        version.xmin = version.xmin if made else FROZEN
        version.xmax = version.xmax if ended else 0
        file.add(place, version)
        if made:
            made.made.append((file, place, version))
        if ended:
            ended.ended.append((file, place, version))

    def add_from_base(self, file: CatalogFile, place: Place, version: Version) -> None:
        """A version of the base image; who is not known to have committed may do so yet."""
        file.add(place, version)
        if version.xmin != FROZEN and not self._was_committed(version.xmin):
            self._of(version.xmin).made.append((file, place, version))
        if version.xmax and not self._was_committed(version.xmax):
            self._of(version.xmax).ended.append((file, place, version))

    # What transactions do

    def has_written(self, xid: int) -> bool:
        return xid in self._written

    def commit(self, xids: Iterable[int], lsn: int) -> None:
        """A transaction has committed, with those of its subtransactions that did."""
        for xid in xids:
            written = self._written.pop(xid, None)
            if written is None:
                continue
            self._commit_lsn[xid] = lsn
            if not self.epochs or self.epochs[-1] != lsn:
                self.epochs.append(lsn)
            self._finished.append((lsn, xid))
            self._finished_by_xid[xid] = written
            for file, _, version in written.made + written.ended:
                file.note_commit(version, lsn)
                for number, key in enumerate(file.keys(version)):
                    self._tell(file, number, key, lsn)
            self._switch_files(written, lsn)

    def abort(self, xid: int) -> None:
        """What the transaction did has never been."""
        written = self._written.pop(xid, None)
        if written is None:
            return
        for file, place, version in written.made:
            file.remove(place, version)
        for _, _, version in written.ended:
            if version.xmax == xid:
                version.xmax, version.cmax = 0, None

    def abort_before(self, oldest_running: int, precedes: Callable[[int, int], bool]) -> None:
        """Transactions that a crash has ended leave no record; none older than this still runs."""
        for xid in [x for x in self._written if precedes(x, oldest_running)]:
            self.abort(xid)

    def forget(self, horizon: int) -> None:
        """No open transaction has a change before the horizon: drop what nobody can see."""
        while self._finished and self._finished[0][0] < horizon:
            _, xid = self._finished.popleft()
            written = self._finished_by_xid.pop(xid)
            for _, _, version in written.made:
                if version.xmin == xid:
                    version.xmin = FROZEN
            for file, place, version in written.ended:
                if version.xmax == xid:
                    file.remove(place, version)
            self._commit_lsn.pop(xid, None)
        for file in self.files.values():
            file.forget_events(horizon)
        self.epochs = [lsn for lsn in self.epochs if lsn >= horizon]
        self._forget_files(horizon)

    def settle(self) -> None:
        """Write the fate of older transactions into the versions, so that nobody has to be asked
        for it any more."""
        for file in self.files.values():
            places = {id(version): place for place, version in file.places.items()}
            for version in [v for found in file.index[0].values() for v in found]:
                if self._is_old(version.xmin) and self._was_committed(version.xmin):
                    version.xmin = FROZEN
                if version.xmax and self._is_old(version.xmax):
                    if self._was_committed(version.xmax):
                        file.remove(places.get(id(version), -1), version)
                    else:
                        version.xmax = 0
        self._was_committed = _nobody

    def _is_old(self, xid: int) -> bool:
        """Whether its end is not in the WAL that was read."""
        return xid != FROZEN and xid not in self._written and xid not in self._commit_lsn

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "on_change": None}

    # Asking

    def find(
        self,
        catalog: int,
        number: int,
        key: int | bytes,
        snapshot: Snapshot,
        lookups: Lookups | None = None,
    ) -> list[Row]:
        """The visible rows whose key of that number has the value."""
        file = self.current_file(catalog, snapshot.lsn)
        if file is None:
            return []
        if isinstance(key, int):
            key = key.to_bytes(4, "little")
        if lookups is not None:
            self._record(lookups, file, number, key)
        versions = file.index[number].get(key, ())
        return [self._row(catalog, v) for v in versions if self.is_visible(v, snapshot)]

    def scan(self, catalog: int, snapshot: Snapshot) -> list[Row]:
        """All visible rows."""
        file = self.current_file(catalog, snapshot.lsn)
        versions = [v for found in file.index[0].values() for v in found] if file else []
        return [self._row(catalog, v) for v in versions if self.is_visible(v, snapshot)]

    def is_visible(self, version: Version, snapshot: Snapshot) -> bool:
        if version.xmin in snapshot.own:
            if version.cmin is None or version.cmin >= snapshot.command_id:
                return False
        elif not self._committed_before(version.xmin, snapshot):
            return False
        if not version.xmax:
            return True
        if version.xmax in snapshot.own:
            return version.cmax is None or version.cmax >= snapshot.command_id
        return not self._committed_before(version.xmax, snapshot)

    def _committed_before(self, xid: int, snapshot: Snapshot) -> bool:
        if xid == FROZEN:
            return True
        if xid in snapshot.hidden:
            return False
        committed = self._commit_lsn.get(xid)
        if committed is not None:
            return committed < snapshot.lsn
        return xid not in self._written and self._was_committed(xid)

    def _row(self, catalog: int, version: Version) -> Row:
        if version.row is None:
            version.row = decode_row(self._columns_of(catalog), version.stored)
        return version.row

    def _columns_of(self, catalog: int) -> CatalogColumns:
        if catalog not in self._columns:
            raise FormatError(f"the base image has no columns of catalog {catalog}")
        return self._columns[catalog]

    def _record(self, lookups: Lookups, file: CatalogFile, number: int, key: bytes) -> None:
        begin, end = file.stretch(number, key, lookups.lsn)
        # Another file of the catalog may hold other rows.
        switches = [since for since, _ in self._files[file.catalog]]
        at = bisect_right(switches, lookups.lsn)
        lookups.begin = max(lookups.begin, begin, switches[at - 1] if at else 0)
        lookups.end = min(lookups.end, end, switches[at] if at < len(switches) else end)
        lookups.keys.add((file.catalog, number, key))

    def _tell(self, file: CatalogFile, number: int, key: bytes, lsn: int) -> None:
        if self.on_change is not None:
            self.on_change(file.catalog, number, key, lsn)

    def _of(self, xid: int) -> _Written:
        return self._written.setdefault(xid, _Written())

    def _traced(self, xid: int) -> _Written | None:
        return self._written.get(xid) or self._finished_by_xid.get(xid)

    def _is_in_base(self, file: CatalogFile, place: Place, end_lsn: int) -> bool:
        return end_lsn <= file.page_lsn.get(place >> 16, 0)

    # Rewritten catalogs

    def _watch_rewrite(self, version: Version) -> None:
        """VACUUM FULL and CLUSTER fill a transient heap whose row names the rewritten relation."""
        row = self._row(PG_CLASS, version)
        catalog = row["relrewrite"]
        if catalog in KEYS:
            number = row["relfilenode"] or row["oid"]
            self.watch_file(catalog, self.locate(catalog, number))

    def _switch_files(self, written: _Written, lsn: int) -> None:
        """The rows of pg_class that the commit made may name other files of catalogs."""
        for file, _, version in written.made:
            if file.catalog != PG_CLASS or version.xmax:
                continue
            row = self._row(PG_CLASS, version)
            if row["oid"] in KEYS and row["relfilenode"]:
                self.use_file(row["oid"], row["relfilenode"], lsn + 1)

    def _forget_files(self, horizon: int) -> None:
        for timeline in self._files.values():
            while len(timeline) > 1 and timeline[1][0] <= horizon:
                _, locator = timeline.pop(0)
                self.files.pop(locator, None)


def _nobody(xid: int) -> bool:
    """All that had committed is frozen."""
    return False


def catalog_columns(rows: Iterable[Row]) -> CatalogColumns:
    """The columns of a catalog, from its rows in pg_attribute."""
    chosen = sorted((r for r in rows if r["attnum"] > 0), key=lambda r: int(r["attnum"]))
    columns = tuple(
        ColumnDescriptor(
            r["attnum"], r["attname"].decode(), None, r["attlen"], r["attbyval"], r["attalign"]
        )
        for r in chosen
    )
    return CatalogColumns(columns, tuple(r["atttypid"] for r in chosen))
