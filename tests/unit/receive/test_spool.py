"""The spool keeps whole transactions, in order, each once, whatever happens to its files."""

from __future__ import annotations

import errno
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.stream.changes import (
    Transaction,
    append,
    commit_ends,
    join,
    read_all,
    relation_version,
)

from millrace.errors import FormatError, WorkDirError
from millrace.postgres.pgoutput.messages import encode_keepalive, scan
from millrace.spool.interface import FOLDER
from millrace.spool.reader import SpoolReader, prune
from millrace.spool.segment import (
    HEADER_BYTES,
    VERSION,
    SegmentFile,
    SegmentReader,
    encode_header,
    list_segments,
)
from millrace.spool.writer import SpoolWriter

SMALL = 4096


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def _fill(directory: Path, transactions: list[Transaction], *, segment_bytes: int = SMALL) -> bytes:
    data = join(transactions)
    with SpoolWriter(directory, segment_bytes=segment_bytes) as writer:
        for transaction in transactions:
            append(writer, transaction.frames())
        assert writer.sync() == transactions[-1].end_lsn
    return data


def _numbered(count: int, **more: int) -> list[Transaction]:
    return [Transaction(n, **more) for n in range(1, count + 1)]


def test_what_was_written_is_read_across_segments(tmp_path: Path) -> None:
    data = _fill(tmp_path, _numbered(100, rows=3))
    assert len(list_segments(tmp_path / FOLDER)) > 3
    for max_bytes in (1, 1000, 1 << 30):
        assert read_all(tmp_path, max_bytes=max_bytes) == data


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.data())
def test_any_cut_of_the_stream_gives_the_same_spool(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    transactions = [Transaction(n + 1, rows=count, relation=n) for n, count in enumerate(rows)]
    stream = join(transactions)
    left = b""
    with SpoolWriter(directory, segment_bytes=SMALL) as writer:
        at = 0
        while at < len(stream):
            size = data.draw(st.integers(max(1, len(stream) // 50), max(1, len(stream) // 3)))
            left = append(writer, left + stream[at : at + size])
            at += size
            if data.draw(st.booleans()):
                writer.sync()
        assert left == b""
        assert writer.sync() == transactions[-1].end_lsn
    max_bytes = data.draw(st.integers(1, len(stream) * 2))
    assert read_all(directory, max_bytes=max_bytes) == stream
    reader = SpoolReader(directory, "utf-8")
    for number, transaction in enumerate(transactions):
        found = reader.plan(transaction.end_lsn - 1, 1, None)
        assert found is not None
        assert found.changes == transaction.rows
        expected = {} if number == 0 else {16384: relation_version(number - 1)}
        assert reader.relations(found) == expected


def test_only_synced_transactions_are_seen(tmp_path: Path) -> None:
    reader = SpoolReader(tmp_path, "utf-8")
    assert reader.last_end_lsn() == 0
    assert reader.plan(0, 1000, None) is None
    with SpoolWriter(tmp_path) as writer:
        append(writer, Transaction(1).frames())
        assert reader.last_end_lsn() == 0
        assert writer.sync() == 150
        assert reader.last_end_lsn() == 150
        beginning = Transaction(2).frames()
        append(writer, beginning[:-10])
        assert writer.sync() == 150
        assert writer.is_in_transaction
        assert reader.last_end_lsn() == 150


def test_a_range_is_the_next_whole_transactions(tmp_path: Path) -> None:
    transactions = _numbered(10, rows=2)
    _fill(tmp_path, transactions)
    reader = SpoolReader(tmp_path, "utf-8")
    size = len(transactions[0].frames())
    first = reader.plan(0, 1, None)
    assert first is not None
    assert (first.transactions, first.end_lsn, first.commit_lsn) == (1, 150, 140)
    assert (first.changes, first.committed_at) == (2, 1_000_000)
    three = reader.plan(150, 3 * (size + HEADER_BYTES), None)
    assert three is not None
    assert (three.transactions, three.end_lsn) == (3, 450)
    assert pickle.loads(pickle.dumps(three)) == three
    until = reader.plan(150, 1 << 30, 360)
    assert until is not None
    assert until.end_lsn == 350
    exactly = reader.plan(150, 1 << 30, 350)
    assert exactly == until
    assert reader.plan(350, 1 << 30, 449) is None
    assert reader.plan(1050, 1 << 30, None) is None


def test_a_chunk_never_splits_a_frame_and_holds_only_the_range(tmp_path: Path) -> None:
    transactions = _numbered(3, rows=50, row_bytes=200)
    with SpoolWriter(tmp_path) as writer:
        # One block for all of them, with keepalives in between.
        append(writer, encode_keepalive(1, reply_requested=False) + join(transactions))
        writer.sync()
    reader = SpoolReader(tmp_path, "utf-8")
    second = reader.plan(150, 1, None)
    assert second is not None
    for max_chunk_bytes in (1, 250, 1000, 1 << 20):
        chunks = list(reader.chunks(second, max_chunk_bytes))
        assert b"".join(chunk.tobytes() for chunk in chunks) == transactions[1].frames()
        for chunk in chunks:
            messages = scan(chunk, len(chunk))
            assert messages.consumed == len(chunk)
            assert len(chunk) <= max_chunk_bytes or len(messages) == 1


def test_lag_in_bytes(tmp_path: Path) -> None:
    data = _fill(tmp_path, _numbered(10))
    reader = SpoolReader(tmp_path, "utf-8")
    assert reader.bytes_after(1050) == 0
    assert len(data) <= reader.bytes_after(0) <= len(data) + 20 * HEADER_BYTES + 1000
    assert reader.bytes_after(950) == len(Transaction(10).frames())


def test_an_unfinished_transaction_is_cut_on_reconnect(tmp_path: Path) -> None:
    before = Transaction(1, relation=1)
    unfinished = Transaction(2, rows=500, relation=2).frames()[:-60]
    with SpoolWriter(tmp_path, segment_bytes=SMALL) as writer:
        append(writer, before.frames())
        position = writer.bytes
        left = b""
        for at in range(0, len(unfinished), 700):
            left = append(writer, left + unfinished[at : at + 700])
        assert len(list_segments(tmp_path / FOLDER)) > 3
        writer.cut_unfinished()
        assert not writer.is_in_transaction
        assert writer.bytes == position
        assert writer.last_end_lsn == 150
        again = Transaction(2, rows=5)
        append(writer, again.frames())
        assert writer.sync() == 250
    assert read_all(tmp_path) == before.frames() + again.frames()
    reader = SpoolReader(tmp_path, "utf-8")
    found = reader.plan(150, 1, None)
    assert found is not None
    assert reader.relations(found) == {16384: relation_version(1)}


def test_every_torn_tail_is_cut_on_open(tmp_path: Path) -> None:
    kept = _fill(tmp_path, _numbered(2), segment_bytes=1 << 20)
    file = list_segments(tmp_path / FOLDER)[-1]
    synced = file.path.read_bytes()
    index = file.index_path.read_bytes()
    with SpoolWriter(tmp_path) as writer:
        append(writer, Transaction(3, relation=1).frames())
        append(writer, Transaction(4).frames()[:-30])
        writer.sync()
    whole = file.path.read_bytes()
    third = Transaction(3, relation=1).frames()
    for size in range(len(synced), len(whole)):
        file.path.write_bytes(whole[:size])
        file.index_path.write_bytes(index)
        with SpoolWriter(tmp_path) as writer:
            assert not writer.is_in_transaction
            found = read_all(tmp_path)
            assert found in (kept, kept + third)
            assert writer.last_end_lsn == commit_ends(found)[-1]
            append(writer, Transaction(5).frames())
            writer.sync()
        assert read_all(tmp_path) == found + Transaction(5).frames()


def _remove_index(path: Path) -> None:
    path.unlink()


def _tear_index(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _damage_index(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)


def _empty_index(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [_remove_index, _tear_index, _damage_index, _empty_index])
def test_an_index_is_rebuilt_from_its_segment(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    transactions = [Transaction(n, rows=3, relation=n) for n in range(1, 100)]
    data = _fill(tmp_path, transactions)
    for file in list_segments(tmp_path / FOLDER):
        if file.index_path.stat().st_size > 200:
            harm(file.index_path)
    with SpoolWriter(tmp_path, segment_bytes=SMALL) as writer:
        assert writer.last_end_lsn == transactions[-1].end_lsn
    assert read_all(tmp_path) == data
    reader = SpoolReader(tmp_path, "utf-8")
    found = reader.plan(5050, 1, None)
    assert found is not None
    assert reader.relations(found) == {16384: relation_version(50)}


def test_a_damaged_middle_is_an_error_that_names_file_and_offset(tmp_path: Path) -> None:
    _fill(tmp_path, _numbered(100))
    file = list_segments(tmp_path / FOLDER)[1]
    data = bytearray(file.path.read_bytes())
    data[len(data) // 2] ^= 1
    file.path.write_bytes(data)
    with pytest.raises(FormatError, match=r"is damaged: expected .* at offset") as caught:
        read_all(tmp_path)
    assert caught.value.facts["path"] == str(file.path)
    assert caught.value.facts["offset"] <= len(data) // 2
    file.index_path.unlink()
    with pytest.raises(FormatError, match="is damaged"):
        SpoolWriter(tmp_path)


def test_a_segment_that_vanished_between_others_is_an_error(tmp_path: Path) -> None:
    """Not for the writer alone: to a reader its transactions would just not be there."""
    _fill(tmp_path, _numbered(100))
    files = list_segments(tmp_path / FOLDER)
    assert len(files) > 3
    reader = SpoolReader(tmp_path)
    assert len(list(_iter_ranges(reader))) > 1
    files[1].path.unlink()
    asks: list[Callable[[SpoolReader], object]] = [
        lambda spool: list(_iter_ranges(spool)),
        lambda spool: spool.bytes_after(0),
        SpoolReader.last_end_lsn,
        SpoolReader.extent,
    ]
    for ask in asks:
        for spool in (reader, SpoolReader(tmp_path)):
            with pytest.raises(FormatError, match="a segment of the spool is missing") as caught:
                ask(spool)
            assert files[0].path.name in caught.value.message
            assert files[2].path.name in caught.value.message


def _iter_ranges(reader: SpoolReader) -> Iterator[int]:
    position = 0
    while (found := reader.plan(position, 1000)) is not None:
        yield found.transactions
        position = found.end_lsn


@pytest.mark.parametrize("harm", [_remove_index, _tear_index, _damage_index, _empty_index])
def test_a_harmed_index_between_others_hides_nothing(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    _fill(tmp_path, _numbered(100))
    harm(list_segments(tmp_path / FOLDER)[1].index_path)
    assert sum(_iter_ranges(SpoolReader(tmp_path))) == 100


def test_damage_in_the_newest_segment_is_no_torn_tail(tmp_path: Path) -> None:
    _fill(tmp_path, _numbered(5), segment_bytes=1 << 20)
    (file,) = list_segments(tmp_path / FOLDER)
    data = bytearray(file.path.read_bytes())
    data[len(data) // 2] ^= 1
    file.path.write_bytes(data)
    with pytest.raises(FormatError, match="is damaged"):
        read_all(tmp_path)
    # Not even when the index is gone: whole blocks follow.
    file.index_path.unlink()
    with pytest.raises(FormatError, match="is damaged"):
        SpoolWriter(tmp_path)
    file.path.write_bytes(data[:-100])


def test_a_file_shorter_than_its_index_is_damaged(tmp_path: Path) -> None:
    _fill(tmp_path, _numbered(5), segment_bytes=1 << 20)
    (file,) = list_segments(tmp_path / FOLDER)
    file.path.write_bytes(file.path.read_bytes()[:-10])
    with pytest.raises(FormatError, match="is damaged: expected 10 more bytes"):
        SpoolWriter(tmp_path)


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("has_index", [True, False])
def test_segments_of_another_version_are_refused_and_left_alone(
    tmp_path: Path, which: int, has_index: bool
) -> None:
    """Not taken for a torn tail, which would be cut; nor for a spool without transactions."""
    _fill(tmp_path, _numbered(100))
    file = list_segments(tmp_path / FOLDER)[which]
    newer = _in_version(file, VERSION + 1)
    if not has_index:
        file.index_path.write_bytes(b"of another layout")
    before = {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    assert before[file.path.name] == newer
    asks: list[Callable[[], object]] = [
        lambda: SpoolWriter(tmp_path, segment_bytes=SMALL),
        lambda: list(_iter_ranges(SpoolReader(tmp_path))),
        lambda: SpoolReader(tmp_path).bytes_after(0),
        lambda: SpoolReader(tmp_path).last_end_lsn(),
        lambda: SpoolReader(tmp_path).extent(),
    ]
    for ask in asks:
        with pytest.raises(FormatError, match="expected version 1 of the spool's format, found 2"):
            ask()
    assert before == {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}


def _in_version(file: SegmentFile, version: int) -> bytes:
    """The segment as a program of that version would have written it."""
    data = b""
    with SegmentReader(file) as reader:
        for block in reader.iter_blocks(file.position, reader.end):
            header = bytearray(encode_header(block.kind, block.lsn, block.position, b""))
            header[4:6] = version.to_bytes(2)
            header[8:12], header[12:16] = len(block.payload).to_bytes(4), bytes(4)
            header[12:16] = zlib.crc32(block.payload, zlib.crc32(header)).to_bytes(4)
            data += header + block.payload
    file.path.write_bytes(data)
    return data


def test_every_single_wrong_byte_is_noticed(tmp_path: Path) -> None:
    data = _fill(tmp_path, _numbered(3), segment_bytes=1 << 20)
    (file,) = list_segments(tmp_path / FOLDER)
    good = file.path.read_bytes()
    start = good.index(b"MRSP", 4)
    for place in range(start, len(good)):
        bad = bytearray(good)
        bad[place] ^= 0x10
        file.path.write_bytes(bad)
        with pytest.raises(FormatError):
            read_all(tmp_path)
    file.path.write_bytes(good)
    assert read_all(tmp_path) == data


def test_pruning_removes_what_was_applied_and_nothing_else(tmp_path: Path) -> None:
    transactions = [Transaction(n, rows=3, relation=n) for n in range(1, 101)]
    _fill(tmp_path, transactions)
    before = len(list_segments(tmp_path / FOLDER))
    assert prune(tmp_path, 0) == 0
    assert prune(tmp_path, 5050) > 0
    assert 1 < len(list_segments(tmp_path / FOLDER)) < before
    assert read_all(tmp_path, after_lsn=5050) == join(transactions[50:])
    reader = SpoolReader(tmp_path, "utf-8")
    found = reader.plan(5050, 1, None)
    assert found is not None
    assert reader.relations(found) == {16384: relation_version(50)}
    with pytest.raises(WorkDirError, match="was pruned"):
        reader.plan(150, 1, None)
    prune(tmp_path, 10050)
    assert reader.last_end_lsn() == 10050
    with SpoolWriter(tmp_path, segment_bytes=SMALL) as writer:
        assert writer.last_end_lsn == 10050
        append(writer, Transaction(101).frames())
        writer.sync()
    assert read_all(tmp_path, after_lsn=10050) == Transaction(101).frames()


def test_a_range_planned_before_it_was_pruned_is_refused(tmp_path: Path) -> None:
    _fill(tmp_path, _numbered(100))
    reader = SpoolReader(tmp_path, "utf-8")
    found = reader.plan(0, 1, None)
    assert found is not None
    prune(tmp_path, 10050)
    with pytest.raises(WorkDirError, match="was pruned"):
        list(reader.chunks(found, 1000))


def test_a_transaction_over_many_segments_is_pruned_as_one(tmp_path: Path) -> None:
    long = Transaction(2, rows=1000)
    stream = Transaction(1).frames() + long.frames() + Transaction(3).frames()
    with SpoolWriter(tmp_path, segment_bytes=SMALL) as writer:
        left = b""
        for at in range(0, len(stream), 500):
            left = append(writer, left + stream[at : at + 500])
        writer.sync()
    count = len(list_segments(tmp_path / FOLDER))
    assert count > 5
    assert prune(tmp_path, 150) == 0
    assert read_all(tmp_path, after_lsn=150) == long.frames() + Transaction(3).frames()
    prune(tmp_path, 250)
    assert len(list_segments(tmp_path / FOLDER)) == 1
    assert read_all(tmp_path, after_lsn=250) == Transaction(3).frames()
    with pytest.raises(WorkDirError, match="was pruned"):
        read_all(tmp_path, after_lsn=150)


def test_an_idle_mark_survives_reopening_and_rebuilding(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path) as writer:
        writer.mark_idle(120)
        writer.sync()
        assert (writer.complete_lsn, writer.durable_lsn, writer.last_end_lsn) == (120, 120, 0)
    with SpoolWriter(tmp_path) as writer:
        assert writer.complete_lsn == 120
        append(writer, Transaction(2).frames())
        writer.sync()
        writer.mark_idle(900)
        writer.sync()
        append(writer, Transaction(10).frames()[:-40])
        writer.mark_idle(5000)
        assert writer.complete_lsn == 900
    (file,) = list_segments(tmp_path / FOLDER)
    file.index_path.unlink()
    with SpoolWriter(tmp_path) as writer:
        assert (writer.complete_lsn, writer.last_end_lsn) == (900, 250)
    assert read_all(tmp_path) == Transaction(2).frames()


def test_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.spool.writer.LOCK_SECONDS", 0.1)
    refused = pytest.raises(WorkDirError, match="another process writes the spool")
    with SpoolWriter(tmp_path), refused:
        SpoolWriter(tmp_path)
    SpoolWriter(tmp_path).close()


def test_a_writer_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    first = SpoolWriter(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(SpoolWriter, tmp_path)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        first.close()
        second.result(60).close()


def test_a_process_that_died_while_beginning_a_segment_leaves_nothing(tmp_path: Path) -> None:
    data = _fill(tmp_path, _numbered(50))
    last = list_segments(tmp_path / FOLDER)[-1]
    following = last.path.stat().st_size + last.position
    (tmp_path / FOLDER / f"{following:016X}-{5050:016X}.spool").write_bytes(b"MRS")
    with SpoolWriter(tmp_path, segment_bytes=SMALL) as writer:
        assert writer.last_end_lsn == 5050
    assert read_all(tmp_path) == data


def test_messages_out_of_place_are_refused(tmp_path: Path) -> None:
    frames = Transaction(1).frames()
    messages = scan(np.frombuffer(frames, np.uint8), len(frames))
    row = int(messages.offset[1]) - 30
    with SpoolWriter(tmp_path) as writer:
        with pytest.raises(FormatError, match="message I is out of place"):
            append(writer, frames[row:])
        append(writer, frames)
        with pytest.raises(FormatError, match="message B is out of place"):
            append(writer, frames[:row] + frames[:row])


def test_many_small_commits_are_indexed_fast_enough(tmp_path: Path) -> None:
    data = join(_numbered(20_000))
    with SpoolWriter(tmp_path) as writer:
        append(writer, data)
        assert writer.sync() == 20_000 * 100 + 50
    reader = SpoolReader(tmp_path, "utf-8")
    found = reader.plan(0, 1 << 30, None)
    assert found is not None
    assert found.transactions == 20_000


def _failing(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("soon", [False, True], ids=["waited for", "in the background"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_what_an_fsync_failed_for_is_never_called_stored(
    tmp_path: Path, number: int, soon: bool
) -> None:
    """A second fsync would succeed, and the bytes can still be read: both mean nothing."""
    first, second, third = _numbered(3)
    with SpoolWriter(tmp_path) as writer:
        append(writer, first.frames())
        writer.sync()
        append(writer, second.frames())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fdatasync", _failing(number))
            if soon:
                writer.sync_soon()
            with pytest.raises(WorkDirError, match=os.strerror(number)) as caught:
                writer.sync()
        assert "run the same command again" in caught.value.hint
        assert ("at least 64 MB" in caught.value.hint) == (number == errno.ENOSPC)
        # The disk is well again, but this writer has lost its trust.
        for more in (writer.sync, writer.sync_soon, lambda: append(writer, third.frames())):
            with pytest.raises(WorkDirError):
                more()
        assert writer.durable_lsn == first.end_lsn
    with SpoolWriter(tmp_path) as writer:
        assert writer.durable_lsn == first.end_lsn
        append(writer, second.frames())
        append(writer, third.frames())
        writer.sync()
    assert read_all(tmp_path) == join([first, second, third])


def test_index_that_could_not_be_stored_leaves_the_transactions(tmp_path: Path) -> None:
    """A reader may have seen them."""
    first, second = _numbered(2)
    calls = []

    def fail_second(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            _failing(errno.EIO)()

    with SpoolWriter(tmp_path) as writer:
        append(writer, first.frames())
        writer.sync()
        append(writer, second.frames())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fdatasync", fail_second)
            with pytest.raises(WorkDirError):
                writer.sync()
        assert writer.durable_lsn == first.end_lsn
    with SpoolWriter(tmp_path) as writer:
        assert writer.durable_lsn == second.end_lsn
    assert read_all(tmp_path) == join([first, second])


@pytest.mark.parametrize("allowed", range(0, 3 * SMALL, 331))
def test_disk_that_fills_up_anywhere_loses_nothing_that_was_stored(
    tmp_path: Path, allowed: int
) -> None:
    transactions = _numbered(20, rows=4)
    left = [allowed]

    def writev(descriptor: int, parts: tuple[bytes, memoryview]) -> int:
        data = b"".join(parts)
        size = min(len(data), left[0])
        if not size:
            _failing(errno.ENOSPC)()
        left[0] -= size
        return os.write(descriptor, data[:size])

    def write(descriptor: int, data: memoryview) -> int:
        return _failing(errno.ENOSPC)() or 0

    stored = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        SpoolWriter(tmp_path, segment_bytes=SMALL) as writer,
    ):
        patch.setattr("millrace.spool.writer.os", _Disk(writev, write))
        try:
            for transaction in transactions:
                append(writer, transaction.frames())
                stored = writer.sync()
        except WorkDirError:
            assert writer.durable_lsn == stored
    with SpoolWriter(tmp_path, segment_bytes=SMALL) as writer:
        assert writer.durable_lsn >= stored
        for transaction in transactions:
            if transaction.end_lsn > writer.last_end_lsn:
                append(writer, transaction.frames())
        writer.sync()
    assert read_all(tmp_path) == join(transactions)


class _Disk:
    """The module os, on a disk of its own."""

    def __init__(self, writev: Callable[..., int], write: Callable[..., int]) -> None:
        self.writev, self.write = writev, write

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)
