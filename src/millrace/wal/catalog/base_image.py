"""The catalogs of a database as files had them: from a base backup, or an image of the same shape.

Invariant: pages may be of different moments, as long as all WAL from `start_lsn` on is read: a
record changes a page only if the page is older. From `consistent_lsn` on the catalog is exact.

    backup_label or millrace_image.json   where WAL has to be read from
    global/pg_filenode.map, global/<file>             shared catalogs
    base/<database>/pg_filenode.map, base/<database>/<file>
    pg_xact/<segment>                                 the fate of transactions: 2 bits each
    pg_multixact/{offsets,members}/<segment>          who is behind a multixact

Facts: backup_label in xlogbackup.c; relmapper.c; clog.c; multixact.c; pg_control.h.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from millrace.errors import ConfigError, FormatError, UnknownVersion
from millrace.lsn import parse_lsn
from millrace.wal.catalog.catalog_file import FROZEN, CatalogFile, Version
from millrace.wal.catalog.catalog_layout import (
    DEFAULT_TABLESPACE,
    GLOBAL_TABLESPACE,
    KEYS,
    PG_ATTRIBUTE,
    PG_CLASS,
    PG_DATABASE,
    SHARED,
    attribute_columns,
)
from millrace.wal.catalog.catalog_row import Row, decode_row
from millrace.wal.catalog.historic_catalog import HistoricCatalog, Snapshot, catalog_columns
from millrace.wal.row.heap_page import (
    PAGE_BYTES,
    XMAX_COMMITTED,
    XMAX_INVALID,
    XMAX_IS_MULTI,
    XMAX_LOCK_ONLY,
    XMIN_COMMITTED,
    XMIN_FROZEN,
    XMIN_INVALID,
    PageTuple,
    iter_tuples,
    page_lsn,
)

IMAGE_LABEL = "millrace_image.json"
_START = re.compile(r"^START WAL LOCATION: ([0-9A-F]+/[0-9A-F]+)", re.MULTILINE)
_TIMELINE = re.compile(r"^START TIMELINE: (\d+)", re.MULTILINE)
RELMAP_MAGIC = 0x592717
_XIDS_PER_SEGMENT = 32 * PAGE_BYTES * 4
_COMMITTED = 1
# Blocks of one file of a relation: 1 GB.
_SEGMENT_BLOCKS = 131072
_MULTIS_PER_PAGE = PAGE_BYTES // 4
_MEMBER_GROUP_BYTES = 20  # 4 flags, 4 transaction ids
_MEMBERS_PER_PAGE = PAGE_BYTES // _MEMBER_GROUP_BYTES * 4
_SLRU_PAGES = 32
_NO_KEY_UPDATE = 4  # MultiXactStatusNoKeyUpdate and above: not only a lock
_FIRST_NORMAL_XID = 3


class BaseFiles(Protocol):
    """The files of a data directory, by their relative names."""

    def read(self, name: str) -> bytes | None: ...

    def names(self, prefix: str) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class BaseLabel:
    """Where a base image belongs in the WAL."""

    version: int
    system_identifier: int
    timeline: int
    # WAL is read from here on.
    start_lsn: int
    # From here on the catalog is exact; None: where the backup's end is noted in the WAL.
    consistent_lsn: int | None


@dataclass(frozen=True, slots=True)
class Database:
    """A row of pg_database."""

    oid: int
    name: str
    tablespace: int
    encoding: int


# A database that every cluster has and nobody moves.
_TEMPLATE1 = Database(1, "template1", DEFAULT_TABLESPACE, 6)


def read_label(files: BaseFiles) -> BaseLabel:
    """What the image says of itself."""
    control = files.read("global/pg_control")
    version_text = files.read("PG_VERSION")
    if control is None or version_text is None:
        raise ConfigError(
            "the base is no data directory: it lacks PG_VERSION or global/pg_control",
            hint="name a base backup made by pg_basebackup, or an image by decode prepare",
        )
    version = int(version_text.split(b".")[0])
    attribute_columns(version)
    (system_identifier,) = struct.unpack_from("<Q", control)
    label = files.read(IMAGE_LABEL)
    if label is not None:
        found = json.loads(label)
        return BaseLabel(
            version,
            system_identifier,
            found["timeline"],
            parse_lsn(found["start_lsn"]),
            parse_lsn(found["consistent_lsn"]),
        )
    return _backup_label(files, version, system_identifier)


def _backup_label(files: BaseFiles, version: int, system_identifier: int) -> BaseLabel:
    text = (files.read("backup_label") or b"").decode(errors="replace")
    start, timeline = _START.search(text), _TIMELINE.search(text)
    if not start or not timeline:
        raise ConfigError(
            "the base has no backup_label: a running or stopped server's own directory is no base",
            hint="make one with pg_basebackup",
        )
    return BaseLabel(version, system_identifier, int(timeline[1]), parse_lsn(start[1]), None)


def list_databases(files: BaseFiles, version: int) -> list[Database]:
    """The databases of the image; rows of pg_database in any state count."""
    shared = read_relmap(_required(files, "global/pg_filenode.map"))
    rows = _attribute_rows(files, _TEMPLATE1, version)
    described = catalog_columns(r for r in rows if r["attrelid"] == PG_DATABASE)
    found: dict[int, Database] = {}
    for page in _pages(files, f"global/{shared[PG_DATABASE]}"):
        for item in iter_tuples(page):
            row = decode_row(described, item.stored)
            found[row["oid"]] = Database(
                row["oid"], row["datname"].decode(), row["dattablespace"], row["encoding"]
            )
    return list(found.values())


def find_database(files: BaseFiles, version: int, name: str) -> Database:
    databases = _image_databases(files) or list_databases(files, version)
    for database in databases:
        if database.name == name:
            return database
    raise ConfigError(
        f"the base has no database {name}",
        hint=f"it has {', '.join(sorted(d.name for d in databases))}",
    )


def _image_databases(files: BaseFiles) -> list[Database]:
    """The one database of an image that is no base backup."""
    label = files.read(IMAGE_LABEL)
    return [Database(*json.loads(label)["database"])] if label is not None else []


def image_multixacts(files: BaseFiles) -> dict[int, int]:
    """Who is behind the multixacts of an image."""
    label = files.read(IMAGE_LABEL)
    found = json.loads(label)["multixacts"] if label is not None else {}
    return {int(multi): xid for multi, xid in found.items()}


def load_catalog(
    files: BaseFiles, label: BaseLabel, database: Database, multis: MultiXacts
) -> HistoricCatalog:
    """The catalogs of a database with everything the pages hold."""
    clog = Clog(files)
    catalog = HistoricCatalog(label.version, database.oid, database.tablespace, clog.is_committed)
    maps = {
        **read_relmap(_required(files, "global/pg_filenode.map")),
        **read_relmap(_required(files, f"{database_folder(database)}/pg_filenode.map")),
    }
    for mapped in (PG_ATTRIBUTE, PG_CLASS):
        _load_file(catalog, files, mapped, maps[mapped], multis)
    _read_columns(catalog)
    for oid in KEYS:
        if oid in (PG_ATTRIBUTE, PG_CLASS):
            continue
        numbers = [maps[oid]] if oid in maps else _file_numbers(catalog, oid)
        for number in numbers:
            _load_file(catalog, files, oid, number, multis)
    return catalog


def mapped_files(files: BaseFiles, database: Database) -> set[int]:
    """File numbers of mapped catalogs, their indexes and TOAST tables."""
    names = ("global/pg_filenode.map", f"{database_folder(database)}/pg_filenode.map")
    return {number for name in names for number in read_relmap(_required(files, name)).values()}


def list_prepared(files: BaseFiles) -> list[int]:
    """Transactions that were prepared and not yet ended when the image was made."""
    return [int(name, 16) & 0xFFFFFFFF for name in files.names("pg_twophase")]


def read_relmap(image: bytes) -> dict[int, int]:
    """A relation map: catalog OID to file number."""
    if len(image) < 8:
        raise FormatError(f"expected a relation map, found {len(image)} bytes")
    magic, count = struct.unpack_from("<ii", image)
    if magic != RELMAP_MAGIC or not 0 <= count <= (len(image) - 8) // 8:
        raise FormatError(f"expected a relation map, found magic 0x{magic:X} and {count} entries")
    pairs = struct.iter_unpack("<II", image[8 : 8 + 8 * count])
    return {oid: number for oid, number in pairs}


def page_version(item: PageTuple, multis: MultiXacts) -> Version | None:
    """The version of a tuple in a page; None if it was never there for anybody, or is gone."""
    mask = item.stored.infomask
    xmin = item.xmin
    if mask & XMIN_FROZEN == XMIN_FROZEN or mask & XMIN_COMMITTED or xmin < _FIRST_NORMAL_XID:
        xmin = FROZEN
    elif mask & XMIN_INVALID:
        return None
    xmax = 0 if mask & (XMAX_INVALID | XMAX_LOCK_ONLY) else item.xmax
    if xmax and mask & XMAX_IS_MULTI:
        xmax = multis.updater(xmax)
    elif xmax and mask & XMAX_COMMITTED:
        return None
    return Version(item.stored, xmin, xmax)


class Clog:
    """pg_xact of the image: which transactions had committed."""

    def __init__(self, files: BaseFiles) -> None:
        self._read = lru_cache(maxsize=64)(
            lambda segment: files.read(f"pg_xact/{segment:04X}") or b""
        )

    def is_committed(self, xid: int) -> bool:
        if xid < _FIRST_NORMAL_XID:
            return xid != 0
        segment, at = divmod(xid, _XIDS_PER_SEGMENT)
        data = self._read(segment)
        byte, shift = at // 4, at % 4 * 2
        return byte < len(data) and data[byte] >> shift & 3 == _COMMITTED


class MultiXacts:
    """pg_multixact of the image, and what WAL records added: who updated behind a multixact."""

    def __init__(self, files: BaseFiles | None, updaters: dict[int, int] | None = None) -> None:
        self._files = files
        self.updaters = dict(updaters or {})

    def note(self, multi: int, updater: int) -> None:
        """A record that created one."""
        self.updaters[multi] = updater

    def updater(self, multi: int) -> int:
        """The transaction that updated or deleted; 0 if all of them only locked."""
        if multi in self.updaters:
            return self.updaters[multi]
        begin, end = self._offset(multi), self._offset(multi + 1)
        for member in range(begin, end if end > begin else begin + 1):
            status, xid = self._member(member)
            if status >= _NO_KEY_UPDATE:
                return xid
        return 0

    def _offset(self, multi: int) -> int:
        page = self._page("offsets", multi // _MULTIS_PER_PAGE)
        at = multi % _MULTIS_PER_PAGE * 4
        return int.from_bytes(page[at : at + 4], "little")

    def _member(self, number: int) -> tuple[int, int]:
        page = self._page("members", number // _MEMBERS_PER_PAGE)
        group, at = divmod(number % _MEMBERS_PER_PAGE, 4)
        base = group * _MEMBER_GROUP_BYTES
        xid = page[base + 4 + 4 * at : base + 8 + 4 * at]
        return (page[base + at] if base + at < len(page) else 0), int.from_bytes(xid, "little")

    def _page(self, folder: str, number: int) -> bytes:
        segment, page = divmod(number, _SLRU_PAGES)
        name = f"pg_multixact/{folder}/{segment:04X}"
        data = (self._files.read(name) if self._files else None) or b""
        return data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


def database_folder(database: Database) -> str:
    if database.tablespace != DEFAULT_TABLESPACE:
        return f"pg_tblspc/{database.tablespace}/*/{database.oid}"
    return f"base/{database.oid}"


def _attribute_rows(files: BaseFiles, database: Database, version: int) -> Iterator[Row]:
    """Rows of pg_attribute about the server's own catalogs."""
    columns = attribute_columns(version)
    mapped = read_relmap(_required(files, f"{database_folder(database)}/pg_filenode.map"))
    for page in _pages(files, f"{database_folder(database)}/{mapped[PG_ATTRIBUTE]}"):
        for item in iter_tuples(page):
            yield decode_row(columns, item.stored)


def _required(files: BaseFiles, name: str) -> bytes:
    data = files.read(name)
    if data is None:
        raise ConfigError(f"the base lacks {name}", hint="take the base backup again")
    return data


def _pages(files: BaseFiles, name: str) -> Iterator[bytes]:
    """The pages of a relation; a page that was just being written may be cut off."""
    segment = 0
    while (data := files.read(name if not segment else f"{name}.{segment}")) is not None:
        for at in range(0, len(data) - PAGE_BYTES + 1, PAGE_BYTES):
            yield data[at : at + PAGE_BYTES]
        if len(data) < _SEGMENT_BLOCKS * PAGE_BYTES:
            return
        segment += 1


def _load_file(
    catalog: HistoricCatalog, files: BaseFiles, oid: int, number: int, multis: MultiXacts
) -> None:
    file = catalog.use_file(oid, number, 0)
    locator = catalog.locate(oid, number)
    if locator[0] == GLOBAL_TABLESPACE:
        name = f"global/{number}"
    else:
        folder = database_folder(Database(catalog.database, "", catalog.tablespace, 6))
        name = f"{folder}/{number}"
    for block, page in enumerate(_pages(files, name)):
        _load_page(catalog, file, block, page, multis)


def _load_page(
    catalog: HistoricCatalog, file: CatalogFile, block: int, page: bytes, multis: MultiXacts
) -> None:
    file.page_lsn[block] = page_lsn(page)
    for item in iter_tuples(page):
        version = page_version(item, multis)
        if version is not None:
            catalog.add_from_base(file, block << 16 | item.offset, version)


def _read_columns(catalog: HistoricCatalog) -> None:
    """The columns of the kept catalogs; these never change within a version."""
    now = Snapshot((1 << 64) - 1)
    for oid in KEYS:
        if oid != PG_ATTRIBUTE:
            rows = catalog.find(PG_ATTRIBUTE, 0, oid, now)
            if not rows:
                raise UnknownVersion(f"the base has no columns of catalog {oid}")
            catalog.set_columns(oid, catalog_columns(rows))


def _file_numbers(catalog: HistoricCatalog, oid: int) -> list[int]:
    """The files that pg_class names for a catalog, the one that counts last."""
    now = Snapshot((1 << 64) - 1)
    current = [row["relfilenode"] for row in catalog.find(PG_CLASS, 0, oid, now)]
    if not current or oid in SHARED:
        raise FormatError(f"the base has no file of catalog {oid}")
    return current
