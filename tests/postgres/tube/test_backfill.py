"""Backfills: in one transaction as pg-tube has them, and page by page."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.fixtures.tube.tubes import TubeDatabase
from tests.fixtures.wait import wait_for

from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.tube import backfill as backfills

ITEM = "CREATE TABLE item (id bigint PRIMARY KEY, name text, n int)"
COLUMNS = "seq, op, shard, ids, payload"


def step3(tubes: TubeDatabase, table: str = "item", order: str = "id", more: str = "") -> str:
    (start,) = tubes.rows("SELECT tube_backfill_step1()")
    tubes.run("SELECT tube_backfill_step2()")
    tubes.run(f"SELECT tube_backfill_step3('{start}', 'pods', '{table}', '{order}'{more})")
    return str(start)


def pages(tubes: TubeDatabase, backfill: int, rows: int) -> int:
    count = 0
    while not tubes.rows("SELECT tube_backfill_page(%s, %s, 250)", backfill, rows)[0]:
        count += 1
    return count


def test_one_transaction_emits_start_pods_and_end(tubes: TubeDatabase) -> None:
    tubes.run(ITEM, "INSERT INTO item SELECT i, 'x', 100 - i FROM generate_series(1, 5) i")
    tubes.run("SELECT tube_ensure_exists('pods', 1, 'id <> 3')")
    tubes.run("SELECT tube_table_ensure_attached('pods', 'item', 6)")
    start = step3(tubes, order="n", more=", NULL, 3, 2")
    found = tubes.rows(f"SELECT {COLUMNS} FROM tube.pods ORDER BY seq")
    begin = int(start)
    assert found == [
        (begin + 1, "T", 6, [], {"type": "backfill_start", "start_seq": start}),
        (begin + 2, "B", 6, [5, 4], None),
        (begin + 3, "B", 6, [2], None),
        (begin + 4, "B", 6, [1], None),
        (begin + 5, "B", 6, [], {"type": "backfill_end", "start_seq": start}),
    ]
    step3(tubes)
    assert "skipped" in tubes.notices[-1]
    assert len(tubes.pods()) == 5
    other = tubes.connect(autocommit=False)
    other.execute("SELECT tube_backfill_step3('1', 'pods', 'item', 'id', 6)")
    assert "Another transaction is backfilling" in tubes.fails(
        "SELECT tube_backfill_step3('1', 'pods', 'item', 'id', 6)"
    )
    other.rollback()
    other.close()


def test_two_tables_of_a_shard_each_get_their_backfill(tubes: TubeDatabase) -> None:
    tubes.run(
        ITEM,
        "CREATE TABLE second (id bigint)",
        "INSERT INTO item VALUES (1)",
        "INSERT INTO second VALUES (2)",
    )
    tubes.attach("item", 1)
    tubes.attach("second", 1)
    step3(tubes)
    step3(tubes, "second")
    found = tubes.pods(columns="tbl, ids, payload->>'type'")
    assert found == [
        (tbl, ids, kind)
        for tbl, own in ((1, [1]), (2, [2]))
        for ids, kind in (([], "backfill_start"), (own, None), ([], "backfill_end"))
    ]
    assert tubes.rows("SELECT tube_backfill_schedule('pods', 'id', 1, 1)") == [2]
    assert tubes.rows("SELECT tube_backfill_schedule('pods', 'id', -5, 5)") == [0]
    assert tubes.rows("SELECT tube_backfill_schedule('pods', 'id', 2, 5)") == [0]
    assert tubes.pods(columns="op, shard, payload") == [
        ("B", 1, {"type": "backfill_schedule", "tbl": f"public.{table}", "order_col": "id"})
        for table in ("item", "second")
    ]


def test_a_schedule_survives_quotes_in_names(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run('CREATE TABLE "it\'s ""q""" (id bigint, "o""r" int)')
    tubes.run("SELECT tube_ensure_exists('pods')")
    tubes.rows("SELECT tube_table_ensure_attached('pods', %s::regclass, 1)", '"it\'s ""q"""')
    assert tubes.rows("SELECT tube_backfill_schedule('pods', %s, 1, 1)", 'o"r') == [1]
    (payload,) = tubes.pods(columns="payload")
    assert payload == {
        "type": "backfill_schedule",
        "tbl": 'public."it\'s ""q"""',
        "order_col": 'o"r',
    }


def test_routed_rows_are_emitted_to_their_shards_and_the_end_to_each_partition(
    tubes: TubeDatabase,
) -> None:
    tubes.run(ITEM, "SELECT tube_ensure_exists('pods', 2)")
    tubes.run("SELECT tube_table_attach('pods', 'item', routing => 'n')")
    tubes.run(
        "INSERT INTO item SELECT i, 'x', i % 3 FROM generate_series(1, 6) i",
        "DELETE FROM tube.pods",
    )
    step3(tubes)
    ends = "SELECT shard FROM tube.pods WHERE payload->>'type' = 'backfill_end' ORDER BY 1"
    assert tubes.rows(ends) == [0, 1]
    tubes.run("SELECT tube_ensure_exists('pods', 3)")
    assert tubes.rows(ends) == [0, 1, 2]
    regular = tubes.rows("SELECT op, shard, ids FROM tube.pods WHERE ids <> '{}' ORDER BY seq")
    assert regular == [("B", 0, [3, 6]), ("B", 1, [1, 4]), ("B", 2, [2, 5])]


def test_the_barrier_waits_for_open_transactions(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.run("SELECT tube_backfill_step2('60s')")
    other = tubes.connect(autocommit=False)
    other.execute("SELECT 1")  # without an xid nobody waits for it
    tubes.run("SELECT tube_backfill_step2('60s')")
    other.execute("INSERT INTO item VALUES (1)")
    assert "did not end within" in tubes.fails("SELECT tube_backfill_step2('0.1s')")
    failed: list[BaseException] = []
    waiting = threading.Thread(target=_wait, args=(tubes, failed))
    waiting.start()
    with tubes.connect() as look:
        query = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE query ~ 'step2..300' AND pid <> pg_backend_pid()"
        )
        wait_for(lambda: look.execute(query).fetchone() == (1,))
        assert waiting.is_alive()
    other.commit()
    waiting.join()
    other.close()
    assert failed == []


def _wait(tubes: TubeDatabase, failed: list[BaseException]) -> None:
    try:
        with tubes.connect() as connection:
            connection.execute("SELECT tube_backfill_step2('300s')")
    except BaseException as error:
        failed.append(error)


@pytest.fixture(scope="module")
def preparing() -> Any:
    with open_cluster(16, tcp=True, settings={"max_prepared_transactions": "5"}) as cluster:
        yield cluster


def test_prepared_transactions_are_possible_and_waited_for(preparing: Cluster) -> None:
    from tests.fixtures.tube.tubes import open_tubes

    with open_tubes(preparing) as tubes:
        tubes.run(ITEM)
        tubes.attach()
        tubes.run(
            "BEGIN", "INSERT INTO item VALUES (1)", "TRUNCATE item", "PREPARE TRANSACTION 'held'"
        )
        assert "PREPARE TRANSACTION 'held'" in tubes.fails("SELECT tube_backfill_step2('0.1s')")
        tubes.run("COMMIT PREPARED 'held'", "SELECT tube_backfill_step2('1s')")
        assert [pod[0] for pod in tubes.pods()] == ["I", "T"]


def test_pages_go_on_where_they_stopped(tubes: TubeDatabase) -> None:
    tubes.run("CREATE TABLE t (a int, b text, w int, PRIMARY KEY (b, a))")
    tubes.run(
        "INSERT INTO t SELECT i, i % 7, CASE WHEN i % 5 > 0 THEN i % 4 END FROM"
        " generate_series(1, 100) i"
    )
    tubes.attach("t")
    tubes.run("SELECT tube_table_attach('pods', 't', 1, predicate => 'a <> 50')")
    for order in (None, "w"):
        (number,) = tubes.rows("SELECT tube_backfill_begin('pods', 't', %s)", order)
        assert tubes.rows("SELECT tube_backfill_page(%s, 30)", number) == [False]
        # As after a crash: begun again is the same one.
        assert tubes.rows("SELECT tube_backfill_begin('pods', 't', %s)", order) == [number]
        pages(tubes, number, 9)
        assert tubes.rows("SELECT tube_backfill_page(%s, 9)", number) == [True]
        start, state, ids = tubes.rows(
            "SELECT start_seq, state, ids FROM tube_backfill_progress('pods') WHERE backfill = %s",
            number,
        )[0]
        assert (state, ids) == ("done", 99)
        assert "was not delivered yet" in tubes.fails("SELECT tube_backfill_begin('pods', 't')")
        found = tubes.pods(columns="op, keys, payload")
        assert found[0] == ("T", None, {"type": "backfill_start", "start_seq": str(start)})
        assert found[-1] == ("B", None, {"type": "backfill_end", "start_seq": str(start)})
        keys = [key for _, some, _ in found[1:-1] for key in some]
        by = f"coalesce({order}, 999), " if order else ""
        expected = tubes.rows(
            f"SELECT json_build_array(b, a::text)::text FROM t WHERE a <> 50 ORDER BY {by}b, a"
        )
        assert keys == expected


def test_a_backfill_can_be_cancelled(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run(ITEM, "INSERT INTO item SELECT i FROM generate_series(1, 100) i")
    tubes.attach()
    (number,) = tubes.rows("SELECT tube_backfill_begin('pods', 'item')")
    tubes.rows("SELECT tube_backfill_page(%s, 10)", number)
    assert tubes.rows("SELECT tube_backfill_cancel(%s)", number) == [True]
    assert "was cancelled" in tubes.fails(f"SELECT tube_backfill_page({number})")
    assert [pod[2] for pod in tubes.pods()] == [[], list(range(1, 11))]
    (second,) = tubes.rows("SELECT tube_backfill_begin('pods', 'item')")
    assert second != number


def test_pages_run_from_beginning_to_end(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run(ITEM, "INSERT INTO item SELECT i FROM generate_series(1, 5000) i")
    tubes.attach()
    done = backfills.run(tubes.connection, "pods", "item", None, backfills.Pace(0.5, 0, 30))
    assert (done["state"], done["ids"]) == ("done", 5000)
    assert sum(len(pod[2]) for pod in tubes.pods()) == 5000


def test_the_size_of_a_page_follows_the_time_it_took() -> None:
    assert backfills.next_rows(1000, 10.0, 1.0) == 50
    assert backfills.next_rows(1000, 0.001, 1.0) == 2000
    assert backfills.next_rows(1, 100.0, 1.0) == 1


def test_a_role_that_reads_the_table_can_backfill_it(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run(ITEM, "INSERT INTO item VALUES (1)")
    tubes.attach()
    role = f"filler_{tubes.name}"
    tubes.run(f"CREATE ROLE {role} LOGIN", f"GRANT SELECT ON item TO {role}")
    tubes.run(f"GRANT USAGE ON SCHEMA tube TO {role}", f"GRANT USAGE ON tube.tube_seq TO {role}")
    try:
        with tubes.connect(user=role) as filler:
            filler.execute("SELECT tube_backfill_schedule('pods', 'id', 1, 1)")
            filler.execute("SELECT tube_backfill_step2('60s')")
            filler.execute(
                "SELECT tube_backfill_step3(tube_backfill_step1(), 'pods', 'item', 'id')"
            )
            filler.execute("SELECT tube_pods_insert('pods', 'SELECT 7, 1', 0)")
            filler.execute("SELECT item_touch('{8}'), pods_touch(1, '{9}', 'T')")
        assert [pod[2] for pod in tubes.pods()] == [[], [], [1], [], [7], [8], [9]]
    finally:
        tubes.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
