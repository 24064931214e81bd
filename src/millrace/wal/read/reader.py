"""Records out of segments, window by window.

Invariant: returns only whole records with a right checksum, each linked to the one before. The end
of WAL is no error; a gap is, and so is anything else that a server does not write.

A server fills pages with zeros before it writes records, and pages that it has not come to are
zero or still have the address of the segment that the file held before. So the end of WAL is
recognised, and whatever looks different there is damage.

Facts: xlogreader.c, XLogDecodeNextRecord() and XLogReaderValidatePageHeader(); xlog.c,
AdvanceXLInsertBuffer().
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal.read import reader_kernel as kernels
from millrace.wal.read.files import WalFiles
from millrace.wal.read.page import (
    ALL_FLAGS,
    IS_CONTINUED,
    IS_LONG,
    LONG_HEADER_BYTES,
    PAGE_BYTES,
    SHORT_HEADER_BYTES,
    decode_headers,
    decode_long_header,
)
from millrace.wal.read.record import (
    BLOCK_COLUMNS,
    I64,
    RECORD_COLUMNS,
    U8,
    U64,
    Records,
    concat,
    empty_records,
)

# Pages that are held at once. One segment of the usual size.
WINDOW_BYTES = 16 << 20
_FRAGMENT_COLUMNS = ("top_xid", "origin", "main_start", "main_length")
_REASONS = {
    kernels.BAD_PAGE: "a page header that does not belong here",
    kernels.ZERO_LENGTH: "no record",
    kernels.BAD_LENGTH: "a record of less than 24 bytes",
    kernels.NOT_CONTINUED: "a page that does not continue the record before it",
    kernels.BAD_REMAINING: "a page that continues another record",
    kernels.UNEXPECTED_CONTINUED: "a page that continues a record that does not exist",
    kernels.BAD_RMGR: "a record of an unknown resource manager",
    kernels.BAD_PREV: "a record that is not linked to the one before",
    kernels.BAD_CRC: "a record with a wrong checksum",
}
_FRAGMENT_REASONS = {
    kernels.FRAGMENT_ID: "an unknown fragment",
    kernels.FRAGMENT_ORDER: "block references out of order",
    kernels.FRAGMENT_PAST_END: "a fragment header past its end",
    kernels.FRAGMENT_LENGTHS: "lengths that do not add up",
    kernels.FRAGMENT_NO_RELATION: "a block reference without a relation",
    kernels.FRAGMENT_IMAGE: "an impossible page image",
    kernels.FRAGMENT_DATA: "a block reference whose flags and length disagree",
}
# What is read more when a record goes past a window, at first.
_MORE_BYTES = 8 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class _Window:
    """Whole pages, and what their headers say; a walk changes the pages."""

    pages: U8
    base_lsn: int
    flags: NDArray[np.uint16]
    remaining: NDArray[np.uint32]
    is_good: NDArray[np.bool_]

    @property
    def end_lsn(self) -> int:
        return self.base_lsn + self.pages.size


@dataclass(frozen=True, slots=True)
class _Walk:
    """What a walk over a window has found, and why it ended."""

    records: Records
    reason: int
    stop_lsn: int  # where the reason is


def iter_records(
    files: WalFiles,
    start_lsn: int | None = None,
    end_lsn: int | None = None,
    *,
    check_crc: bool = True,
    window_bytes: int = WINDOW_BYTES,
) -> Iterator[Records]:
    """The records that start at or after `start_lsn` and before `end_lsn` or the end of WAL.

    The start may lie within a record. With an end, all up to there must exist.
    """
    at = files.start_lsn if start_lsn is None else start_lsn
    limit = files.end_lsn if end_lsn is None else min(end_lsn, files.end_lsn)
    is_aligned = False
    last_lsn = more_bytes = 0
    while at < limit:
        boundary = (at // window_bytes + 1) * window_bytes
        window = _read_window(files, at, boundary + more_bytes)
        if not is_aligned:
            at, is_aligned = _find_record(files, window)
            continue
        walk = _walk(files, window, at, min(limit, boundary), last_lsn, check_crc)
        at = walk.records.next_lsn
        if len(walk.records):
            last_lsn, more_bytes = int(walk.records.lsn[-1]), 0
            yield _without_before(walk.records, start_lsn)
        if walk.reason == kernels.OUT_OF_PAGES and window.end_lsn == boundary + more_bytes:
            # A record goes on behind the window. Its pages must say so, so this ends with them.
            more_bytes = max(_MORE_BYTES, 2 * more_bytes)
        elif walk.reason != kernels.REACHED:
            _check_is_end(files, window, walk)
            break
    _check_reached(files, at, end_lsn)


def read_records(
    files: WalFiles,
    start_lsn: int | None = None,
    end_lsn: int | None = None,
    *,
    check_crc: bool = True,
) -> Records:
    """All of a stretch at once."""
    parts = list(iter_records(files, start_lsn, end_lsn, check_crc=check_crc))
    if parts:
        return concat(parts)
    return empty_records(files.version, files.start_lsn if start_lsn is None else start_lsn)


def _read_window(files: WalFiles, lsn: int, end_lsn: int) -> _Window:
    """The pages from the one that holds a position on."""
    base_lsn = lsn - lsn % PAGE_BYTES
    pages = files.read(base_lsn, end_lsn - base_lsn)
    pages = pages[: pages.size - pages.size % PAGE_BYTES]
    headers = decode_headers(pages)
    address = base_lsn + np.arange(len(headers), dtype=np.uint64) * np.uint64(PAGE_BYTES)
    is_continued = headers["flags"] & IS_CONTINUED != 0
    is_good = (
        (headers["magic"] == files.version.magic)
        & (headers["address"] == address)
        & (headers["timeline"] == _timelines(files, address))
        & (headers["flags"] & ~np.uint16(ALL_FLAGS) == 0)
        & (is_continued == (headers["remaining"] != 0))
        & _has_right_length(files, pages, headers["flags"], address)
    )
    flags, remaining = headers["flags"].copy(), headers["remaining"].copy()
    return _Window(pages, base_lsn, flags, remaining, is_good)


def _timelines(files: WalFiles, address: U64) -> NDArray[np.int64]:
    begins = np.array(files.history.begins, np.uint64)
    place = np.maximum(np.searchsorted(begins, address, "right") - 1, 0)
    return np.array(files.history.timelines, np.int64)[place]


def _has_right_length(
    files: WalFiles, pages: U8, flags: NDArray[np.uint16], address: U64
) -> NDArray[np.bool_]:
    """The first page of a segment has a long header, which names the system; no other has one."""
    is_first = address % np.uint64(files.segment_bytes) == 0
    is_right: NDArray[np.bool_] = (flags & IS_LONG != 0) == is_first
    for page in np.flatnonzero(is_first & is_right):
        begin = int(page) * PAGE_BYTES
        header = decode_long_header(pages[begin : begin + PAGE_BYTES].tobytes())
        assert header is not None
        is_right[page] = (
            header.system_identifier == files.system_identifier
            and header.segment_bytes == files.segment_bytes
            and header.page_bytes == PAGE_BYTES
        )
    return is_right


def _find_record(files: WalFiles, window: _Window) -> tuple[int, bool]:
    """(where the first record of a window begins, True), or (its end, False)."""
    offset = int(
        kernels.first_record(
            window.flags, window.remaining, window.is_good, window.base_lsn, files.segment_bytes
        )
    )
    if offset < 0 or not window.pages.size:
        bad = int(np.argmin(window.is_good)) * PAGE_BYTES if window.pages.size else 0
        raise _damage(files, window.base_lsn + bad, "no page of this WAL")
    return window.base_lsn + offset, offset < window.pages.size


def _walk(
    files: WalFiles, window: _Window, lsn: int, limit: int, last_lsn: int, check_crc: bool
) -> _Walk:
    capacity = window.pages.size // kernels.HEADER_BYTES + 1
    starts, ends = np.empty(capacity, np.uint64), np.empty(capacity, np.uint64)
    places = np.empty(capacity, np.int64)
    reason, count, next_at, stop_at = kernels.walk_records(
        window.pages, window.pages.view(np.uint64),
        window.flags, window.remaining, window.is_good, window.base_lsn, files.segment_bytes,
        lsn - window.base_lsn, limit - window.base_lsn, last_lsn, check_crc,
        starts, ends, places,
    )  # fmt: skip
    records = _split(
        files, window.pages, starts[:count].copy(), ends[:count].copy(), places[:count].copy(),
        window.base_lsn + next_at,
    )  # fmt: skip
    return _Walk(records, reason, window.base_lsn + stop_at)


def _split(files: WalFiles, data: U8, lsn: U64, end_lsn: U64, start: I64, next_lsn: int) -> Records:
    """The headers and fragments of whole records."""
    count = len(lsn)
    columns: dict[str, Any] = {name: np.empty(count, kind) for name, kind in RECORD_COLUMNS.items()}
    columns |= {"lsn": lsn, "end_lsn": end_lsn, "start": start}
    names = ("prev_lsn", "xid", "rmid", "info", "total_length")
    kernels.read_headers(data, start, *(columns[name] for name in names))
    first_block = np.zeros(count + 1, np.int64)
    room = 2 * count + 64
    blocks = {name: np.empty(room, kind) for name, kind in BLOCK_COLUMNS.items()}
    done = 0
    while done < count:
        arguments = [data, start, columns["total_length"], done]
        arguments += [columns[name] for name in _FRAGMENT_COLUMNS]
        arguments += [first_block, *blocks.values()]
        wrong, done = kernels.read_fragments(*arguments)
        if wrong:
            raise _damage(files, int(lsn[done]), f"a record with {_FRAGMENT_REASONS[wrong]}")
        if done < count:
            room *= 2
            blocks = {name: np.resize(column, room) for name, column in blocks.items()}
    used = int(first_block[-1])
    return Records(
        version=files.version,
        first_block=first_block,
        data=data,
        next_lsn=next_lsn,
        **columns,
        **{name: column[:used].copy() for name, column in blocks.items()},
    )


def _without_before(records: Records, start_lsn: int | None) -> Records:
    if start_lsn is None or int(records.lsn[0]) >= start_lsn:
        return records
    return records.take(records.lsn >= np.uint64(start_lsn))


def _check_is_end(files: WalFiles, window: _Window, walk: _Walk) -> None:
    """A server may have stopped here; otherwise the file is damaged."""
    if walk.reason == kernels.OUT_OF_PAGES:
        return  # the last record is not whole, because the files end
    what = _REASONS[walk.reason]
    if walk.reason not in (kernels.BAD_PAGE, kernels.ZERO_LENGTH):
        raise _damage(files, walk.stop_lsn, what)
    offset = walk.stop_lsn - window.base_lsn
    page_end = offset - offset % PAGE_BYTES + PAGE_BYTES
    is_zero = not window.pages[offset:page_end].any()
    is_old = walk.reason == kernels.BAD_PAGE and _is_old_page(files, window, offset)
    if not is_zero and not is_old:
        raise _damage(files, walk.stop_lsn, what)
    if _goes_on(files, window.base_lsn + page_end):
        raise _damage(files, walk.stop_lsn, f"{what}, and WAL goes on behind it")


def _is_old_page(files: WalFiles, window: _Window, offset: int) -> bool:
    """A page of the segment for which the file was used before: its address is that of the same
    place in an earlier segment, and what it holds is not younger."""
    page = window.pages[offset : offset + PAGE_BYTES]
    header = decode_headers(page)[0]
    address, expected = int(header["address"]), window.base_lsn + offset
    back = expected - address
    if header["magic"] != files.version.magic or back <= 0 or back % files.segment_bytes:
        return False
    is_long = bool(header["flags"] & IS_LONG)
    at = LONG_HEADER_BYTES if is_long else SHORT_HEADER_BYTES
    at += (int(header["remaining"]) + 7) & ~7
    if at + kernels.HEADER_BYTES > PAGE_BYTES:
        return True
    prev = int.from_bytes(page[at + 8 : at + 16].tobytes(), "little")
    return prev < address + PAGE_BYTES


def _goes_on(files: WalFiles, lsn: int) -> bool:
    """Whether any page from there on is one of this WAL."""
    while lsn < files.end_lsn:
        boundary = (lsn // WINDOW_BYTES + 1) * WINDOW_BYTES
        window = _read_window(files, lsn, boundary)
        if not window.pages.size:
            return False
        if window.is_good.any():
            return True
        lsn = window.end_lsn
    return False


def _check_reached(files: WalFiles, lsn: int, end_lsn: int | None) -> None:
    if not lsn % PAGE_BYTES:  # no record can start in the header of a page
        is_first = lsn % files.segment_bytes == 0
        lsn += LONG_HEADER_BYTES if is_first else SHORT_HEADER_BYTES
    if end_lsn is None or lsn >= end_lsn:
        return
    raise FormatError(
        f"{files.name_at(lsn)}: WAL ends at {render_lsn(lsn)}, before {render_lsn(end_lsn)}",
        hint="fetch the segments that follow from the archive, or end earlier with --to",
        file=files.name_at(lsn),
        offset=lsn % files.segment_bytes,
        lsn=render_lsn(lsn),
    )


def _damage(files: WalFiles, lsn: int, what: str) -> FormatError:
    offset = lsn % files.segment_bytes
    return FormatError(
        f"{files.name_at(lsn)}, offset {offset} ({render_lsn(lsn)}): {what}",
        hint="the file is damaged: fetch it again from the archive; at the end of a crashed "
        "server's WAL, end before it with --to",
        file=files.name_at(lsn),
        offset=offset,
        lsn=render_lsn(lsn),
    )
