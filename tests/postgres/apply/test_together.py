"""Applying changes of rows that depend on each other: they take each other's keys and values."""

from __future__ import annotations

import pytest
from tests.fixtures.stream.stream_pair import StreamPair

from millrace.apply.conflict import OnConflict
from millrace.filter.exclusions import Exclusions
from millrace.lsn import parse_lsn


@pytest.mark.parametrize("on_target", ["DEFERRABLE", ""], ids=["both", "source"])
def test_a_deferrable_key_may_be_there_twice_for_a_moment(pair: StreamPair, on_target: str) -> None:
    """Among changes with whole old rows, the key alone does not say which row is meant."""
    table = "CREATE TABLE chair (name text, id int PRIMARY KEY {}, note text)"
    pair.begin(
        on_source=f"{table.format('DEFERRABLE')}; ALTER TABLE chair REPLICA IDENTITY FULL",
        on_target=table.format(on_target),
    )
    pair.run("INSERT INTO chair SELECT chr(64 + i), i, repeat('n', i) FROM generate_series(1, 9) i")
    pair.follow()
    for transactions in (
        ["UPDATE chair SET id = id + 1"],
        ["UPDATE chair SET id = 12 - id", "UPDATE chair SET note = id::text WHERE id > 4"],
        ["UPDATE chair SET id = id - 1", "DELETE FROM chair WHERE id = 5"],
        ["UPDATE chair SET note = NULL WHERE id = 3", "DELETE FROM chair WHERE name = 'C'"],
    ):
        pair.run(*transactions)
        pair.follow()
        pair.assert_equal()


DOCUMENT = (
    "CREATE TABLE document (id int PRIMARY KEY, slug text UNIQUE, size int, body text)",
    "ALTER TABLE document ALTER body SET STORAGE EXTERNAL",
    "INSERT INTO document VALUES (1, 'a', 0, repeat('x', 9000)), (2, 'b', 5, 'short'),"
    " (3, 'c', 7, repeat('y', 9000)), (4, 'd', 8, 'short')",
)


@pytest.mark.parametrize("on_conflict", OnConflict)
@pytest.mark.parametrize(
    "statements",
    [
        # A value that a row with an unsent body gives up, taken by a row that is sent whole.
        [
            "UPDATE document SET slug = 'z' WHERE id = 1",
            "UPDATE document SET slug = 'a' WHERE id = 2",
        ],
        [
            "UPDATE document SET slug = 'z' WHERE id = 2",
            "UPDATE document SET slug = 'b' WHERE id = 1",
        ],
        # A key likewise, in both directions, and round in a ring.
        ["UPDATE document SET id = 9 WHERE id = 1", "UPDATE document SET id = 1 WHERE id = 2"],
        ["UPDATE document SET id = 9 WHERE id = 2", "UPDATE document SET id = 2 WHERE id = 1"],
        [
            "UPDATE document SET id = 9 WHERE id = 1",
            "UPDATE document SET id = 1 WHERE id = 2",
            "UPDATE document SET id = 2 WHERE id = 3",
            "UPDATE document SET id = 3, body = 'new' WHERE id = 4",
            "UPDATE document SET id = 4 WHERE id = 9",
        ],
    ],
)
def test_rows_with_and_without_unsent_values_take_each_others_place(
    pair: StreamPair, statements: list[str], on_conflict: OnConflict
) -> None:
    pair.begin(*DOCUMENT)
    pair.run(*statements)
    outcome = pair.follow(on_conflict=on_conflict)
    pair.assert_equal()
    assert outcome.applied.skipped == outcome.applied.overwritten == 0


def test_a_key_that_a_filtered_row_gives_up_is_another_rows(pair: StreamPair) -> None:
    pair.begin(*DOCUMENT[:2])
    left = Exclusions(where={("public", "document"): "size > 1"})
    pair.run(DOCUMENT[2])
    pair.follow(left=left)
    pair.run(
        # Its body is not sent, and it is not there; the next one has its key then.
        "UPDATE document SET id = 9 WHERE id = 1",
        "UPDATE document SET id = 1 WHERE id = 2",
    )
    pair.follow(left=left)
    query = "SELECT id, slug, size, body FROM document WHERE size > 1 ORDER BY id"
    there = pair.target.execute("SELECT id, slug, size, body FROM document ORDER BY id").fetchall()
    assert there == pair.source.execute(query).fetchall()


def test_rows_are_lifted_whatever_their_columns_are_called(pair: StreamPair) -> None:
    pair.begin("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, n int, s int, l int, v1 int)")
    pair.run("INSERT INTO t SELECT i, i, i, i, i, i FROM generate_series(1, 4) i")
    pair.follow()
    pair.run(
        [
            "UPDATE t SET u = 100 WHERE id = 1",
            "UPDATE t SET u = 1, n = 7 WHERE id = 2",
            "UPDATE t SET u = 2, l = 8 WHERE id = 1",
        ]
    )
    pair.follow()
    pair.assert_equal()


def test_an_identity_that_alone_changes_arrives(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE ticket (id int PRIMARY KEY, number int GENERATED ALWAYS AS IDENTITY)",
        "CREATE TABLE own (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY)",
        "INSERT INTO ticket VALUES (1), (2)",
        "INSERT INTO own DEFAULT VALUES",
    )
    pair.run("UPDATE ticket SET number = DEFAULT WHERE id = 1", "UPDATE own SET id = DEFAULT")
    pair.follow()
    pair.assert_equal()
    pair.run("DELETE FROM own", "UPDATE ticket SET id = id")
    pair.follow()
    pair.assert_equal()


def test_a_batch_without_effect_moves_the_position_for_good(pair: StreamPair) -> None:
    """What lies before it may be pruned, so the target must not forget it."""
    pair.begin("CREATE TABLE queue (id int PRIMARY KEY)")
    pair.run(["INSERT INTO queue VALUES (1)", "DELETE FROM queue"])
    pair.receive()
    with pair.target.cursor() as cursor:
        before = cursor.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        outcome = pair.apply()
        found = cursor.execute(
            "SELECT remote_lsn::text, pg_current_wal_flush_lsn() > %s::pg_lsn"
            " FROM pg_replication_origin_status WHERE external_id = %s",
            (before[0] if before else None, pair.slot),
        ).fetchone()
    assert outcome.error is None
    assert outcome.applied.changes == 2
    assert found is not None
    assert (parse_lsn(found[0]), found[1]) == (outcome.position, True)


def test_an_update_that_is_in_a_rows_way_is_skipped_alone(
    pair: StreamPair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.begin("CREATE TABLE seat (id int PRIMARY KEY, place int UNIQUE, guest text)")
    pair.run("INSERT INTO seat SELECT i, i, 'guest' FROM generate_series(1, 100) i")
    pair.follow()
    pair.target.execute("INSERT INTO seat VALUES (900, 1050, 'theirs'), (901, 1077, 'theirs')")
    pair.run("UPDATE seat SET place = place + 1000, guest = 'moved'")
    outcome = pair.follow(on_conflict=OnConflict.SKIP)
    assert (outcome.applied.updated, outcome.applied.skipped) == (98, 2)
    there = pair.target.execute(
        "SELECT id, place, guest FROM seat WHERE guest <> 'moved' ORDER BY id"
    ).fetchall()
    assert there == [
        (50, 50, "guest"),
        (77, 77, "guest"),
        (900, 1050, "theirs"),
        (901, 1077, "theirs"),
    ]
    assert caplog.text.count("is skipped") == 2


def test_a_missing_row_is_not_the_one_that_has_its_key_by_now(pair: StreamPair) -> None:
    """Skipping: 2 takes the key of 1, which is not there, and 4 can't have its new place."""
    pair.begin(*DOCUMENT)
    pair.target.execute("DELETE FROM document WHERE id = 1")
    pair.target.execute("INSERT INTO document VALUES (99, 'taken', 1, 'theirs')")
    pair.run(
        "UPDATE document SET id = 9 WHERE id = 1",
        "UPDATE document SET id = 1 WHERE id = 2",
        "UPDATE document SET slug = 'taken' WHERE id = 4",
    )
    outcome = pair.follow(on_conflict=OnConflict.SKIP)
    there = pair.target.execute("SELECT id, slug FROM document ORDER BY id").fetchall()
    assert there == [(1, "b"), (3, "c"), (4, "d"), (99, "taken")]
    assert (outcome.applied.updated, outcome.applied.skipped) == (1, 2)


def test_a_table_that_one_that_is_not_followed_references_is_emptied(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE a (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int)",
        "CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a)",
    )
    left = Exclusions(tables=frozenset({("public", "b")}))
    pair.run(
        "INSERT INTO a (v) VALUES (1), (2)",
        "INSERT INTO b VALUES (1, 1)",
        "TRUNCATE a CASCADE",
        "INSERT INTO a (v) VALUES (3)",
    )
    pair.follow(left=left)
    pair.assert_equal()


SEATS = (
    "CREATE TABLE seat (id int, room int, place int, body text, PRIMARY KEY (id, room))"
    " PARTITION BY LIST (room)",
    "CREATE TABLE seat1 PARTITION OF seat FOR VALUES IN (1)",
    "CREATE TABLE seat2 PARTITION OF seat FOR VALUES IN (2, 3) PARTITION BY LIST (room)",
    "CREATE TABLE seat2a PARTITION OF seat2 FOR VALUES IN (2)",
    "CREATE TABLE seat2b PARTITION OF seat2 FOR VALUES IN (3)",
    "INSERT INTO seat SELECT i, 1 + i % 3, i / 3, repeat('x', 9) FROM generate_series(0, 29) i",
)
TRADE = [
    "UPDATE seat SET place = -1 WHERE room = {0} AND place = 1",
    "UPDATE seat SET place = 1 WHERE room = {0} AND place = 2",
    "UPDATE seat SET place = 2 WHERE room = {0} AND place = -1",
]


LEAF_INDEXES = "CREATE UNIQUE INDEX ON seat1 (place); CREATE UNIQUE INDEX ON seat2b (place)"


@pytest.mark.parametrize(
    "index",
    [
        LEAF_INDEXES,
        "CREATE UNIQUE INDEX ON seat1 (place); CREATE UNIQUE INDEX ON seat2 (place, room)",
        "ALTER TABLE seat1 ADD EXCLUDE (place WITH =);"
        "CREATE UNIQUE INDEX ON seat2b ((place + 1)) WHERE place > 0",
        # Attached to one above that is not valid, because other partitions have none.
        "CREATE UNIQUE INDEX whole ON ONLY seat (place, room);"
        "CREATE UNIQUE INDEX one ON seat1 (place, room); ALTER INDEX whole ATTACH PARTITION one",
    ],
    ids=["leaves", "branch", "exclusion", "invalid"],
)
def test_rows_trade_values_that_are_unique_in_their_partition_only(
    pair: StreamPair, index: str
) -> None:
    pair.begin(*SEATS, on_target=index)
    pair.run(*([one.format(room) for one in TRADE] for room in (1, 3)))
    pair.follow()
    pair.assert_equal()


@pytest.mark.parametrize("on_conflict", [OnConflict.SKIP, OnConflict.OVERWRITE])
def test_a_trade_within_a_partition_is_no_conflict(
    pair: StreamPair, on_conflict: OnConflict
) -> None:
    pair.begin(*SEATS, on_target=LEAF_INDEXES)
    pair.run(*([one.format(room) for one in TRADE] for room in (1, 3)))
    outcome = pair.follow(on_conflict=on_conflict)
    pair.assert_equal()
    assert outcome.applied.skipped == outcome.applied.overwritten == 0


@pytest.mark.parametrize("is_valid", [True, False], ids=["valid", "unfinished"])
def test_rows_trade_values_of_the_only_index_that_the_target_has(
    pair: StreamPair, is_valid: bool
) -> None:
    """It is not that of the key; one whose making was broken off refuses rows all the same."""
    pair.begin(
        on_source="CREATE TABLE t (id int PRIMARY KEY, v int UNIQUE)",
        on_target="CREATE TABLE t (id int NOT NULL, v int); CREATE UNIQUE INDEX t_v ON t (v)",
    )
    if not is_valid:
        pair.target.execute("UPDATE pg_index SET indisvalid = false WHERE indrelid = 't'::regclass")
    pair.run("INSERT INTO t SELECT i, i FROM generate_series(1, 9) i")
    pair.follow()
    pair.run(
        [
            "UPDATE t SET v = -1 WHERE id = 1",
            "UPDATE t SET v = 1 WHERE id = 2",
            "UPDATE t SET v = 2 WHERE id = 1",
        ]
    )
    pair.follow()
    pair.assert_equal()
