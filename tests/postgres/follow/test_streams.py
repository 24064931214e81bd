"""Several streams in one process: each begins, fails, is stopped and continues by itself."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as futures_thread
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.stream.followed import SCHEMA, Followed, Silent, open_followed, writing
from tests.fixtures.stream.syncing import request, requested, run_sql
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.apply.prepare import Share
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.errors import ApplyError, WorkDirError
from millrace.follow.audit.baseline import note_counters, note_tables
from millrace.follow.clone_follow import clone_and_follow
from millrace.follow.settings import DEFAULT_SLOT, FollowSettings, SlotSettings
from millrace.follow.slot import cleanup, create_stream
from millrace.follow.stream import Stream
from millrace.log import TextFormatter
from millrace.name import Naming
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.wal_end import read_end
from millrace.route import Route
from millrace.workdir.lock import read_holder
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.stream_binding import has_stream
from millrace.workdir.stream_state import StreamState, read_stream_status


@pytest.fixture
def pair(
    source_cluster: Cluster, target_cluster: Cluster, tmp_path: Path
) -> Iterator[tuple[Followed, Followed]]:
    """Two databases of one server, followed by two of another."""
    with ExitStack() as stack:
        found = []
        for name in ("shop", "shop2"):
            source = source_cluster.create_database(f"streams_{name}")
            stack.callback(source_cluster.drop_database, f"streams_{name}")
            target = target_cluster.create_database(f"streams_{name}_there")
            stack.callback(target_cluster.drop_database, f"streams_{name}_there")
            directory = tmp_path / name
            found.append(
                stack.enter_context(open_followed(source, target, directory, DirectEngine()))
            )
        yield found[0], found[1]


def open_stream(followed: Followed, name: str) -> Stream:
    return Stream(followed.settings(), followed.engine, name=name)


def steps(*streams: Stream) -> list[StreamState]:
    return [stream.step(0.01) for stream in streams]


def end(followed: Followed, stream: Stream) -> None:
    """Bring it to where its source is."""
    followed.set_endpos(followed.end())
    wait_for(lambda: not stream.step(0.01).is_running)
    assert stream.result().reached_endpos
    followed.assert_equal()


def test_a_stream_that_is_killed_leaves_the_other_alone_and_continues(
    pair: tuple[Followed, Followed],
) -> None:
    shop, other = pair
    streams = [open_stream(shop, "shop"), open_stream(other, "shop2")]
    try:
        with (
            writing(shop.source, 1, pause_seconds=0.02) as first,
            writing(other.source, 2, pause_seconds=0.02) as second,
        ):
            assert all(stream.open().is_running for stream in streams)
            wait_for(lambda: steps(*streams) and all(s.progress.transactions for s in streams))
            killed, left = streams
            assert killed.receiver_pid is not None
            os.kill(killed.receiver_pid, signal.SIGKILL)
            killed.stop(cancels=True)
            assert killed.state is StreamState.ENDED
            assert left.step().is_running
            with pytest.raises(WorkDirError, match="stopped before it ended"):
                killed.result()
            behind, ahead = killed.progress.transactions, left.progress.transactions
            already = first(), second()
            wait_for(lambda: first() > already[0] + 20 and second() > already[1] + 20)
            wait_for(lambda: left.step(0.01) and left.progress.transactions > ahead + 20)
            assert killed.step() is StreamState.ENDED
            assert killed.progress.transactions == behind
        end(other, left)
        killed.open()
        end(shop, killed)
    finally:
        for stream in streams:
            stream.stop()


def test_threads_of_a_stream_keep_no_process_from_ending(pair: tuple[Followed, Followed]) -> None:
    """A stream in a thread of its own, which nobody stops: Ctrl-C of `millrace demo`."""
    before = set(threading.enumerate())
    stream = open_stream(pair[0], "shop")
    try:
        assert stream.open().is_running
        [worker] = wait_for(
            lambda: [one for one in threading.enumerate() if one.name.startswith("apply")]
        )
        assert stream.step(0.5).is_running
        # Python waits for the threads of an executor at its end, daemons or not.
        assert worker not in set(futures_thread._threads_queues)
        assert all(one.daemon for one in set(threading.enumerate()) - before)
    finally:
        stream.stop()


class Lines(logging.Handler):
    """The log as it is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(TextFormatter().format(record))


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    caplog.set_level(logging.DEBUG, "millrace")
    handler = Lines()
    logging.getLogger("millrace").addHandler(handler)
    yield handler.lines
    logging.getLogger("millrace").removeHandler(handler)


def test_a_stream_that_fails_says_why_and_continues_when_that_is_mended(
    pair: tuple[Followed, Followed], log_lines: list[str]
) -> None:
    shop, other = pair
    streams = [open_stream(shop, "shop"), open_stream(other, "shop2")]
    failing = streams[0]
    try:
        assert all(stream.open().is_running for stream in streams)
        run_sql(shop.target, "DELETE FROM seat WHERE id = 3")
        run_sql(shop.source, "UPDATE seat SET place = 300 WHERE id = 3")
        run_sql(other.source, "UPDATE seat SET place = 300 WHERE id = 3")
        wait_for(lambda: steps(*streams)[0] is StreamState.FAILED)
        assert isinstance(failing.failure, ApplyError)
        with pytest.raises(ApplyError, match=r"public\.seat"):
            failing.result()
        found = read_stream_status(shop.directory)
        assert found is not None
        assert (found.state, found.is_running) == (StreamState.FAILED, False)
        assert "public.seat" in found.error
        # As often as one likes, and it changes nothing.
        assert failing.open().is_running
        wait_for(lambda: failing.step(0.01) is StreamState.FAILED)
        run_sql(shop.target, "INSERT INTO seat VALUES (3, 3)")
        assert failing.open().is_running
        assert failing.failure is None
        for followed, stream in zip(pair, streams, strict=True):
            end(followed, stream)
    finally:
        for stream in streams:
            stream.stop()
    # Each line says whose it is, also those of other threads.
    for name in ("shop", "shop2"):
        own = [line for line in log_lines if line.endswith(f"  stream={name}")]
        assert any("received everything up to" in line for line in own)
        assert any("applied up to" in line for line in own)


def test_the_state_is_seen_from_outside(pair: tuple[Followed, Followed]) -> None:
    shop, _ = pair
    stream = open_stream(shop, "")

    def seen() -> str:
        found = read_stream_status(shop.directory)
        assert found is not None
        return found.label

    assert seen() == "not running"
    try:
        stream.open()
        wait_for(lambda: stream.step(0.01) and seen() == "following")
        with Sentinel(shop.directory) as sentinel:
            sentinel.set_apply(False)
            wait_for(lambda: stream.step(0.01) is StreamState.HELD)
            assert seen() == "held"
            sentinel.set_apply(True)
            wait_for(lambda: stream.step(0.01) is StreamState.FOLLOWING)
            # Receiving is held back, and there is nothing to apply.
            sentinel.set_prefetch(False)
            wait_for(lambda: stream.step(0.01) is StreamState.HELD)
            sentinel.set_prefetch(True)
        second = open_stream(shop, "again")
        assert second.open() is StreamState.FAILED
        with pytest.raises(WorkDirError, match="another millrace is running"):
            second.result()
        assert stream.step().is_running
        stream.stop()
        assert seen() == "ended"
        # This process lives, but it does not hold the directory any more.
        assert read_holder(shop.directory) is None
        with Sentinel(shop.directory) as sentinel:
            # As a process that is killed leaves it.
            sentinel.write_state(StreamState.FOLLOWING)
        assert seen() == "not running (was following)"
    finally:
        stream.stop()


def test_tables_are_shared_out_by_their_names_on_the_target() -> None:
    naming = Naming({"public": "shop_public"})
    names = [("public", f"t{number}") for number in range(50)]
    for number in range(3):
        mapped = Share(number, 3, naming=naming)
        plain = Share(number, 3)
        assert [mapped.has_name(*name) for name in names] == [
            plain.has_name("shop_public", name) for _, name in names
        ]


def remove_stream(source: Dsn, target: Dsn) -> None:
    with connect(source, "test") as here, connect(target, "test") as there:
        cleanup(here, there, DEFAULT_SLOT, source.identity())


def open_schema(
    stack: ExitStack, cluster: Cluster, target_db: str, directory: Path, schema: str
) -> Followed:
    """A source of its own, into a schema of its own; the slot's name is the same for all."""
    source = cluster.create_database(f"into_{schema}")
    stack.callback(cluster.drop_database, f"into_{schema}")
    run_sql(source, SCHEMA)
    run_sql(target_db, f"CREATE SCHEMA {schema}", f"SET search_path = {schema}; {SCHEMA}")
    dsn = Dsn.parse(source)
    note_counters(directory, dsn)
    created = create_stream(dsn, DEFAULT_SLOT, "pgoutput")
    setup = StreamSetup(dsn.identity(), DEFAULT_SLOT, "pgoutput", "UTF8", created.start_lsn)
    note_tables(directory, dsn, setup, None)
    with Sentinel(directory) as sentinel:
        sentinel.write_setup(setup)

    stack.callback(remove_stream, dsn, Dsn.parse(target_db))
    return Followed(source, target_db, directory, DEFAULT_SLOT, DirectEngine())


def test_two_sources_with_one_slot_name_go_to_two_schemas_of_one_database(
    source_cluster: Cluster, target_cluster: Cluster, target_db: str, tmp_path: Path
) -> None:
    clusters = {"north": source_cluster, "south": target_cluster}
    with ExitStack() as stack:
        followed, streams = {}, {}
        for name, cluster in clusters.items():
            followed[name] = open_schema(stack, cluster, target_db, tmp_path / name, name)
            settings = followed[name].settings(
                naming=Naming({"public": name}), apply_jobs=2 if name == "north" else None
            )
            streams[name] = Stream(settings, followed[name].engine, name=name)
            stack.callback(streams[name].stop)
        north, south = followed.values()
        with (
            writing(north.source, 3, pause_seconds=0.02) as first,
            writing(south.source, 4, pause_seconds=0.02) as second,
        ):
            # All at once, as a driver of many would: they make the same tables of ours.
            with ThreadPoolExecutor(2) as pool:
                states = list(pool.map(Stream.open, streams.values()))
            assert all(state.is_running for state in states)
            wait_for(lambda: first() > 20 and second() > 20)
            # Two tables are copied again at the same time.
            for one in followed.values():
                asked = request(one, "account")
                wait_for(
                    lambda one=one, asked=asked: (
                        steps(*streams.values()) and not requested(one, asked).is_unfinished
                    )
                )
            streams["north"].stop(cancels=True)
            reached = streams["south"].progress.transactions
            wait_for(
                lambda: (
                    steps(*streams.values()) and streams["south"].progress.transactions > reached
                )
            )
            assert streams["north"].state is StreamState.ENDED
            # A stream that is opened without a number of workers keeps its own.
            settings = replace(streams["north"].settings, apply_jobs=None)
            streams["north"] = Stream(settings, north.engine, name="north")
            stack.callback(streams["north"].stop)
            assert streams["north"].open().is_running
        for name, one in followed.items():
            one.set_endpos(one.end())
            wait_for(lambda name=name: not streams[name].step(0.01).is_running)
            assert streams[name].result().reached_endpos
            naming = streams[name].settings.naming
            compare = CompareSettings(
                Route(Dsn.parse(one.source), Dsn.parse(target_db), naming=naming)
            )
            found = compare_data(compare, one.engine)
            assert [table.is_equal for table in found] == [True] * 4


def changes_of(directory: Path) -> int:
    """Applied since the stream began."""
    if not has_stream(directory):
        return 0
    with Sentinel(directory) as sentinel:
        return sentinel.read().changes


def test_two_clones_are_made_and_followed_in_one_process_into_one_database(
    source_cluster: Cluster, target_cluster: Cluster, target_db: str, tmp_path: Path
) -> None:
    target, slot = Dsn.parse(target_db), SlotSettings(DEFAULT_SLOT)
    clusters = {"north": source_cluster, "south": target_cluster}
    sources: dict[str, Dsn] = {}
    copying: dict[str, str] = {}
    failures: list[BaseException] = []

    def state(name: str) -> str:
        found = read_stream_status(tmp_path / name)
        return found.state if found else ""

    def run(name: str) -> None:
        source, directory = sources[name], tmp_path / name
        settings = CloneSettings(Route(source, target, directory, naming=Naming({"public": name})))
        follow = FollowSettings(Route(source, target, directory))

        def on_cloned(_: object) -> None:
            copying[name] = state(name)

        try:
            clone_and_follow(settings, follow, slot, DirectEngine(), Silent(), on_cloned=on_cloned)
        except BaseException as error:
            failures.append(error)

    with ExitStack() as stack:
        writers = stack.enter_context(ExitStack())
        for name, cluster in clusters.items():
            uri = cluster.create_database(f"cloned_{name}")
            stack.callback(cluster.drop_database, f"cloned_{name}")
            run_sql(uri, SCHEMA)
            sources[name] = Dsn.parse(uri)
            stack.callback(remove_stream, sources[name], target)
            writers.enter_context(writing(uri, 21, truncates=False, pause_seconds=0.05))
        threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in sources]
        for thread in threads:
            thread.start()
        wait_for(lambda: failures or all(changes_of(tmp_path / name) > 100 for name in sources))
        writers.close()
        assert not failures, failures
        assert copying == dict.fromkeys(sources, StreamState.COPYING)
        for name, source in sources.items():
            with connect(source, "test") as connection, Sentinel(tmp_path / name) as sentinel:
                sentinel.set_endpos(read_end(connection))
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        assert not failures, failures
        for name, source in sources.items():
            assert state(name) == StreamState.ENDED
            compare = CompareSettings(Route(source, target, naming=Naming({"public": name})))
            found = compare_data(compare, DirectEngine())
            assert [one.is_equal for one in found] == [True] * 4
