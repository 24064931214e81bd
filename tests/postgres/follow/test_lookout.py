"""Tables that the publications did not know: found, held back, and taken up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures.stream.receiving import Source, received_messages
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.config.dsn import Dsn
from millrace.errors import ApplyError
from millrace.filter.rules import FilterRules, parse_filters
from millrace.follow.lookout import Lookout
from millrace.follow.membership import take_up, write_beginning
from millrace.follow.publication import read_publications
from millrace.follow.settings import FollowSettings, SlotSettings
from millrace.follow.setup import open_slot_snapshot, published
from millrace.follow.slot import cleanup, create_stream
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.own_schema import create_sql
from millrace.postgres.pgoutput.messages import decode_relation, decode_truncate
from millrace.postgres.run_record import INSTALL
from millrace.postgres.wire.connect import connect
from millrace.receive.loop import receive
from millrace.route import Route
from millrace.spool.writer import SpoolWriter
from millrace.workdir.followed_table import read_followed
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.sync_request import read_requests

SCHEMA = """
CREATE TABLE keyed (id int PRIMARY KEY, v text);
CREATE TABLE bare (v text);
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
"""
LATE = (
    "CREATE TABLE late (id int PRIMARY KEY, v text)",
    "CREATE TABLE late_bare (v text)",
    "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)",
    "DROP TABLE keyed",
    "CREATE TABLE keyed (id int PRIMARY KEY, v text)",
    "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
)


class Stream:
    """A stream that was set up, and what looks for its tables."""

    def __init__(self, source: str, target: str, directory: Path, filters: FilterRules) -> None:
        self.source, self.target, self.directory = source, target, directory
        self.dsn = Dsn.parse(source)
        database = self.dsn.parameters["dbname"]
        self.slot = f"look_{database}"
        self.run(source, SCHEMA)
        self.run(target, SCHEMA)
        created = create_stream(self.dsn, self.slot, "pgoutput", published(self.dsn, filters))
        self.setup = StreamSetup(
            self.dsn.identity(), self.slot, "pgoutput", "UTF8", created.start_lsn
        )
        self.sentinel = Sentinel(directory)
        write_beginning(self.dsn, self.sentinel, self.setup)
        self.sentinel.write_setup(self.setup)
        settings = FollowSettings(Route(self.dsn, Dsn.parse(target), directory, filters=filters))
        self.lookout = Lookout(settings, self.setup, self.sentinel)

    def run(self, uri: str, *statements: str) -> None:
        with psycopg.connect(uri, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def look(self) -> set[str]:
        return {name for _, name in self.lookout.look()}

    def requested(self) -> set[str]:
        return {request.name for request in read_requests(self.sentinel)}

    def close(self) -> None:
        self.sentinel.close()
        with connect(self.dsn, "test") as connection:
            cleanup(connection, None, self.slot)


@pytest.fixture
def stream(source_db: str, target_db: str, tmp_path: Path) -> Iterator[Stream]:
    opened = Stream(source_db, target_db, tmp_path, FilterRules())
    yield opened
    opened.close()


@pytest.fixture
def filtered(source_db: str, target_db: str, tmp_path: Path) -> Iterator[Stream]:
    rules = parse_filters("[exclude-table]\npublic.late\n", name="f")
    opened = Stream(source_db, target_db, tmp_path, rules)
    yield opened
    opened.close()


def test_what_came_later_is_copied_again_and_partitions_are_not(stream: Stream) -> None:
    assert stream.look() == set()
    stream.run(stream.source, *LATE)
    stream.run(stream.target, *LATE)
    assert stream.look() == {"late", "late_bare", "child", "keyed"}
    assert stream.requested() == {"late", "late_bare", "child", "keyed"}
    # They are in the queue, and are not asked for twice.
    assert stream.look() == set()
    reasons = {one.name: one.reason for one in read_requests(stream.sentinel)}
    assert "created again" in reasons["keyed"]
    assert "after the stream began" in reasons["child"]
    with connect(stream.dsn, "test") as connection:
        row = connection.execute("SELECT 'public.parted_2'::regclass::oid::int8").fetchone()
    assert row is not None
    assert read_followed(stream.sentinel)[row[0]].root_oid is not None
    # Detached, it is still no table that is new.
    stream.run(stream.source, "ALTER TABLE parted DETACH PARTITION parted_2")
    assert stream.look() == set()


def test_at_its_end_a_stream_begins_no_copy(stream: Stream) -> None:
    """It would be newer than the end; the audit there tells of the table."""
    stream.run(stream.source, *LATE)
    stream.run(stream.target, *LATE)
    stream.sentinel.set_endpos(stream.setup.start_lsn)
    assert stream.look() == set()
    stream.sentinel.set_endpos(None)
    assert stream.look() == {"late", "late_bare", "child", "keyed"}


def test_filters_keep_what_is_new_out_and_lists_are_looked_at(filtered: Stream) -> None:
    with connect(filtered.dsn, "test") as connection:
        assert not read_publications(connection, filtered.slot).is_for_all
    filtered.run(filtered.source, *LATE)
    filtered.run(filtered.target, *LATE)
    assert filtered.look() == {"late_bare", "child", "keyed"}


def test_an_identity_that_comes_later_is_taken_up(stream: Stream) -> None:
    stream.run(stream.source, "ALTER TABLE bare REPLICA IDENTITY FULL")
    assert stream.look() == {"bare"}
    # The publications are left to those who copy: what they lack until then is lost.
    with connect(stream.dsn, "test") as connection:
        published = read_publications(connection, stream.slot)
        names = {name for (name,) in connection.execute(
            "SELECT relname FROM pg_class WHERE oid = ANY(%s)", (list(published.whole),)
        )}  # fmt: skip
    assert "bare" not in names


def test_a_lost_identity_makes_no_statement_fail(stream: Stream) -> None:
    stream.run(stream.source, "ALTER TABLE keyed DROP CONSTRAINT keyed_pkey")
    stream.run(stream.source, "INSERT INTO keyed VALUES (1, 'v')")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        stream.run(stream.source, "UPDATE keyed SET v = 'w'")
    # And of a partition that has none.
    stream.run(stream.source, "CREATE TABLE loose (id int, v text) PARTITION BY RANGE (id)")
    assert stream.look() == set()
    stream.run(stream.source, "UPDATE keyed SET v = 'w'", "DELETE FROM keyed")
    followed = {one.name: one.is_whole for one in read_followed(stream.sentinel).values()}
    assert followed["keyed"] is False
    stream.run(stream.source, "ALTER TABLE keyed ADD PRIMARY KEY (id)")
    stream.run(stream.target, "CREATE TABLE loose (id int, v text)")
    assert stream.look() == {"keyed", "loose"}


def test_a_table_that_the_target_lacks_stops_the_stream(stream: Stream) -> None:
    stream.run(stream.source, "CREATE TABLE short_lived (id int)")
    assert stream.look() == set()
    stream.run(stream.source, "DROP TABLE short_lived", "CREATE TABLE lasting (id int)")
    assert stream.look() == set()
    with pytest.raises(ApplyError, match=r"public\.lasting .* target has no such table") as caught:
        stream.look()
    assert "create it there" in caught.value.hint
    stream.run(stream.target, "CREATE TABLE lasting (id int)")
    assert stream.look() == {"lasting"}


OLD_TABLES = """
CREATE TABLE kept (id int PRIMARY KEY, v text);
CREATE TABLE loose (v text);
CREATE TABLE made (a int, g int GENERATED ALWAYS AS (a * 2) STORED NOT NULL, v text,
    PRIMARY KEY (a, g));
CREATE TABLE made_full (a int, g int GENERATED ALWAYS AS (a * 2) STORED, v text);
ALTER TABLE made_full REPLICA IDENTITY FULL;
"""


@pytest.mark.parametrize("cluster", ["source_cluster", "target_cluster"])
def test_a_stream_of_an_earlier_version_continues(
    request: pytest.FixtureRequest, cluster: str, target_db: str, tmp_path: Path
) -> None:
    """Its publications are lists, send no generated columns, and have tables that they should not
    have."""
    server = request.getfixturevalue(cluster)
    uri = server.create_database("earlier")
    dsn, slot = Dsn.parse(uri), f"earlier_{cluster}"
    whole, inserts = publication_names(slot)
    with psycopg.connect(uri, autocommit=True) as connection, Sentinel(tmp_path) as sentinel:
        connection.execute(OLD_TABLES.encode())
        for name, tables, kinds in (
            (whole, "kept, made, made_full", "insert, update, delete, truncate"),
            (inserts, "loose", "insert, truncate"),
        ):
            connection.execute(
                f"CREATE PUBLICATION {name} FOR TABLE {tables} WITH (publish = '{kinds}')".encode()
            )
            comment = f"made by millrace for replication slot {slot}"
            connection.execute(f"COMMENT ON PUBLICATION {name} IS '{comment}'".encode())
        setup = StreamSetup(dsn.identity(), slot, "pgoutput", "UTF8", 1)
        settings = FollowSettings(Route(dsn, Dsn.parse(target_db), tmp_path))
        assert Lookout(settings, setup, sentinel).look() == []
        followed = {one.name: one.is_whole for one in read_followed(sentinel).values()}
        is_refused = connection.info.server_version >= 180000
        assert followed == {
            "kept": True, "loose": False, "made": False, "made_full": not is_refused
        }  # fmt: skip
        for table in ("kept", "loose", "made", "made_full"):
            connection.execute(f"UPDATE {table} SET v = 'x'".encode())
            connection.execute(f"DELETE FROM {table}".encode())
    server.drop_database("earlier")


def spooled(directory: Path) -> list[tuple[str, str]]:
    """(kind, table) of every message about a table, in order."""
    names: dict[int, str] = {}
    found = []
    for message in received_messages(directory):
        kind = message[:1].decode()
        if kind == "R":
            relation = decode_relation(message)
            names[relation.oid] = relation.name
            found.append((kind, relation.name))
        elif kind in "IUD":
            found.append((kind, names[int.from_bytes(message[1:5], "big")]))
        elif kind == "T":
            found.extend((kind, names[oid]) for oid in decode_truncate(message).relations)
    return found


@pytest.mark.parametrize("plugin", ["pgoutput", "test_decoding"])
def test_changes_are_spooled_from_the_time_that_a_table_is_taken_up(
    request: pytest.FixtureRequest, plugin: str, tmp_path: Path
) -> None:
    cluster = request.getfixturevalue(
        "source_cluster" if plugin == "pgoutput" else "system_cluster"
    )
    uri = cluster.create_database("withheld")
    source = Source(uri, SCHEMA, plugin=plugin)
    try:
        _check_withheld(source, plugin, tmp_path)
    finally:
        source.close()
        cluster.drop_database("withheld")


def _check_withheld(source: Source, plugin: str, directory: Path) -> None:
    setup = StreamSetup("here", source.slot, plugin, "UTF8", source.created.start_lsn)
    with Sentinel(directory) as sentinel, SpoolWriter(directory) as spool:
        write_beginning(source.dsn, sentinel, setup)

        def receive_all() -> list[tuple[str, str]]:
            before = len(spooled(directory))
            asked = source.settings(endpos=source.lsn(), plugin=plugin)
            receive(asked, spool, sentinel)
            return spooled(directory)[before:]

        source.execute(
            create_sql().decode(),
            INSTALL,
            "INSERT INTO millrace.run VALUES ('r', 1, 's')",
            *LATE,
            "INSERT INTO late VALUES (1, 'v'); INSERT INTO bare VALUES ('v')",
            "INSERT INTO parted VALUES (11, 'v')",
            "UPDATE late SET v = 'w'; TRUNCATE late, bare, millrace.done_step",
        )
        told = [one for one in receive_all() if one[0] != "R"]
        assert told == [("I", "bare"), ("I", "parted"), ("T", "bare")]
        source.execute("INSERT INTO keyed VALUES (1, 'dropped and created')")
        assert receive_all() == []
        oid = source.scalar("SELECT 'late'::regclass::oid::int8")
        if plugin == "pgoutput":
            name = publication_names(source.slot)[0]
            source.execute(f"ALTER PUBLICATION {name} ADD TABLE late")
        take_up(source.connection, sentinel, setup, oid)
        source.execute("TRUNCATE keyed, late", "INSERT INTO late VALUES (2, 'v')")
        source.execute(
            "UPDATE late SET v = 'w'", "DELETE FROM late", "INSERT INTO keyed VALUES (2)"
        )
        told = receive_all()
        assert told[0] == ("R", "late")
        rest = [one for one in told if one[0] != "R"]
        assert rest == [(kind, "late") for kind in "TIUD"]


def test_tables_taken_up_while_the_receiver_runs_are_described_first(
    source_db: str, tmp_path: Path
) -> None:
    source = Source(source_db, SCHEMA)
    setup = StreamSetup("here", source.slot, "pgoutput", "UTF8", source.created.start_lsn)
    directory = tmp_path
    with Sentinel(directory) as sentinel, SpoolWriter(directory) as spool:
        write_beginning(source.dsn, sentinel, setup)
        sentinel.write_setup(setup)
        running = threading.Thread(
            target=receive, args=(source.settings(), spool, sentinel), daemon=True
        )
        running.start()
        try:
            source.execute("CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
            source.execute("INSERT INTO bare VALUES ('mark 1')")
            wait_for(lambda: ("I", "bare") in spooled(directory))
            assert ("I", "late") not in spooled(directory)
            oid = source.scalar("SELECT 'late'::regclass::oid::int8")
            take_up(source.connection, sentinel, setup, oid)
            source.execute("TRUNCATE late", "INSERT INTO late VALUES (2)")
            wait_for(lambda: ("I", "late") in spooled(directory))
            late = [kind for kind, name in spooled(directory) if name == "late"]
            assert late[0] == "R"
            assert [kind for kind in late if kind != "R"] == ["T", "I"]
        finally:
            sentinel.set_endpos(source.lsn())
            running.join(DEADLINE_SECONDS)
            source.close()
    assert not running.is_alive()


@pytest.fixture
def roles(source_db: str) -> Iterator[tuple[str, str]]:
    """A superuser's connection, and that of a role that may not publish all."""
    name = f"lister_{Dsn.parse(source_db).parameters['dbname']}"
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN REPLICATION".encode())
        connection.execute(f"GRANT CREATE ON DATABASE {connection.info.dbname} TO {name}".encode())
        connection.execute(f"ALTER SCHEMA public OWNER TO {name}".encode())
    yield source_db, f"{source_db.replace('user=postgres', f'user={name}')}"
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(f"REASSIGN OWNED BY {name} TO postgres".encode())
        connection.execute(f"DROP OWNED BY {name}".encode())
        connection.execute(f"DROP ROLE {name}".encode())


@pytest.mark.parametrize("role", ["superuser", "owner"])
def test_tables_committed_while_the_slot_is_made_are_followed(
    roles: tuple[str, str], role: str, target_db: str, tmp_path: Path
) -> None:
    """A slot waits for the transactions that are open: they are in its snapshot."""
    uri = roles[0] if role == "superuser" else roles[1]
    dsn = Dsn.parse(uri)
    slot = f"late_{role}"
    caught: list[Any] = []

    def begin() -> None:
        settings = SlotSettings(slot)
        try:
            route = Route(dsn, Dsn.parse(target_db), tmp_path)
            with open_slot_snapshot(route, settings) as held, connect(dsn, "test") as connection:
                published = read_publications(connection, slot)
                names = dict(connection.execute("SELECT oid::int8, relname FROM pg_class"))
                caught.append((held, published, {names[oid] for oid in published.whole}))
        except BaseException as error:
            caught.append(error)

    with psycopg.connect(uri) as early:
        early.execute("CREATE TABLE committed_late (id int PRIMARY KEY)")
        early.execute("CREATE TABLE committed_bare (id int)")
        thread = threading.Thread(target=begin)
        thread.start()
        with psycopg.connect(uri, autocommit=True) as watching:
            wait_for(
                lambda: (
                    watching.execute(
                        "SELECT FROM pg_replication_slots WHERE slot_name = %s", (slot,)
                    ).fetchone()
                    is not None
                )
            )
        early.commit()
    thread.join(DEADLINE_SECONDS)
    assert not isinstance(caught[0], BaseException), caught[0]
    _, published, whole = caught[0]
    assert whole == {"committed_late"}
    assert published.is_for_all == (role == "superuser")
    assert len(published.inserts) == (0 if role == "superuser" else 1)
    with Sentinel(tmp_path) as sentinel:
        followed = {one.name: one.is_whole for one in read_followed(sentinel).values()}
    assert followed == {"committed_late": True, "committed_bare": False}
    with connect(dsn, "test") as connection:
        cleanup(connection, None, slot)
