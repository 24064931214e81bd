"""Receiving: every transaction once, in commit order, none missing; confirmed after fsync only."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.fixtures.stream.changes import Transaction, read_all
from tests.fixtures.stream.receiving import (
    IS_ACTIVE,
    NO_BATCHES,
    ReceiveChild,
    Source,
    assert_as_sent,
    commit_ends_of,
    insert,
    last_end,
    received_messages,
    receiving,
    without_relations,
)
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for
from tests.torture.failpoints import RECEIVER

from millrace.postgres.pgoutput.messages import encode_frame, scan
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect
from millrace.receive import loop as receive_module
from millrace.receive.loop import receive
from millrace.receive.partitions import Partitions
from millrace.receive.plugin import open_plugin
from millrace.spool.index import Records
from millrace.spool.reader import SpoolReader, prune
from millrace.spool.writer import SpoolWriter
from millrace.workdir.sentinel import Sentinel


def test_the_spool_holds_what_the_server_sends(source: Source, tmp_path: Path) -> None:
    source.execute(
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) AS i",
        "UPDATE t SET id = -id WHERE id < 10",
        "BEGIN",
        "DELETE FROM t WHERE id > 990",
        "SAVEPOINT s",
        "INSERT INTO t VALUES (5000, 'rolled back')",
        "ROLLBACK TO s",
        "INSERT INTO t VALUES (5001, NULL)",
        "COMMIT",
        "TRUNCATE t",
    )
    received = source.receive(tmp_path)
    assert received.reached_endpos
    assert received_messages(tmp_path) == source.expected(binary=True)
    assert source.confirmed_lsn() == received.complete_lsn
    # Going on adds what is new, and only that.
    insert(source, 1, 3)
    source.receive(tmp_path)
    assert_as_sent(source, tmp_path)


class _LazySpool(SpoolWriter):
    """Its disk takes its time."""

    def __init__(self, directory: Path) -> None:
        self.may_sync = threading.Event()
        self.asked = threading.Event()
        super().__init__(directory)

    def _flush(self, position: int, size: int, records: Records) -> None:
        if len(records) and self.last_end_lsn:
            self.asked.set()
            assert self.may_sync.wait(DEADLINE_SECONDS)
        super()._flush(position, size, records)


def test_slot_position_does_not_move_before_fsync(source: Source, tmp_path: Path) -> None:
    before = source.confirmed_lsn()
    with _LazySpool(tmp_path) as spool:
        with receiving(source.settings(), spool):
            insert(source, 1, 5)
            assert spool.asked.wait(DEADLINE_SECONDS)
            assert spool.last_end_lsn > before
            time.sleep(0.3)  # time in which a wrong receiver would confirm
            assert source.confirmed_lsn() == before
            spool.may_sync.set()
            wait_for(lambda: source.confirmed_lsn() > before)
            assert source.confirmed_lsn() <= spool.durable_lsn
        assert SpoolReader(tmp_path).last_end_lsn() == spool.last_end_lsn


POINTS = (*RECEIVER, RECEIVER[0])


def test_killed_anywhere_it_goes_on_without_loss(either16: Source, tmp_path: Path) -> None:
    source = either16
    directory = tmp_path / "dir"
    marker = tmp_path / "marker"
    for turn, point in enumerate(POINTS):
        insert(source, 1 + 1000 * turn, 300, per_transaction=3)
        marker.touch()
        child = ReceiveChild(
            source.uri,
            source.slot,
            directory,
            endpos=source.lsn(),
            failpoints=f"{point}=kill@{marker}",
            batches=source.batches,
        )
        assert child.exit_status() == -signal.SIGKILL, point
    wait_for(lambda: not source.scalar(IS_ACTIVE.format(source.slot)))
    ReceiveChild(
        source.uri, source.slot, directory, endpos=source.lsn(), batches=source.batches
    ).outcome()
    assert_as_sent(source, directory)


def test_an_idle_database_still_advances(
    source_cluster: Cluster, source16: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_module, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(receive_module, "FEEDBACK_SECONDS", 0.1)
    source = source16
    with SpoolWriter(tmp_path) as spool, receiving(source.settings(), spool):
        # WAL of another database.
        source_cluster.execute("CREATE TABLE busy (a int)")
        source_cluster.execute("INSERT INTO busy SELECT generate_series(1, 10000)")
        source_cluster.execute("DROP TABLE busy")
        source_cluster.execute("CHECKPOINT")
        end = source.lsn()
        wait_for(lambda: source.confirmed_lsn() >= end)
    assert read_all(tmp_path) == b""


def test_a_full_spool_holds_the_receiver_back(
    either16: Source,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receive_module, "CONTROL_SECONDS", 0.02)
    caplog.set_level("INFO", logger="millrace")
    source = either16
    limit = 300_000
    with (
        Sentinel(tmp_path) as sentinel,
        SpoolWriter(tmp_path, segment_bytes=50_000) as spool,
        receiving(source.settings(max_spool_bytes=limit), spool, sentinel),
    ):
        for turn in range(20):
            insert(source, 1 + turn * 1000, 1000, per_transaction=500)
            time.sleep(0.03)
        wait_for(lambda: "holding back" in caplog.text)
        held = source.confirmed_lsn()
        reader = SpoolReader(tmp_path)
        end = last_end(source)

        def is_all_received() -> bool:
            applied = reader.last_end_lsn()
            sentinel.write_applied(applied)
            prune(tmp_path, applied)
            return applied == end and source.confirmed_lsn() > held

        wait_for(is_all_received)
        wait_for(lambda: caplog.text.count("holding back") == caplog.text.count("receiving again"))


def test_a_transaction_larger_than_the_limit_passes(either16: Source, tmp_path: Path) -> None:
    source = either16
    insert(source, 1, 20_000, per_transaction=20_000)
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        settings = source.settings(max_spool_bytes=100_000, endpos=source.lsn())
        assert receive(settings, spool, sentinel).reached_endpos
    assert_as_sent(source, tmp_path)


def test_prefetch_off_holds_and_on_goes_on(either16: Source, tmp_path: Path) -> None:
    source = either16
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        sentinel.set_prefetch(False)
        with receiving(source.settings(), spool, sentinel):
            insert(source, 1, 10)
            time.sleep(0.5)
            assert spool.last_end_lsn == 0
            sentinel.set_prefetch(True)
            end = last_end(source)
            wait_for(lambda: spool.last_end_lsn == end)


@pytest.mark.slow
def test_a_value_of_200_megabytes_passes(source16: Source, tmp_path: Path) -> None:
    source = source16
    insert(source, 1, 2)
    source.execute("INSERT INTO t VALUES (100, repeat('x', 200 * 1024 * 1024))")
    insert(source, 3, 2)
    source.receive(tmp_path)
    assert len(read_all(tmp_path)) > 200 * 1024 * 1024
    found = received_messages(tmp_path)
    assert [message[:1] for message in found if len(message) > 1_000_000] == [b"I"]
    assert commit_ends_of(found) == commit_ends_of(source.expected())
    for chunk in SpoolReader(tmp_path).chunks(_whole(tmp_path), 1 << 20):
        assert len(chunk)


def _whole(directory: Path):  # type: ignore[no-untyped-def]
    found = SpoolReader(directory).plan(0, 1 << 40, None)
    assert found is not None
    return found


@pytest.mark.slow
def test_a_million_rows_in_one_transaction_take_little_memory(
    source16: Source, tmp_path: Path
) -> None:
    source = source16
    insert(source, 1, 1)
    small = ReceiveChild(source.uri, source.slot, tmp_path, endpos=source.lsn()).outcome()
    insert(source, 10, 1_000_000, per_transaction=1_000_000)
    large = ReceiveChild(source.uri, source.slot, tmp_path, endpos=source.lsn()).outcome()
    assert _whole(tmp_path).changes == 1_000_001
    assert large["peak_bytes"] < small["peak_bytes"] + 64 * 1024 * 1024


def test_text_takes_over_when_a_column_needs_it(
    source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="millrace")
    end = {}
    # On one connection: the next one would know.
    asked = source.settings(batches=NO_BATCHES)
    with SpoolWriter(tmp_path) as spool, receiving(asked, spool):
        insert(source, 1, 2)
        end["binary"] = last_end(source)
        wait_for(lambda: spool.durable_lsn >= end["binary"])
        source.execute(
            "CREATE TYPE mood AS ENUM ('good', 'bad')",
            "CREATE TYPE pair AS (a int, b int)",
            "ALTER TABLE t ADD m mood",
            "INSERT INTO t VALUES (10, 'an enum is its label', 'good')",
            "ALTER TABLE t ADD ms mood[], ADD p pair",
            "INSERT INTO t VALUES (11, 'in text', 'bad', '{good,bad}', '(1,2)')",
        )
        end["text"] = last_end(source)
        wait_for(lambda: spool.durable_lsn >= end["text"])
    assert caplog.text.count("continuing in text") == 1
    found = without_relations(received_messages(tmp_path))
    in_text = without_relations(source.expected())
    in_binary = without_relations(source.expected(binary=True))
    assert len(found) == len(in_text)
    assert found[-2] == in_text[-2]
    assert found[1] == in_binary[1]
    assert found[1] != in_text[1]
    # The next connection knows it before it begins.
    insert(source, 20, 1)
    caplog.clear()
    source.receive(tmp_path)
    assert "continuing in text" not in caplog.text
    assert "in text: " in caplog.text


def test_the_end_of_a_transaction_that_was_never_sent_is_dropped(source16: Source) -> None:
    # As version 18 sends it for some large ones that are rolled back, unasked.
    abort = encode_frame(b"A" + (754).to_bytes(4, "big") + (755).to_bytes(4, "big"), 160)
    parts = [Transaction(1).frames(), Transaction(2).frames()]
    data = abort.join([b"", *parts, b""])
    with connect(source16.dsn, "test") as catalog:
        plugin = open_plugin(
            "pgoutput",
            catalog,
            source16.slot,
            "UTF8",
            binary=True,
            reconnect=lambda: connect(source16.dsn, "test"),
            partitions=Partitions("UTF8"),
        )
        found = scan(np.frombuffer(data, np.uint8), len(data))
        frames, messages = plugin.translate(memoryview(data), found)
        assert bytes(frames) == b"".join(parts)
        assert messages.consumed == len(frames)
        found = scan(np.frombuffer(abort, np.uint8), len(abort))
        frames, messages = plugin.translate(memoryview(abort), found)
        assert (len(frames), len(messages)) == (0, 0)
