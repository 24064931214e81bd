"""Receiving: every transaction once, in commit order, none missing; confirmed after fsync only."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from tests.fixtures.changes import Transaction, read_all
from tests.fixtures.proxy import open_proxy
from tests.fixtures.receiving import (
    BATCHES,
    NO_BATCHES,
    ReceiveChild,
    Source,
    commit_ends_of,
    received_messages,
    receiving,
    without_relations,
)
from tests.fixtures.tls import open_tls_cluster, tls_uri
from tests.fixtures.wait import wait_for

from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, ConnectionLost, ServerError, SlotLost
from millrace.lsn import parse_lsn
from millrace.postgres.connect import connect
from millrace.postgres.embedded import Cluster, open_cluster
from millrace.postgres.pgoutput import encode_frame, scan
from millrace.postgres.slot_batch import BatchSizes
from millrace.stream import receive as receive_module
from millrace.stream.partition import Partitions
from millrace.stream.plugin import open_plugin
from millrace.stream.receive import receive
from millrace.stream.sentinel import Sentinel, StreamSetup
from millrace.stream.slot import SlotState, read_slot
from millrace.stream.spool_index import Records
from millrace.stream.spool_reader import SpoolReader, prune
from millrace.stream.spool_writer import SpoolWriter

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"


@pytest.fixture(params=["16", "18", "18 in batches"])
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    version, *in_batches = request.param.split(maxsplit=1)
    name = {"16": "source_db", "18": "target_db"}[version]
    batches = BATCHES if in_batches else NO_BATCHES
    source = Source(request.getfixturevalue(name), TABLE, batches=batches)
    yield source
    source.close()


@pytest.fixture
def source16(source_db: str) -> Iterator[Source]:
    source = Source(source_db, TABLE)
    yield source
    source.close()


@pytest.fixture(params=[NO_BATCHES, BATCHES], ids=["streamed", "in batches"])
def either16(request: pytest.FixtureRequest, source_db: str) -> Iterator[Source]:
    source = Source(source_db, TABLE, batches=request.param)
    yield source
    source.close()


def _insert(source: Source, first: int, count: int, *, per_transaction: int = 1) -> None:
    for begin in range(first, first + count, per_transaction):
        source.execute(
            f"INSERT INTO t SELECT i, 'value ' || i FROM"
            f" generate_series({begin}, {begin + per_transaction - 1}) AS i"
        )


def _assert_as_sent(source: Source, directory: Path, *, binary: bool = True) -> None:
    expected = without_relations(source.expected(binary=binary))
    assert without_relations(received_messages(directory)) == expected


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
    _insert(source, 1, 3)
    source.receive(tmp_path)
    _assert_as_sent(source, tmp_path)


class _LazySpool(SpoolWriter):
    """Its disk takes its time."""

    def __init__(self, directory: Path) -> None:
        self.may_sync = threading.Event()
        self.asked = threading.Event()
        super().__init__(directory)

    def _flush(self, segment: int, index: int, size: int, records: Records) -> None:
        if len(records) and self.last_end_lsn:
            self.asked.set()
            assert self.may_sync.wait(30)
        super()._flush(segment, index, size, records)


def test_slot_position_does_not_move_before_fsync(source: Source, tmp_path: Path) -> None:
    before = source.confirmed_lsn()
    with _LazySpool(tmp_path) as spool:
        with receiving(source.settings(), spool):
            _insert(source, 1, 5)
            assert spool.asked.wait(30)
            assert spool.last_end_lsn > before
            time.sleep(0.3)  # time in which a wrong receiver would confirm
            assert source.confirmed_lsn() == before
            spool.may_sync.set()
            wait_for(lambda: source.confirmed_lsn() > before)
            assert source.confirmed_lsn() <= spool.durable_lsn
        assert SpoolReader(tmp_path).last_end_lsn() == spool.last_end_lsn


@pytest.mark.parametrize(
    "point",
    [
        "receive.before_sync",
        "receive.after_sync",
        "receive.before_feedback",
        "receive.after_feedback",
        "spool.before_index",
    ],
)
def test_killed_anywhere_it_goes_on_without_loss(
    either16: Source, tmp_path: Path, point: str
) -> None:
    source = either16
    directory = tmp_path / "dir"
    marker = tmp_path / "marker"
    for turn in range(3):
        _insert(source, 1 + 1000 * turn, 300, per_transaction=3)
        marker.touch()
        child = ReceiveChild(
            source.uri,
            source.slot,
            directory,
            endpos=source.lsn(),
            failpoints=f"{point}=kill@{marker}",
            batches=source.batches,
        )
        assert child.exit_status() == -signal.SIGKILL
    wait_for(lambda: not source.scalar(_IS_ACTIVE.format(source.slot)))
    ReceiveChild(
        source.uri, source.slot, directory, endpos=source.lsn(), batches=source.batches
    ).outcome()
    _assert_as_sent(source, directory)


_IS_ACTIVE = "SELECT active FROM pg_replication_slots WHERE slot_name = '{}'"


@pytest.mark.parametrize("cut_after", [5_000, 100_000, 1_000_000])
@pytest.mark.parametrize("side", ["server", "client"])
def test_a_cut_wire_is_connected_again(
    source_cluster: Cluster, either16: Source, tmp_path: Path, cut_after: int, side: str
) -> None:
    source = either16
    if side == "client":
        cut_after //= 50
    _insert(source, 1, 20_000, per_transaction=500)
    with open_proxy(source_cluster.port, cut_after=cut_after, side=side) as port:
        database = source.scalar("SELECT current_database()")
        dsn = Dsn.parse(f"postgresql://postgres@127.0.0.1:{port}/{database}")
        with SpoolWriter(tmp_path) as spool:
            receive(source.settings(source=dsn, endpos=source.lsn()), spool)
    _assert_as_sent(source, tmp_path)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restarted_server_is_connected_again(tmp_path: Path, mode: str) -> None:
    with open_cluster(16, tcp=True) as cluster:
        source = Source(cluster.create_database("s"), TABLE)
        with SpoolWriter(tmp_path) as spool, receiving(source.settings(), spool):
            _insert(source, 1, 300)
            wait_for(lambda: spool.durable_lsn >= source.confirmed_lsn() > 0)
            started = time.monotonic()
            cluster.restart(mode)
            assert time.monotonic() - started < 20
            again = psycopg.connect(source.uri, autocommit=True)
            source.connection.close()
            source.connection = again
            source.execute("SET synchronous_commit = on")
            _insert(source, 1001, 300)
            end = source.lsn()
            wait_for(lambda: spool.durable_lsn >= end or _ends(tmp_path, source))
        _assert_as_sent(source, tmp_path)
        source.close()


def _ends(directory: Path, source: Source) -> bool:
    return commit_ends_of(received_messages(directory)) == commit_ends_of(source.expected())


def test_endpos_in_the_past_ends_at_once(source: Source, tmp_path: Path) -> None:
    start = source.confirmed_lsn()
    _insert(source, 1, 3)
    with SpoolWriter(tmp_path) as spool:
        begun = time.monotonic()
        received = receive(source.settings(endpos=start - 1000), spool)
        assert time.monotonic() - begun < 5
    assert received.reached_endpos
    assert received.end_lsn == 0
    assert read_all(tmp_path) == b""
    assert source.receive(tmp_path).reached_endpos
    _assert_as_sent(source, tmp_path)


def test_endpos_between_transactions_takes_what_is_before(source: Source, tmp_path: Path) -> None:
    _insert(source, 1, 5)
    expected = commit_ends_of(source.expected())
    _insert(source, 6, 5)
    for end in (expected[2], expected[2] + 1, expected[4]):
        with SpoolWriter(tmp_path) as spool:
            received = receive(source.settings(endpos=end), spool)
        assert received.reached_endpos
        before = [lsn for lsn in expected if lsn <= end]
        assert commit_ends_of(received_messages(tmp_path)) == before
    source.receive(tmp_path)
    _assert_as_sent(source, tmp_path)


def test_endpos_inside_a_transaction_leaves_it_for_later(source: Source, tmp_path: Path) -> None:
    _insert(source, 1, 1)
    source.execute("BEGIN", "INSERT INTO t VALUES (2, 'first half')")
    with psycopg.connect(source.uri, autocommit=True) as other:
        other.execute("SET synchronous_commit = on")
        other.execute("INSERT INTO t VALUES (100, 'committed in between')")
    middle = source.lsn()
    source.execute("INSERT INTO t VALUES (3, 'second half')", "COMMIT")
    with SpoolWriter(tmp_path) as spool:
        begun = time.monotonic()
        received = receive(source.settings(endpos=middle), spool)
        assert time.monotonic() - begun < 5
    assert received.reached_endpos
    expected = commit_ends_of(source.expected())
    assert commit_ends_of(received_messages(tmp_path)) == expected[:2]
    source.receive(tmp_path)
    _assert_as_sent(source, tmp_path)


def test_endpos_inside_a_commit_record_leaves_the_transaction(
    source: Source, tmp_path: Path
) -> None:
    _insert(source, 1, 3)
    ends = commit_ends_of(source.expected())
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        received = receive(source.settings(endpos=ends[1] - 1), spool, sentinel)
        # Whoever applies knows that no more comes; the source keeps the whole commit record.
        assert sentinel.read().flushed_lsn == ends[1] - 1
    assert received.reached_endpos
    assert source.confirmed_lsn() < ends[1] - 1
    assert commit_ends_of(received_messages(tmp_path)) == ends[:1]
    source.receive(tmp_path)
    _assert_as_sent(source, tmp_path)


def test_endpos_on_an_idle_source_ends_in_seconds(source: Source, tmp_path: Path) -> None:
    _insert(source, 1, 1)
    source.receive(tmp_path)
    source.execute("CREATE TABLE unpublished (a int)", "INSERT INTO unpublished VALUES (1)")
    begun = time.monotonic()
    assert source.receive(tmp_path).reached_endpos
    assert time.monotonic() - begun < 5
    begun = time.monotonic()
    assert source.receive(tmp_path).reached_endpos
    assert time.monotonic() - begun < 5


def test_endpos_set_while_it_runs(source16: Source, tmp_path: Path) -> None:
    source = source16
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        with receiving(source.settings(), spool, sentinel) as thread:
            _insert(source, 1, 10)
            wait_for(lambda: spool.durable_lsn > source.created.start_lsn)
            sentinel.set_endpos(source.lsn())
            thread.join(10)
            assert thread.received is not None
            assert thread.received.reached_endpos
        state = sentinel.read()
        assert state.flushed_lsn is not None
        assert state.endpos is not None
        assert state.flushed_lsn >= state.endpos
    _assert_as_sent(source, tmp_path)


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
            _insert(source, 1 + turn * 1000, 1000, per_transaction=500)
            time.sleep(0.03)
        wait_for(lambda: "holding back" in caplog.text)
        held = source.confirmed_lsn()
        reader = SpoolReader(tmp_path)
        last_end = _last_end(source)

        def is_all_received() -> bool:
            applied = reader.last_end_lsn()
            sentinel.write_applied(applied)
            prune(tmp_path, applied)
            return applied == last_end and source.confirmed_lsn() > held

        wait_for(is_all_received)
        wait_for(lambda: caplog.text.count("holding back") == caplog.text.count("receiving again"))


def _last_end(source: Source) -> int:
    return commit_ends_of(source.expected())[-1]


def test_a_transaction_larger_than_the_limit_passes(either16: Source, tmp_path: Path) -> None:
    source = either16
    _insert(source, 1, 20_000, per_transaction=20_000)
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        settings = source.settings(max_spool_bytes=100_000, endpos=source.lsn())
        assert receive(settings, spool, sentinel).reached_endpos
    _assert_as_sent(source, tmp_path)


def test_prefetch_off_holds_and_on_goes_on(either16: Source, tmp_path: Path) -> None:
    source = either16
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        sentinel.set_prefetch(False)
        with receiving(source.settings(), spool, sentinel):
            _insert(source, 1, 10)
            time.sleep(0.5)
            assert spool.last_end_lsn == 0
            sentinel.set_prefetch(True)
            end = _last_end(source)
            wait_for(lambda: spool.last_end_lsn == end)


@pytest.mark.slow
def test_a_value_of_200_megabytes_passes(source16: Source, tmp_path: Path) -> None:
    source = source16
    _insert(source, 1, 2)
    source.execute("INSERT INTO t VALUES (100, repeat('x', 200 * 1024 * 1024))")
    _insert(source, 3, 2)
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
    _insert(source, 1, 1)
    small = ReceiveChild(source.uri, source.slot, tmp_path, endpos=source.lsn()).outcome()
    _insert(source, 10, 1_000_000, per_transaction=1_000_000)
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
        _insert(source, 1, 2)
        end["binary"] = _last_end(source)
        wait_for(lambda: spool.durable_lsn >= end["binary"])
        source.execute(
            "CREATE TYPE mood AS ENUM ('good', 'bad')",
            "CREATE TYPE pair AS (a int, b int)",
            "ALTER TABLE t ADD m mood",
            "INSERT INTO t VALUES (10, 'an enum is its label', 'good')",
            "ALTER TABLE t ADD ms mood[], ADD p pair",
            "INSERT INTO t VALUES (11, 'in text', 'bad', '{good,bad}', '(1,2)')",
        )
        end["text"] = _last_end(source)
        wait_for(lambda: spool.durable_lsn >= end["text"])
    assert caplog.text.count("going on in text") == 1
    found = without_relations(received_messages(tmp_path))
    in_text = without_relations(source.expected())
    in_binary = without_relations(source.expected(binary=True))
    assert len(found) == len(in_text)
    assert found[-2] == in_text[-2]
    assert found[1] == in_binary[1]
    assert found[1] != in_text[1]
    # The next connection knows it before it begins.
    _insert(source, 20, 1)
    caplog.clear()
    source.receive(tmp_path)
    assert "going on in text" not in caplog.text
    assert "in text: " in caplog.text


def test_a_missing_slot_is_lost(source16: Source, tmp_path: Path) -> None:
    source = source16
    _insert(source, 1, 1)
    source.receive(tmp_path)
    source.execute(f"SELECT pg_drop_replication_slot('{source.slot}')")
    _insert(source, 2, 1)
    with pytest.raises(SlotLost, match="does not exist") as caught:
        source.receive(tmp_path)
    assert "millrace stream cleanup" in caught.value.hint


def test_a_slot_that_somebody_else_moved_is_lost(source16: Source, tmp_path: Path) -> None:
    source = source16
    _insert(source, 1, 1)
    source.receive(tmp_path)
    _insert(source, 2, 1)
    source.execute(f"SELECT pg_replication_slot_advance('{source.slot}', pg_current_wal_lsn())")
    with pytest.raises(SlotLost, match="somebody else has read it"):
        source.receive(tmp_path)


def test_a_spool_that_is_gone_is_told(source16: Source, tmp_path: Path) -> None:
    source = source16
    setup = StreamSetup("source", source.slot, "pgoutput", "UTF8", source.confirmed_lsn())
    with Sentinel(tmp_path) as sentinel:
        sentinel.write_setup(setup)
        for count, folder in ((1, "spool"), (2, "spool"), (3, "new")):
            _insert(source, count, 1)
            with SpoolWriter(tmp_path / folder) as spool:
                settings = source.settings(endpos=source.lsn())
                if folder == "spool":
                    receive(settings, spool, sentinel)
                    continue
                with pytest.raises(SlotLost, match="the spool with the changes between is gone"):
                    receive(settings, spool, sentinel)


def test_a_source_that_is_away_before_the_connection_is_waited_for(
    source16: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def look(catalog: psycopg.Connection[Any], slot: str) -> SlotState | None:
        looks.append(slot)
        if len(looks) == 1:
            raise ConnectionLost("gone", sqlstate=None)
        return read_slot(catalog, slot)

    monkeypatch.setattr(receive_module, "SLOT_LAG_SECONDS", 0.0)
    monkeypatch.setattr(receive_module, "read_slot", look)
    _insert(source16, 1, 1)
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        settings = source16.settings(max_slot_lag_bytes=1 << 30, endpos=source16.lsn())
        assert receive(settings, spool, sentinel).reached_endpos
    _assert_as_sent(source16, tmp_path)
    assert looks


def test_a_slot_of_another_plugin_is_refused(source16: Source, tmp_path: Path) -> None:
    with SpoolWriter(tmp_path) as spool, pytest.raises(ConfigError, match="plugin pgoutput"):
        receive(source16.settings(plugin="test_decoding"), spool)


def test_an_invalidated_slot_is_lost(tmp_path: Path) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    with open_cluster(16, settings=settings) as cluster:
        source = Source(cluster.create_database("s"), TABLE)
        for _ in range(6):
            source.execute(
                "INSERT INTO t SELECT i, repeat('x', 300) FROM generate_series(1, 20000) i"
                " ON CONFLICT (id) DO UPDATE SET v = excluded.v",
                "SELECT pg_switch_wal()",
                "CHECKPOINT",
            )
        with pytest.raises(SlotLost, match="has removed WAL"):
            source.receive(tmp_path)
        source.close()


@pytest.mark.parametrize("batches", [NO_BATCHES, BATCHES], ids=["streamed", "in batches"])
def test_an_encrypted_connection_gives_the_same_frames(tmp_path: Path, batches: BatchSizes) -> None:
    with open_tls_cluster() as cluster:
        cluster.create_database("s")
        source = Source(tls_uri(cluster, "s"), TABLE, batches=batches)
        assert source.connection.pgconn.ssl_in_use
        _insert(source, 1, 20_000, per_transaction=1000)
        source.execute("INSERT INTO t VALUES (-1, repeat('x', 10 * 1024 * 1024))")
        source.receive(tmp_path)
        _assert_as_sent(source, tmp_path)
        with SpoolWriter(tmp_path) as spool, receiving(source.settings(), spool):
            _insert(source, 30_000, 10)
            end = _last_end(source)
            wait_for(lambda: spool.durable_lsn >= end)
            source.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active"
            )
            _insert(source, 40_000, 10)
            end = _last_end(source)
            wait_for(lambda: spool.durable_lsn >= end)
        _assert_as_sent(source, tmp_path)
        source.close()


@pytest.mark.parametrize("batches", [NO_BATCHES, BATCHES], ids=["streamed", "in batches"])
def test_a_promoted_standby_goes_on(tmp_path: Path, batches: BatchSizes) -> None:
    """With a slot that the standby keeps in step, as PostgreSQL 17 can."""
    settings = {
        "hot_standby_feedback": "on",
        "sync_replication_slots": "on",
        "primary_slot_name": "standby",
    }
    with ExitStack() as stack:
        primary = stack.enter_context(open_cluster(18, tcp=True))
        primary.execute("SELECT pg_create_physical_replication_slot('standby')")
        uri = primary.create_database("s")
        standby = stack.enter_context(
            open_cluster(18, tcp=True, base_backup_of=primary, settings=settings)
        )
        # Slots are kept in step through a database.
        standby.execute(
            f"ALTER SYSTEM SET primary_conninfo = 'host={primary.socket_dir} port={primary.port}"
            " user=postgres dbname=postgres'"
        )
        standby.restart()
        source = Source(uri, TABLE, batches=batches)
        source.execute(f"SELECT pg_drop_replication_slot('{source.oracle_slot}')")
        numbers = itertools.count(1)

        def is_in_step() -> bool:
            """The standby waits for the slot to move."""
            _insert(source, next(numbers), 1)
            source.execute("SELECT pg_log_standby_snapshot()")
            return _has_synced_slot(replica, source)

        both = (
            f"host=127.0.0.1,127.0.0.1 port={primary.port},{standby.port} user=postgres dbname=s"
            " target_session_attrs=read-write"
        )
        asked = source.settings(source=Dsn.parse(both))
        with SpoolWriter(tmp_path) as spool, receiving(asked, spool):
            with psycopg.connect(standby.uri("s"), autocommit=True) as replica:
                wait_for(is_in_step)
                written = source.insert_lsn()
                wait_for(lambda: _replayed(replica) >= written)
            source.connection.close()
            primary.stop("immediate")
            with psycopg.connect(standby.uri("s"), autocommit=True) as replica:
                replica.execute("SELECT pg_promote()")
                replica.execute("SET synchronous_commit = on")
                for _ in range(100):
                    replica.execute("INSERT INTO t VALUES (%s, 'after')", (next(numbers),))
            count = next(numbers) - 1
            wait_for(lambda: _count_rows(tmp_path) >= count)
        assert _count_rows(tmp_path) == count


def _has_synced_slot(replica: psycopg.Connection[tuple[object, ...]], source: Source) -> bool:
    row = replica.execute(
        "SELECT synced AND NOT temporary AND invalidation_reason IS NULL"
        " FROM pg_replication_slots WHERE slot_name = %s",
        (source.slot,),
    ).fetchone()
    return bool(row and row[0])


def _replayed(replica: psycopg.Connection[tuple[object, ...]]) -> int:
    row = replica.execute("SELECT pg_last_wal_replay_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(str(row[0]))


def _count_rows(directory: Path) -> int:
    return sum(message[:1] == b"I" for message in received_messages(directory))


def test_a_slot_lag_beyond_the_limit_is_told(
    source16: Source,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receive_module, "SLOT_LAG_SECONDS", 0.0)
    source = source16
    _insert(source, 1, 1000, per_transaction=1000)
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        # Catching up: the lag shrinks by itself.
        receive(source.settings(max_slot_lag_bytes=1, endpos=source.lsn()), spool, sentinel)
        assert "more than --max-slot-lag" in caplog.text
        # Held back it does not, and somebody must decide.
        sentinel.set_prefetch(False)
        with pytest.raises(ServerError, match="while prefetch is off"):
            receive(source.settings(max_slot_lag_bytes=1), spool, sentinel)


def test_two_receivers_of_one_slot_do_not_get_along(source16: Source, tmp_path: Path) -> None:
    source = source16
    with SpoolWriter(tmp_path / "a") as spool, receiving(source.settings(), spool):
        wait_for(lambda: source.scalar(_IS_ACTIVE.format(source.slot)))
        with (
            SpoolWriter(tmp_path / "b") as other,
            pytest.raises(ServerError, match=r"is active|somebody else"),
        ):
            receive(source.settings(), other)


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
