"""A small image of a database's catalogs, from a running server: what decoding starts from.

Invariant: every page of the image is at least as new as `start_lsn`, and none is newer than
`consistent_lsn`; so WAL from the one on makes it exact at the other, as with a base backup. Nothing
is left on the server, no slot and no object.

Pages come from pageinspect, which reads what the server has in memory, or as files after a
checkpoint. The relation maps are made from pg_relation_filenode(), the fate of transactions that
pages are not sure of is asked for with pg_xact_status().

Facts: "pageinspect", "Generic File Access Functions" and "Transaction ID and Snapshot Information
Functions" in PostgreSQL's documentation.
"""

from __future__ import annotations

import io
import json
import logging
import struct
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import PreflightError
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.wire.connect import connect
from millrace.wal.catalog.base_image import IMAGE_LABEL, RELMAP_MAGIC, Database, database_folder
from millrace.wal.catalog.catalog_layout import KEYS
from millrace.wal.row.heap_page import (
    PAGE_BYTES,
    XMAX_COMMITTED,
    XMAX_INVALID,
    XMAX_IS_MULTI,
    XMAX_LOCK_ONLY,
    XMIN_COMMITTED,
    XMIN_INVALID,
    iter_tuples,
)

log = logging.getLogger(__name__)

_FIRST_NORMAL_XID = 3
_XIDS_PER_SEGMENT = 32 * PAGE_BYTES * 4
_SEGMENT_BYTES = _XIDS_PER_SEGMENT // 4
_STATUS = {"committed": 1, "aborted": 2, "in progress": 0, None: 1}
_SETTINGS = (
    "DateStyle", "IntervalStyle", "TimeZone", "bytea_output", "extra_float_digits", "lc_monetary",
)  # fmt: skip
_PAGES = """\
SELECT get_raw_page(oid::regclass::text, 'main', n::int)
FROM (SELECT %s::oid AS oid) o, generate_series(0, pg_relation_size(oid, 'main') / 8192 - 1) n
"""

Session = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class Prepared:
    """An image that was made."""

    path: Path
    start_lsn: int
    consistent_lsn: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "image": str(self.path),
            "start_lsn": render_lsn(self.start_lsn),
            "consistent_lsn": render_lsn(self.consistent_lsn),
        }


def prepare(dsn: Dsn, output: Path) -> Prepared:
    """Write an image of the database's catalogs."""
    with connect(dsn, "decode prepare") as session:
        _check_server(session)
        has_pageinspect = _one(session, "SELECT to_regproc('get_raw_page') IS NOT NULL")
        start = _begin(session, is_file_read=not has_pageinspect)
        image = _Image(session, _database(session))
        for oid in KEYS:
            image.add_catalog(oid, has_pageinspect=bool(has_pageinspect))
        image.add_maps()
        image.add_fates()
        consistent = parse_lsn(_one(session, "SELECT pg_current_wal_insert_lsn()::text"))
        image.add_label(start, consistent)
    draft = output.with_name(output.name + ".draft")
    image.write(draft)
    draft.replace(output)
    return Prepared(output, start, consistent)


def _one(session: Session, query: str, *values: object) -> Any:
    row = session.execute(query.encode(), values or None).fetchone()
    return row[0] if row else None


def _check_server(session: Session) -> None:
    if _one(session, "SHOW wal_level") != "logical":
        raise PreflightError(
            "wal_level is not logical: the WAL has not what decoding needs",
            hint="set wal_level = logical and restart the server",
        )
    if _one(session, "SELECT pg_is_in_recovery()"):
        raise PreflightError(
            "the server is a standby", hint="name its primary, or take a base backup of the standby"
        )


def _begin(session: Session, *, is_file_read: bool) -> int:
    """Where WAL has to be read from; a list of running transactions follows it."""
    start = parse_lsn(_one(session, "SELECT pg_current_wal_insert_lsn()::text"))
    with suppress(psycopg.errors.InsufficientPrivilege):
        if is_file_read or session.info.server_version < 160000:
            session.execute("CHECKPOINT")
        else:
            session.execute("SELECT pg_log_standby_snapshot()")
        return start
    if is_file_read:
        raise PreflightError(
            "neither pageinspect nor a checkpoint can be used here",
            hint="install the extension pageinspect in this database, or take a base backup",
        )
    log.info("no right to write a list of running transactions: the server does within 15 s")
    return start


def _database(session: Session) -> Database:
    row = session.execute(
        "SELECT oid, datname, dattablespace, encoding FROM pg_database "
        "WHERE datname = current_database()"
    ).fetchone()
    assert row is not None
    return Database(int(row[0]), row[1], int(row[2]), row[3])


class _Image:
    """The files of an image, under the names they have in a data directory."""

    def __init__(self, session: Session, database: Database) -> None:
        self._session = session
        self._database = database
        self._folder = database_folder(database).replace("*", "PG")
        self._files: dict[str, bytes] = {}
        self._xids: set[int] = set()
        self._multis: set[int] = set()
        self._updaters: dict[int, int] = {}

    def add_catalog(self, oid: int, *, has_pageinspect: bool) -> None:
        if has_pageinspect:
            rows = self._session.execute(_PAGES.encode(), (oid,), binary=True).fetchall()
            pages = b"".join(bytes(row[0]) for row in rows)
        else:
            pages = self._read_file(oid)
        number, shared = self._session.execute(
            "SELECT pg_relation_filenode(oid), relisshared FROM pg_class WHERE oid = %s", (oid,)
        ).fetchone() or (0, False)
        folder = "global" if shared else self._folder
        self._files[f"{folder}/{number}"] = pages
        for at in range(0, len(pages), PAGE_BYTES):
            self._note_doubts(pages[at : at + PAGE_BYTES])

    def _read_file(self, oid: int) -> bytes:
        try:
            return bytes(
                _one(self._session, "SELECT pg_read_binary_file(pg_relation_filepath(%s))", oid)
            )
        except psycopg.errors.InsufficientPrivilege as error:
            raise PreflightError(
                "no right to read the catalogs' pages",
                hint="install the extension pageinspect as a superuser, become a member of "
                "pg_read_server_files, or take a base backup",
            ) from error

    def _note_doubts(self, page: bytes) -> None:
        """Transactions whose fate the page does not tell."""
        for item in iter_tuples(page):
            mask = item.stored.infomask
            if not mask & (XMIN_COMMITTED | XMIN_INVALID):
                self._xids.add(item.xmin)
            if mask & (XMAX_INVALID | XMAX_LOCK_ONLY | XMAX_COMMITTED):
                continue
            (self._multis if mask & XMAX_IS_MULTI else self._xids).add(item.xmax)

    def add_maps(self) -> None:
        rows = self._session.execute(
            "SELECT relisshared, oid, pg_relation_filenode(oid) FROM pg_class "
            "WHERE relfilenode = 0 AND pg_relation_filenode(oid) IS NOT NULL"
        ).fetchall()
        for shared, folder in ((True, "global"), (False, self._folder)):
            pairs = [(int(oid), int(number)) for own, oid, number in rows if own == shared]
            data = struct.pack("<Ii", RELMAP_MAGIC, len(pairs))
            self._files[f"{folder}/pg_filenode.map"] = data + b"".join(
                struct.pack("<II", *pair) for pair in pairs
            )

    def add_fates(self) -> None:
        """pg_xact for the transactions in doubt, and who is behind multixacts."""
        self._updaters = {multi: self._updater(multi) for multi in self._multis if multi}
        self._xids |= set(self._updaters.values())
        next_xid = int(_one(self._session, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"))
        segments: dict[int, bytearray] = {}
        for xid in self._xids:
            if xid >= _FIRST_NORMAL_XID:
                segment, at = divmod(xid, _XIDS_PER_SEGMENT)
                page = segments.setdefault(segment, bytearray(_SEGMENT_BYTES))
                page[at // 4] |= self._status(xid, next_xid) << at % 4 * 2
        for segment, data in segments.items():
            self._files[f"pg_xact/{segment:04X}"] = bytes(data)
        prepared = self._session.execute("SELECT transaction::text FROM pg_prepared_xacts")
        for (xid,) in prepared.fetchall():
            self._files[f"pg_twophase/{int(xid):08X}"] = b""

    def _status(self, xid: int, next_xid: int) -> int:
        full = (next_xid & ~0xFFFFFFFF) | xid
        if full > next_xid:
            full -= 1 << 32
        return _STATUS[_one(self._session, "SELECT pg_xact_status(%s::text::xid8)", str(full))]

    def _updater(self, multi: int) -> int:
        rows = self._session.execute(
            "SELECT xid::text, mode FROM pg_get_multixact_members(%s::text::xid)", (str(multi),)
        ).fetchall()
        return next((int(xid) for xid, mode in rows if mode in ("nokeyupd", "upd")), 0)

    def add_label(self, start: int, consistent: int) -> None:
        identifier, control_version = self._session.execute(
            "SELECT system_identifier, pg_control_version FROM pg_control_system()"
        ).fetchone() or (0, 0)
        timeline = _one(self._session, "SELECT timeline_id FROM pg_control_checkpoint()")
        database = self._database
        label = {
            "timeline": timeline,
            "start_lsn": render_lsn(start),
            "consistent_lsn": render_lsn(consistent),
            "database": [database.oid, database.name, database.tablespace, database.encoding],
            "multixacts": {str(multi): xid for multi, xid in self._updaters.items()},
        }
        self._files[IMAGE_LABEL] = json.dumps(label, indent=2).encode()
        self._files["PG_VERSION"] = b"%d\n" % (self._session.info.server_version // 10000)
        self._files["global/pg_control"] = struct.pack(
            "<QI", int(identifier) & (1 << 64) - 1, control_version
        )
        self._files["postgresql.conf"] = "".join(self._setting_lines()).encode()

    def _setting_lines(self) -> Iterator[str]:
        for name in _SETTINGS:
            # Not what our own session is set to.
            value = _one(self._session, "SELECT reset_val FROM pg_settings WHERE name = %s", name)
            yield f"{name} = '{str(value).replace(chr(39), chr(39) * 2)}'\n"

    def write(self, path: Path) -> None:
        with tarfile.open(path, "w:gz", compresslevel=1) as archive:
            for name, data in self._files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
