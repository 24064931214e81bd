"""Heap records of catalogs, applied to the version store.

Invariant: after each record the store holds what the page holds, and what it held before. A record
whose tuple cannot be found is a FormatError with its position: the catalog would be wrong from
there on.

A record with a page image has no tuple: it is cut out of the image, which shows the page after the
change. An update may carry only the middle of its tuple; the rest is that of the old one.

Facts: heapam_xlog.h; heapam.c, log_heap_update(), heap_xlog_update(), heap_xlog_multi_insert().
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal import classify as kind
from millrace.wal.catalog.base_image import MultiXacts, page_version
from millrace.wal.catalog.catalog_file import CatalogFile, Locator, Place
from millrace.wal.catalog.historic_catalog import HistoricCatalog
from millrace.wal.read.record import Records
from millrace.wal.row.heap_page import iter_tuples, read_tuple
from millrace.wal.row.heap_tuple import HEADER_BYTES, HeapTuple
from millrace.wal.row.image import restore_image

_INIT_PAGE = 0x80
_PREFIX_FROM_OLD, _SUFFIX_FROM_OLD = 0x20, 0x40
_MULTI_INSERT_HEADER = struct.Struct("<HHHB")
_TUPLE_HEADER = struct.Struct("<HHB")


class CatalogRecords:
    """Applies records to the catalog of a decoder."""

    def __init__(self, catalog: HistoricCatalog, multis: MultiXacts) -> None:
        self._catalog = catalog
        self._multis = multis

    def apply(self, records: Records, i: int) -> None:
        """A record whose first block is in a file of a catalog."""
        block = records.find_block(i, 0)
        locator = (int(records.spc[block]), int(records.db[block]), int(records.rel[block]))
        try:
            self._operation(records, i)(records, i, block, locator)
        except (FormatError, struct.error, IndexError) as error:
            lsn = render_lsn(int(records.lsn[i]))
            raise FormatError(
                f"the record at {lsn} does not fit catalog file {locator[2]}: {error}",
                hint="the base image and the WAL do not belong together, or one is damaged",
                lsn=lsn,
            ) from error

    def _operation(self, records: Records, i: int) -> Callable[[Records, int, int, Locator], None]:
        if records.rmid[i] == kind.XLOG:
            return self._images
        if records.rmid[i] == kind.HEAP2:
            return self._multi_insert
        operations = {
            kind.INSERT: self._insert,
            kind.DELETE: self._delete,
            kind.UPDATE: self._update,
            kind.HOT_UPDATE: self._update,
            kind.INPLACE: self._inplace,
        }
        return operations[int(records.info[i]) & 0x70]

    def _insert(self, records: Records, i: int, block: int, locator: Locator) -> None:
        (offset,) = struct.unpack_from("<H", records.main_data(i))
        place = _place(records, block, offset)
        self._put(
            records, i, locator, place, lambda: HeapTuple.from_record(records.block_data(block))
        )

    def _delete(self, records: Records, i: int, block: int, locator: Locator) -> None:
        (offset,) = struct.unpack_from("<H", records.main_data(i), 4)
        place = _place(records, block, offset)
        self._end(records, i, locator, place)

    def _update(self, records: Records, i: int, block: int, locator: Locator) -> None:
        main = records.main_data(i)
        old_offset, _, flags, _, new_offset = struct.unpack_from("<HBBIH", main, 4)
        old_block = records.find_block(i, 1)
        old_place = _place(records, block if old_block < 0 else old_block, old_offset)
        old = self._catalog.files[locator].places.get(old_place)
        old_tuple = old.stored if old else None
        self._end(records, i, locator, old_place)
        place = _place(records, block, new_offset)
        self._put(
            records,
            i,
            locator,
            place,
            lambda: _rebuild(records.block_data(block), flags, old_tuple),
        )

    def _multi_insert(self, records: Records, i: int, block: int, locator: Locator) -> None:
        main = records.main_data(i)
        (count,) = struct.unpack_from("<H", main, 2)
        if records.info[i] & _INIT_PAGE:
            offsets: tuple[int, ...] = tuple(range(1, count + 1))
        else:
            offsets = struct.unpack_from(f"<{count}H", main, 4)
        data = records.block_data(block)
        at = 0
        for offset in offsets:
            at, stored = next_tuple(data, at) if data else (0, None)
            place = _place(records, block, offset)
            self._put(records, i, locator, place, partial(_identity, stored))

    def _inplace(self, records: Records, i: int, block: int, locator: Locator) -> None:
        (offset,) = struct.unpack_from("<H", records.main_data(i))
        place = _place(records, block, offset)
        values = records.block_data(block)
        if not values:
            found = read_tuple(restore_image(records, block), offset)
            if found is None:
                raise FormatError(f"no tuple at line pointer {offset} of the page image")
            values = found.stored.body[found.stored.hoff - HEADER_BYTES :]
        self._catalog.overwrite(locator, place, values, int(records.end_lsn[i]))

    def _images(self, records: Records, i: int, block: int, locator: Locator) -> None:
        """Page images of a catalog that is being rewritten: all that they hold is new."""
        for each in range(int(records.first_block[i]), int(records.first_block[i + 1])):
            if records.fork[each] != 0:
                continue
            for item in iter_tuples(restore_image(records, each)):
                version = page_version(item, self._multis)
                if version is not None:
                    place = _place(records, each, item.offset)
                    self._catalog.add_rewritten(locator, place, version)

    def _put(
        self,
        records: Records,
        i: int,
        locator: Locator,
        place: Place,
        stored: Callable[[], HeapTuple | None],
    ) -> None:
        """A new version, unless the base's page has it already."""
        end_lsn, xid = int(records.end_lsn[i]), int(records.xid[i])
        if self._is_in_base(self._catalog.files[locator], place, end_lsn):
            found: HeapTuple | None = HeapTuple(0, 0, HEADER_BYTES, b"")
        else:
            block = records.find_block(i, 0)
            found = stored() if records.data_length[block] else _from_image(records, block, place)
        if found is None:
            raise FormatError("no tuple in the record")
        self._catalog.insert(locator, place, found, xid, end_lsn)

    def _end(self, records: Records, i: int, locator: Locator, place: Place) -> None:
        end_lsn = int(records.end_lsn[i])
        ended = self._catalog.delete(locator, place, int(records.xid[i]), end_lsn)
        if ended is None and not self._is_in_base(self._catalog.files[locator], place, end_lsn):
            raise FormatError(f"no row at block {place >> 16}, line pointer {place & 0xFFFF}")

    @staticmethod
    def _is_in_base(file: CatalogFile, place: Place, end_lsn: int) -> bool:
        return end_lsn <= file.page_lsn.get(place >> 16, 0)


def _identity(stored: HeapTuple | None) -> HeapTuple | None:
    return stored


def _place(records: Records, block: int, offset: int) -> Place:
    return int(records.blkno[block]) << 16 | offset


def _from_image(records: Records, block: int, place: Place) -> HeapTuple | None:
    found = read_tuple(restore_image(records, block), place & 0xFFFF)
    return found.stored if found else None


def _rebuild(data: bytes, flags: int, old: HeapTuple | None) -> HeapTuple:
    """The new tuple of an update, whose ends may be those of the old one."""
    at = prefix = suffix = 0
    if flags & _PREFIX_FROM_OLD:
        (prefix,) = struct.unpack_from("<H", data, at)
        at += 2
    if flags & _SUFFIX_FROM_OLD:
        (suffix,) = struct.unpack_from("<H", data, at)
        at += 2
    infomask2, infomask, hoff = _TUPLE_HEADER.unpack_from(data, at)
    rest = data[at + _TUPLE_HEADER.size :]
    if prefix or suffix:
        if old is None:
            raise FormatError("the old row of an update is not known")
        values = old.body[old.hoff - HEADER_BYTES :]
        head = hoff - HEADER_BYTES
        tail = values[len(values) - suffix :] if suffix else b""
        rest = rest[:head] + values[:prefix] + rest[head:] + tail
    return HeapTuple(infomask2, infomask, hoff, rest)


def next_tuple(data: bytes, at: int) -> tuple[int, HeapTuple]:
    """(where the next one begins, the tuple) of a MULTI_INSERT."""
    at += at & 1
    length, infomask2, infomask, hoff = _MULTI_INSERT_HEADER.unpack_from(data, at)
    at += _MULTI_INSERT_HEADER.size
    return at + length, HeapTuple(infomask2, infomask, hoff, data[at : at + length])
