"""The queue of tables that are to be copied again."""

from __future__ import annotations

from pathlib import Path

from millrace.apply.table_state import SyncState, TableState, cuts, skipped_tables
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.sync_request import (
    RequestState,
    note_copied,
    note_ended,
    note_running,
    read_request,
    read_requests,
    request_sync,
    spool_floor,
)


def test_table_that_waits_is_queued_once_and_again_while_it_is_copied(tmp_path: Path) -> None:
    with Sentinel(tmp_path) as sentinel, Sentinel(tmp_path) as other:
        first = request_sync(sentinel, "shop", "order", "asked for")
        assert request_sync(other, "shop", "order", "found late").id == first.id
        note_running(sentinel, first.id, "a1", 100)
        second = request_sync(other, "shop", "order", "again")
        assert second.id != first.id
        assert [one.id for one in read_requests(sentinel, unfinished=True)] == [first.id, second.id]
        assert spool_floor(other) == 100
        note_copied(sentinel, first.id, 120, 7)
        # It failed, and the one that waits stands for both.
        note_ended(sentinel, first.id, RequestState.QUEUED, "the target has no such table")
        assert [one.id for one in read_requests(other, unfinished=True)] == [second.id]
        note_ended(sentinel, second.id, RequestState.DONE)
        assert not read_requests(sentinel, unfinished=True)
        assert spool_floor(sentinel) is None
        found = read_request(sentinel, first.id)
        assert found is not None
        assert (found.copied_lsn, found.rows) == (120, 7)


def test_failed_request_waits_with_its_error(tmp_path: Path) -> None:
    with Sentinel(tmp_path) as sentinel:
        asked = request_sync(sentinel, "shop", "order", "asked for")
        note_running(sentinel, asked.id, "a1", 100)
        note_ended(sentinel, asked.id, RequestState.QUEUED, "no such table")
        assert [(one.state, one.error) for one in read_requests(sentinel)] == [
            (RequestState.QUEUED, "no such table")
        ]
        sentinel.clear()
        assert not read_requests(sentinel)


def test_apply_leaves_out_what_a_copy_holds_and_batches_end_there() -> None:
    def state(name: str, state: SyncState, lsn: int) -> TableState:
        return TableState("s", name, state, lsn, "", 1)

    found = [
        state("copying", SyncState.COPYING, 10),
        state("catching_up", SyncState.CATCHING_UP, 20),
        state("ahead", SyncState.FOLLOWED, 30),
        state("behind", SyncState.FOLLOWED, 5),
        state("abandoned", SyncState.ABANDONED, 1),
    ]
    states = {(one.schema, one.name): one for one in found}
    skipped = {name for _, name in skipped_tables(states, 30)}
    assert skipped == {"copying", "catching_up", "ahead", "abandoned"}
    assert {name for _, name in skipped_tables(states, 31)} == skipped - {"ahead"}
    assert cuts(states, 10) == [30]
    assert cuts(states, 30) == []
