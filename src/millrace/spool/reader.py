"""Reads a spool in files, and removes what is applied.

Invariant: only what an index describes is read, so a writer is never in the way; what was pruned,
or is missing between two segments, is an error, and never left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import FormatError, WorkDirError
from millrace.lsn import render_lsn
from millrace.postgres.pgoutput.messages import (
    FRAME_HEADER_BYTES,
    Bytes,
    RelationVersion,
    decode_relation,
    whole_frames,
)
from millrace.postgres.wire.encoding import python_encoding
from millrace.spool.index import (
    RELATION,
    IndexFile,
    Records,
    relations_before,
)
from millrace.spool.interface import FOLDER, Range, SpoolExtent
from millrace.spool.recover import check_index
from millrace.spool.segment import (
    Block,
    BlockKind,
    SegmentFile,
    SegmentReader,
    has_known_version,
    list_segments,
    remove_segment,
    sync_folder,
)


class SpoolReader:
    """Reads a spool, also while another process writes it; `encoding` by PostgreSQL's name."""

    def __init__(self, directory: Path, encoding: str = "utf-8") -> None:
        self._folder = directory / FOLDER
        self._encoding = python_encoding(encoding)
        self._indexes: dict[Path, IndexFile] = {}
        # Positions of segments that follow each other without a gap.
        self._adjacent: set[tuple[int, int]] = set()
        # Segments of our version.
        self._checked: set[Path] = set()

    def close(self) -> None:
        """Nothing stays open."""

    def extent(self) -> SpoolExtent:
        files = self._segments()
        if not files:
            return SpoolExtent(0, 0, 0)
        first = IndexFile(files[0].index_path)
        first.read()
        # Transactions that began in a segment that is gone.
        torn = first.commits[first.commits["begin"] < files[0].position]
        oldest = int(torn["end_lsn"][-1]) if len(torn) else files[0].lsn
        last = IndexFile(files[-1].index_path).read()
        ends = last["end_lsn"][last["kind"] != RELATION]
        complete = int(ends.max()) if len(ends) else files[-1].lsn
        return SpoolExtent(oldest, self.last_end_lsn(), complete)

    def last_end_lsn(self) -> int:
        """The end of the last transaction that is on disk; 0 if there is none."""
        files = self._segments()
        if not files:
            return 0
        return _last_end(files[-1], self._commits(files[-1]))

    def plan(self, after_lsn: int, max_bytes: int, until_lsn: int | None = None) -> Range | None:
        """The next whole transactions: at least one, then as many as fit; None if there is none
        yet."""
        first: Any = None
        last: Any = None
        transactions = changes = 0
        for commits in self._iter_commits(after_lsn, until_lsn):
            if first is None:
                first = commits[0]
            limit = int(first["begin"]) + max_bytes
            fitting = int(np.searchsorted(commits["end"], limit, side="right"))
            if not transactions:
                fitting = max(fitting, 1)
            if not fitting:
                break
            last = commits[fitting - 1]
            transactions += fitting
            changes += int(commits["changes"][:fitting].sum())
            if fitting < len(commits):
                break
        if last is None:
            return None
        return Range(
            after_lsn,
            int(last["end_lsn"]),
            int(last["commit_lsn"]),
            int(last["committed_at"]),
            transactions,
            changes,
            int(last["end"]) - int(first["begin"]),
            int(first["begin_block"]),
            int(first["begin"]),
            int(last["end"]),
        )

    def chunks(self, range_: Range, max_chunk_bytes: int) -> Iterator[Bytes]:
        """The frames from the first Begin to the last Commit, in buffers of whole frames."""
        held: list[Bytes] = []
        held_bytes = 0
        for block in self._iter_blocks(range_):
            if block.kind != BlockKind.FRAMES:
                continue
            first = max(0, range_.begin - block.payload_position)
            end = min(len(block.payload), range_.end - block.payload_position)
            rest = np.frombuffer(block.payload, np.uint8)[first:end]
            if held and held_bytes + len(rest) > max_chunk_bytes:
                yield _joined(held)
                held, held_bytes = [], 0
            while len(rest) > max_chunk_bytes:
                size = whole_frames(rest, max_chunk_bytes)
                yield rest[:size]
                rest = rest[size:]
            if len(rest):
                held.append(rest)
                held_bytes += len(rest)
        if held:
            yield _joined(held)

    def relations(self, range_: Range) -> dict[int, RelationVersion]:
        """The relations as they were known where the range begins."""
        file = self._segment_of(self._segments(), range_.begin_block, range_)
        frames = relations_before(file, self._index(file), range_.begin)
        found = {}
        for oid, frame in frames.items():
            found[oid] = decode_relation(frame[FRAME_HEADER_BYTES:], self._encoding)
        return found

    def bytes_after(self, lsn: int) -> int:
        """How much there is to read after a position."""
        first: int | None = None
        end = 0
        for commits in self._iter_commits(lsn, None):
            if first is None:
                first = int(commits["begin"][0])
            end = int(commits["end"][-1])
        return 0 if first is None else end - first

    def _segments(self) -> list[SegmentFile]:
        """The segments, one after the other; a gap between two of them is an error."""
        gap: tuple[SegmentFile, SegmentFile] | None = None
        while True:
            files = list_segments(self._folder)
            found = next((pair for pair in pairwise(files) if self._has_gap(*pair)), None)
            if found is None:
                self._check_versions(files)
                return files
            if found == gap:
                raise _missing(*found)
            gap = found  # a listing is not of one moment: what was pruned meanwhile is not missing

    def _check_versions(self, files: list[SegmentFile]) -> None:
        """Before an index is read, whose layout is of the segment's version."""
        for file in files:
            if file.path not in self._checked and has_known_version(file):
                self._checked.add(file.path)

    def _has_gap(self, file: SegmentFile, following: SegmentFile) -> bool:
        if (file.position, following.position) in self._adjacent:
            return False
        try:
            end = file.position + file.path.stat().st_size
        except FileNotFoundError:
            return True
        if end == following.position:
            self._adjacent.add((file.position, following.position))
        return end != following.position

    def _iter_commits(self, after_lsn: int, until_lsn: int | None) -> Iterator[Records]:
        """The commits after a position, a segment at a time."""
        files = self._segments()
        if not files:
            return
        at = bisect_right([file.lsn for file in files], after_lsn) - 1
        if at < 0:
            raise _pruned(self._folder, after_lsn, files[0].lsn)
        for file, following in zip_longest(files[at:], files[at + 1 :]):
            commits = self._commits(file)
            if following is not None and _last_end(file, commits) != following.lsn:
                # It was whole before the next segment began: somebody has harmed it since.
                check_index(file, following)
                self._indexes.pop(file.path, None)
                commits = self._commits(file)
            first = int(np.searchsorted(commits["end_lsn"], after_lsn, side="right"))
            end = len(commits)
            if until_lsn is not None:
                end = int(np.searchsorted(commits["end_lsn"], until_lsn, side="right"))
            if first < end:
                if int(commits["begin"][first]) < files[0].position:
                    raise _pruned(self._folder, after_lsn, int(commits["end_lsn"][first]))
                yield commits[first:end]
            if end < len(commits):
                return

    def _iter_blocks(self, range_: Range) -> Iterator[Block]:
        files = self._segments()
        position = range_.begin_block
        while position < range_.end:
            file = self._segment_of(files, position, range_)
            with SegmentReader(file) as reader:
                end = min(range_.end, reader.end)
                if position >= end:
                    raise reader.damaged(position, "expected another block")
                for block in reader.iter_blocks(position, end):
                    yield block
                    position = block.end

    def _segment_of(self, files: list[SegmentFile], position: int, range_: Range) -> SegmentFile:
        at = bisect_right([file.position for file in files], position) - 1
        if at < 0:
            pruned_to = files[0].lsn if files else range_.end_lsn
            raise _pruned(self._folder, range_.after_lsn, pruned_to)
        return files[at]

    def _commits(self, file: SegmentFile) -> Records:
        index = self._index(file)
        index.read()
        return index.commits

    def _index(self, file: SegmentFile) -> IndexFile:
        return self._indexes.setdefault(file.path, IndexFile(file.index_path))


def prune(directory: Path, applied_lsn: int) -> int:
    """Remove the segments whose transactions all end at or before `applied_lsn`; the bytes
    freed. The newest segment stays."""
    folder = directory / FOLDER
    removed = 0
    for file, size in _prunable(folder, applied_lsn):
        remove_segment(file)
        removed += size
    if removed:
        sync_folder(folder)
    return removed


def prunable_bytes(directory: Path, applied_lsn: int) -> int:
    """How much `prune` would free."""
    return sum(size for _, size in _prunable(directory / FOLDER, applied_lsn))


def _prunable(folder: Path, applied_lsn: int) -> Iterator[tuple[SegmentFile, int]]:
    files = list_segments(folder)
    needed = _first_needed(files, applied_lsn)
    for file, following in pairwise(files):
        if following.position > needed:
            return
        yield file, following.position - file.position


def _first_needed(files: list[SegmentFile], applied_lsn: int) -> int:
    """The position of the first block that is still to be applied."""
    needed = 0
    for file in files:
        index = IndexFile(file.index_path)
        index.read()
        commits = index.commits
        at = int(np.searchsorted(commits["end_lsn"], applied_lsn, side="right"))
        if at < len(commits):
            return int(commits["begin_block"][at])
        if len(commits):
            # The next transaction, perhaps an open one, begins here at the earliest.
            needed = int(commits["end"][-1])
    return needed


def _last_end(file: SegmentFile, commits: Records) -> int:
    """The end of the last transaction in a segment, or before it."""
    return int(commits["end_lsn"][-1]) if len(commits) else file.lsn


def _joined(parts: list[Bytes]) -> Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _pruned(folder: Path, after_lsn: int, known_lsn: int) -> WorkDirError:
    return WorkDirError(
        f"{folder} was pruned: changes after {render_lsn(after_lsn)} are requested, "
        f"it begins after {render_lsn(known_lsn)}",
        hint="the target is behind the position that was recorded as applied: make a new clone, "
        "or restore the target to that position",
    )


def _missing(file: SegmentFile, following: SegmentFile) -> FormatError:
    return FormatError(
        f"a segment of the spool is missing: between {file.path} and {following.path.name}",
        hint="the source no longer has these changes: they were confirmed as stored; make a new "
        "clone, or restore the file from a backup",
        path=str(file.path),
    )
