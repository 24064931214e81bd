"""The sentinel: one row that any process may read and write."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from millrace.errors import WorkDirError
from millrace.workdir.sentinel import FILE, Sentinel, StreamSetup


def test_what_is_set_is_read_by_others(tmp_path: Path) -> None:
    with Sentinel(tmp_path) as one, Sentinel(tmp_path) as other:
        state = other.read()
        assert (state.startpos, state.endpos, state.apply, state.prefetch) == (
            None,
            None,
            True,
            True,
        )
        one.set_startpos(1)
        one.set_endpos(0x16B374D848)
        one.set_apply(False)
        one.set_prefetch(False)
        one.write_received(30, 20)
        one.write_applied(10, 5.0)
        one.write_applied(11)
        state = other.read()
        assert (state.startpos, state.endpos) == (1, 0x16B374D848)
        assert (state.apply, state.prefetch) == (False, False)
        assert (state.received_lsn, state.flushed_lsn, state.applied_lsn) == (30, 20, 11)
        assert state.applied_committed_at == 5.0
        one.set_endpos(None)
        assert other.read().endpos is None


def test_the_setup_is_kept_until_cleared(tmp_path: Path) -> None:
    setup = StreamSetup("postgresql://host/db", "slot", "pgoutput", "UTF8", 77)
    with Sentinel(tmp_path) as sentinel:
        assert sentinel.read_setup() is None
        sentinel.write_setup(setup)
        sentinel.write_system_identifier("42")
    with Sentinel(tmp_path) as sentinel:
        found = sentinel.read_setup()
        assert found is not None
        assert (found.slot_name, found.start_lsn, found.system_identifier) == ("slot", 77, "42")
        sentinel.clear()
        assert sentinel.read_setup() is None


def test_many_writers_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    def write(first: int) -> None:
        with Sentinel(tmp_path) as sentinel:
            for number in range(first, first + 100):
                sentinel.write_received(number, number)
                sentinel.write_applied(number)

    threads = [threading.Thread(target=write, args=(n * 1000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Sentinel(tmp_path) as sentinel:
        state = sentinel.read()
        assert state.received_lsn in {n * 1000 + 99 for n in range(4)}


def test_many_may_open_a_new_one_at_once(tmp_path: Path) -> None:
    failures: list[Exception] = []

    def begin(directory: Path, gate: threading.Barrier) -> None:
        gate.wait()
        try:
            Sentinel(directory).close()
        except WorkDirError as error:
            failures.append(error)

    for number in range(100):
        gate = threading.Barrier(8)
        threads = [
            threading.Thread(target=begin, args=(tmp_path / str(number), gate)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_stream_from_before_there_was_a_choice_has_its_spool_in_files(tmp_path: Path) -> None:
    with Sentinel(tmp_path) as sentinel:
        sentinel.write_setup(StreamSetup("source", "slot", "pgoutput", "UTF8", 1))
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.execute("ALTER TABLE stream DROP COLUMN spool")
    with Sentinel(tmp_path) as sentinel:
        setup = sentinel.read_setup()
    assert setup is not None
    assert setup.spool == "files"


def test_an_end_position_and_what_is_being_applied_never_cross(tmp_path: Path) -> None:
    with Sentinel(tmp_path) as worker, Sentinel(tmp_path) as person:
        assert worker.claim(100)
        assert person.try_endpos(99) == 100
        assert person.read().endpos is None
        assert person.try_endpos(150) is None
        assert worker.claim(150)
        assert not worker.claim(151)
        assert person.choose_endpos(120) == 150
        assert person.choose_endpos(160) == 160
        # The worker is gone, and had applied less than it was to.
        worker.reset_claim(140)
        assert person.try_endpos(145) is None


def test_claims_and_end_positions_set_at_once_never_cross(tmp_path: Path) -> None:
    claimed: list[int] = []

    def claim() -> None:
        with Sentinel(tmp_path) as sentinel:
            lsn = 1
            while sentinel.claim(lsn):
                claimed.append(lsn)
                lsn += 1

    thread = threading.Thread(target=claim)
    thread.start()
    with Sentinel(tmp_path) as sentinel:
        while len(claimed) < 20 or sentinel.try_endpos(len(claimed)) is not None:
            pass
        thread.join()
        assert sentinel.read().endpos == claimed[-1]
