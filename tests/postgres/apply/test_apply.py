"""Applying changes: the source's own statements, decoded by the source, against its rows."""

from __future__ import annotations

import pytest
from tests.fixtures.stream.stream_pair import ACCOUNT, StreamPair

from millrace.apply.position import drop_position, setup_position
from millrace.apply.prepare import Share
from millrace.errors import ApplyError


def test_inserts_updates_and_deletes_arrive(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.run(
        "INSERT INTO account SELECT i, 'owner ' || i, i FROM generate_series(1, 5000) i",
        "UPDATE account SET balance = balance * 2 WHERE id % 3 = 0",
        "DELETE FROM account WHERE id % 7 = 0",
        "INSERT INTO account VALUES (7, E'tab\\there \\\\ new\\nline', NULL)",
    )
    pair.follow()
    pair.assert_equal()
    # A second batch meets rows that are there.
    pair.run(
        "UPDATE account SET owner = NULL WHERE id < 100",
        "DELETE FROM account WHERE id BETWEEN 50 AND 70",
        "INSERT INTO account VALUES (51, '', 0)",
    )
    pair.follow()
    pair.assert_equal()


def test_a_batch_below_the_position_is_not_applied_again(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.run("INSERT INTO account VALUES (1, 'a', 1)")
    assert pair.follow().applied.inserted == 1
    assert pair.apply().applied.inserted == 0
    pair.assert_equal()


def test_key_changes_follow_the_row(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.run("INSERT INTO account SELECT i, 'o' || i, 0 FROM generate_series(1, 100) i")
    pair.follow()
    pair.run(
        # A chain, a ring and a row that goes and comes back.
        "UPDATE account SET id = id + 1000",
        "UPDATE account SET id = 5000 WHERE id = 1001",
        "UPDATE account SET id = 1001 WHERE id = 1002",
        "UPDATE account SET id = 1002 WHERE id = 5000",
        ["DELETE FROM account WHERE id = 1050", "INSERT INTO account VALUES (1050, 'again', 1)"],
        "UPDATE account SET id = -id, balance = 7 WHERE id = 1060",
    )
    pair.follow()
    pair.assert_equal()


def test_rows_that_trade_unique_values(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE seat (id int PRIMARY KEY, place int UNIQUE, guest text UNIQUE, note text)"
    )
    pair.run(
        "INSERT INTO seat SELECT i, i, 'g' || i, repeat('x', 10) FROM generate_series(1, 50) i"
    )
    pair.follow()
    pair.run(
        [
            "UPDATE seat SET place = NULL WHERE id = 1",
            "UPDATE seat SET place = 1 WHERE id = 2",
            "UPDATE seat SET place = 2 WHERE id = 1",
        ],
        [
            "UPDATE seat SET guest = guest || '!' WHERE id IN (3, 4)",
            "UPDATE seat SET guest = 'g4' WHERE id = 3",
            "UPDATE seat SET guest = 'g3' WHERE id = 4",
        ],
        # One leaves, another takes the place, a third is new there.
        "DELETE FROM seat WHERE id = 10",
        "UPDATE seat SET place = 10 WHERE id = 11",
        "INSERT INTO seat VALUES (100, 11, 'new', NULL)",
    )
    pair.follow()
    pair.assert_equal()


def test_unchanged_out_of_line_values_stay(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE document (id int PRIMARY KEY, title text, body text, other text)",
        "ALTER TABLE document ALTER body SET STORAGE EXTERNAL, ALTER other SET STORAGE EXTERNAL",
    )
    pair.run(
        "INSERT INTO document SELECT i, 't', repeat(i::text, 9000), repeat('o', 9000)"
        " FROM generate_series(1, 20) i"
    )
    pair.follow()
    pair.run(
        "UPDATE document SET title = 'one' WHERE id < 5",
        "UPDATE document SET title = 'two', body = 'short' WHERE id BETWEEN 5 AND 8",
        "UPDATE document SET other = repeat('n', 9000) WHERE id BETWEEN 7 AND 12",
        "UPDATE document SET title = 'again' WHERE id BETWEEN 3 AND 10",
        "UPDATE document SET id = id + 100 WHERE id IN (1, 9)",
        # The value is known from the insert of the same batch.
        "INSERT INTO document VALUES (50, 't', repeat('z', 9000), NULL)",
        "UPDATE document SET title = 'u' WHERE id = 50",
    )
    pair.follow()
    pair.assert_equal()


def test_a_long_key_is_found_although_it_was_not_sent_again(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE page (path text PRIMARY KEY, hits int)",
        "ALTER TABLE page ALTER path SET STORAGE EXTERNAL",
    )
    pair.run(
        "INSERT INTO page SELECT i || repeat('p', 2100), 0 FROM generate_series(1, 9) i",
    )
    pair.follow()
    pair.run("UPDATE page SET hits = hits + 1", "UPDATE page SET hits = 9 WHERE path LIKE '1%'")
    pair.follow()
    pair.assert_equal()


@pytest.mark.parametrize("key", ["", "PRIMARY KEY"])
def test_replica_identity_full_removes_exactly_one_of_equal_rows(
    pair: StreamPair, key: str
) -> None:
    columns = f"id int {key}, j json, x path, p point, t text, n numeric"
    pair.begin(f"CREATE TABLE loose ({columns})", "ALTER TABLE loose REPLICA IDENTITY FULL")
    equal = "NULL" if not key else "i"
    pair.run(
        f"INSERT INTO loose SELECT {equal}, '{{\"a\": 1}}', '((1,2),(3,4))', '(1,2)', '', 1.0"
        " FROM generate_series(1, 5) i",
        "INSERT INTO loose VALUES (100, NULL, NULL, NULL, NULL, NULL)",
    )
    pair.follow()
    pair.run(
        "DELETE FROM loose WHERE ctid = (SELECT min(ctid) FROM loose WHERE n = 1)",
        "UPDATE loose SET n = 1.00 WHERE ctid = (SELECT max(ctid) FROM loose WHERE n = 1)",
        "UPDATE loose SET t = NULL WHERE n::text = '1.00'",
        "UPDATE loose SET j = '[1,  2]' WHERE id = 100",
        "INSERT INTO loose VALUES (101, '{}', NULL, NULL, 'new', 2)",
        "DELETE FROM loose WHERE id = 101",
    )
    pair.follow()
    pair.assert_equal()


def test_identity_by_another_index(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE item (id int PRIMARY KEY, code text NOT NULL, at int NOT NULL, note text)",
        "CREATE UNIQUE INDEX item_code ON item (at, code)",
        "ALTER TABLE item REPLICA IDENTITY USING INDEX item_code",
    )
    pair.run("INSERT INTO item SELECT i, 'c' || i % 5, i, NULL FROM generate_series(1, 40) i")
    pair.follow()
    pair.run(
        "UPDATE item SET note = code",
        "UPDATE item SET code = code || 'x', id = id + 100 WHERE id < 20",
        "DELETE FROM item WHERE id % 4 = 0",
    )
    pair.follow()
    pair.assert_equal()


def test_truncate_of_several_tables(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE parent (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY)",
        "CREATE TABLE child (id serial PRIMARY KEY, parent_id int REFERENCES parent)",
        "CREATE TABLE alone (id int PRIMARY KEY)",
    )
    pair.run(
        "INSERT INTO parent SELECT FROM generate_series(1, 10)",
        "INSERT INTO child (parent_id) SELECT id FROM parent",
        "INSERT INTO alone SELECT generate_series(1, 5)",
    )
    pair.follow()
    pair.run(
        [
            "INSERT INTO parent DEFAULT VALUES",
            "TRUNCATE parent, alone RESTART IDENTITY CASCADE",
            "INSERT INTO parent DEFAULT VALUES",
            "INSERT INTO alone VALUES (1), (2)",
        ],
        "UPDATE alone SET id = 3 WHERE id = 1",
        "TRUNCATE alone",
        "INSERT INTO alone VALUES (9)",
    )
    pair.follow()
    pair.assert_equal()


def test_generated_and_identity_columns(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE gen (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a int,"
        " twice int GENERATED ALWAYS AS (a * 2) STORED,"
        " own int GENERATED BY DEFAULT AS IDENTITY,"
        " number bigint GENERATED ALWAYS AS IDENTITY)"
    )
    pair.run("INSERT INTO gen (a) SELECT generate_series(1, 20)")
    pair.follow()
    pair.run(
        "UPDATE gen SET a = a + 1 WHERE id < 10",
        "UPDATE gen SET id = DEFAULT WHERE id = 3",
        "UPDATE gen SET number = DEFAULT WHERE id IN (7, 8)",
        "DELETE FROM gen WHERE id = 5",
    )
    pair.follow()
    pair.assert_equal()


def test_partitioned_differently(pair: StreamPair) -> None:
    pair.begin(
        on_source="CREATE TABLE m (id int, at date, v text, PRIMARY KEY (id, at))"
        " PARTITION BY RANGE (at);"
        "CREATE TABLE m1 PARTITION OF m FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');"
        "CREATE TABLE m2 PARTITION OF m DEFAULT",
        on_target="CREATE TABLE m (v text, at date, id int, PRIMARY KEY (id, at))"
        " PARTITION BY HASH (id);"
        "CREATE TABLE h0 PARTITION OF m FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE h1 PARTITION OF m FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    )
    pair.run(
        "INSERT INTO m SELECT i, date '2020-06-01' + i, 'v' || i FROM generate_series(1, 500) i"
    )
    pair.follow()
    pair.run(
        "UPDATE m SET at = at + 400 WHERE id % 2 = 0",
        "UPDATE m SET id = id + 1001 WHERE id < 50",
        "DELETE FROM m WHERE id % 5 = 0",
    )
    pair.follow()
    pair.assert_equal()


def test_other_order_extra_columns_and_wider_types_on_the_target(pair: StreamPair) -> None:
    pair.begin(
        on_source="CREATE TABLE t (id int PRIMARY KEY, a text, n int, f real)",
        on_target="CREATE TABLE t (extra text DEFAULT 'kept', n bigint, a varchar(50),"
        " id bigint PRIMARY KEY, f double precision, seen timestamptz DEFAULT now())",
    )
    pair.run("INSERT INTO t SELECT i, 'a' || i, i, i FROM generate_series(1, 50) i")
    pair.follow()
    pair.target.execute("UPDATE t SET extra = 'mine' WHERE id = 2")
    pair.run(
        "UPDATE t SET n = n + 1", "UPDATE t SET id = 99 WHERE id = 2", "DELETE FROM t WHERE id = 3"
    )
    pair.follow()
    query = "SELECT id, a, n, f FROM t ORDER BY id"
    assert pair.target.execute(query).fetchall() == pair.source.execute(query).fetchall()
    assert pair.target.execute("SELECT id FROM t WHERE extra = 'mine'").fetchall() == [(99,)]


def test_column_added_on_both_sides_in_mid_stream(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.run("INSERT INTO account VALUES (1, 'a', 1), (2, 'b', 2)")
    for connection in (pair.source, pair.target):
        connection.execute("ALTER TABLE account ADD COLUMN email text DEFAULT 'none'")
    pair.run(
        "UPDATE account SET email = 'x@y' WHERE id = 1",
        "INSERT INTO account VALUES (3, 'c', 3, NULL)",
    )
    pair.follow()
    pair.assert_equal()


def test_column_missing_on_the_target_stops(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.source.execute("ALTER TABLE account ADD COLUMN email text")
    pair.run("INSERT INTO account VALUES (1, 'a', 1, 'e')")
    with pytest.raises(ApplyError, match="no column email"):
        pair.follow()
    pair.target.execute("ALTER TABLE account ADD COLUMN email text")
    assert pair.apply().error is None
    pair.assert_equal()


def test_odd_names_subtransactions_and_rollbacks(pair: StreamPair) -> None:
    pair.begin(
        'CREATE SCHEMA "Odd ""one"',
        'CREATE TABLE "Odd ""one"."Tä ble" ("select" int, "a b" text, PRIMARY KEY ("select"))',
    )
    name = '"Odd ""one"."Tä ble"'
    with pair.source.transaction():
        pair.source.execute(f"INSERT INTO {name} VALUES (1, 'kept')")
        with pair.source.transaction(force_rollback=True):
            pair.source.execute(f"INSERT INTO {name} VALUES (2, 'gone')")
        with pair.source.transaction():
            pair.source.execute(f'UPDATE {name} SET "a b" = \'inner\' WHERE "select" = 1')
    with pair.source.transaction(force_rollback=True):
        pair.source.execute(f"DELETE FROM {name}")
    pair.follow()
    pair.assert_equal()
    assert pair.target.execute(f"SELECT * FROM {name}").fetchall() == [(1, "inner")]


def test_triggers_and_foreign_keys_of_the_target_stay_out_of_it(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY, a_id int REFERENCES a ON DELETE CASCADE)",
        on_target="CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN RAISE 'never'; END$$;"
        "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE OR DELETE ON b FOR EACH ROW"
        " EXECUTE FUNCTION refuse()",
    )
    pair.run(
        ["INSERT INTO a VALUES (1), (2)", "INSERT INTO b VALUES (1, 1), (2, 2)"],
        "DELETE FROM a WHERE id = 1",
    )
    pair.follow()
    pair.assert_equal()


def test_a_transaction_larger_than_a_chunk_is_one_transaction(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.run(
        [
            "INSERT INTO account SELECT i, 'o', 0 FROM generate_series(1, 3000) i",
            "UPDATE account SET balance = 5",
            "DELETE FROM account WHERE id > 2900",
            "UPDATE account SET id = -id WHERE id % 2 = 0",
        ]
    )
    outcome = pair.follow(chunk_bytes=10_000)
    assert (outcome.batches, outcome.transactions) == (1, 1)
    pair.assert_equal()


def test_until_ends_between_transactions(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.run("INSERT INTO account VALUES (1, 'a', 1)")
    pair.receive()
    first = pair.apply().position
    pair.run("INSERT INTO account VALUES (2, 'b', 2)", "INSERT INTO account VALUES (3, 'c', 3)")
    pair.receive()
    assert pair.apply(until_lsn=first).transactions == 0
    assert pair.apply(until_lsn=first + 1).transactions == 0
    assert pair.apply(batch_bytes=1).transactions == 2
    pair.assert_equal()


def test_tables_of_several_workers(pair: StreamPair) -> None:
    names = [f"t{number}" for number in range(8)]
    pair.begin(
        *(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)" for name in names),
        "ALTER TABLE t1 ADD FOREIGN KEY (v) REFERENCES t0",
    )
    assert pair.task is not None
    first, second = (f"{pair.slot}_{number}" for number in range(2))
    for name in (first, second):
        setup_position(pair.target, name, pair.apply().position)
    pair.run(
        *(f"INSERT INTO {name} SELECT i, i FROM generate_series(1, 50) i" for name in names),
        "TRUNCATE " + ", ".join(names[:4]),
        *(f"INSERT INTO {name} VALUES (1, NULL)" for name in names[:4]),
    )
    pair.receive()
    try:
        for number, name in enumerate((first, second)):
            outcome = pair.apply(stream=name, share=Share(number, 2))
            assert outcome.error is None
            assert outcome.applied.inserted > 0
        pair.assert_equal()
    finally:
        for name in (first, second):
            drop_position(pair.target, name)


def test_a_batch_holds_no_more_of_the_sources_time_than_asked(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.run(*(f"INSERT INTO account VALUES ({i}, 'x', 0)" for i in range(5)))
    pair.receive()
    assert pair.apply(batch_seconds=0.0).batches == 5
    pair.run(*(f"UPDATE account SET balance = {i} WHERE id = 1" for i in range(5)))
    pair.receive()
    assert pair.apply(batch_seconds=3600.0).batches == 1
    pair.assert_equal()
