"""What the records say that are looked at one by one.

Invariant: a record that is too short for what it announces is a FormatError with its position.

    end of a transaction = time:8, then by the bits of xinfo: database:4 tablespace:4, subxids,
        files to drop, statistics to drop, invalidations, xid of the prepared transaction, its gid,
        origin_lsn:8 origin_time:8
    PREPARE = the header of a state file, then blocks padded to 8: gid, subxids, ...
    running-xacts = xcnt:4 subxcnt:4 overflow:1 pad next:4 oldest:4 latest:4 xids

Facts: xact.h, xl_xact_parsed_commit; twophase.c, TwoPhaseFileHeader; standbydefs.h; pg_control.h.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal.read.record import Records
from millrace.wal.snapshot_builder import RunningXacts

_HAS_INFO = 0x80
_HAS_DATABASE, _HAS_SUBXIDS, _HAS_FILES, _HAS_INVALIDATIONS = 1, 2, 4, 8
_HAS_TWO_PHASE, _HAS_ORIGIN, _HAS_GID, _HAS_STATISTICS = 16, 32, 128, 256
_FILE_BYTES, _INVALIDATION_BYTES = 12, 16
_PREPARE_MAGIC = 0x57F94534
_PREPARE = struct.Struct("<IIIIqIiiiiiiBxHQq")
_NO_KEY_UPDATE = 4
_WAL_LEVEL_AT = 20
_NEXT_XID_AT = 24

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TransactionEnd:
    """A commit or an abort, of a prepared transaction or another."""

    xid: int
    # Microseconds since 2000-01-01.
    time: int
    database: int = 0
    subxids: tuple[int, ...] = ()
    gid: str | None = None
    origin_lsn: int = 0


@dataclass(frozen=True, slots=True)
class Preparation:
    """PREPARE TRANSACTION."""

    xid: int
    time: int
    database: int
    subxids: tuple[int, ...]
    gid: str
    origin_lsn: int


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What was given to pg_logical_emit_message."""

    database: int
    is_transactional: bool
    prefix: bytes
    content: bytes


def decode_end(records: Records, i: int) -> TransactionEnd:
    return _decode(records, i, _end)


def decode_prepare(records: Records, i: int) -> Preparation:
    return _decode(records, i, _preparation)


def decode_running_xacts(records: Records, i: int) -> RunningXacts:
    return _decode(records, i, lambda r, k: _running_xacts(r.main_data(k)))


def decode_message(records: Records, i: int) -> LogicalMessage:
    return _decode(records, i, lambda r, k: _message(r.main_data(k)))


def decode_next_xid(records: Records, i: int) -> int:
    """Of a checkpoint, without its epoch."""
    return _decode(records, i, lambda r, k: _number(r.main_data(k), "<I", _NEXT_XID_AT))


def decode_wal_level(records: Records, i: int) -> int:
    """Of a change of parameters."""
    return _decode(records, i, lambda r, k: _number(r.main_data(k), "<i", _WAL_LEVEL_AT))


def decode_backup_start(records: Records, i: int) -> int:
    """Of the end of a backup: where that backup began."""
    return _decode(records, i, lambda r, k: _number(r.main_data(k), "<Q", 0))


def decode_relmap(records: Records, i: int) -> tuple[int, bytes]:
    """(database, the whole map)"""
    return _decode(records, i, lambda r, k: _relmap(r.main_data(k)))


def decode_multixact(records: Records, i: int) -> tuple[int, int]:
    """(multixact, the member that updated, or 0)"""
    return _decode(records, i, lambda r, k: _multixact(r.main_data(k)))


def _decode(records: Records, i: int, decoder: Callable[[Records, int], T]) -> T:
    try:
        return decoder(records, i)
    except (struct.error, ValueError, IndexError) as error:
        lsn = render_lsn(int(records.lsn[i]))
        raise FormatError(
            f"the record at {lsn} (resource manager {records.rmid[i]}) is shorter than it says",
            lsn=lsn,
        ) from error


def _number(main: bytes, layout: str, at: int) -> int:
    return int(struct.unpack_from(layout, main, at)[0])


def _end(records: Records, i: int) -> TransactionEnd:
    main, xid = records.main_data(i), int(records.xid[i])
    (time,) = struct.unpack_from("<q", main)
    if not records.info[i] & _HAS_INFO:
        return TransactionEnd(xid, time)
    (info,) = struct.unpack_from("<I", main, 8)
    at, database, subxids, gid, origin_lsn = 12, 0, (), None, 0
    if info & _HAS_DATABASE:
        (database,) = struct.unpack_from("<I", main, at)
        at += 8
    if info & _HAS_SUBXIDS:
        (count,) = struct.unpack_from("<i", main, at)
        subxids = struct.unpack_from(f"<{count}I", main, at + 4)
        at += 4 + 4 * count
    for bit, size in (
        (_HAS_FILES, _FILE_BYTES),
        (_HAS_STATISTICS, records.version.stats_item_bytes),
        (_HAS_INVALIDATIONS, _INVALIDATION_BYTES),
    ):
        if info & bit:
            at += 4 + size * _number(main, "<i", at)
    if info & _HAS_TWO_PHASE:
        (xid,) = struct.unpack_from("<I", main, at)
        at += 4
        if info & _HAS_GID:
            end = main.index(b"\0", at)
            gid = main[at:end].decode("utf-8", "surrogateescape")
            at = end + 1
    if info & _HAS_ORIGIN:
        (origin_lsn,) = struct.unpack_from("<Q", main, at)
    return TransactionEnd(xid, time, database, subxids, gid, origin_lsn)


def _preparation(records: Records, i: int) -> Preparation:
    main = records.main_data(i)
    found = _PREPARE.unpack_from(main)
    magic, _, xid, database, time, _, count = found[:7]
    gid_bytes, origin_lsn = found[13], found[14]
    if magic != _PREPARE_MAGIC:
        raise ValueError
    at = _PREPARE.size
    gid = main[at : at + gid_bytes].rstrip(b"\0").decode("utf-8", "surrogateescape")
    at += -(-gid_bytes // 8) * 8
    subxids = struct.unpack_from(f"<{count}I", main, at)
    return Preparation(xid, time, database, subxids, gid, origin_lsn)


def _running_xacts(main: bytes) -> RunningXacts:
    overflow, next_xid, oldest = struct.unpack_from("<B3xII", main, 8)
    return RunningXacts(next_xid, oldest, bool(overflow))


def _message(main: bytes) -> LogicalMessage:
    database, transactional, prefix_bytes, content_bytes = struct.unpack_from("<IB3xQQ", main)
    end = 24 + prefix_bytes + content_bytes
    if end > len(main):
        raise ValueError
    prefix = main[24 : 24 + prefix_bytes].rstrip(b"\0")
    return LogicalMessage(database, bool(transactional), prefix, main[24 + prefix_bytes : end])


def _relmap(main: bytes) -> tuple[int, bytes]:
    database, _, size = struct.unpack_from("<IIi", main)
    return database, main[12 : 12 + size]


def _multixact(main: bytes) -> tuple[int, int]:
    multi, _, count = struct.unpack_from("<IIi", main)
    for number in range(count):
        xid, status = struct.unpack_from("<Ii", main, 12 + 8 * number)
        if status >= _NO_KEY_UPDATE:
            return multi, xid
    return multi, 0
