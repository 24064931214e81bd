"""Catching up in batches: the same messages as by the replication protocol, each once."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.pq.abc import PGconn
from tests.fixtures.stream.receiving import (
    BATCHES,
    NO_BATCHES,
    Source,
    commit_ends_of,
    received_messages,
    receiving,
    without_relations,
)
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, ServerError, SlotLost
from millrace.follow import slot as slot_module
from millrace.follow.publication import create_publications
from millrace.follow.slot import drop_slot
from millrace.lsn import parse_lsn
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.postgres.wire import slot_batch
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.replication import CopyStream, FrameBuffer
from millrace.postgres.wire.slot import SlotState
from millrace.postgres.wire.slot_batch import BatchSizes, BatchStream, moves_slots
from millrace.postgres.wire.slot_error import lock_sql
from millrace.receive import batch_policy as batches_module
from millrace.receive.batch_policy import Batches
from millrace.receive.loop import ReceiveSettings, receive
from millrace.spool.writer import SpoolWriter

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
MEGABYTE = 1024 * 1024


@pytest.fixture
def source(source_db: str) -> Iterator[Source]:
    source = Source(source_db, TABLE, batches=BATCHES)
    yield source
    source.close()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="millrace")
    return caplog


def _update(source: Source, rows: int, times: int = 1) -> None:
    source.execute(
        *[
            f"INSERT INTO t SELECT i, '{turn} ' || i FROM generate_series(1, {rows}) AS i"
            " ON CONFLICT (id) DO UPDATE SET v = excluded.v"
            for turn in range(times)
        ]
    )


def _assert_as_sent(source: Source, directory: Path) -> None:
    found = without_relations(received_messages(directory))
    assert found == without_relations(source.expected(binary=True))


def _batches(told: pytest.LogCaptureFixture) -> int:
    return told.text.count("catching up")


def test_batches_grow_and_hold_everything(
    source: Source, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    _update(source, 1000, times=30)
    received = source.receive(tmp_path)
    assert _batches(told) >= 3
    assert received.reached_endpos
    assert source.confirmed_lsn() == received.complete_lsn
    _assert_as_sent(source, tmp_path)


def test_a_transaction_that_is_open_over_many_batches_comes_once(
    source: Source, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(source.uri) as long:
        long.execute("SET synchronous_commit = on")
        long.execute("INSERT INTO t SELECT -i, 'long' FROM generate_series(1, 500) AS i")
        _update(source, 1000, times=10)
        source.receive(tmp_path)
        assert _batches(told) >= 2
        long.execute("INSERT INTO t SELECT -i, 'long' FROM generate_series(501, 1000) AS i")
        _update(source, 1000, times=10)
    source.receive(tmp_path)
    _assert_as_sent(source, tmp_path)


def test_what_is_written_meanwhile_is_not_missed(source: Source, tmp_path: Path) -> None:
    is_over = threading.Event()

    def write(first: int) -> None:
        with psycopg.connect(source.uri, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = on")
            for number in itertools.count(first, 10):
                if is_over.is_set():
                    return
                connection.execute("INSERT INTO t VALUES (%s, 'x')", (number,))

    writers = [threading.Thread(target=write, args=(first,)) for first in (-100_000, -99_999)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(5):
            source.receive(tmp_path)
            time.sleep(0.1)
    finally:
        is_over.set()
        for writer in writers:
            writer.join()
    source.receive(tmp_path)
    _assert_as_sent(source, tmp_path)


def test_who_falls_behind_the_protocol_goes_on_in_batches(
    source: Source,
    tmp_path: Path,
    told: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches_module, "LOOK_BYTES", 200_000)
    with SpoolWriter(tmp_path) as spool, receiving(source.settings(), spool):
        wait_for(lambda: source.scalar(f"SELECT active FROM {_SLOT.format(source.slot)}"))
        before = _batches(told)
        _update(source, 1000, times=100)
        end = commit_ends_of(source.expected())[-1]
        wait_for(lambda: spool.durable_lsn >= end)
        assert _batches(told) > before
    _assert_as_sent(source, tmp_path)


_SLOT = "pg_replication_slots WHERE slot_name = '{}'"


def test_a_source_that_refuses_a_batch_is_asked_by_the_protocol(
    source: Source, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    database = source.scalar("SELECT current_database()")
    source.execute(f"ALTER DATABASE {database} SET temp_file_limit = '64kB'")
    source.execute(f"ALTER DATABASE {database} SET work_mem = '64kB'")
    _update(source, 20_000)
    assert source.receive(tmp_path).reached_endpos
    assert "temporary file size exceeds" in told.text
    assert "continuing with the replication protocol" in told.text
    _assert_as_sent(source, tmp_path)


def test_a_batch_whose_session_is_ended_comes_again(
    source: Source, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    _update(source, 200_000)
    asked = source.settings(endpos=source.lsn(), batches=_WHOLE)
    with SpoolWriter(tmp_path) as spool, receiving(asked, spool) as thread:
        wait_for(
            lambda: source.scalar(
                "SELECT count(pg_terminate_backend(pid)) > 0 FROM pg_stat_activity"
                " WHERE query LIKE 'COPY%peek%' AND state = 'active' AND pid <> pg_backend_pid()"
                " AND datname = current_database()"
            )
        )
        thread.join(DEADLINE_SECONDS)
    assert "trying again" in told.text
    _assert_as_sent(source, tmp_path)


def test_who_is_stopped_in_a_batch_cancels_it(
    source_cluster: Cluster, source: Source, tmp_path: Path
) -> None:
    _update(source, 300_000)
    log = source_cluster.data_dir.parent / "server.log"
    before = log.read_text().count("canceling statement due to user request")
    with SpoolWriter(tmp_path) as spool:
        with receiving(source.settings(batches=_WHOLE), spool):
            wait_for(lambda: source.scalar(f"SELECT active FROM {_SLOT.format(source.slot)}"))
        wait_for(lambda: not source.scalar(f"SELECT active FROM {_SLOT.format(source.slot)}"))
        assert log.read_text().count("canceling statement due to user request") == before + 1
        assert spool.last_end_lsn == 0
    source.receive(tmp_path)
    _assert_as_sent(source, tmp_path)


def test_a_server_that_is_restarted_before_a_batch_gives_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it crashed, a slot may go back to where it was."""
    with open_cluster(16, tcp=True) as cluster:
        source = Source(cluster.create_database("s"), TABLE, batches=BATCHES)
        send, turns = slot_batch.send_copy, itertools.count()

        def send_late(session: PGconn, slot: str, command: str) -> CopyStream:
            if next(turns) == 1:
                source.connection.close()
                cluster.restart("immediate")
                source.connection = psycopg.connect(source.uri, autocommit=True)
            return send(session, slot, command)

        _update(source, 1000, times=10)
        monkeypatch.setattr(slot_batch, "send_copy", send_late)
        source.receive(tmp_path)
        assert next(turns) == 2
        _assert_as_sent(source, tmp_path)
        source.close()


def test_a_standby_gives_batches_too(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    with open_cluster(18, tcp=True) as primary:
        uri = primary.create_database("s")
        with (
            open_cluster(
                18, tcp=True, base_backup_of=primary, settings={"hot_standby_feedback": "on"}
            ) as standby,
            psycopg.connect(uri, autocommit=True) as writer,
        ):
            writer.execute("SET synchronous_commit = on")
            writer.execute(TABLE)
            with connect(Dsn.parse(uri), "test") as connection:
                create_publications(connection, "s")
            written = writer.execute("SELECT pg_current_wal_lsn()").fetchone()
            with psycopg.connect(standby.uri("s"), autocommit=True) as replica:
                wait_for(lambda: _has_replayed(replica, written))
                with ThreadPoolExecutor(1) as pool:
                    making = pool.submit(
                        replica.execute,
                        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
                    )
                    while not making.done():
                        writer.execute("SELECT pg_log_standby_snapshot()")
                        time.sleep(0.1)
                    making.result()
                for turn in range(20):
                    rows = f"generate_series({turn * 100}, {turn * 100 + 99})"
                    writer.execute(f"INSERT INTO t SELECT i, 'x' FROM {rows} AS i".encode())
                written = writer.execute("SELECT pg_current_wal_lsn()").fetchone()
                wait_for(lambda: _has_replayed(replica, written))
                assert written is not None
                settings = ReceiveSettings(
                    Dsn.parse(standby.uri("s")),
                    "s",
                    endpos=parse_lsn(str(written[0])),
                    batches=BATCHES,
                )
                with SpoolWriter(tmp_path) as spool:
                    receive(settings, spool)
            found = received_messages(tmp_path)
            assert sum(message[:1] == b"I" for message in found) == 2000
            assert _batches(told) >= 2


def _has_replayed(
    replica: psycopg.Connection[tuple[object, ...]], written: tuple[object, ...] | None
) -> bool:
    assert written is not None
    row = replica.execute("SELECT pg_last_wal_replay_lsn() >= %s", written).fetchone()
    return row == (True,)


def test_a_slot_whose_batch_is_read_is_not_for_others(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_module, "LEAVING_SECONDS", 0.0)
    _update(source, 1000)
    with connect(source.dsn, "test") as reader:
        reader.execute(f"SELECT {lock_sql(source.slot)}")
        with connect(source.dsn, "test") as other, pytest.raises(ServerError, match="is active"):
            drop_slot(other, source.slot)
        with pytest.raises(ServerError, match="is active"):
            source.receive(tmp_path)
        with pytest.raises(ServerError, match="is active"):
            _drain(source, source.created.start_lsn)
    source.receive(tmp_path)
    _assert_as_sent(source, tmp_path)


def test_a_slot_that_somebody_else_moved_is_lost(source: Source) -> None:
    _update(source, 1000)
    source.execute(f"SELECT pg_replication_slot_advance('{source.slot}', pg_current_wal_lsn())")
    with pytest.raises(SlotLost, match="another client has read it"):
        _drain(source, source.created.start_lsn)


def test_a_refusal_is_remembered(
    source: Source,
    tmp_path: Path,
    told: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches_module, "LOOK_BYTES", 10_000)
    monkeypatch.setattr(slot_batch, "_peek", lambda slot, end_lsn, options: "COPY no FROM here")
    _update(source, 1000, times=20)
    source.receive(tmp_path)
    assert told.text.count("continuing with the replication protocol") == 1
    assert _batches(told) == 1
    _assert_as_sent(source, tmp_path)


@pytest.mark.parametrize(
    ("version", "is_trusted"),
    [(180000, True), (170005, True), (170004, False), (160008, False), (150013, True)],
)
def test_releases_that_move_slots_wrongly_are_not_trusted(version: int, is_trusted: bool) -> None:
    assert moves_slots(version) == is_trusted


def test_a_slot_that_is_in_use_is_an_error(source: Source, tmp_path: Path) -> None:
    _update(source, 1000)
    with (
        SpoolWriter(tmp_path) as spool,
        receiving(source.settings(batches=NO_BATCHES), spool),
    ):
        wait_for(lambda: source.scalar(f"SELECT active FROM {_SLOT.format(source.slot)}"))
        with pytest.raises(ServerError, match="is active"):
            _drain(source, source.created.start_lsn)


def test_values_larger_than_the_buffer_pass(source: Source, tmp_path: Path) -> None:
    source.execute(f"INSERT INTO t VALUES (1, repeat('x', {20 * MEGABYTE})), (2, 'small')")
    source.receive(tmp_path)
    _assert_as_sent(source, tmp_path)


def test_an_old_server_gives_the_same(
    system_cluster: Cluster, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    source = Source(system_cluster.create_database("batches"), TABLE, batches=BATCHES)
    _update(source, 1000, times=10)
    source.receive(tmp_path)
    assert _batches(told) >= 2
    _assert_as_sent(source, tmp_path)
    source.close()
    system_cluster.drop_database("batches")


class _Pieces:
    """A stream that comes in pieces of any size."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._kept = FrameBuffer()
        self._chosen = random.Random(1)

    def read(self, buffer: FrameBuffer) -> int:
        self._stream.read(self._kept)
        size = min(self._kept.filled, self._chosen.choice((1, 2, 7, 50, 3000)))
        if size:
            buffer.put(self._kept.view(size).tobytes())
            self._kept.drop(size)
        return size

    def wait(self, seconds: float) -> bool:
        return bool(self._kept.filled) or self._stream.wait(seconds)

    def close(self) -> None:
        self._stream.close()


def test_rows_become_frames_wherever_the_wire_splits_them(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    _update(source, 50, times=30)
    send = slot_batch.send_copy
    monkeypatch.setattr(slot_batch, "send_copy", lambda *asked: _Pieces(send(*asked)))
    assert _drain(source, source.created.start_lsn) == source.expected()


def _drain(source: Source, begin_lsn: int) -> list[bytes]:
    """The messages of one batch, read without a receiver."""
    names = ",".join(f'"{name}"' for name in publication_names(source.slot))
    options = {"proto_version": "1", "publication_names": names}
    stream = BatchStream(
        source.dsn,
        source.slot,
        begin_lsn,
        options,
        encoding="UTF8",
        sizes=_WHOLE,
    )
    buffer = FrameBuffer()
    found: list[bytes] = []
    try:
        while stream.awaited_lsn is None:
            if not stream.read(buffer):
                stream.wait(0.1)
            messages = buffer.scan()
            data = buffer.view(messages.consumed).tobytes()
            places = zip(messages.offset, messages.length, strict=True)
            found += [data[offset : offset + length] for offset, length in places]
            buffer.drop(messages.consumed)
        assert messages.wal_end == stream.awaited_lsn
    finally:
        stream.close()
    return found


_WHOLE = BatchSizes(
    least_bytes=1, next_bytes=1 << 40, most_bytes=1 << 40, most_decoded_bytes=1 << 60
)


@pytest.mark.parametrize(
    ("begin", "restart", "flushed", "wished", "end"),
    [
        (1000, 1000, 1009, 100, None),  # too little
        (1000, 1000, 1010, 100, 1010),
        (1000, 1000, 5000, 100, 1100),
        (1000, 1000, 1109, 100, 1109),  # a rest that would be too little comes along
        (1000, 1000, 1110, 100, 1100),
        (1000, 800, 5000, 100, 1200),  # as long as the way to it
        (1000, 600, 5000, 100, 1400),
        (1000, 200, 5000, 100, 1400),
        (1000, 199, 5000, 100, None),  # too long a way
        (1000, 1000, 5000, 1000, 1400),
        (1000, 0, 0, 100, None),  # nobody knows how far the source is
    ],
)
def test_the_size_of_a_batch(
    begin: int, restart: int, flushed: int, wished: int, end: int | None
) -> None:
    sizes = BatchSizes(least_bytes=10, next_bytes=wished, most_bytes=400)
    assert sizes.end_of(begin, restart, flushed) == end


def test_batches_grow_as_long_as_they_do_not_decode_to_too_much() -> None:
    sizes = BatchSizes(least_bytes=10, next_bytes=20, most_bytes=400, most_decoded_bytes=1000)
    sizes = sizes.after(20, 40)
    assert sizes.end_of(1000, 1000, 9000) == 1080
    sizes = sizes.after(80, 160)
    assert sizes.end_of(1000, 1000, 9000) == 1320
    sizes = sizes.after(320, 3200)
    assert sizes.end_of(1000, 1000, 9000) == 1100
    # Also where the way to it would make it larger.
    assert sizes.end_of(1000, 850, 9000) == 1100
    assert sizes.end_of(1000, 799, 9000) is None
    # And where the rest is small.
    assert sizes.end_of(1000, 1000, 1105) == 1105
    assert sizes.end_of(1000, 1000, 1112) == 1100
    assert sizes.after(100, 50).end_of(1000, 1000, 9000) == 1400


def test_after_two_batches_that_break_off_there_are_no_more() -> None:
    state = SlotState("s", "pgoutput", "d", None, 0, 0, "", "", 1 << 30)
    batches = Batches(BATCHES)
    lost = ConnectionLost("gone", sqlstate=None)
    in_use = ServerError("is active", sqlstate="55006")
    assert batches.may_begin(state, 1, None)
    for _ in range(3):
        batches.begin()
        assert not batches.break_off(in_use)
        assert not batches.may_begin(state, 1, None)  # the protocol has its turn
        assert batches.should_take_over(state, 1, None)
    batches.begin()
    assert not batches.break_off(lost)
    assert batches.should_take_over(state, 1, None)
    batches.begin()
    assert not batches.break_off(lost)
    assert not batches.should_take_over(state, 1, None)
    assert not batches.is_time_to_look(1 << 40)


def test_near_the_end_position_there_is_no_batch() -> None:
    state = SlotState("s", "pgoutput", "d", None, 0, 0, "", "", 1 << 30)
    batches = Batches(BatchSizes(least_bytes=100))
    assert batches.may_begin(state, 1000, None)
    assert batches.may_begin(state, 1000, 1100)
    assert not batches.may_begin(state, 1000, 1099)
