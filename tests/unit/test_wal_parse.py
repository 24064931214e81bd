"""Stretches of WAL, parsed one by one, are the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.fixtures.decode.wal_writer import SEGMENT, WalWriter, block_record, main_fragment
from tests.fixtures.engines.direct_engine import DirectEngine

from millrace.decode.parsing import ParsedPieces
from millrace.errors import FormatError
from millrace.wal.read.files import open_wal
from millrace.wal.read.parse_task import (
    Parsed,
    check_joins,
    is_needed,
    parse_stretch,
    plan_stretches,
)
from millrace.wal.read.reader import read_records
from millrace.wal.read.record import Records, column_names, concat
from millrace.wal.read.record_file import read_record_file

BTREE, XACT = 11, 1


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    wal = WalWriter()
    draw = np.random.default_rng(5)
    xid = 700
    while len(wal.data) < 3 * SEGMENT + 5000:
        wal.add(block_record(b"t" * int(draw.integers(5, 3000)), b"f" * 3), xid=xid)
        wal.add(block_record(b"i" * 30, b"off"), rmid=BTREE, xid=xid)
        if draw.integers(0, 4) == 0:
            wal.add(main_fragment(bytes(8)), rmid=XACT, xid=xid)
            xid += 1
    folder = tmp_path / "wal"
    folder.mkdir()
    wal.save(folder)
    return folder


def rows(records: Records) -> list[tuple[int, int, bytes, bytes]]:
    return [
        (
            int(records.lsn[i]),
            int(records.xid[i]),
            records.main_data(i),
            b"".join(
                records.block_data(b)
                for b in range(int(records.first_block[i]), int(records.first_block[i + 1]))
            ),
        )
        for i in range(len(records))
    ]


def test_stretches_one_after_the_other_are_the_whole(directory: Path, tmp_path: Path) -> None:
    files = open_wal([directory])
    whole = read_records(files)
    stretches = plan_stretches(files, files.start_lsn, None, tmp_path)
    parsed = [parse_stretch(stretch) for stretch in stretches]
    check_joins(parsed)
    assert len(stretches) == 4
    together = concat([read_record_file(part.path) for part in parsed])
    found = {row[0]: row for row in rows(together)}
    # Transactions that span stretches have a first record in each.
    assert rows(whole.take(is_needed(whole))) == [
        found[int(lsn)] for lsn in whole.lsn[is_needed(whole)]
    ]
    assert len(whole) > len(together) > len(whole) // 2
    assert parsed[-1].next_lsn == whole.next_lsn


def test_a_second_attempt_writes_the_same_file(directory: Path, tmp_path: Path) -> None:
    files = open_wal([directory])
    (stretch, *_) = plan_stretches(files, files.start_lsn, None, tmp_path)
    first = parse_stretch(stretch)
    content = first.path.read_bytes()
    assert parse_stretch(stretch, 1) == first
    assert first.path.read_bytes() == content
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


def test_a_file_of_records_is_read_as_it_was_written(directory: Path, tmp_path: Path) -> None:
    files = open_wal([directory])
    (stretch, *_) = plan_stretches(files, files.start_lsn, None, tmp_path)
    path = parse_stretch(stretch).path
    expected = read_records(files, stretch.start_lsn, stretch.end_lsn)
    expected = expected.take(is_needed(expected))
    found = read_record_file(path)
    for name in column_names():
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FormatError, match="no file of parsed records"):
        read_record_file(path)


@pytest.mark.parametrize("jobs", [1, 3])
def test_pieces_of_tasks_are_in_order_whatever_the_number_of_tasks(
    directory: Path, tmp_path: Path, jobs: int
) -> None:
    files = open_wal([directory])
    pieces = ParsedPieces(files, None, DirectEngine(), tmp_path, jobs)
    found = [(piece, rows(records)) for piece, records in pieces.read(files.start_lsn, None)]
    assert [piece for piece, _ in found] == sorted(
        int(p.stem, 16) for p in tmp_path.glob("*.records")
    )
    assert rows(pieces.get(found[1][0])) == found[1][1]
    kept = [row[0] for _, piece_rows in found for row in piece_rows]
    assert kept == sorted(kept)


def test_stretches_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    parts = [
        Parsed(tmp_path, 2, 100, 140, 60, 180),
        Parsed(tmp_path, 0, 0, 0, 0, 200),
        Parsed(tmp_path, 1, 220, 220, 139, 260),
    ]
    with pytest.raises(FormatError, match="the record at 0/DC follows 0/8B"):
        check_joins(parts)
