"""Receiving from a slot that is lost, taken, of another kind, or far behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures.stream.receiving import (
    IS_ACTIVE,
    TABLE,
    Source,
    assert_as_sent,
    insert,
    receiving,
)
from tests.fixtures.wait import wait_for

from millrace.errors import ConfigError, ConnectionLost, ServerError, SlotLost
from millrace.postgres.program.embedded import open_cluster
from millrace.postgres.wire.slot import SlotState, read_slot
from millrace.receive import limits as receive_limits
from millrace.receive.loop import receive
from millrace.spool.writer import SpoolWriter
from millrace.workdir.sentinel import Sentinel, StreamSetup


def test_a_missing_slot_is_lost(source16: Source, tmp_path: Path) -> None:
    source = source16
    insert(source, 1, 1)
    source.receive(tmp_path)
    source.execute(f"SELECT pg_drop_replication_slot('{source.slot}')")
    insert(source, 2, 1)
    with pytest.raises(SlotLost, match="does not exist") as caught:
        source.receive(tmp_path)
    assert "millrace stream cleanup" in caught.value.hint


def test_a_slot_that_somebody_else_moved_is_lost(source16: Source, tmp_path: Path) -> None:
    source = source16
    insert(source, 1, 1)
    source.receive(tmp_path)
    insert(source, 2, 1)
    source.execute(f"SELECT pg_replication_slot_advance('{source.slot}', pg_current_wal_lsn())")
    with pytest.raises(SlotLost, match="another client has read it"):
        source.receive(tmp_path)


def test_a_spool_that_is_gone_is_told(source16: Source, tmp_path: Path) -> None:
    source = source16
    setup = StreamSetup("source", source.slot, "pgoutput", "UTF8", source.confirmed_lsn())
    with Sentinel(tmp_path) as sentinel:
        sentinel.write_setup(setup)
        for count, folder in ((1, "spool"), (2, "spool"), (3, "new")):
            insert(source, count, 1)
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

    monkeypatch.setattr(receive_limits, "SLOT_LAG_SECONDS", 0.0)
    monkeypatch.setattr(receive_limits, "read_slot", look)
    insert(source16, 1, 1)
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        settings = source16.settings(max_slot_lag_bytes=1 << 30, endpos=source16.lsn())
        assert receive(settings, spool, sentinel).reached_endpos
    assert_as_sent(source16, tmp_path)
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


def test_a_slot_lag_beyond_the_limit_is_told(
    source16: Source,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receive_limits, "SLOT_LAG_SECONDS", 0.0)
    source = source16
    insert(source, 1, 1000, per_transaction=1000)
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
        wait_for(lambda: source.scalar(IS_ACTIVE.format(source.slot)))
        with (
            SpoolWriter(tmp_path / "b") as other,
            pytest.raises(ServerError, match=r"is active|another client"),
        ):
            receive(source.settings(), other)
