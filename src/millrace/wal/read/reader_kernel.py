"""The loops of the reader: from pages to whole records, from records to their fragments.

Invariant: no place outside the arrays is read or written, whatever the bytes are; every loop moves
on by at least a byte.

Facts: xlogreader.c, XLogDecodeNextRecord() and DecodeXLogRecord(); xlogrecord.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.postgres.kernel import kernel, le16, le32, le64
from millrace.wal.read.crc import running_crc
from millrace.wal.read.page import (
    IS_CONTINUED,
    IS_OVERWRITE,
    LONG_HEADER_BYTES,
    PAGE_BYTES,
    SHORT_HEADER_BYTES,
)

HEADER_BYTES = 24

# Why a walk has ended.
REACHED = 0  # the limit: the next record starts at or after it
OUT_OF_PAGES = 1  # before a record, or in its middle
BAD_PAGE = 2
ZERO_LENGTH = 3  # nothing is written here yet
BAD_LENGTH = 4
NOT_CONTINUED = 5  # the next page does not say that it continues the record
BAD_REMAINING = 6
UNEXPECTED_CONTINUED = 7
BAD_RMGR = 8
BAD_PREV = 9
BAD_CRC = 10
_LOST = 11  # in a crash, and the server went on at the page that says so

# Why the fragments of a record are not right.
FRAGMENT_ID = 1
FRAGMENT_ORDER = 2
FRAGMENT_PAST_END = 3
FRAGMENT_LENGTHS = 4
FRAGMENT_NO_RELATION = 5
FRAGMENT_IMAGE = 6
FRAGMENT_DATA = 7

_LAST_RMGR = 21  # LogicalMessage; 22 is new in 19
_FIRST_CUSTOM_RMGR = 128
_XLOG_RMGR = 0
_SWITCH = 0x40

_MAX_BLOCK_ID = 32
_ORIGIN = 253
_TOP_XID = 252
_DATA_SHORT = 255
_DATA_LONG = 254
_HAS_IMAGE = 0x10
_HAS_DATA = 0x20
_SAME_RELATION = 0x80
_HAS_HOLE = 0x01
_COMPRESSED = 0x1C  # pglz, lz4 or zstd


@kernel
def _header_bytes(lsn: Any, segment_bytes: Any) -> Any:
    if lsn % segment_bytes == 0:
        return LONG_HEADER_BYTES
    return SHORT_HEADER_BYTES


@kernel
def first_record(
    flags: Any, remaining: Any, is_good: Any, base_lsn: Any, segment_bytes: Any
) -> Any:
    """Where the first record begins that is not continued from before, as an offset into the
    pages; the end of the pages if there is none; -1 at a page that is not good."""
    for page in range(len(flags)):
        if not is_good[page]:
            return -1
        begin = page * PAGE_BYTES
        if not flags[page] & IS_CONTINUED:
            return begin
        rest = (np.int64(remaining[page]) + 7) & ~7
        header = _header_bytes(base_lsn + begin, segment_bytes)
        if header + rest <= PAGE_BYTES:
            return begin + header + rest
    return len(flags) * PAGE_BYTES


@kernel
def _assemble(
    words: Any, flags: Any, remaining: Any, is_good: Any, base_lsn: Any, segment_bytes: Any,
    place: Any, total: Any,
) -> Any:  # fmt: skip
    """Move the parts of a record that goes past its page together, over the headers of the pages
    between them; (why it failed or REACHED, offset of its end, of the page that overwrites it or of
    the page at fault)"""
    page = place // PAGE_BYTES
    have = (page + 1) * PAGE_BYTES - place
    while have < total:
        page += 1
        begin = page * PAGE_BYTES
        if page >= len(flags):
            return OUT_OF_PAGES, begin
        if not is_good[page]:
            return BAD_PAGE, begin
        if flags[page] & IS_OVERWRITE:
            return _LOST, begin
        if not flags[page] & IS_CONTINUED:
            return NOT_CONTINUED, begin
        if np.int64(remaining[page]) != total - have:
            return BAD_REMAINING, begin
        have += PAGE_BYTES - _header_bytes(base_lsn + begin, segment_bytes)
    # All is there. Everything is aligned to 8 bytes: where the record starts, headers, pages.
    page = place // PAGE_BYTES
    have = (page + 1) * PAGE_BYTES - place
    end = place
    while have < total:
        page += 1
        begin = page * PAGE_BYTES
        source = begin + _header_bytes(base_lsn + begin, segment_bytes)
        size = min(total - have, begin + PAGE_BYTES - source)
        shift = (source - place - have) // 8
        for word in range((place + have) // 8, (place + have + size + 7) // 8):
            words[word] = words[word + shift]
        have += size
        end = source + size
    return REACHED, (end + 7) & ~7


@kernel
def walk_records(
    buffer: Any, words: Any, flags: Any, remaining: Any, is_good: Any,
    base_lsn: Any, segment_bytes: Any, at: Any, limit: Any, last_lsn: Any, check_crc: Any,
    out_lsn: Any, out_end: Any, out_start: Any,
) -> Any:  # fmt: skip
    """Whole records from the offset `at` on, as long as they start before the offset `limit`.

    Returns (why it ended, how many records, offset of the next record, offset of what ended it).
    `last_lsn` is the record before, 0 if it is not known. `words` is the same buffer. Afterwards
    every record is in one piece there; the page headers between its parts are gone.
    """
    count = 0
    reason = REACHED
    place = at
    while True:
        place = at
        if at >= limit:
            break
        page = at // PAGE_BYTES
        if page >= len(flags):
            reason = OUT_OF_PAGES
            break
        if not is_good[page]:
            reason = BAD_PAGE
            break
        if at % PAGE_BYTES == 0:
            if flags[page] & IS_CONTINUED:
                reason = UNEXPECTED_CONTINUED
                break
            place = at + _header_bytes(base_lsn + at, segment_bytes)
            if place >= limit:
                at = place
                break
        total = le32(buffer, place)
        if total < HEADER_BYTES:
            reason = BAD_LENGTH if total else ZERO_LENGTH
            break
        if place + total <= (page + 1) * PAGE_BYTES:
            end = (place + total + 7) & ~7
        else:
            reason, end = _assemble(
                words, flags, remaining, is_good, base_lsn, segment_bytes, place, total
            )
            if reason == _LOST:
                reason = REACHED
                at = end
                continue
            if reason != REACHED:
                if reason != OUT_OF_PAGES:
                    place = end
                break
        rmid = buffer[place + 17]
        if _LAST_RMGR < rmid < _FIRST_CUSTOM_RMGR:
            reason = BAD_RMGR
            break
        prev = le64(buffer, place + 8)
        if (last_lsn and prev != last_lsn) or prev >= base_lsn + place or prev < 0:
            reason = BAD_PREV
            break
        if check_crc:
            crc = running_crc(buffer, place + HEADER_BYTES, place + total, 0xFFFFFFFF)
            crc = running_crc(buffer, place, place + 20, crc) ^ 0xFFFFFFFF
            if crc != le32(buffer, place + 20):
                reason = BAD_CRC
                break
        if rmid == _XLOG_RMGR and buffer[place + 16] & 0xF0 == _SWITCH:
            end_lsn = base_lsn + end
            end += (segment_bytes - end_lsn % segment_bytes) % segment_bytes
        last_lsn = base_lsn + place
        out_lsn[count] = last_lsn
        out_end[count] = base_lsn + end
        out_start[count] = place
        count += 1
        at = end
    return reason, count, at, place


@kernel
def read_headers(
    data: Any, start: Any, prev_lsn: Any, xid: Any, rmid: Any, info: Any, total_length: Any
) -> Any:
    for i in range(len(start)):
        at = start[i]
        total_length[i] = le32(data, at)
        xid[i] = le32(data, at + 4)
        prev_lsn[i] = le64(data, at + 8)
        info[i] = data[at + 16]
        rmid[i] = data[at + 17]


@kernel
def read_fragments(
    data: Any, start: Any, total_length: Any, begin: Any,
    top_xid: Any, origin: Any, main_start: Any, main_length: Any, first_block: Any,
    block_id: Any, fork: Any, block_flags: Any, spc: Any, db: Any, rel: Any, blkno: Any,
    image_start: Any, image_length: Any, hole_offset: Any, hole_length: Any, image_info: Any,
    data_start: Any, data_length: Any,
) -> Any:  # fmt: skip
    """The fragments of the records from `begin` on. Returns (what is wrong or 0, the record at
    which it ended): fewer than all if there was no room for more blocks."""
    blocks = first_block[begin]
    for i in range(begin, len(start)):
        at = start[i] + HEADER_BYTES
        end = start[i] + np.int64(total_length[i])
        top_xid[i] = 0
        origin[i] = 0
        main_start[i] = end
        main_length[i] = 0
        first_block[i] = blocks
        if blocks + _MAX_BLOCK_ID + 1 > len(block_id):
            return 0, i
        payload: Any = 0
        last_id: Any = -1
        has_relation = False
        while end - at > payload:
            kind = data[at]
            at += 1
            if kind in (_DATA_SHORT, _DATA_LONG):
                width = 4 if kind == _DATA_LONG else 1
                if at + width > end:
                    return FRAGMENT_PAST_END, i
                size: Any = le32(data, at) if kind == _DATA_LONG else np.int64(data[at])
                at += width
                main_length[i] = size
                payload += size
                break  # it is the last, by definition
            if kind == _ORIGIN:
                if at + 2 > end:
                    return FRAGMENT_PAST_END, i
                origin[i] = le16(data, at)
                at += 2
            elif kind == _TOP_XID:
                if at + 4 > end:
                    return FRAGMENT_PAST_END, i
                top_xid[i] = le32(data, at)
                at += 4
            elif kind <= _MAX_BLOCK_ID:
                if kind <= last_id:
                    return FRAGMENT_ORDER, i
                last_id = np.int64(kind)
                if at + 3 > end:
                    return FRAGMENT_PAST_END, i
                flag = data[at]
                size = le16(data, at + 1)
                at += 3
                if (flag & _HAS_DATA != 0) != (size != 0):
                    return FRAGMENT_DATA, i
                block_id[blocks] = kind
                fork[blocks] = flag & 0x0F
                block_flags[blocks] = flag & 0xF0
                data_length[blocks] = size
                payload += size
                image_length[blocks] = 0
                hole_offset[blocks] = 0
                hole_length[blocks] = 0
                image_info[blocks] = 0
                if flag & _HAS_IMAGE:
                    if at + 7 > end:
                        return FRAGMENT_PAST_END, i
                    image = le16(data, at)
                    hole_at = le16(data, at + 2)
                    what = data[at + 4]
                    at += 5
                    hole = 0
                    if what & _HAS_HOLE:
                        if what & _COMPRESSED:
                            hole = le16(data, at)
                            at += 2
                        else:
                            hole = PAGE_BYTES - image
                    if hole < 0 or hole_at + hole > PAGE_BYTES or image > PAGE_BYTES:
                        return FRAGMENT_IMAGE, i
                    if what & _COMPRESSED == 0 and image + hole != PAGE_BYTES:
                        return FRAGMENT_IMAGE, i
                    image_length[blocks] = image
                    hole_offset[blocks] = hole_at
                    hole_length[blocks] = hole
                    image_info[blocks] = what
                    payload += image
                if flag & _SAME_RELATION:
                    if not has_relation:
                        return FRAGMENT_NO_RELATION, i
                    spc[blocks] = spc[blocks - 1]
                    db[blocks] = db[blocks - 1]
                    rel[blocks] = rel[blocks - 1]
                else:
                    if at + 12 > end:
                        return FRAGMENT_PAST_END, i
                    spc[blocks] = le32(data, at)
                    db[blocks] = le32(data, at + 4)
                    rel[blocks] = le32(data, at + 8)
                    at += 12
                    has_relation = True
                if at + 4 > end:
                    return FRAGMENT_PAST_END, i
                blkno[blocks] = le32(data, at)
                at += 4
                blocks += 1
            else:
                return FRAGMENT_ID, i
        if end - at != payload:
            return FRAGMENT_LENGTHS, i
        for block in range(first_block[i], blocks):
            image_start[block] = at
            at += np.int64(image_length[block])
            data_start[block] = at
            at += np.int64(data_length[block])
        main_start[i] = at
        first_block[i + 1] = blocks
    return 0, len(start)
