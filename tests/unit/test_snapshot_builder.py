"""The state machine of decoding, and open transactions, without WAL."""

from __future__ import annotations

import numpy as np

from millrace.wal.reorder_buffer import ReorderBuffer
from millrace.wal.snapshot_builder import BuilderState, RunningXacts, SnapshotBuilder, precedes


def test_a_server_on_which_nothing_runs_is_consistent_at_once() -> None:
    builder = SnapshotBuilder()
    builder.process_running_xacts(100, RunningXacts(next_xid=10, oldest_running_xid=10))
    assert builder.is_consistent
    assert not builder.emits(100)
    assert builder.emits(101)


def test_long_transaction_that_was_open_at_the_start_holds_back_consistency() -> None:
    builder = SnapshotBuilder()
    builder.process_running_xacts(100, RunningXacts(10, 5))
    assert builder.state == BuilderState.BUILDING_SNAPSHOT
    builder.process_running_xacts(200, RunningXacts(20, 5))
    assert builder.state == BuilderState.BUILDING_SNAPSHOT
    builder.process_running_xacts(300, RunningXacts(30, 12))
    assert builder.state == BuilderState.FULL_SNAPSHOT
    assert not builder.accepts_change(29)
    assert builder.accepts_change(30)
    builder.process_commit(350, [])
    builder.process_running_xacts(400, RunningXacts(40, 30))
    assert builder.is_consistent
    assert builder.emits(351)


def test_suboverflow_changes_nothing() -> None:
    builder = SnapshotBuilder()
    builder.process_running_xacts(100, RunningXacts(10, 5, is_suboverflowed=True))
    builder.process_running_xacts(200, RunningXacts(20, 10, is_suboverflowed=True))
    assert builder.state == BuilderState.FULL_SNAPSHOT


def test_shutdown_checkpoint_is_a_start_unless_strict() -> None:
    builder = SnapshotBuilder()
    builder.process_shutdown(100, next_xid=10, oldest_prepared=None)
    assert builder.is_consistent
    waiting = SnapshotBuilder()
    waiting.process_shutdown(100, next_xid=10, oldest_prepared=7)
    assert waiting.state == BuilderState.BUILDING_SNAPSHOT
    strict = SnapshotBuilder(strict=True)
    strict.process_shutdown(100, next_xid=10, oldest_prepared=None)
    assert strict.state == BuilderState.START


def test_catalog_changes_before_full_are_hidden_only_if_strict() -> None:
    for strict in (False, True):
        builder = SnapshotBuilder(strict=strict)
        builder.process_running_xacts(100, RunningXacts(10, 5))
        builder.process_commit(150, [11])
        # 10 began after the start and still runs, so 11 is not below the new xmin.
        builder.process_running_xacts(200, RunningXacts(20, 10))
        assert builder.state == BuilderState.FULL_SNAPSHOT
        assert builder.hidden_at(250) == (frozenset({11}) if strict else frozenset())


def test_transaction_ids_are_compared_on_a_circle() -> None:
    assert precedes(0xFFFFFFF0, 5)
    assert not precedes(5, 0xFFFFFFF0)


def test_subxacts_known_only_at_commit_belong_to_it() -> None:
    buffer = ReorderBuffer()
    buffer.register(10, 100)
    buffer.register(11, 110)
    buffer.add_changes(10, 0, np.array([1, 5]))
    buffer.add_changes(11, 0, np.array([3]))
    whole = buffer.gather(10, (11,))
    assert whole is not None
    assert whole.first_lsn == 100
    assert [(piece, indices.tolist()) for piece, indices in whole.references] == [(0, [1, 3, 5])]


def test_subxact_seen_first_gives_its_position_to_the_top() -> None:
    buffer = ReorderBuffer()
    buffer.assign(10, 11, 90)
    buffer.register(10, 100)
    assert buffer.open[10].first_lsn == 90


def test_crash_leftovers_go_with_the_next_running_xacts() -> None:
    buffer = ReorderBuffer()
    buffer.register(10, 100)
    buffer.register(20, 200)
    assert buffer.drop_before(15) == [10]
    assert list(buffer.open) == [20]


def test_rolled_back_subxact_leaves_an_empty_transaction() -> None:
    buffer = ReorderBuffer()
    buffer.assign(10, 11, 90)
    buffer.add_changes(11, 0, np.array([1]))
    buffer.drop([11])
    whole = buffer.gather(10, ())
    assert whole is not None
    assert whole.has_snapshot
    assert not whole.references
