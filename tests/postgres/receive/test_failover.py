"""A source that becomes another server: one that continues the stream, or one that lacks a part."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.stream.receiving import NO_BATCHES, Source, received_messages, receiving
from tests.fixtures.wait import wait_for

from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, SourceDiverged
from millrace.follow.standby_advice import read_standby_advice
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.postgres.wire.walsender import SystemState, TimelineEnd, parse_history
from millrace.receive.history import require_continuation, require_history
from millrace.receive.loop import receive
from millrace.spool.writer import SpoolWriter
from millrace.workdir.sentinel import Sentinel, SourceRecord, StreamSetup

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"


@dataclass
class Pair:
    """A primary, and a standby that keeps its slots in step."""

    primary: Cluster
    standby: Cluster
    source: Source
    numbers: Iterator[int]

    def insert(self, count: int = 1) -> int:
        """Rows on the primary; its position after them."""
        for _ in range(count):
            self.source.execute(f"INSERT INTO t VALUES ({next(self.numbers)}, 'v')")
        return self.source.lsn()

    def is_in_step(self) -> bool:
        """The standby waits for the slot to move."""
        self.insert()
        self.source.execute("SELECT pg_log_standby_snapshot()")
        with psycopg.connect(self.standby.uri("s"), autocommit=True) as replica:
            row = replica.execute(
                "SELECT synced AND NOT temporary AND invalidation_reason IS NULL"
                " FROM pg_replication_slots WHERE slot_name = %s",
                (self.source.slot,),
            ).fetchone()
        return bool(row and row[0])

    def has_replayed(self, lsn: int) -> bool:
        with psycopg.connect(self.standby.uri("s"), autocommit=True) as replica:
            row = replica.execute("SELECT pg_last_wal_replay_lsn()::text").fetchone()
        assert row is not None
        return parse_lsn(row[0]) >= lsn

    def promote(self) -> None:
        with psycopg.connect(self.standby.uri("s"), autocommit=True) as replica:
            replica.execute("SELECT pg_promote()")
            replica.execute("SET synchronous_commit = on")
            replica.execute("INSERT INTO t SELECT generate_series(100001, 100010), 'after'")


@contextmanager
def open_pair() -> Iterator[Pair]:
    settings = {
        "hot_standby_feedback": "on",
        "sync_replication_slots": "on",
        "primary_slot_name": "standby",
    }
    with open_cluster(18, tcp=True) as primary:
        primary.execute("SELECT pg_create_physical_replication_slot('standby')")
        uri = primary.create_database("s")
        with open_cluster(18, tcp=True, base_backup_of=primary, settings=settings) as standby:
            # Slots are kept in step through a database.
            standby.execute(
                f"ALTER SYSTEM SET primary_conninfo = 'host={primary.socket_dir} "
                f"port={primary.port} user=postgres dbname=postgres'"
            )
            standby.restart()
            source = Source(uri, TABLE, batches=NO_BATCHES)
            source.execute(f"SELECT pg_drop_replication_slot('{source.oracle_slot}')")
            yield Pair(primary, standby, source, itertools.count(1))
            source.connection.close()


def _count_rows(directory: Path) -> int:
    return sum(message[:1] == b"I" for message in received_messages(directory))


def _begin(sentinel: Sentinel, source: Source) -> None:
    sentinel.write_setup(
        StreamSetup("source", source.slot, "pgoutput", "UTF8", source.created.start_lsn)
    )


def test_a_standby_is_waited_for_until_it_is_promoted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before that its copy of the slot is the primary's: not lost, only not ready."""
    with open_pair() as pair, Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        _begin(sentinel, pair.source)
        any_host = Dsn.parse(
            f"host=127.0.0.1,127.0.0.1 port={pair.primary.port},{pair.standby.port}"
            " user=postgres dbname=s"
        )
        asked = pair.source.settings(source=any_host)
        with receiving(asked, spool, sentinel) as receiver:
            wait_for(pair.is_in_step)
            written = pair.insert()
            wait_for(lambda: pair.has_replayed(written))
            wait_for(lambda: spool.durable_lsn >= written)
            assert sentinel.read_source().timeline == 1
            pair.source.connection.close()
            pair.primary.stop("immediate")
            wait_for(lambda: "keeps it in step with its primary" in caplog.text)
            assert receiver.is_alive()
            pair.promote()
            expected = next(pair.numbers) - 1 + 10
            wait_for(lambda: _count_rows(tmp_path) >= expected)
        assert _count_rows(tmp_path) == expected
        assert sentinel.read_source().timeline == 2


def test_a_promoted_standby_that_was_behind_is_refused(tmp_path: Path) -> None:
    with open_pair() as pair, Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        _begin(sentinel, pair.source)
        _assert_advised(pair)
        with receiving(pair.source.settings(), spool, sentinel):
            wait_for(pair.is_in_step)
            pair.standby.stop()
            written = pair.insert(20)
            wait_for(lambda: spool.durable_lsn >= written)
        sentinel.write_applied(spool.last_end_lsn)
        pair.source.connection.close()
        pair.primary.stop("immediate")
        pair.standby.start()
        pair.promote()
        promoted = Dsn.parse(pair.standby.uri("s"))
        settings = pair.source.settings(source=promoted)
        with pytest.raises(SourceDiverged) as caught:
            receive(settings, spool, sentinel)
        message = caught.value.message
        assert "is on timeline 2, which left timeline 1 at 0/" in message
        assert f"the spool holds changes up to {render_lsn(spool.complete_lsn)}" in message
        assert f"those up to {render_lsn(spool.last_end_lsn)} are applied" in message
        assert caught.value.exit_code == 5
        # Whoever applies asks as well, and keeps asking: the old timeline stays the known one.
        with pytest.raises(SourceDiverged):
            require_history(promoted, sentinel, spool.complete_lsn)
        assert sentinel.read_source().timeline == 1
        with pytest.raises(SourceDiverged):
            receive(settings, spool, sentinel)
        # Far enough by now, it is still another history.
        with psycopg.connect(pair.standby.uri("s"), autocommit=True) as new:
            new.execute("INSERT INTO t SELECT generate_series(200001, 230000), 'more'")
            new.execute("SELECT pg_switch_wal()")
        with pytest.raises(SourceDiverged, match="which left timeline 1 at"):
            receive(settings, spool, sentinel)


def _assert_advised(pair: Pair) -> None:
    """Who begins a stream is told how a standby can't be behind it."""
    advice = "\n".join(pair.source.created.warnings)
    statement = "ALTER SYSTEM SET synchronized_standby_slots = 'standby'"
    assert statement in advice
    with psycopg.connect(pair.source.uri, autocommit=True) as connection:
        connection.execute(statement)
        connection.execute("SELECT pg_reload_conf()")
        wait_for(lambda: read_standby_advice(connection) == [])
        connection.execute("ALTER SYSTEM RESET synchronized_standby_slots")
        connection.execute("SELECT pg_reload_conf()")
        wait_for(lambda: read_standby_advice(connection) != [])


def test_a_source_restored_from_an_older_copy_is_refused(tmp_path: Path) -> None:
    """On the same timeline, with the same slot: only its position tells."""
    with open_cluster(16) as cluster, SpoolWriter(tmp_path) as spool:
        source = Source(cluster.create_database("s"), TABLE)
        source.connection.close()
        cluster.stop()
        copy = cluster.data_dir.with_name("copy")
        subprocess.run(["cp", "-a", cluster.data_dir, copy], check=True)
        cluster.start()
        with psycopg.connect(source.uri, autocommit=True) as connection, Sentinel(tmp_path) as mine:
            _begin(mine, source)
            connection.execute("SET synchronous_commit = on")
            connection.execute("INSERT INTO t SELECT generate_series(1, 1000), 'v'")
            row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
            assert row is not None
            receive(source.settings(endpos=parse_lsn(row[0])), spool, mine)
        cluster.stop()
        subprocess.run(["rm", "-r", cluster.data_dir], check=True)
        copy.rename(cluster.data_dir)
        cluster.start()
        with Sentinel(tmp_path) as mine, pytest.raises(SourceDiverged) as caught:
            receive(source.settings(), spool, mine)
        assert "restored from an older copy" in caught.value.message
        assert render_lsn(spool.complete_lsn) in caught.value.message


PAGE = 8192
NOW = SystemState(
    "7", 3, 900 * PAGE + 77, False, "today", parse_history("1\t0/6000\twhy\n\n2 0/A000 x")
)


def test_a_history_is_read() -> None:
    assert NOW.history == (TimelineEnd(1, 0x6000), TimelineEnd(2, 0xA000))


@pytest.mark.parametrize(
    ("known", "held", "refusal"),
    [
        (SourceRecord(), 0xA000, None),  # a directory of before
        (SourceRecord(3), 0xB000, None),
        (SourceRecord(2), 0xA000, None),
        (SourceRecord(2), 0xA000 + 24, None),  # after the next page's header
        (SourceRecord(2), 0xA000 + 48, "left timeline 2 at 0/A000"),
        (SourceRecord(1), 0x7000, "left timeline 1 at 0/6000"),
        # Promoted while it was received from: what came after was of the new timeline.
        (SourceRecord(2, "today"), 0xB000, None),
        (SourceRecord(2, "yesterday"), 0xB000, "left timeline 2"),
        (SourceRecord(4), 0x1000, "does not come from timeline 4"),
        (SourceRecord(3), 901 * PAGE, "ends at 0/"),
    ],
)
def test_only_a_server_that_has_everything_continues(
    known: SourceRecord, held: int, refusal: str | None
) -> None:
    if refusal is None:
        require_continuation(NOW, known, held, 0)
        return
    for held_lsn, applied_lsn in ((held, 0), (0, held)):
        with pytest.raises(SourceDiverged, match=refusal):
            require_continuation(NOW, known, held_lsn, applied_lsn)


def test_a_standby_that_replays_is_waited_for() -> None:
    with pytest.raises(ConnectionLost, match="has replayed up to"):
        require_continuation(replace(NOW, is_standby=True), SourceRecord(3), 901 * PAGE, 0)
