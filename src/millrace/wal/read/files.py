"""The segments of one history: directories in, bytes by WAL position out.

Invariant: every segment that is read belongs to one system, one version and the chosen history, and
none is missing between the first and the last. Files that a server keeps for later use, whose pages
still have old addresses or none, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millrace.errors import ConfigError, FormatError
from millrace.lsn import render_lsn
from millrace.wal.read.page import (
    IS_LONG,
    LONG_HEADER_BYTES,
    PAGE_BYTES,
    LongHeader,
    decode_long_header,
    is_segment_size,
)
from millrace.wal.read.record import U8
from millrace.wal.read.segment import (
    SegmentFile,
    name_of_number,
    parse_history_name,
    parse_segment_name,
    read_head,
    read_history_file,
    read_into,
)
from millrace.wal.read.timeline import History, parse_history, single_history
from millrace.wal.read.version import VERSIONS, WalVersion, name_of_magic, version_of_magic


@dataclass(frozen=True, slots=True)
class WalFiles:
    """Segments in order, without a gap."""

    version: WalVersion
    history: History
    segment_bytes: int
    system_identifier: int
    first_number: int
    segments: tuple[SegmentFile, ...]

    @property
    def start_lsn(self) -> int:
        return self.first_number * self.segment_bytes

    @property
    def end_lsn(self) -> int:
        """The end of the last segment, or where its timeline was left."""
        end = (self.first_number + len(self.segments)) * self.segment_bytes
        left_at = self.history.end_of(self.segments[-1].timeline)
        return end if left_at is None else min(end, left_at)

    def file_at(self, lsn: int) -> SegmentFile | None:
        place = lsn // self.segment_bytes - self.first_number
        return self.segments[place] if 0 <= place < len(self.segments) else None

    def name_at(self, lsn: int) -> str:
        """The file that holds a position, or the name it would have."""
        if file := self.file_at(lsn):
            return file.path
        number = lsn // self.segment_bytes
        timeline = self.history.timeline_at((number + 1) * self.segment_bytes - 1)
        return name_of_number(timeline, number, self.segment_bytes)

    def read(self, lsn: int, size: int) -> U8:
        """Bytes from a position on, in an array of their own; fewer than asked for where the files
        end."""
        end = (self.first_number + len(self.segments)) * self.segment_bytes
        out = np.empty(max(min(size, end - lsn), 0), np.uint8)
        at = 0
        while at < out.size and (file := self.file_at(lsn + at)):
            offset = (lsn + at) % self.segment_bytes
            wanted = out[at : at + self.segment_bytes - offset]
            count = read_into(file, offset, wanted, self.segment_bytes)
            at += count
            if count < wanted.size:
                break
        return out[:at]


def open_wal(
    directories: Sequence[Path],
    *,
    timeline: int | None = None,
    start_lsn: int | None = None,
    end_lsn: int | None = None,
    system_identifier: int | None = None,
) -> WalFiles:
    """The segments from `start_lsn`, or the first that there is, up to the last. A gap is an error
    if it lies before `end_lsn`."""
    files, histories = _list_files(directories)
    if not files:
        where = ", ".join(str(directory) for directory in directories)
        raise FormatError(f"no WAL segment in {where}", hint="name the directory of the archive")
    segment_bytes = _segment_size(files)
    history = _choose_history(files, histories, timeline)
    chosen = _choose_segments(files, history, segment_bytes)
    first, last = min(chosen), max(chosen)
    if start_lsn is not None:
        first = start_lsn // segment_bytes
    while last > first and end_lsn is not None and _has_gap(chosen, end_lsn // segment_bytes, last):
        last -= 1
    headers, last = _probe(chosen, first, last, history, segment_bytes)
    identifier = _check_system(chosen, headers, system_identifier)
    return WalFiles(
        version=_version_of(chosen, headers),
        history=history,
        segment_bytes=segment_bytes,
        system_identifier=identifier,
        first_number=first,
        segments=tuple(chosen[number] for number in range(first, last + 1)),
    )


def _list_files(directories: Iterable[Path]) -> tuple[list[SegmentFile], dict[int, Path]]:
    files: list[SegmentFile] = []
    histories: dict[int, Path] = {}
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(
                f"{directory} is no directory", hint="--wal names a directory with WAL segments"
            )
        for path in sorted(directory.iterdir()):
            if file := parse_segment_name(path):
                files.append(file)
            elif (timeline := parse_history_name(path)) is not None:
                histories.setdefault(timeline, path)
    return files, histories


def _segment_size(files: Sequence[SegmentFile]) -> int:
    """As the first file says that has a header at all."""
    for file in sorted(files, key=lambda f: (f.timeline, f.high, f.low)):
        header = decode_long_header(read_head(file, LONG_HEADER_BYTES))
        if header is None or not header.magic:
            continue
        _check_version(file, header)
        if not is_segment_size(header.segment_bytes) or not header.flags & IS_LONG:
            raise _bad_header(file, f"a segment of {header.segment_bytes} bytes")
        return header.segment_bytes
    raise FormatError(
        f"{files[0].path}: no WAL in this file, nor in the {len(files) - 1} others",
        hint="name the directory of the archive",
        file=files[0].path,
        offset=0,
    )


def _choose_history(
    files: Sequence[SegmentFile], histories: dict[int, Path], timeline: int | None
) -> History:
    newest = timeline or max([*histories, *(file.timeline for file in files)])
    if path := histories.get(newest):
        return parse_history(read_history_file(path), newest, str(path))
    others = {file.timeline for file in files if file.timeline < newest}
    if newest == 1 or not others:
        return single_history(newest)
    raise FormatError(
        f"segments of timelines {min(others)} and {newest}, without {newest:08X}.history",
        hint="put the history file beside the segments, or choose one timeline with --timeline",
        timeline=newest,
    )


def _choose_segments(
    files: Sequence[SegmentFile], history: History, segment_bytes: int
) -> dict[int, SegmentFile]:
    """For each number the file to read: of the newest timeline that has it, whole before partial,
    plain before compressed."""
    chosen: dict[int, SegmentFile] = {}
    for file in sorted(files, key=_preference):
        if file.timeline not in history.timelines:
            continue
        number = file.number(segment_bytes)
        begin = history.begins[history.timelines.index(file.timeline)]
        end = history.end_of(file.timeline)
        is_before = number < begin // segment_bytes
        is_after = end is not None and number * segment_bytes >= end
        if not is_before and not is_after:
            chosen.setdefault(number, file)
    if not chosen:
        raise FormatError(
            f"no segment of timeline {history.newest} nor of its ancestors",
            hint="choose another timeline with --timeline",
            timeline=history.newest,
        )
    return chosen


def _has_gap(chosen: dict[int, SegmentFile], number: int, last: int) -> bool:
    """Between that segment, which itself may be missing, and the last."""
    return any(n not in chosen for n in range(number + 1, last + 1))


def _preference(file: SegmentFile) -> tuple[int, bool, bool, str]:
    return -file.timeline, file.is_partial, file.codec is not None, file.path


def _probe(
    chosen: dict[int, SegmentFile], first: int, last: int, history: History, segment_bytes: int
) -> tuple[dict[int, LongHeader], int]:
    """The headers of the segments that are in use, and the last of them."""
    headers: dict[int, LongHeader] = {}
    unused: list[int] = []
    for number in range(first, last + 1):
        if number not in chosen:
            raise _missing(chosen, number, history, segment_bytes)
        header = _read_header(chosen[number], number, segment_bytes)
        if header is None:
            unused.append(number)
            continue
        if unused:
            raise _bad_header(chosen[unused[0]], "no page of this segment")
        headers[number] = header
    if not headers:
        raise _missing(chosen, first, history, segment_bytes)
    return headers, max(headers)


def _read_header(file: SegmentFile, number: int, segment_bytes: int) -> LongHeader | None:
    """None for a file that holds nothing of its segment: it is empty, or from before."""
    header = decode_long_header(read_head(file, LONG_HEADER_BYTES))
    expected = number * segment_bytes
    if header is None or header == LongHeader(0, 0, 0, 0, 0, 0, 0, 0):
        return None
    _check_version(file, header)
    if header.segment_bytes != segment_bytes or not header.flags & IS_LONG:
        raise _bad_header(file, f"a segment of {header.segment_bytes} bytes")
    if header.page_bytes != PAGE_BYTES:
        raise _bad_header(file, f"pages of {header.page_bytes} bytes")
    if header.address != expected:
        if header.address < expected and header.address % segment_bytes == 0:
            return None
        raise _bad_header(file, f"a page with address {render_lsn(header.address)}")
    return header


def _check_version(file: SegmentFile, header: LongHeader) -> None:
    if version_of_magic(header.magic):
        return
    majors = ", ".join(str(version.major) for version in VERSIONS)
    raise FormatError(
        f"{file.path}: {name_of_magic(header.magic)} at offset 0",
        hint=f"WAL of PostgreSQL {majors} can be read; if it is one of them, the file is damaged",
        file=file.path,
        offset=0,
        magic=header.magic,
    )


def _check_system(
    chosen: dict[int, SegmentFile], headers: dict[int, LongHeader], expected: int | None
) -> int:
    first = min(headers)
    wanted = headers[first].system_identifier if expected is None else expected
    for number, header in headers.items():
        if header.system_identifier != wanted:
            origin = "the base" if expected is not None else chosen[first].path
            raise FormatError(
                f"{chosen[number].path}: system identifier {header.system_identifier}, "
                f"{origin} has {wanted}",
                hint="name only directories with the WAL of one server",
                file=chosen[number].path,
                offset=24,
            )
    return wanted


def _version_of(chosen: dict[int, SegmentFile], headers: dict[int, LongHeader]) -> WalVersion:
    first = min(headers)
    for number, header in headers.items():
        if header.magic != headers[first].magic:
            raise FormatError(
                f"{chosen[number].path}: {name_of_magic(header.magic)}, but "
                f"{chosen[first].path} has {name_of_magic(headers[first].magic)}",
                hint="an upgraded server begins anew: read the WAL of each version alone",
                file=chosen[number].path,
                offset=0,
            )
    version = version_of_magic(headers[first].magic)
    assert version is not None
    return version


def _missing(
    chosen: dict[int, SegmentFile], number: int, history: History, segment_bytes: int
) -> FormatError:
    lsn = number * segment_bytes
    timeline = history.timeline_at(lsn + segment_bytes - 1)
    name = name_of_number(timeline, number, segment_bytes)
    there = f"{chosen[min(chosen)].name} to {chosen[max(chosen)].name}"
    return FormatError(
        f"segment {name} is missing (from {render_lsn(lsn)}); there are segments from {there}",
        hint="fetch it from the archive, or name its directory with another --wal",
        file=name,
        offset=0,
        lsn=render_lsn(lsn),
    )


def _bad_header(file: SegmentFile, what: str) -> FormatError:
    return FormatError(
        f"{file.path}: {what}, which cannot be in this file",
        hint="fetch the file again from the archive",
        file=file.path,
        offset=0,
    )
