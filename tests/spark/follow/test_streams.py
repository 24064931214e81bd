"""Two streams in one process on one Spark: one is killed, the other does not notice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.fixtures.stream.followed import Followed, open_followed, writing
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.errors import ServerError
from millrace.follow.stream import Stream
from millrace.postgres.program.embedded import Cluster
from millrace.spark.session import Engine
from millrace.workdir.stream_state import StreamState


def test_cancelling_a_group_ends_its_own_tasks_and_no_others(
    engine: Engine, tmp_path: Path
) -> None:
    outcomes: dict[str, str] = {}

    def wait_for_file(path: str, attempt: int) -> str:
        Path(f"{path}.begun").touch()
        deadline = time.monotonic() + 600.0
        while not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return "done"

    def call(name: str) -> None:
        try:
            body, path = wait_for_file, str(tmp_path / name)
            outcomes[name] = engine.group(name).call(body, path, f"wait for {name}")
        except ServerError as error:
            outcomes[name] = str(error)

    names = ("shop", "shop2")
    threads = {name: threading.Thread(target=call, args=(name,)) for name in names}
    for thread in threads.values():
        thread.start()
    wait_for(lambda: all((tmp_path / f"{name}.begun").exists() for name in names))
    engine.group("shop").cancel()
    threads["shop"].join(DEADLINE_SECONDS)
    assert outcomes == {"shop": "wait for shop: cancelled"}
    (tmp_path / "shop2").touch()
    threads["shop2"].join(DEADLINE_SECONDS)
    assert outcomes["shop2"] == "done"


@pytest.fixture
def pair(
    source_cluster: Cluster, target_cluster: Cluster, tmp_path: Path, engine: Engine
) -> Iterator[tuple[Followed, Followed]]:
    with ExitStack() as stack:
        found = []
        for name in ("north", "south"):
            source = source_cluster.create_database(f"spark_{name}")
            stack.callback(source_cluster.drop_database, f"spark_{name}")
            target = target_cluster.create_database(f"spark_{name}_there")
            stack.callback(target_cluster.drop_database, f"spark_{name}_there")
            opened = open_followed(source, target, tmp_path / name, engine)
            found.append(stack.enter_context(opened))
        yield found[0], found[1]


def test_of_two_streams_under_writers_one_is_killed_and_both_end_equal(
    pair: tuple[Followed, Followed], engine: Engine
) -> None:
    streams = [Stream(one.settings(), engine, name=one.slot) for one in pair]
    killed, left = streams

    def run_on(stream: Stream, until: int) -> bool:
        return stream.step(0.02).is_running and stream.progress.transactions > until

    try:
        with (
            writing(pair[0].source, 11, pause_seconds=0.05),
            writing(pair[1].source, 12, pause_seconds=0.05),
        ):
            for stream in streams:
                stream.open()
            wait_for(lambda: all(run_on(stream, 0) for stream in streams))
            assert killed.receiver_pid is not None
            os.kill(killed.receiver_pid, signal.SIGKILL)
            # In the middle of a batch, if there is one: it is rolled back.
            killed.stop(cancels=True)
            assert killed.state is StreamState.ENDED
            reached = left.progress.transactions
            wait_for(lambda: run_on(left, reached + 20))
            killed.open()
            reached = killed.progress.transactions
            wait_for(lambda: left.step().is_running and run_on(killed, reached))
        for followed, stream in zip(pair, streams, strict=True):
            followed.set_endpos(followed.end())
            wait_for(lambda stream=stream: not stream.step(0.02).is_running)
            assert stream.result().reached_endpos
            followed.assert_equal()
    finally:
        for stream in streams:
            stream.stop()
