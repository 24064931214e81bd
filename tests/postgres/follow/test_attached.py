"""Tables that are attached to a followed root, and a record that changes while it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.stream.receiving import Source
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for
from tests.postgres.follow.test_lookout import SCHEMA, Stream, spooled

from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
from millrace.filter.rules import FilterRules
from millrace.follow import lookout
from millrace.follow.audit.attached import WHY_COPIED
from millrace.follow.audit.closing import audit
from millrace.follow.membership import take_up, write_beginning
from millrace.follow.settings import FollowSettings
from millrace.receive.loop import receive
from millrace.route import Route
from millrace.spool.writer import SpoolWriter
from millrace.workdir.followed_table import FollowedTable, read_followed, write_followed
from millrace.workdir.sentinel import Sentinel, StreamSetup

ATTACH = "ALTER TABLE parted ATTACH PARTITION {0} FOR VALUES FROM ({1}) TO ({2})"


@pytest.fixture
def stream(source_db: str, target_db: str, tmp_path: Path) -> Iterator[Stream]:
    opened = Stream(source_db, target_db, tmp_path, FilterRules())
    yield opened
    opened.close()


def scalar(uri: str, query: str) -> int:
    with psycopg.connect(uri) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def found(stream: Stream) -> list[str]:
    settings = FollowSettings(Route(stream.dsn, Dsn.parse(stream.target), stream.directory))
    findings = audit(settings, stream.setup, stream.sentinel, 0, waits=False)
    return [one.table for one in findings if WHY_COPIED in one.reason]


def copy_parted(stream: Stream) -> None:
    """As far as the record goes, a copy of the root that was requested."""
    oid = scalar(stream.source, "SELECT 'parted'::regclass::oid::int8")
    with psycopg.connect(stream.source, autocommit=True) as connection:
        take_up(connection, stream.sentinel, stream.setup, oid)
    stream.sentinel.write("UPDATE table_sync SET state = 'done'")


def test_a_table_that_is_attached_with_rows_is_copied_with_its_root(stream: Stream) -> None:
    """One that was made as a partition, or is empty, is not."""
    stream.run(
        stream.source,
        "CREATE TABLE born PARTITION OF parted FOR VALUES FROM (10) TO (20)",
        "INSERT INTO parted VALUES (11, 'v')",
        "CREATE TABLE hollow (LIKE parted INCLUDING ALL)",
        ATTACH.format("hollow", 20, 30),
    )
    assert stream.look() == set()
    assert found(stream) == []
    known = read_followed(stream.sentinel)
    for name in ("born", "hollow"):
        assert scalar(stream.source, f"SELECT '{name}'::regclass::oid::int8") in known
    stream.run(
        stream.source,
        "INSERT INTO parted VALUES (21, 'v')",
        "BEGIN; CREATE TABLE filled (LIKE parted INCLUDING ALL); INSERT INTO filled VALUES (31);"
        + ATTACH.format("filled", 30, 40)
        + "; COMMIT",
    )
    assert found(stream) == ["public.parted"]
    filled = scalar(stream.source, "SELECT 'filled'::regclass::oid::int8")
    assert stream.look() == {"parted"}
    # Its changes are left out until the root is taken up.
    assert filled not in read_followed(stream.sentinel)
    copy_parted(stream)
    assert stream.look() == set()
    assert found(stream) == []
    # What is done to a partition between DETACH and ATTACH is not published.
    stream.run(
        stream.source,
        "ALTER TABLE parted DETACH PARTITION filled",
        "UPDATE filled SET v = 'meanwhile'",
        ATTACH.format("filled", 30, 40),
    )
    assert found(stream) == ["public.parted"]
    assert stream.look() == {"parted"}
    copy_parted(stream)
    assert stream.look() == set()


def test_a_tree_that_is_attached_is_copied_with_its_root(stream: Stream) -> None:
    """Its leaves were made as partitions, but not of this root."""
    stream.run(
        stream.source,
        "CREATE TABLE tree (LIKE parted INCLUDING ALL) PARTITION BY RANGE (id)",
        "CREATE TABLE tree_1 PARTITION OF tree FOR VALUES FROM (10) TO (20)",
        "INSERT INTO tree VALUES (11, 'v')",
        ATTACH.format("tree", 10, 20),
    )
    assert stream.look() == {"parted"}
    assert scalar(stream.source, "SELECT 'tree_1'::regclass::oid::int8") not in read_followed(
        stream.sentinel
    )


@contextmanager
def receiving(
    source: Source, plugin: str, directory: Path
) -> Iterator[tuple[Sentinel, StreamSetup, Callable[[], list[tuple[str, str]]]]]:
    """A receiver that runs; and everything that was spooled up to now."""
    setup = StreamSetup("here", source.slot, plugin, "UTF8", source.created.start_lsn)
    with Sentinel(directory) as sentinel, SpoolWriter(directory) as spool:
        write_beginning(source.dsn, sentinel, setup)
        sentinel.write_setup(setup)
        running = threading.Thread(
            target=receive, args=(source.settings(plugin=plugin), spool, sentinel), daemon=True
        )
        running.start()
        marks = 0

        def told() -> list[tuple[str, str]]:
            nonlocal marks
            marks += 1
            source.execute(f"INSERT INTO parent VALUES ({marks})")
            wait_for(lambda: spooled(directory).count(("I", "parent")) == marks)
            return [one for one in spooled(directory) if one[0] != "R" and one[1] != "parent"]

        try:
            yield sentinel, setup, told
        finally:
            sentinel.set_endpos(source.lsn())
            running.join(DEADLINE_SECONDS)
    assert not running.is_alive()


@pytest.fixture(params=["pgoutput", "test_decoding"])
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    plugin = request.param
    cluster = request.getfixturevalue(
        "source_cluster" if plugin == "pgoutput" else "system_cluster"
    )
    opened = Source(cluster.create_database("attached"), SCHEMA, plugin=plugin)
    yield opened
    opened.close()
    cluster.drop_database("attached")


def test_a_receiver_that_saw_a_table_before_it_was_attached_follows_it_when_it_is_taken_up(
    source: Source, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    plugin = request.node.callspec.params["source"]
    with receiving(source, plugin, tmp_path) as (sentinel, setup, told):
        source.execute(
            "CREATE TABLE filled (LIKE parted INCLUDING ALL)", "INSERT INTO filled VALUES (31, 'v')"
        )
        assert told() == []
        source.execute(ATTACH.format("filled", 30, 40), "INSERT INTO parted VALUES (32, 'v')")
        assert told() == []
        oid = source.scalar("SELECT 'parted'::regclass::oid::int8")
        take_up(source.connection, sentinel, setup, oid)
        source.execute(
            "INSERT INTO parted VALUES (33, 'v')",
            "UPDATE parted SET v = 'w' WHERE id = 31",
            "CREATE TABLE born PARTITION OF parted FOR VALUES FROM (40) TO (50)",
            "INSERT INTO born VALUES (41)",
        )
        assert told() == [("I", "parted"), ("U", "parted"), ("I", "parted")]


@pytest.mark.parametrize("source", ["test_decoding"], indirect=True)
def test_a_text_plugin_follows_updates_of_a_table_that_got_an_identity(
    source: Source, tmp_path: Path
) -> None:
    with receiving(source, "test_decoding", tmp_path) as (sentinel, setup, told):
        source.execute("INSERT INTO bare VALUES ('a'), ('b')", "UPDATE bare SET v = 'c'")
        assert told() == [("I", "bare")] * 2
        source.execute("ALTER TABLE bare ADD COLUMN id serial PRIMARY KEY")
        oid = source.scalar("SELECT 'bare'::regclass::oid::int8")
        take_up(source.connection, sentinel, setup, oid)
        source.execute("UPDATE bare SET v = 'd' WHERE id = 1", "DELETE FROM bare WHERE id = 2")
        assert told()[2:] == [("U", "bare"), ("D", "bare")]
        # What is left out is left out of a table that is not written down as whole.
        source.execute("ALTER TABLE bare DROP CONSTRAINT bare_pkey", "ALTER TABLE bare DROP id")
        write_followed(sentinel, [read_followed(sentinel)[oid]])  # somebody else's, too
        source.execute("UPDATE bare SET v = 'e'")
        assert len(told()) == 4
        assert not read_followed(sentinel)[oid].is_whole


def test_the_record_of_an_attempt_that_never_became_a_stream_is_replaced(stream: Stream) -> None:
    stream.sentinel.write("DELETE FROM stream")
    stream.run(stream.source, "CREATE TABLE later (v text)")
    write_beginning(stream.dsn, stream.sentinel, stream.setup)
    assert "later" in {one.name for one in read_followed(stream.sentinel).values()}
    stream.sentinel.write_setup(stream.setup)
    stream.run(stream.source, "CREATE TABLE even_later (v text)")
    write_beginning(stream.dsn, stream.sentinel, stream.setup)
    assert "even_later" not in {one.name for one in read_followed(stream.sentinel).values()}


def test_tables_are_written_down_together_or_not_at_all(tmp_path: Path) -> None:
    with Sentinel(tmp_path) as sentinel:
        bad = FollowedTable(2, "public", None, True)  # type: ignore[arg-type]
        with pytest.raises(WorkDirError):
            write_followed(sentinel, [FollowedTable(1, "public", "one", True), bad])
        assert read_followed(sentinel) == {}


def test_whatever_ends_the_lookout_ends_the_stream(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: lookout.Lookout) -> list[tuple[str, str]]:
        raise ValueError("unforeseen")

    monkeypatch.setattr(lookout.Lookout, "look", fail)
    settings = FollowSettings(Route(stream.dsn, Dsn.parse(stream.target), stream.directory))
    stopped = threading.Event()
    looking = lookout.looking_out(settings, stream.setup, stream.sentinel, stopped.set)
    with pytest.raises(ValueError, match="unforeseen"), looking:
        assert stopped.wait(DEADLINE_SECONDS)
