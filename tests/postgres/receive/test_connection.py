"""Receiving over wires that are cut, encrypted, and from servers that restart or take over."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.proxy import open_proxy
from tests.fixtures.stream.receiving import (
    BATCHES,
    NO_BATCHES,
    TABLE,
    Source,
    assert_as_sent,
    commit_ends_of,
    insert,
    last_end,
    received_messages,
    receiving,
)
from tests.fixtures.tls import open_tls_cluster, tls_uri
from tests.fixtures.wait import wait_for

from millrace.config.dsn import Dsn
from millrace.lsn import parse_lsn
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.postgres.wire.slot_batch import BatchSizes
from millrace.receive.loop import receive
from millrace.spool.writer import SpoolWriter


@pytest.mark.parametrize("cut_after", [5_000, 100_000, 1_000_000])
@pytest.mark.parametrize("side", ["server", "client"])
def test_a_cut_wire_is_connected_again(
    source_cluster: Cluster, either16: Source, tmp_path: Path, cut_after: int, side: str
) -> None:
    source = either16
    if side == "client":
        cut_after //= 50
    insert(source, 1, 20_000, per_transaction=500)
    with open_proxy(source_cluster.port, cut_after=cut_after, side=side) as port:
        database = source.scalar("SELECT current_database()")
        dsn = Dsn.parse(f"postgresql://postgres@127.0.0.1:{port}/{database}")
        with SpoolWriter(tmp_path) as spool:
            receive(source.settings(source=dsn, endpos=source.lsn()), spool)
    assert_as_sent(source, tmp_path)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restarted_server_is_connected_again(tmp_path: Path, mode: str) -> None:
    with open_cluster(16, tcp=True) as cluster:
        source = Source(cluster.create_database("s"), TABLE)
        with SpoolWriter(tmp_path) as spool, receiving(source.settings(), spool):
            insert(source, 1, 300)
            wait_for(lambda: spool.durable_lsn >= source.confirmed_lsn() > 0)
            cluster.restart(mode)
            again = psycopg.connect(source.uri, autocommit=True)
            source.connection.close()
            source.connection = again
            source.execute("SET synchronous_commit = on")
            insert(source, 1001, 300)
            end = source.lsn()
            wait_for(lambda: spool.durable_lsn >= end or _ends(tmp_path, source))
        assert_as_sent(source, tmp_path)
        source.close()


def _ends(directory: Path, source: Source) -> bool:
    return commit_ends_of(received_messages(directory)) == commit_ends_of(source.expected())


@pytest.mark.parametrize("batches", [NO_BATCHES, BATCHES], ids=["streamed", "in batches"])
def test_an_encrypted_connection_gives_the_same_frames(tmp_path: Path, batches: BatchSizes) -> None:
    with open_tls_cluster() as cluster:
        cluster.create_database("s")
        source = Source(tls_uri(cluster, "s"), TABLE, batches=batches)
        assert source.connection.pgconn.ssl_in_use
        insert(source, 1, 20_000, per_transaction=1000)
        source.execute("INSERT INTO t VALUES (-1, repeat('x', 10 * 1024 * 1024))")
        source.receive(tmp_path)
        assert_as_sent(source, tmp_path)
        with SpoolWriter(tmp_path) as spool, receiving(source.settings(), spool):
            insert(source, 30_000, 10)
            end = last_end(source)
            wait_for(lambda: spool.durable_lsn >= end)
            source.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active"
            )
            insert(source, 40_000, 10)
            end = last_end(source)
            wait_for(lambda: spool.durable_lsn >= end)
        assert_as_sent(source, tmp_path)
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
            insert(source, next(numbers), 1)
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
