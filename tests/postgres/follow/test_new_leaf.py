"""Partitions that come to a root without a primary key: no statement on them fails, and what is not
published of them is copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.sql import execute
from tests.fixtures.stream.followed import open_followed
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for
from tests.postgres.follow.test_lookout import Stream

from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.filter.rules import FilterRules, parse_filters
from millrace.follow import lookout
from millrace.follow.membership import take_up
from millrace.follow.new_leaf import publish_untouched
from millrace.follow.publication import create_publications, find_unpublished, read_publications
from millrace.follow.published_table import read_published_tables
from millrace.follow.slot import cleanup
from millrace.follow.table_sync.publication import publish_table
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect
from millrace.receive.partitions import Partitions
from millrace.workdir.followed_table import FollowedTables, read_followed
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.sync_request import RequestState, read_requests

FULL = "ALTER TABLE {} REPLICA IDENTITY FULL"
ROOTS = """
CREATE TABLE metric (id int, v text) PARTITION BY RANGE (id);
CREATE TABLE metric_1 PARTITION OF metric FOR VALUES FROM (0) TO (10);
CREATE TABLE metric_2 PARTITION OF metric FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id);
CREATE TABLE metric_2a PARTITION OF metric_2 FOR VALUES FROM (10) TO (20);
CREATE UNLOGGED TABLE metric_3 PARTITION OF metric FOR VALUES FROM (20) TO (30);
ALTER TABLE metric REPLICA IDENTITY FULL;
ALTER TABLE metric_1 REPLICA IDENTITY FULL;
ALTER TABLE metric_2 REPLICA IDENTITY FULL;
ALTER TABLE metric_2a ALTER id SET NOT NULL;
CREATE UNIQUE INDEX metric_2a_id ON metric_2a (id);
ALTER TABLE metric_2a REPLICA IDENTITY USING INDEX metric_2a_id;
ALTER TABLE metric_3 REPLICA IDENTITY FULL;
"""
LEAVES = {"metric_1", "metric_2a"}
# In the transaction that makes them, or not.
LATE = "CREATE TABLE {0} PARTITION OF metric FOR VALUES FROM ({1}) TO ({2})"
LATE_FULL = f"BEGIN; {LATE}; ALTER TABLE {{0}} REPLICA IDENTITY FULL; COMMIT"


def listed(uri: str, slot: str) -> tuple[set[str], set[str]]:
    """What both publications list, by name."""
    with psycopg.connect(uri, autocommit=True) as connection:
        found = read_publications(connection, slot)
        names = dict(connection.execute("SELECT oid::int8, relname FROM pg_class").fetchall())
    return {names[oid] for oid in found.whole}, {names[oid] for oid in found.inserts}


@pytest.fixture(params=["system_cluster", "source_cluster", "target_cluster"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database whose tables belong to a role that may not publish all."""
    cluster: Cluster = request.getfixturevalue(request.param)
    uri = cluster.create_database("leaves")
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("CREATE ROLE leaf_owner LOGIN REPLICATION")
        connection.execute("GRANT CREATE ON DATABASE leaves TO leaf_owner")
        connection.execute("ALTER SCHEMA public OWNER TO leaf_owner")
        connection.execute("SET ROLE leaf_owner")
        connection.execute(ROOTS)
    yield uri
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("REASSIGN OWNED BY leaf_owner TO CURRENT_USER")
        connection.execute("DROP OWNED BY leaf_owner; DROP ROLE leaf_owner")
    cluster.drop_database("leaves")


@pytest.mark.parametrize("user", [None, "leaf_owner"])
def test_no_statement_fails_in_a_partition_that_comes_later(server: str, user: str | None) -> None:
    """Nobody has looked at it yet."""
    dsn = Dsn.parse(server).with_(user=user) if user else Dsn.parse(server)
    with connect(dsn, "test") as connection:
        (warning,) = create_publications(connection, "leaves")
        connection.execute("SET search_path = public")
        connection.execute(LATE.format("metric_4", 30, 40))
        for statement in (
            "INSERT INTO metric SELECT i, 'v' FROM generate_series(1, 38, 4) i",
            "UPDATE metric SET v = 'w'",
            "UPDATE metric SET id = id + 10 WHERE id BETWEEN 21 AND 29",
            "UPDATE metric SET id = 2 WHERE id = 37",
            "DELETE FROM metric WHERE id > 5",
            "TRUNCATE metric_4",
        ):
            connection.execute(statement.encode())
        assert "REPLICA IDENTITY FULL on every partition" in warning
        assert listed(server, "leaves") == (LEAVES, set() if user is None else {"metric"})
        # An identity makes it a table of which more could be published.
        assert find_unpublished(connection, "leaves") == []
        connection.execute(FULL.format("metric_4").encode())
        (late,) = find_unpublished(connection, "leaves")
        publish_table(dsn, "leaves", late.oid, lambda: False, lambda step: None)
        assert listed(server, "leaves")[0] == LEAVES | {"metric_4"}
        # Without one, table sync takes all leaves out.
        connection.execute("ALTER TABLE metric_4 REPLICA IDENTITY DEFAULT")
        publish_table(dsn, "leaves", late.oid, lambda: False, lambda step: None)
        assert listed(server, "leaves") == (set(), set() if user is None else {"metric"})
        connection.execute("UPDATE metric SET v = 'x'")
        cleanup(connection, None, "leaves")


def rules(is_filtered: bool) -> FilterRules:
    return (
        parse_filters("[exclude-table]\npublic.bare\n", name="f") if is_filtered else FilterRules()
    )


@pytest.fixture(params=[False, True], ids=["for all", "filtered"])
def stream(
    request: pytest.FixtureRequest, source_db: str, target_db: str, tmp_path: Path
) -> Iterator[Stream]:
    execute(source_db, ROOTS)
    execute(target_db, ROOTS)
    opened = Stream(source_db, target_db, tmp_path, rules(request.param))
    yield opened
    opened.close()


def whole_leaves(stream: Stream) -> set[str]:
    return listed(stream.source, stream.slot)[0] - {"keyed", "parent", "parted"}


def is_whole(stream: Stream) -> set[bool]:
    """What is written down of the root and its partitions."""
    known = read_followed(stream.sentinel).values()
    return {one.is_whole for one in known if one.name == "metric"}


def test_a_look_publishes_what_is_untouched_and_has_the_rest_copied(stream: Stream) -> None:
    assert stream.look() == set()
    assert whole_leaves(stream) == LEAVES
    stream.run(stream.source, LATE_FULL.format("untouched", 30, 40))
    # Somebody who may write to it.
    with psycopg.connect(stream.source) as early:
        early.execute("LOCK TABLE untouched IN ROW EXCLUSIVE MODE")
        assert stream.look() == set()
        assert whole_leaves(stream) == LEAVES
    assert stream.look() == set()
    assert whole_leaves(stream) == LEAVES | {"untouched"}
    assert is_whole(stream) == {True}
    # Empty, and yet a row of it was deleted.
    stream.run(
        stream.source,
        LATE_FULL.format("emptied", 40, 50),
        "INSERT INTO metric VALUES (41, 'v')",
        "DELETE FROM emptied",
        "VACUUM emptied",
    )
    assert stream.look() == {"metric"}
    assert is_whole(stream) == {False}
    assert whole_leaves(stream) == LEAVES | {"untouched"}
    assert "not published at first" in read_requests(stream.sentinel)[-1].reason


def test_leaves_without_identity_and_detached_ones_leave_the_publication(stream: Stream) -> None:
    stream.run(
        stream.source,
        "ALTER TABLE metric DETACH PARTITION metric_2",
        "INSERT INTO metric_2 VALUES (11, 'v')",
    )
    assert stream.look() == set()
    assert whole_leaves(stream) == {"metric_1"}
    assert is_whole(stream) == {True}
    stream.run(
        stream.source, LATE.format("bare_leaf", 30, 40), "INSERT INTO metric VALUES (1), (31)"
    )
    stream.run(stream.source, "UPDATE metric SET v = 'w'")
    assert stream.look() == set()
    assert whole_leaves(stream) == set()
    assert is_whole(stream) == {False}
    whole, inserts = listed(stream.source, stream.slot)
    assert "parted" in whole
    assert ("metric" in inserts) == ("parent" not in inserts and bool(inserts))
    stream.run(
        stream.source, "ALTER TABLE metric_1 REPLICA IDENTITY DEFAULT", "UPDATE metric SET v = 'x'"
    )
    stream.run(stream.source, FULL.format("metric_1"), FULL.format("bare_leaf"))
    assert stream.look() == {"metric"}


def test_a_root_that_an_earlier_version_listed_stays_listed(stream: Stream) -> None:
    name, _ = publication_names(stream.slot)
    stream.run(
        stream.source,
        f"ALTER PUBLICATION {name} DROP TABLE ONLY metric_1, ONLY metric_2a",
        f"ALTER PUBLICATION {name} ADD TABLE ONLY metric",
        LATE_FULL.format("late", 30, 40),
        "INSERT INTO metric VALUES (31, 'v')",
        "UPDATE metric SET v = 'w'",
    )
    assert stream.look() == set()
    assert whole_leaves(stream) == {"metric"}
    assert is_whole(stream) == {True}
    stream.run(stream.source, LATE.format("bare_leaf", 40, 50), "INSERT INTO metric VALUES (41)")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        stream.run(stream.source, "UPDATE metric SET v = 'w'")
    assert stream.look() == set()
    stream.run(stream.source, "UPDATE metric SET v = 'w'")
    assert whole_leaves(stream) == set()


def test_table_sync_lists_the_leaves_of_a_root_that_was_listed(stream: Stream) -> None:
    name, _ = publication_names(stream.slot)
    stream.run(stream.source, f"ALTER PUBLICATION {name} ADD TABLE ONLY metric")
    with connect(stream.dsn, "test") as connection:
        row = connection.execute("SELECT 'public.metric'::regclass::oid::int8").fetchone()
    assert row is not None
    assert publish_table(stream.dsn, stream.slot, row[0], lambda: False, lambda step: None)
    assert whole_leaves(stream) == LEAVES
    assert not publish_table(stream.dsn, stream.slot, row[0], lambda: False, lambda step: None)


def test_the_record_tells_a_listed_leaf_from_a_table_that_was_attached(stream: Stream) -> None:
    stream.run(
        stream.source, "ALTER TABLE parted ATTACH PARTITION keyed FOR VALUES FROM (20) TO (30)"
    )
    names = publication_names(stream.slot)
    followed = FollowedTables(stream.sentinel)
    partitions, without_record = Partitions("UTF8", followed), Partitions("UTF8")
    with connect(stream.dsn, "test") as connection:
        oids = dict(connection.execute("SELECT relname, oid::int8 FROM pg_class").fetchall())

        def root_of(name: str, known: Partitions) -> str | None:
            found = known.find(oids[name])
            return found and found.root_name

        for known in (partitions, without_record):
            known.read(connection, names)
            assert root_of("metric_1", known) == "metric"
            assert root_of("parted_1", known) == "parted"
            assert root_of("keyed", known) is None
        # Its root was copied: from there on it is one of its partitions.
        take_up(connection, stream.sentinel, stream.setup, oids["parted"])
        assert followed.look_again()
        assert root_of("keyed", partitions) == "parted"


def test_a_partition_of_somebody_else_is_named(stream: Stream) -> None:
    stream.run(stream.source, LATE_FULL.format("metric_4", 30, 40))
    with connect(stream.dsn, "test") as connection:
        role = f"stranger_{stream.slot}"
        connection.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            (table,) = [t for t in read_published_tables(connection) if t.name == "metric"]
            publications = read_publications(connection, stream.slot)
            with (
                connect(stream.dsn.with_(user=role), "test") as stranger,
                pytest.raises(ServerError, match=f"{role} may not publish") as caught,
            ):
                publish_untouched(stranger, publications, table)
            assert 'ALTER TABLE "public"."metric_4" OWNER' in caught.value.hint
        finally:
            connection.execute(f"DROP ROLE {role}".encode())


def rows(uri: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(uri) as connection:
        return connection.execute("SELECT id, v FROM metric ORDER BY 1, 2").fetchall()


FOLLOWED = ROOTS.replace("UNLOGGED ", "")


def test_leaves_are_followed_by_the_name_of_their_root(
    source_db: str, target_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is not partitioned: nothing else would find the rows."""
    monkeypatch.setattr(lookout, "LOOK_SECONDS", 0.2)
    execute(
        source_db,
        FOLLOWED,
        # A table of its own before it became a leaf; and one that stays one for now.
        "CREATE TABLE joined (v text, id int)",
        FULL.format("joined"),
        "ALTER TABLE metric ATTACH PARTITION joined FOR VALUES FROM (60) TO (70)",
    )
    execute(target_db, "CREATE TABLE metric (id int, v text)")
    with open_followed(source_db, target_db, tmp_path, DirectEngine()) as followed:
        running = followed.start()
        with Sentinel(tmp_path) as sentinel:
            wait_for(lambda: read_followed(sentinel))
        execute(
            source_db,
            "INSERT INTO metric SELECT i, 'v' FROM generate_series(1, 29) i",
            "INSERT INTO metric VALUES (61, 'j'), (62, 'k')",
            "UPDATE metric SET v = 'w' WHERE id % 3 = 0 OR id = 61",
            "DELETE FROM metric WHERE id = 12",
            "UPDATE metric SET id = 12 WHERE id = 9",
            "UPDATE metric SET id = 8 WHERE id IN (13, 25)",
            "DELETE FROM metric WHERE id IN (3, 62)",
            "TRUNCATE metric_3",
            LATE_FULL.format("metric_4", 30, 40),
        )
        wait_for(lambda: "metric_4" in listed(source_db, followed.slot)[0])
        execute(
            source_db,
            "INSERT INTO metric SELECT i, 'v' FROM generate_series(30, 39) i",
            "UPDATE metric_4 SET v = 'w' WHERE id > 35",
            "UPDATE metric SET id = 1 WHERE id = 38",
            "DELETE FROM metric_4 WHERE id = 39",
        )
        # With rows that were changed before anybody could look.
        execute(
            source_db,
            LATE_FULL.format("metric_5", 40, 50).replace(
                "COMMIT",
                "INSERT INTO metric SELECT i, 'v' FROM generate_series(40, 49) i;"
                "UPDATE metric SET v = 'w' WHERE id > 45; DELETE FROM metric WHERE id = 41; COMMIT",
            ),
        )
        with Sentinel(tmp_path) as sentinel:
            wait_for(
                lambda: (
                    [(r.name, r.state) for r in read_requests(sentinel)]
                    == [("metric", RequestState.DONE)]
                )
            )
        execute(
            source_db,
            "UPDATE metric SET v = 'x' WHERE id % 4 = 0",
            "DELETE FROM metric WHERE id = 49",
            "TRUNCATE metric_1",
        )
        followed.set_endpos(followed.end())
        running.join(DEADLINE_SECONDS)
        assert followed.result.reached_endpos
        assert followed.result.unfollowed == ()
        assert rows(target_db) == rows(source_db)
        # At the end nobody looks any more, and the audit tells.
        followed.set_endpos(None)
        execute(
            source_db,
            LATE.format("metric_6", 50, 60),
            "INSERT INTO metric VALUES (51, 'v')",
            "UPDATE metric SET v = 'lost' WHERE id = 51",
        )
        (finding,) = followed.follow().unfollowed
        assert finding.table == "public.metric"
        assert "public.metric_6" in finding.partitions
