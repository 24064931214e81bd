"""Receiving up to an end position: what is committed before it, whole transactions, and no more."""

from __future__ import annotations

from pathlib import Path

import psycopg
from tests.fixtures.stream.changes import read_all
from tests.fixtures.stream.receiving import (
    Source,
    assert_as_sent,
    commit_ends_of,
    insert,
    received_messages,
    receiving,
)
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.receive.loop import receive
from millrace.spool.writer import SpoolWriter
from millrace.workdir.sentinel import Sentinel


def test_endpos_in_the_past_ends_at_once(source: Source, tmp_path: Path) -> None:
    start = source.confirmed_lsn()
    insert(source, 1, 3)
    with SpoolWriter(tmp_path) as spool:
        received = receive(source.settings(endpos=start - 1000), spool)
    assert received.reached_endpos
    assert received.end_lsn == 0
    assert read_all(tmp_path) == b""
    assert source.receive(tmp_path).reached_endpos
    assert_as_sent(source, tmp_path)


def test_endpos_between_transactions_takes_what_is_before(source: Source, tmp_path: Path) -> None:
    insert(source, 1, 5)
    expected = commit_ends_of(source.expected())
    insert(source, 6, 5)
    for end in (expected[2], expected[2] + 1, expected[4]):
        with SpoolWriter(tmp_path) as spool:
            received = receive(source.settings(endpos=end), spool)
        assert received.reached_endpos
        before = [lsn for lsn in expected if lsn <= end]
        assert commit_ends_of(received_messages(tmp_path)) == before
    source.receive(tmp_path)
    assert_as_sent(source, tmp_path)


def test_endpos_inside_a_transaction_leaves_it_for_later(source: Source, tmp_path: Path) -> None:
    insert(source, 1, 1)
    source.execute("BEGIN", "INSERT INTO t VALUES (2, 'first half')")
    with psycopg.connect(source.uri, autocommit=True) as other:
        other.execute("SET synchronous_commit = on")
        other.execute("INSERT INTO t VALUES (100, 'committed in between')")
    middle = source.lsn()
    source.execute("INSERT INTO t VALUES (3, 'second half')", "COMMIT")
    with SpoolWriter(tmp_path) as spool:
        received = receive(source.settings(endpos=middle), spool)
    assert received.reached_endpos
    expected = commit_ends_of(source.expected())
    assert commit_ends_of(received_messages(tmp_path)) == expected[:2]
    source.receive(tmp_path)
    assert_as_sent(source, tmp_path)


def test_endpos_inside_a_commit_record_leaves_the_transaction(
    source: Source, tmp_path: Path
) -> None:
    insert(source, 1, 3)
    ends = commit_ends_of(source.expected())
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        received = receive(source.settings(endpos=ends[1] - 1), spool, sentinel)
        # Whoever applies knows that no more comes; the source keeps the whole commit record.
        assert sentinel.read().flushed_lsn == ends[1] - 1
    assert received.reached_endpos
    assert source.confirmed_lsn() < ends[1] - 1
    assert commit_ends_of(received_messages(tmp_path)) == ends[:1]
    source.receive(tmp_path)
    assert_as_sent(source, tmp_path)


def test_endpos_on_an_idle_source_ends_without_more_changes(source: Source, tmp_path: Path) -> None:
    insert(source, 1, 1)
    source.receive(tmp_path)
    source.execute("CREATE TABLE unpublished (a int)", "INSERT INTO unpublished VALUES (1)")
    assert source.receive(tmp_path).reached_endpos
    assert source.receive(tmp_path).reached_endpos


def test_endpos_set_while_it_runs(source16: Source, tmp_path: Path) -> None:
    source = source16
    with Sentinel(tmp_path) as sentinel, SpoolWriter(tmp_path) as spool:
        with receiving(source.settings(), spool, sentinel) as thread:
            insert(source, 1, 10)
            wait_for(lambda: spool.durable_lsn > source.created.start_lsn)
            sentinel.set_endpos(source.lsn())
            thread.join(DEADLINE_SECONDS)
            assert thread.received is not None
            assert thread.received.reached_endpos
        state = sentinel.read()
        assert state.flushed_lsn is not None
        assert state.endpos is not None
        assert state.flushed_lsn >= state.endpos
    assert_as_sent(source, tmp_path)
