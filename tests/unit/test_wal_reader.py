"""WAL files that were written here, read back; and what is said of those that are damaged."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.decode.wal_writer import (
    PAGE,
    SEGMENT,
    SWITCH,
    XLOG,
    WalWriter,
    block_record,
    main_fragment,
)

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal.read import crc
from millrace.wal.read.files import open_wal
from millrace.wal.read.reader import iter_records, read_records
from millrace.wal.read.record import Records, concat

SIZES = st.one_of(st.integers(0, 300), st.integers(8000, 9000), st.integers(0, 40_000))


def written(sizes: list[int], **settings: int) -> WalWriter:
    """A stream with a record of each size; every one is recognised by its bytes."""
    wal = WalWriter(**settings)
    for number, size in enumerate(sizes):
        wal.add(main_fragment(bytes([number % 251]) * size), xid=number + 3)
    return wal


def contents(records: Records) -> list[tuple[int, int, bytes]]:
    numbers = range(len(records))
    return [(int(records.lsn[i]), int(records.xid[i]), records.main_data(i)) for i in numbers]


def big() -> WalWriter:
    """Three segments; the last is half full, and a record spans the last two."""
    wal = written([int(s) for s in np.random.default_rng(1).integers(0, 700, 5000)])
    wal.add(main_fragment(b"long" * 100_000))
    while len(wal.data) < 2 * SEGMENT + SEGMENT // 2:
        wal.add(block_record(b"d" * 60, b"m" * 3))
    return wal


@pytest.fixture(scope="module")
def stream() -> WalWriter:
    return big()


@pytest.fixture
def directory(stream: WalWriter, tmp_path: Path) -> Path:
    stream.save(tmp_path)
    return tmp_path


@given(sizes=st.lists(SIZES, min_size=1, max_size=40), data=st.data())
@settings(max_examples=25)
def test_what_was_written_is_read_whatever_the_window_and_wherever_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    wal = written(sizes)
    folder = tmp_path_factory.mktemp("wal")
    wal.save(folder)
    files = open_wal([folder])
    expected = contents(read_records(files))
    assert [lsn for lsn, _, _ in expected] == wal.lsns
    assert [len(main) for _, _, main in expected] == sizes
    window = data.draw(st.sampled_from([PAGE, 4 * PAGE, SEGMENT]))
    assert contents(concat(list(iter_records(files, window_bytes=window)))) == expected
    cut = data.draw(st.integers(wal.base, wal.lsn))
    parts = [read_records(files, None, cut), read_records(files, cut)]
    assert [row for part in parts for row in contents(part)] == expected


def test_fragments_of_a_record_have_their_places(tmp_path: Path) -> None:
    wal = WalWriter()
    wal.add(block_record(b"block", b"main", rel=99, blkno=7, top_xid=5, origin=3), xid=6)
    wal.save(tmp_path)
    records = read_records(open_wal([tmp_path]))
    assert (records.block_data(0), records.main_data(0)) == (b"block", b"main")
    assert (records.rel[0], records.blkno[0]) == (99, 7)
    assert (records.top_xid[0], records.origin[0], records.xid[0]) == (5, 3, 6)
    assert records.find_block(0, 1) == -1
    assert records.end_lsn[0] == wal.lsn


def test_a_selection_has_the_same_bytes(directory: Path) -> None:
    records = read_records(open_wal([directory]))
    chosen = records.take(np.arange(len(records)) % 7 == 3)
    every = [(records.main_data(i), *_blocks(records, i)) for i in range(3, len(records), 7)]
    assert [(chosen.main_data(i), *_blocks(chosen, i)) for i in range(len(chosen))] == every


def _blocks(records: Records, i: int) -> Iterator[bytes]:
    for block in range(int(records.first_block[i]), int(records.first_block[i + 1])):
        yield records.block_data(block)


def test_a_switch_goes_on_in_the_next_segment(tmp_path: Path) -> None:
    wal = written([10, 20])
    wal.add(b"", rmid=XLOG, info=SWITCH)
    after = wal.add(main_fragment(b"after"))
    wal.save(tmp_path)
    records = read_records(open_wal([tmp_path]))
    assert records.lsn.tolist() == wal.lsns
    assert records.end_lsn[2] == wal.base + SEGMENT
    assert after == wal.base + SEGMENT + 40


def test_a_record_that_was_lost_in_a_crash_is_left_out(tmp_path: Path) -> None:
    wal = written([5000, 40])
    wal.lose_rest(5000)
    wal.add(main_fragment(b"after"))
    wal.save(tmp_path)
    records = read_records(open_wal([tmp_path]))
    assert records.lsn.tolist() == wal.lsns
    assert records.main_data(len(records) - 1) == b"after"


@pytest.mark.parametrize("suffix", [".gz", ".lz4", ".zst", ".partial", ".gz.partial"])
def test_compressed_and_partial_segments_are_read_as_plain_ones(
    directory: Path, suffix: str
) -> None:
    expected = contents(read_records(open_wal([directory])))
    last = max(directory.iterdir())
    content = last.read_bytes()
    if "partial" in suffix:
        content = content[: len(content) - SEGMENT // 4]
    codec = {".lz4": "lz4", ".zst": "zstd"}.get(suffix)
    if codec:
        with pa.CompressedOutputStream(str(last) + suffix, codec) as out:
            out.write(content)
    else:
        packed = gzip.compress(content) if ".gz" in suffix else content
        Path(str(last) + suffix).write_bytes(packed)
    last.unlink()
    assert contents(read_records(open_wal([directory]))) == expected


def test_several_directories_are_one(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = contents(read_records(open_wal([directory])))
    other = tmp_path_factory.mktemp("other")
    middle = sorted(directory.iterdir())[1]
    middle.rename(other / middle.name)
    with pytest.raises(FormatError, match=f"{middle.name} is missing"):
        open_wal([directory])
    assert contents(read_records(open_wal([directory, other]))) == expected


def test_files_that_a_server_keeps_for_later_do_not_count(
    directory: Path, stream: WalWriter
) -> None:
    expected = contents(read_records(open_wal([directory])))
    names = sorted(p.name for p in directory.iterdir())
    future = f"{int(names[-1], 16) + 1:024X}"
    (directory / future).write_bytes((directory / names[0]).read_bytes())
    # The last segment itself was another before: its pages behind the end are old.
    content = bytearray((directory / names[-1]).read_bytes())
    end = len(stream.data) % SEGMENT
    page = end - end % PAGE + PAGE
    content[page:] = (directory / names[1]).read_bytes()[page:]
    (directory / names[-1]).write_bytes(content)
    assert contents(read_records(open_wal([directory]))) == expected


def test_wal_ends_where_the_next_segment_is_not_there_yet(
    directory: Path, stream: WalWriter
) -> None:
    max(directory.iterdir()).unlink()
    records = read_records(open_wal([directory]))
    assert records.lsn.tolist() == [lsn for lsn in stream.lsns if lsn <= records.lsn[-1]]
    assert len(records) == 5000  # the long record goes on in the last segment
    with pytest.raises(FormatError, match="WAL ends at"):
        read_records(open_wal([directory]), None, stream.lsn)


def damaged(directory: Path, place: int, offset: int, value: bytes) -> Path:
    path = sorted(directory.iterdir())[place]
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"\x21\xd1", "page magic 0xD121, PostgreSQL 19"),
        (0, b"\xd1\x18", "of a big-endian server"),
        (0, b"\x34\x12", "page magic 0x1234"),
        (24, b"\x55\x55", "system identifier"),
        (32, b"\x00\x00\x20\x00", "a segment of 2097152 bytes"),
        (36, b"\x00\x40", "pages of 16384 bytes"),
        (8, b"\x08", "a page with address"),
        (5 * PAGE + 4, b"\x02", "a page header that does not belong here"),
        (5 * PAGE + 8, b"\xff", "a page header that does not belong here"),
        (5 * PAGE, bytes(PAGE), "a page header that does not belong here, and WAL goes on"),
        (5 * PAGE + 100, bytes(PAGE), ""),
    ],
)
def test_damage_in_the_middle_is_an_error_with_its_place(
    directory: Path, offset: int, value: bytes, message: str
) -> None:
    path = damaged(directory, 1, offset, value)
    with pytest.raises(FormatError) as caught:
        read_records(open_wal([directory]))
    assert message in str(caught.value)
    assert caught.value.facts["file"] == str(path)
    assert abs(caught.value.facts["offset"] - offset) <= PAGE
    assert caught.value.hint


def test_a_changed_byte_of_a_record_is_a_wrong_checksum(directory: Path, stream: WalWriter) -> None:
    at = stream.lsns[100] - stream.base + 30
    damaged(directory, 0, at, bytes([stream.data[at] ^ 1]))
    with pytest.raises(FormatError, match="wrong checksum") as caught:
        read_records(open_wal([directory]))
    assert caught.value.facts["lsn"] == render_lsn(stream.lsns[100])


@pytest.mark.parametrize("size", [0, 30, 100_000])
def test_a_cut_file_is_an_error(directory: Path, size: int) -> None:
    path = sorted(directory.iterdir())[1]
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FormatError, match=path.name):
        read_records(open_wal([directory]))


def test_a_cut_compressed_file_is_an_error(directory: Path) -> None:
    path = sorted(directory.iterdir())[1]
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    path.with_suffix(".gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(FormatError, match=path.name):
        read_records(open_wal([directory]))


def test_timelines_are_followed_by_their_history(tmp_path: Path) -> None:
    old = written([300] * 2000)
    switch = old.lsn
    promoted = replace(old, timeline=2, data=bytearray(old.data), lsns=list(old.lsns))
    for number in range(3000):
        old.add(main_fragment(b"never read"))
        promoted.add(main_fragment(b"new"), xid=number + 3)
    old.save(tmp_path)
    for name, content in promoted.segments().items():
        if int(name[16:], 16) >= switch // SEGMENT:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=r"without 00000002\.history"):
        open_wal([tmp_path])
    (tmp_path / "00000002.history").write_text(f"1\t{render_lsn(switch)}\tno recovery target\n\n")
    records = read_records(open_wal([tmp_path]))
    assert records.lsn.tolist() == promoted.lsns
    assert len(read_records(open_wal([tmp_path], timeline=1))) == len(old.lsns)
    # Without the new segment, what the old primary wrote behind the switch is still not read.
    for path in tmp_path.glob("00000002*0*"):
        if path.suffix != ".history":
            path.unlink()
    assert read_records(open_wal([tmp_path])).lsn.tolist() == promoted.lsns[:2000]


def test_a_position_before_the_first_segment_names_the_one_that_is_missing(directory: Path) -> None:
    with pytest.raises(FormatError, match="000000010000000000000000 is missing"):
        open_wal([directory], start_lsn=100)


def test_checksums_of_the_instruction_and_of_the_table_agree() -> None:
    assert crc.crc32c(b"123456789") == 0xE3069283
    data = np.frombuffer(random.Random(1).randbytes(300), np.uint8)
    for size in range(64):
        values = {
            int(f(data, size % 9, size + 100, 0xFFFFFFFF)) for f in (crc.running_crc, crc.table_crc)
        }
        assert len(values) == 1


@given(seed=st.integers(0, 2**32), flips=st.integers(1, 3))
@settings(max_examples=60)
def test_changed_bytes_give_an_error_or_the_exact_answer(
    tmp_path_factory: pytest.TempPathFactory, seed: int, flips: int
) -> None:
    wal = written([40, 9000, 0, 300, 17_000, 90, 200, 33], first_number=2)
    folder = tmp_path_factory.mktemp("wal")
    (path,) = wal.save(folder)
    expected = contents(read_records(open_wal([folder])))
    content = bytearray(path.read_bytes())
    draw = random.Random(seed)
    for _ in range(flips):
        content[draw.randrange(len(wal.data) + 2 * PAGE)] = draw.randrange(256)
    path.write_bytes(content)
    try:
        found = contents(read_records(open_wal([folder])))
    except FormatError:
        return
    assert found == expected
