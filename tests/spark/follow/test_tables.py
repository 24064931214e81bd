"""Tables that a stream did not begin with, taken up while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.sql import execute
from tests.fixtures.stream.followed import Followed, open_followed, writing
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.errors import ApplyError
from millrace.follow import lookout
from millrace.spark.session import Engine
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.sync_request import RequestState, read_requests

BEFORE = """
CREATE TABLE bare (id int, v text);
CREATE TABLE renewed (id int PRIMARY KEY, v text);
CREATE TABLE parent (id int PRIMARY KEY, v text);
"""
NEW = (
    "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)",
    "CREATE TABLE fresh (id int PRIMARY KEY, v text)",
    "CREATE TABLE fresh_parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE fresh_parted_1 PARTITION OF fresh_parted FOR VALUES FROM (0) TO (1000000)",
)
NAMES = {"child", "fresh", "fresh_parted", "renewed", "bare"}


@pytest.fixture
def followed(
    source_db: str, target_db: str, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Followed]:
    monkeypatch.setattr(lookout, "LOOK_SECONDS", 2.0)
    for uri in (source_db, target_db):
        execute(uri, BEFORE)
    execute(source_db, "INSERT INTO renewed VALUES (1, 'old')")
    execute(target_db, "INSERT INTO renewed VALUES (1, 'old')")
    with open_followed(source_db, target_db, tmp_path / "work", engine) as opened:
        yield opened


def requests(followed: Followed) -> dict[str, RequestState]:
    with Sentinel(followed.directory) as sentinel:
        return {one.name: one.state for one in read_requests(sentinel)}


def churn(source: str, stop: threading.Event) -> None:
    """Insert, update, delete and insert again, in every table that is there."""
    number = 0
    with psycopg.connect(source, autocommit=True) as connection:
        while not stop.is_set():
            number += 1
            for name in sorted(NAMES):
                with connection.transaction():
                    row = connection.execute("SELECT to_regclass(%s)", (name,)).fetchone()
                    if row == (None,):
                        continue
                    for statement in (
                        f"INSERT INTO {name} VALUES ({number + 10}, 'a')",
                        f"UPDATE {name} SET v = v || 'b' WHERE id > {number}",
                        f"DELETE FROM {name} WHERE id = {number + 8}",
                    ):
                        connection.execute(statement.encode())


def test_new_tables_are_copied_and_followed_while_they_are_written_to(followed: Followed) -> None:
    stop = threading.Event()
    writer = threading.Thread(target=churn, args=(followed.source, stop))
    running = followed.start()
    with writing(followed.source, seed=11, writers=1) as count:
        wait_for(lambda: count() > 5)
        execute(followed.target, *NEW)
        execute(followed.source, *NEW)
        # Another table of the same name; and one that can be followed wholly from now on.
        execute(followed.source, "DROP TABLE renewed")
        execute(followed.source, "CREATE TABLE renewed (id int PRIMARY KEY, v text)")
        execute(followed.source, "ALTER TABLE bare REPLICA IDENTITY FULL")
        writer.start()
        try:
            wait_for(
                lambda: (
                    requests(followed).keys() == NAMES
                    and set(requests(followed).values()) == {RequestState.DONE}
                ),
                "every table is copied",
            )
            before = count()
            wait_for(lambda: count() > before + 20)
        finally:
            stop.set()
            writer.join()
    # Made and gone before anybody has looked twice, and of no interest to the target.
    execute(
        followed.source,
        "CREATE TABLE fleeting (id int)",
        "INSERT INTO fleeting VALUES (1)",
        "DROP TABLE fleeting",
    )
    followed.set_endpos(followed.end())
    running.join(DEADLINE_SECONDS)
    assert followed.result.reached_endpos
    followed.assert_equal()


def test_a_table_that_the_target_lacks_stops_the_stream_until_it_is_there(
    followed: Followed,
) -> None:
    execute(
        followed.source,
        "CREATE TABLE lacking (id int PRIMARY KEY, v text)",
        "INSERT INTO lacking VALUES (1, 'v')",
    )
    caught: list[BaseException] = []

    def run() -> None:
        from millrace.follow.stream import follow

        try:
            follow(followed.settings(), followed.engine, followed.reporter)
        except ApplyError as error:
            caught.append(error)

    running = threading.Thread(target=run)
    running.start()
    running.join(DEADLINE_SECONDS)
    # The lookout says when it was created, a change that comes earlier only that it is not there.
    assert "public.lacking" in str(caught[0])
    assert "the target has no such table" in str(caught[0])
    execute(followed.target, "CREATE TABLE lacking (id int PRIMARY KEY, v text)")
    again = followed.start()
    wait_for(lambda: requests(followed).get("lacking") is RequestState.DONE)
    execute(followed.source, "UPDATE lacking SET v = 'w'", "INSERT INTO lacking VALUES (2, 'x')")
    followed.set_endpos(followed.end())
    again.join(DEADLINE_SECONDS)
    assert followed.result.reached_endpos
    followed.assert_equal()
