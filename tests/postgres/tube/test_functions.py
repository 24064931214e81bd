"""The SQL functions that users of pg-tube know, and what they refuse."""

from __future__ import annotations

import pytest
from tests.fixtures.tube.tubes import TubeDatabase

ITEM = "CREATE TABLE item (id bigint PRIMARY KEY, name text, n int)"
SIGNATURES = """
SELECT p.proname || '(' || pg_get_function_arguments(p.oid) || ') ' || pg_get_function_result(p.oid)
  FROM pg_proc p WHERE p.pronamespace = 'tube'::regnamespace AND p.proname = %s
"""


@pytest.mark.parametrize(
    "signature",
    [
        "tube_ensure_exists(tube text, partitions integer DEFAULT 1, predicate text"
        " DEFAULT NULL::text) void",
        "tube_ensure_absent(in_tube text) void",
        "tube_table_ensure_attached(tube text, tbl regclass, shard integer DEFAULT"
        " NULL::integer) void",
        "tube_table_ensure_detached(in_tube text, in_tbl regclass) void",
        "tube_list(in_tbl regclass DEFAULT NULL::regclass)"
        " TABLE(tube text, predicate text, partitions integer, tbl regclass, shard integer)",
        "tube_pods_sql(tube text, partitions integer, partition integer,"
        " exclude_backfill boolean DEFAULT false) text",
        "tube_pods_delete(tube text, partitions integer, partition integer, seqs bigint[]) integer",
        "tube_pods_insert(tube_or_tubes text, query text, shard integer, op character"
        " DEFAULT 'B'::bpchar,"
        " approx_size bigint DEFAULT NULL::bigint, fetch_chunk_size integer DEFAULT 20000,"
        " insert_chunk_size integer DEFAULT 250) void",
        "tube_stats() TABLE(tube text, predicate text, partition integer, shards integer,"
        " inc_count text, inc_min_seq bigint, inc_max_seq bigint,"
        " inc_min_ts timestamp with time zone, inc_max_ts timestamp with time zone,"
        " backfill_count text, backfill_min_seq bigint, backfill_max_seq bigint,"
        " backfill_min_ts timestamp with time zone, backfill_max_ts timestamp with time zone,"
        " control_count text)",
        "tube_backfill_step1() text",
        "tube_backfill_step2(timeout interval DEFAULT '00:01:00'::interval) void",
        "tube_backfill_step3(step1 text, tube text, tbl regclass, order_col text,"
        " shard integer DEFAULT NULL::integer, fetch_chunk_size integer DEFAULT 20000,"
        " insert_chunk_size integer DEFAULT 250) void",
        "tube_backfill_schedule(in_tube text, order_col text, shard_from integer,"
        " shard_to integer) integer",
        "pods_touch(shard integer, ids bigint[], op character, payload jsonb DEFAULT NULL::jsonb,"
        " chunk_size integer DEFAULT 250) void",
    ],
    ids=lambda text: text.partition("(")[0],
)
def test_a_signature_is_the_one_that_callers_know(tubes_16: TubeDatabase, signature: str) -> None:
    tubes_16.run("SELECT tube_ensure_exists('pods')")
    found = tubes_16.rows(SIGNATURES, signature.partition("(")[0])
    assert found == [signature]


def test_tubes_and_tables_are_listed(tubes: TubeDatabase) -> None:
    tubes.run(
        "CREATE SCHEMA sh0042; CREATE TABLE sh0042.item (id bigint)",
        ITEM,
        "SELECT tube_ensure_exists('b', 3, 'id > 0')",
        "SELECT tube_ensure_exists('a')",
        "SELECT tube_table_ensure_attached('b', 'sh0042.item')",
        "SELECT tube_table_ensure_attached('b', 'item', -7)",
    )
    assert tubes.rows("SELECT tube, predicate, partitions, tbl::text, shard FROM tube_list()") == [
        ("a", "", 1, None, None),
        ("b", "id > 0", 3, "item", -7),
        ("b", "id > 0", 3, "sh0042.item", 42),
    ]
    assert tubes.rows("SELECT tube FROM tube_list('item')") == ["b"]
    tubes.run("SELECT tube_table_ensure_attached('b', 'item', 8)")
    assert tubes.rows("SELECT shard FROM tube_list('item')") == [8]
    tubes.run("INSERT INTO item VALUES (1)")
    assert tubes.pods("b") == [("I", 8, [1])]
    tubes.run("SELECT tube_table_ensure_detached(NULL, 'item')", "INSERT INTO item VALUES (2)")
    assert tubes.pods("b") == []
    tubes.run("SELECT tube_table_ensure_detached('b', 'item')")
    tubes.run("DROP TABLE sh0042.item")
    assert tubes.rows("SELECT tbl FROM tube_list() WHERE tube = 'b'") == [None]
    tubes.run(
        "SELECT tube_ensure_absent('a')",
        "SELECT tube_ensure_absent('b')",
        "SELECT tube_ensure_absent('c')",
    )
    left = tubes.rows(
        "SELECT relname FROM pg_class WHERE relnamespace = 'tube'::regnamespace AND"
        " relkind IN ('r', 'S')"
        " AND relname !~ '^_tube_[a-z]' UNION ALL SELECT proname FROM pg_proc"
        " WHERE pronamespace = 'tube'::regnamespace AND proname ~ '^[^_].*_touch$' AND"
        " proname <> 'tube_touch'"
    )
    assert left == ["tube_seq"]


def test_touches_reach_every_tube_of_a_table(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach(shard=1)
    tubes.attach(shard=2, tube="other")
    tubes.run("SELECT item_touch('{5,6}')", "SELECT item_touch('{7,8,9}', 'U', NULL, 2)")
    assert tubes.pods() == [("T", 1, [5, 6]), ("U", 1, [7, 8]), ("U", 1, [9])]
    assert tubes.pods("other") == [("T", 2, [5, 6]), ("U", 2, [7, 8]), ("U", 2, [9])]
    tubes.run(
        "SELECT pods_touch(3, '{}', 'T')",
        "SELECT pods_touch(3, NULL, 'T', '{\"type\": \"mine\"}')",
        "SELECT pods_touch(4, '{1}', 'T', '{\"type\": \"ignored\"}')",
    )
    assert tubes.pods(columns="shard, ids, payload") == [(3, [], {"type": "mine"}), (4, [1], None)]
    assert "violates check constraint" in tubes.fails("SELECT pods_touch(4, '{1}', 'X')")
    assert "row is too big" in tubes.fails(
        "SELECT pods_touch(4, array_agg(i), 'T', NULL, 2000) FROM"
        " generate_series(1::bigint, 2000) i"
    )
    tubes.run("SELECT tube_table_ensure_detached(NULL, 'item')")
    assert "does not exist" in tubes.fails("SELECT item_touch('{1}')")


def test_keys_that_are_no_integers_are_touched_as_text(tubes: TubeDatabase) -> None:
    tubes.run("CREATE TABLE t (a int, b text, PRIMARY KEY (a, b))")
    tubes.attach("t")
    tubes.run(
        """SELECT t_touch(ARRAY['["1", "x"]'])""",
        """SELECT tube_touch('pods', 't', ARRAY['["2", "y"]'])""",
    )
    assert tubes.pods(columns="op, keys") == [("T", ['["1", "x"]']), ("T", ['["2", "y"]'])]
    tubes.run(
        "SELECT tube_table_attach('pods', 't', routing => 'a % 5')", "INSERT INTO t VALUES (9, 'z')"
    )
    tubes.run("""SELECT t_touch(ARRAY['["9", "z"]', '["1", "gone"]'])""")
    assert tubes.pods(columns="op, shard, keys") == [
        ("I", 4, ['["9", "z"]']),
        ("T", 0, ['["1", "gone"]']),
        ("T", 4, ['["9", "z"]']),
    ]


def test_pods_are_inserted_from_a_query(tubes: TubeDatabase) -> None:
    tubes.run("SELECT tube_ensure_exists('a')", "SELECT tube_ensure_exists('b,c')")
    query = "SELECT i, row_number() OVER (ORDER BY i DESC) FROM generate_series(1::bigint, 5) i"
    tubes.run(f"SELECT tube_pods_insert('a,\"b,c\"', '{query}', 3, 'T', 10, 3, 2)")
    expected = [("T", 3, [5, 4]), ("T", 3, [3]), ("T", 3, [2, 1])]
    assert tubes.pods("a") == expected
    assert tubes.pods("b,c") == expected
    (notice,) = tubes.notices
    assert notice.startswith("tube_pods_insert: approx_size=10 fetch_ms=")
    assert "insert_ids=5 insert_finished=t insert_percent=100 insert_ms=" in notice
    assert notice.endswith(" (inserting)")
    tubes.run(f"SELECT tube_pods_insert('b,c', '{query}', 0)")
    assert tubes.pods("b,c") == [("B", 0, [5, 4, 3, 2, 1])]
    assert "approx_size=<NULL>" in tubes.notices[-1]
    assert "No such tube: nope" in tubes.fails(
        "SELECT tube_pods_insert('a,nope', 'SELECT 1, 1', 3)"
    )


def test_stats_have_a_row_for_each_partition(tubes: TubeDatabase) -> None:
    tubes.run(ITEM, "SELECT tube_ensure_exists('pods', 2, 'n IS NULL')")
    tubes.run("SELECT tube_table_ensure_attached('pods', 'item', 3)")
    tubes.run(
        "INSERT INTO item VALUES (1)",
        "INSERT INTO item VALUES (2)",
        "SELECT pods_touch(1, '{9}', 'B')",
    )
    tubes.run("SELECT pods_touch(1, NULL, 'B', '{\"type\": \"mine\"}')", "TRUNCATE item")
    found = tubes.rows(
        "SELECT tube, predicate, partition, shards, inc_count, inc_max_seq - inc_min_seq,"
        " inc_min_ts <= inc_max_ts, backfill_count, backfill_min_seq = backfill_max_seq,"
        " control_count"
        " FROM tube_stats()"
    )
    assert found == [
        ("pods", "n IS NULL", 0, 0, "0", None, None, "0", None, "0"),
        ("pods", "n IS NULL", 1, 1, "2", 1, True, "1", True, "mine:1 truncate:1"),
    ]
    tubes.run(
        "DO $$BEGIN FOR i IN 1..1100 LOOP PERFORM tube.pods_touch(1, '{1}', 'T'); END LOOP; END$$"
    )
    (count,) = tubes.rows("SELECT inc_count FROM tube_stats() WHERE partition = 1")
    assert count == "1000+" or count.startswith("~")


def test_what_waits_is_told_for_each_shard(tubes: TubeDatabase) -> None:
    tubes.run(
        ITEM,
        "SELECT tube_ensure_exists('pods', 3)",
        "SELECT tube_table_ensure_attached('pods', 'item', -4)",
        "SELECT pods_touch(7, '{1,2,3}', 'T')",
        "SELECT pods_touch(7, '{4}', 'B')",
        "SELECT pods_touch(7, '{}', 'T', '{\"type\": \"backfill_start\"}')",
        "UPDATE pods SET ts = ts - interval '1 minute' WHERE op = 'T'",
    )
    found = tubes.rows(
        "SELECT partition, shard, pods, ids, lag_seconds >= 60, backfill_pods, backfill_ids,"
        " backfill_lag_seconds < 60, control_pods FROM tube_shards('pods')"
    )
    assert found == [(1, 7, 1, 3, True, 1, 1, True, 1), (2, -4, 0, 0, False, 0, 0, True, 0)]
    assert tubes.rows("SELECT count(*) FROM tube_shards('no')") == [0]


def test_long_and_odd_names_stay_apart(tubes: TubeDatabase) -> None:
    names = ["MyTube", "mytube", 'it\'s "a" tube', "x" * 63, "x" * 62 + "y", "ü" * 31]
    table = "t" * 62 + "é"[:0] + "z"
    tubes.run(
        f'CREATE TABLE "{table}" (id bigint)',
        'CREATE TABLE "Odd ""name""" ("The id" bigint PRIMARY KEY)',
    )
    for name in names:
        tubes.rows("SELECT tube_ensure_exists(%s)", name)
        tubes.rows("SELECT tube_table_ensure_attached(%s, %s::regclass, 1)", name, table)
        tubes.rows("SELECT tube_table_ensure_attached(%s, %s::regclass, 2)", name, '"Odd ""name"""')
    tubes.run(f'INSERT INTO "{table}" VALUES (1)', 'INSERT INTO "Odd ""name""" VALUES (2)')
    for name in names:
        quoted = name.replace('"', '""')
        assert sorted(tubes.pods(quoted)) == [("I", 1, [1]), ("I", 2, [2])]
    assert sorted(tubes.rows("SELECT DISTINCT tube FROM tube_list()")) == sorted(names)
    tubes.rows("SELECT tube_ensure_exists('mytube', 5)")
    assert tubes.rows("SELECT DISTINCT partitions FROM tube_list() WHERE tube = 'MyTube'") == [1]
    for name in names:
        tubes.rows("SELECT tube_ensure_absent(%s)", name)
    assert tubes.rows("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal") == [0]


def test_what_was_dropped_with_drop_table_is_forgotten(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run(ITEM)
    tubes.attach()
    tubes.run("DROP TABLE item", "DROP TABLE tube.pods CASCADE", ITEM)
    assert tubes.rows("SELECT * FROM tube_list()") == []
    assert "No such tube: pods" in tubes.fails("SELECT tube_pods_sql('pods', 1, 0)")
    tubes.attach()
    tubes.run("INSERT INTO item VALUES (1)")
    assert tubes.pods() == [("I", 1, [1])]
    left = tubes.rows(
        "SELECT DISTINCT substring(proname, '^_tube_[0-9]+') FROM pg_proc"
        " WHERE proname ~ '^_tube_[0-9]'"
    )
    assert left == ["_tube_2"]


def test_what_would_fail_later_is_refused_when_attached(tubes: TubeDatabase) -> None:
    tubes.run(
        ITEM,
        "CREATE TABLE keyless (a int)",
        "CREATE VIEW v AS SELECT 1 AS id",
        "SELECT tube_ensure_exists('pods')",
    )
    attach = "SELECT tube_table_attach('pods', 'item', 1, "
    for statement, message in (
        ("SELECT tube_table_ensure_attached('nope', 'item', 1)", "No such tube: nope"),
        ("SELECT tube_table_ensure_attached('pods', 'nope', 1)", 'relation "nope" does not exist'),
        ("SELECT tube_table_ensure_attached('pods', 'item')", "Cannot infer a shard"),
        ("SELECT tube_table_ensure_attached('pods', 'keyless', 1)", "no primary key"),
        ("SELECT tube_table_ensure_attached('pods', 'v', 1)", "v is not a table"),
        ("SELECT tube_table_ensure_attached('pods', 'tube.pods', 1)", "is a tube"),
        (attach + "key => '{nope}')", 'no column "nope"'),
        (attach + "key => '{ctid}')", 'no column "ctid"'),
        (attach + "predicate => 'nope > 1')", "The predicate does not compile"),
        (attach + "predicate => 'n')", "argument of WHERE must be type boolean"),
        (attach + "predicate => 'count(*) > 1')", "aggregate functions are not allowed"),
        (attach + "predicate => 'random() > 0.5')", "The predicate is volatile: it calls random"),
        (attach + "predicate => 'ctid IS NOT NULL')", "system column"),
        (attach + "routing => 'name || ')", "The routing does not compile"),
        (attach + "routing => '(random() * 5)::int')", "The routing is volatile"),
        (attach + "routing => 'point(1, 2)')", "The routing does not compile"),
        ("SELECT tube_ensure_exists('x', 0)", "at least one partition"),
        ("SELECT tube_ensure_exists('')", "1 to 63 bytes"),
        ("SELECT tube_ensure_exists('_tube_tables')", "is not a tube"),
        ("SELECT tube_backfill_step3('1', 'nope', 'item', 'id', 1)", "No such tube: nope"),
        ("SELECT tube_backfill_step3('1', 'pods', 'item', 'nope', 1)", 'ordered by "nope"'),
        ("SELECT tube_backfill_schedule('nope', 'id', 0, 1)", "No such tube: nope"),
        ("SELECT tube_pods_sql('nope', 1, 0)", "No such tube: nope"),
        ("SELECT tube_touch('pods', 'keyless', '{1}')", "is not attached"),
    ):
        assert message in tubes.fails(statement), statement
    tubes.run("INSERT INTO item VALUES (1)")
    tubes.attach()
    assert "does not compile for table item" in tubes.fails(
        "SELECT tube_ensure_exists('pods', 1, 'nope')"
    )
    tubes.run("INSERT INTO item VALUES (2)")
    assert tubes.pods() == [("I", 1, [2])]
