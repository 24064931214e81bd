"""What a write leaves in a tube."""

from __future__ import annotations

import pytest
from tests.fixtures.stream.stream_pair import StreamPair
from tests.fixtures.tube.tubes import TubeDatabase

from millrace.clone.trigger_silence import read_guarded
from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.postgres.catalog.relations import read_tables
from millrace.postgres.wire.connect import connect
from millrace.tube.install import install

ITEM = "CREATE TABLE item (id bigint PRIMARY KEY, name text, n int)"


def test_each_kind_of_write_leaves_its_pod(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach(shard=7)
    tubes.run(
        "INSERT INTO item SELECT i, 'x', i FROM generate_series(1, 3) i",
        "UPDATE item SET n = 0 WHERE id = 2",
        "UPDATE item SET n = 0 WHERE id = 99",
        "DELETE FROM item WHERE id > 2",
        "DELETE FROM item WHERE id > 2",
    )
    with tubes.connection.cursor().copy("COPY item FROM STDIN") as copy:
        copy.write("10\tx\t1\n")
    assert tubes.pods() == [
        ("I", 7, [1, 2, 3]),
        ("U", 7, [2]),
        ("D", 7, [3]),
        ("I", 7, [10]),
    ]
    tubes.run(
        "INSERT INTO item VALUES (1, 'y', 1), (20, 'y', 1) ON CONFLICT (id) DO UPDATE SET n = 5"
    )
    assert sorted(tubes.pods()) == [("I", 7, [20]), ("U", 7, [1])]
    tubes.run(
        "MERGE INTO item USING (VALUES (1), (30)) v (id) ON item.id = v.id"
        " WHEN MATCHED THEN UPDATE SET n = 6 WHEN NOT MATCHED THEN INSERT VALUES (v.id, 'm', 0)"
    )
    assert sorted(tubes.pods()) == [("I", 7, [30]), ("U", 7, [1])]


def test_a_large_statement_is_cut_into_pods_of_250(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run(ITEM)
    tubes.attach()
    tubes.run("INSERT INTO item SELECT i FROM generate_series(1, 1001) i")
    found = tubes.pods(columns="cardinality(ids), ids[1], seq")
    assert [row[0] for row in found] == [250, 250, 250, 250, 1]
    assert [row[1] for row in found] == [1, 251, 501, 751, 1001]
    assert [row[2] for row in found] == list(range(found[0][2], found[0][2] + 5))


def test_a_changed_key_touches_both_and_a_row_that_leaves_the_predicate_too(
    tubes: TubeDatabase,
) -> None:
    tubes.run(ITEM, "SELECT tube_ensure_exists('pods', 1, 'n > 10')")
    tubes.attach()
    tubes.run("SELECT tube_ensure_exists('pods', 1, 'n > 10')")
    tubes.run("INSERT INTO item VALUES (1, 'a', 5), (2, 'b', 20), (3, 'c', 30)")
    assert tubes.pods() == [("I", 1, [2, 3])]
    tubes.run("UPDATE item SET n = 0 WHERE id = 2")  # leaves
    tubes.run("UPDATE item SET n = 99 WHERE id = 1")  # enters
    tubes.run("UPDATE item SET id = 33 WHERE id = 3")
    tubes.run("UPDATE item SET name = 'z' WHERE id = 2")  # outside before and after
    found = tubes.pods(columns="op, ARRAY(SELECT unnest(ids) ORDER BY 1)")
    assert found == [("U", [2]), ("U", [1]), ("U", [3, 33])]
    tubes.run("DELETE FROM item")
    assert tubes.pods(columns="op, ARRAY(SELECT unnest(ids) ORDER BY 1)") == [("D", [1, 33])]


@pytest.mark.parametrize(
    ("columns", "key", "values", "expected"),
    [
        (
            "uid uuid PRIMARY KEY",
            None,
            "('5f2b3a52-0b2c-4f5e-8c3d-1f0e6b7a9c01')",
            ["5f2b3a52-0b2c-4f5e-8c3d-1f0e6b7a9c01"],
        ),
        ("code text PRIMARY KEY", None, "('it''s, \"a\" {key}')", ['it\'s, "a" {key}']),
        ("a int, b text, PRIMARY KEY (b, a)", None, "(1, 'x,y')", ['["x,y", "1"]']),
        ("m mood PRIMARY KEY", None, "('sad')", ["sad"]),
        ("at timestamptz", "{at}", "('2026-01-02 03:04:05+00')", ["2026-01-02 03:04:05+00"]),
        ("id uuid, n int", None, "(NULL, 1)", None),
    ],
    ids=["uuid", "text", "composite", "enum", "timestamptz", "null"],
)
def test_any_key_is_recorded(
    tubes_16: TubeDatabase, columns: str, key: str | None, values: str, expected: list[str] | None
) -> None:
    tubes = tubes_16
    tubes.run("CREATE TYPE mood AS ENUM ('sad', 'glad')", f"CREATE TABLE t ({columns})")
    tubes.run("SELECT tube_ensure_exists('pods')")
    tubes.rows("SELECT tube_table_attach('pods', 't', 1, %s::text[])", key)
    # Whatever the session likes values to look like.
    tubes.run(
        "SET datestyle = 'German'; SET timezone = 'Asia/Tokyo'", f"INSERT INTO t VALUES {values}"
    )
    assert tubes.pods(columns="op, ids, keys") == ([("I", [], expected)] if expected else [])


def test_small_integers_are_ids_under_whatever_name(tubes_16: TubeDatabase) -> None:
    tubes_16.run('CREATE DOMAIN small AS smallint; CREATE TABLE t ("The Key" small PRIMARY KEY)')
    tubes_16.attach("t")
    tubes_16.run("INSERT INTO t VALUES (5)")
    assert tubes_16.pods() == [("I", 1, [5])]


def test_truncate_leaves_a_control_pod(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach(shard=3)
    tubes.run("TRUNCATE item")
    ((op, shard, ids, payload, seq),) = tubes.pods(columns="op, shard, ids, payload, seq")
    assert (op, shard, ids) == ("T", 3, [])
    assert payload["type"] == "truncate"
    assert int(payload["start_seq"]) == seq - 1


PARTED = (
    "CREATE TABLE m (id bigint, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (id)",
    "CREATE TABLE m2a PARTITION OF m2 FOR VALUES FROM (100) TO (200)",
)


def test_writes_into_partitions_are_seen_once_and_later_ones_too(tubes: TubeDatabase) -> None:
    tubes.run(*PARTED)
    tubes.attach("m", 1)
    tubes.run("INSERT INTO m VALUES (1, 1), (101, 1)", "INSERT INTO m1 VALUES (2, 1)")
    tubes.run("UPDATE m2 SET v = 2", "DELETE FROM m2a", "UPDATE m SET id = 150 WHERE id = 2")
    found = tubes.pods(columns="op, ARRAY(SELECT unnest(ids) ORDER BY 1)")
    assert found == [("I", [1, 101]), ("I", [2]), ("U", [101]), ("D", [101]), ("U", [2, 150])]
    tubes.run(
        "CREATE TABLE m3 PARTITION OF m FOR VALUES FROM (200) TO (300)",
        "INSERT INTO m3 VALUES (200, 1)",
        "UPDATE m3 SET id = 201",
        "DELETE FROM m3",
    )
    found = tubes.pods(columns="op, ARRAY(SELECT unnest(ids) ORDER BY 1)")
    assert found == [("I", [200]), ("U", [200, 201]), ("D", [201])]
    assert tubes.rows("SELECT uncovered_partitions FROM tube_tables('pods')") == [1]
    # Somebody writes to it: left alone, and nobody waits.
    other = tubes.connect(autocommit=False)
    other.execute("INSERT INTO m3 VALUES (210, 1)")
    assert tubes.rows("SELECT tube_partitions_refresh()") == [0]
    other.rollback()
    other.close()
    assert tubes.rows("SELECT tube_partitions_refresh()") == [1]
    tubes.run(
        "INSERT INTO m3 VALUES (202, 1), (203, 1)", "INSERT INTO m VALUES (204, 1)", "TRUNCATE m1"
    )
    found = tubes.pods(columns="op, ids")
    assert found == [("I", [202, 203]), ("I", [204]), ("T", [])]
    tubes.run("SELECT tube_table_ensure_detached('pods', 'm')", "INSERT INTO m3 VALUES (205, 1)")
    assert tubes.pods() == []
    assert tubes.rows("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal") == [0]


def test_triggers_are_named_as_before_and_fire_always(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach(shard=4)
    found = tubes.rows(
        "SELECT tgname, tgenabled, encode(tgargs, 'escape') FROM pg_trigger"
        " WHERE tgrelid = 'item'::regclass AND tgname ~ 'pods' ORDER BY 1"
    )
    assert [(name, enabled) for name, enabled, _ in found] == [
        (f"item_pods_after_{event}_trigger", "A") for event in ("delete", "insert", "update")
    ]
    assert {argument for _, _, argument in found} == {"4\\000"}
    tubes.run("SET session_replication_role = replica", "INSERT INTO item VALUES (1)")
    assert tubes.pods() == [("I", 4, [1])]


def test_routing_sends_each_row_to_its_shard_and_a_move_to_both(tubes: TubeDatabase) -> None:
    tubes.run(ITEM, "SELECT tube_ensure_exists('pods', 4)")
    tubes.run("SELECT tube_table_attach('pods', 'item', 99, routing => 'n % 10')")
    tubes.run("INSERT INTO item SELECT i, 'x', i FROM generate_series(1, 6) i WHERE i <> 4")
    tubes.run("INSERT INTO item VALUES (50, 'no', NULL), (12, 'x', 12)")
    found = tubes.pods(columns="op, shard, ids")
    assert found == [("I", n, [n]) for n in (1, 2, 3, 5, 6)] + [("I", 2, [12]), ("I", 99, [50])]
    tubes.run("UPDATE item SET n = 7 WHERE id IN (1, 2)", "DELETE FROM item WHERE id = 1")
    assert tubes.pods() == [("U", 1, [1]), ("U", 2, [2]), ("U", 7, [1, 2]), ("D", 7, [1])]
    tubes.run("TRUNCATE item")
    found = tubes.pods(columns="shard, payload->>'type', payload->'all_shards'")
    assert found == [(n, "truncate", True) for n in range(4)]


def test_an_expression_that_fails_for_a_row_does_not_fail_the_write(tubes: TubeDatabase) -> None:
    tubes.run(ITEM, "SELECT tube_ensure_exists('pods', 1, '100 / n > 1')")
    tubes.attach()
    tubes.run("SELECT tube_ensure_exists('pods', 1, '100 / n > 1')")
    tubes.run("INSERT INTO item VALUES (1, 'a', 0), (2, 'b', 1000)")
    assert tubes.pods() == [("I", 1, [1, 2])]
    tubes.run("SELECT tube_table_attach('pods', 'item', 8, routing => 'name::int')")
    tubes.run("INSERT INTO item VALUES (3, 'no number', 5)")
    assert tubes.pods() == [("I", 8, [3])]


def test_a_key_column_that_is_gone_does_not_fail_the_write(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run(ITEM)
    tubes.attach()
    tubes.run(
        "INSERT INTO item VALUES (1)",
        "ALTER TABLE item RENAME id TO key",
        "INSERT INTO item VALUES (2)",
    )
    assert tubes.pods(columns="ids, payload->>'type'") == [([1], None), ([], "lost")]


def test_writers_need_no_rights_and_cannot_take_any(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach()
    role = f"writer_{tubes.name}"
    tubes.run(
        f"CREATE ROLE {role} LOGIN",
        f"GRANT ALL ON item TO {role}",
        f"GRANT CREATE ON SCHEMA public TO {role}",
    )
    try:
        with tubes.connect(user=role) as writer:
            writer.execute("SET search_path = public, pg_catalog")
            # What an attacker would put into the way of a function that runs as its owner.
            writer.execute(
                "CREATE FUNCTION evil(int, int) RETURNS boolean LANGUAGE plpgsql AS"
                " $$BEGIN RAISE EXCEPTION 'as %', current_user; END$$;"
                "CREATE OPERATOR public.= (LEFTARG = int, RIGHTARG = int, FUNCTION = evil);"
                "CREATE OPERATOR public.> (LEFTARG = int, RIGHTARG = int, FUNCTION = evil);"
                "CREATE DOMAIN public.text AS pg_catalog.text CHECK (false)"
            )
            writer.execute("INSERT INTO public.item VALUES (1)")
            writer.execute("UPDATE public.item SET n = 1")
            writer.execute("TRUNCATE public.item")
        assert tubes.pods() == [("I", 1, [1]), ("U", 1, [1]), ("T", 1, [])]
    finally:
        tubes.run(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def test_who_attaches_a_table_needs_no_rights_on_the_tube_later(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    role = f"owner_{tubes.name}"
    tubes.run(
        "SELECT tube_ensure_exists('pods')",
        f"CREATE ROLE {role} LOGIN",
        f"GRANT ALL ON SCHEMA public, tube TO {role}",
        f"GRANT ALL ON ALL TABLES IN SCHEMA tube TO {role}",
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA tube TO {role}",
    )
    try:
        with tubes.connect(user=role) as owner:
            owner.execute(ITEM)
            owner.execute("SELECT tube_table_ensure_attached('pods', 'item', 1)")
            tubes.run(f"REVOKE ALL ON ALL TABLES IN SCHEMA tube FROM {role}")
            owner.execute("INSERT INTO item (id) SELECT generate_series(1, 300)")
            owner.execute("UPDATE item SET n = 1 WHERE id = 1")
        assert tubes.pods(columns="op, cardinality(ids)") == [("I", 250), ("I", 50), ("U", 1)]
    finally:
        tubes.run(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def test_a_session_that_backfills_leaves_only_backfill_pods(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach()
    tubes.run(
        "SET application_name = 'my backfill 7'",
        "INSERT INTO item VALUES (1)",
        "SELECT item_touch('{5}')",
    )
    tubes.run("SELECT pods_touch(1, '{6}', 'T')")
    assert tubes.pods() == [("B", 1, [1]), ("B", 1, [5]), ("B", 1, [6])]


def test_a_tube_on_a_target_sees_what_is_applied(pair: StreamPair) -> None:
    pair.begin(PARTED[0].replace("id bigint", "id bigint PRIMARY KEY"), *PARTED[1:], ITEM)
    install(pair.target)
    pair.target.execute("SET search_path = tube, public; SELECT tube_ensure_exists('pods')")
    pair.target.execute("SELECT tube_table_ensure_attached('pods', 'item', 2)")
    pair.target.execute("SELECT tube_table_ensure_attached('pods', 'm', 1)")
    pair.run(
        "INSERT INTO item VALUES (1, 'a', 1), (2, 'b', 2)", "INSERT INTO m VALUES (5, 1), (105, 1)"
    )
    pair.follow()
    pair.run("UPDATE item SET n = 5 WHERE id = 1", "DELETE FROM m WHERE id = 5")
    pair.follow()
    pair.run("TRUNCATE item")
    pair.follow()
    pair.assert_equal()
    found = pair.target.execute(
        "SELECT op, shard, array_agg(DISTINCT id), max(payload->>'type') FROM tube.pods"
        " LEFT JOIN LATERAL unnest(ids) id ON true GROUP BY op, shard ORDER BY 1, 2"
    ).fetchall()
    assert found == [
        ("D", 1, [5], None),
        ("I", 1, [5, 105], None),
        ("I", 2, [1, 2], None),
        ("T", 2, [None], "truncate"),
        ("U", 2, [1], None),
    ]


def test_rows_can_be_copied_into_a_table_with_a_tube(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run(ITEM)
    tubes.attach()
    with connect(Dsn.parse(tubes.uri), "test") as connection:
        tables = [table for table in read_tables(connection) if table.name == "item"]
        assert read_guarded(connection, tables) == {tables[0].oid}
        tubes.run(
            "CREATE FUNCTION shout() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
            "CREATE TRIGGER shout BEFORE INSERT ON item FOR EACH ROW EXECUTE FUNCTION shout()",
            "ALTER TABLE item ENABLE ALWAYS TRIGGER shout",
        )
        with pytest.raises(ServerError, match="fire always"):
            read_guarded(connection, tables)
