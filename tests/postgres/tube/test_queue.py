"""How pods are stored: read and deleted by the tube's name, and never in anybody's way."""

from __future__ import annotations

import json
import threading

from tests.fixtures.tube.tubes import TubeDatabase

ITEM = "CREATE TABLE item (id bigint PRIMARY KEY, name text, n int)"
ROTATE = "SELECT tube_rotate('pods', max_age => '0')"
SLOTS = (
    "SELECT rel::text, pg_relation_size(rel) > 0 FROM tube._tube_slots WHERE slot > 0 ORDER BY slot"
)


def drain(tubes: TubeDatabase) -> int:
    (count,) = tubes.rows("WITH d AS (DELETE FROM tube.pods RETURNING 1) SELECT count(*) FROM d")
    return int(count)


def test_a_partition_is_read_in_the_order_of_an_index(tubes: TubeDatabase) -> None:
    tubes.run(
        ITEM,
        "SELECT tube_ensure_exists('pods', 4)",
        "SELECT tube_table_ensure_attached('pods', 'item', 2)",
    )
    tubes.run(
        "SET enable_seqscan = off",
        "SET enable_bitmapscan = off",
        "DO $$BEGIN FOR i IN 1..600 LOOP PERFORM tube.pods_touch(i % 8, ARRAY[i],"
        " CASE WHEN i % 3 = 0 THEN 'B' ELSE 'T' END); END LOOP; END$$",
    )
    for query in (
        "SELECT seq FROM tube.pods WHERE shard % 4 = 2 ORDER BY op = 'B', seq",
        tubes.rows("SELECT tube_pods_sql('pods', 4, 2)")[0],
        tubes.rows("SELECT tube_pods_sql('pods', 4, 2, true)")[0],
        tubes.rows("SELECT tube_fetch_sql('pods', 4, 2)")[0],
    ):
        plan = json.dumps(tubes.rows(f"EXPLAIN (FORMAT JSON) {query}")[0])
        assert '"Sort"' not in plan, query
        assert '"Merge Append"' in plan
        assert "Filter" not in plan
    found = tubes.rows(
        "SELECT seq, op = 'B' FROM tube.pods WHERE shard % 4 = 2 ORDER BY op = 'B', seq"
    )
    assert [row[0] for row in tubes.rows(tubes.rows("SELECT tube_pods_sql('pods', 4, 2)")[0])] == [
        seq for seq, _ in found
    ]
    assert found == sorted(found, key=lambda row: (row[1], row[0]))
    increments = tubes.rows(tubes.rows("SELECT tube_pods_sql('pods', 4, 2, true)")[0])
    assert len(increments) == sum(not is_backfill for _, is_backfill in found)


def test_negative_shards_belong_to_a_partition(tubes: TubeDatabase) -> None:
    tubes.run(
        ITEM,
        "SELECT tube_ensure_exists('pods', 4)",
        "SELECT tube_table_ensure_attached('pods', 'item', -3)",
    )
    tubes.run("INSERT INTO item VALUES (1)", "SELECT pods_touch(1, '{2}', 'T')")
    statement = tubes.rows("SELECT tube_pods_sql('pods', 4, 1)")[0]
    found = tubes.rows(statement)
    assert [(row[1], row[2], row[3]) for row in found] == [("I", -3, "{1}"), ("T", 1, "{2}")]
    stats = tubes.rows("SELECT partition, shards, inc_count FROM tube_stats() ORDER BY 1")
    assert stats == [(0, 0, "0"), (1, 1, "2"), (2, 0, "0"), (3, 0, "0")]
    seqs = [row[0] for row in found]
    assert tubes.rows("SELECT tube_pods_delete('pods', 4, 0, %s)", seqs) == [0]
    assert tubes.rows("SELECT tube_pods_delete('pods', 4, 1, %s)", seqs) == [2]


def test_drained_storage_is_truncated_while_a_snapshot_is_held(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach()
    tubes.run("INSERT INTO item VALUES (1, 'x', 0)")
    holder = tubes.connect(autocommit=False)
    holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
    for number in range(4):
        tubes.run(*["UPDATE item SET n = n + 1"] * 20)
        assert drain(tubes) >= 20, number
        tubes.run(ROTATE)  # another slot is written to
        tubes.run(ROTATE)  # the first one is truncated
        found = tubes.rows(SLOTS)
        assert len(found) == 2
        assert [is_used for _, is_used in found] == [False, False]
    assert holder.execute("SELECT count(*) FROM item").fetchone() == (1,)
    holder.rollback()
    holder.close()


def test_a_reader_that_holds_locks_makes_the_queue_grow_by_a_table_and_nobody_waits(
    tubes: TubeDatabase,
) -> None:
    tubes.run(ITEM)
    tubes.attach()
    tubes.run("SET lock_timeout = '1ms'")
    dump = tubes.connect(autocommit=False)
    dump.execute("SELECT count(*) FROM tube.pods")  # as pg_dump, it holds ACCESS SHARE
    for number in range(1, 9):
        tubes.run(f"INSERT INTO item VALUES ({number})")
        assert drain(tubes) == 1
        tubes.run(ROTATE, ROTATE, ROTATE)
    names = [name for name, _ in tubes.rows(SLOTS)]
    # Two that are locked, and those that are written in turn.
    assert len(names) == 4
    dump.rollback()
    dump.close()
    tubes.run(ROTATE)
    assert sum(is_used for _, is_used in tubes.rows(SLOTS)) <= 1


def test_a_writer_that_is_not_done_keeps_its_slot_from_being_truncated(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach()
    writer = tubes.connect(autocommit=False)
    tubes.run("INSERT INTO item VALUES (1)")
    writer.execute("INSERT INTO item VALUES (2)")
    assert drain(tubes) == 1
    tubes.run(ROTATE, ROTATE, ROTATE)
    writer.commit()
    writer.close()
    assert tubes.rows("SELECT ids FROM tube.pods") == [[2]]
    tubes.run(ROTATE)
    assert tubes.pods() == [("I", 1, [2])]


def test_the_few_pods_of_a_stuck_shard_move_on_with_their_seq(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach()
    tubes.run("INSERT INTO item SELECT i FROM generate_series(1, 5000) i")
    before = tubes.rows("SELECT * FROM tube.pods ORDER BY seq")
    stuck = before[3]
    tubes.rows("DELETE FROM tube.pods WHERE seq <> %s RETURNING 1", stuck[0])
    (place,) = tubes.rows("SELECT tableoid FROM tube.pods")
    tubes.run(ROTATE, ROTATE)
    assert tubes.rows("SELECT * FROM tube.pods") == [stuck]
    assert tubes.rows("SELECT tableoid FROM tube.pods") != [place]
    assert tubes.rows("SELECT tube_pods_delete('pods', 1, 0, %s)", [stuck[0]]) == [1]


def test_nothing_is_truncated_under_an_old_snapshot(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run(ITEM)
    tubes.attach()
    tubes.run("INSERT INTO item VALUES (1)", "DELETE FROM tube.pods", ROTATE)
    old = tubes.connect(autocommit=False)
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
    tubes.run(
        "SELECT setval('tube._tube_1_slot', 1001)",  # a writer that chose before the switch
        "INSERT INTO item VALUES (2)",
        "SELECT setval('tube._tube_1_slot', 1002)",
    )
    assert old.execute(ROTATE).fetchone() == (0,)
    old.commit()
    old.close()
    assert tubes.pods() == [("I", 1, [2])]


def test_a_repartition_locks_the_tube_and_no_table(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach(shard=5)
    tubes.run("INSERT INTO item VALUES (1)")
    reader = tubes.connect(autocommit=False)
    reader.execute("SELECT * FROM item FOR UPDATE")
    writer = tubes.connect(autocommit=False)
    writer.execute("LOCK TABLE item IN ROW EXCLUSIVE MODE")
    other = tubes.connect(autocommit=False)
    other.execute("SET lock_timeout = '60s'")
    other.execute("SELECT tube_ensure_exists('pods', 3)")
    locked = other.execute(
        "SELECT l.mode FROM pg_locks l WHERE l.relation = 'public.item'::regclass"
        " AND l.pid = pg_backend_pid()"
    ).fetchall()
    assert {mode for (mode,) in locked} <= {"AccessShareLock"}
    other.commit()
    for connection in (reader, writer, other):
        connection.rollback()
        connection.close()
    assert tubes.rows("SELECT partitions FROM tube_list()") == [3]
    statement = tubes.rows("SELECT tube_pods_sql('pods', 3, 2)")[0]
    assert [row[3] for row in tubes.rows(statement)] == ["{1}"]
    assert "3 partitions, not 1" in tubes.fails("SELECT tube_pods_sql('pods', 1, 0)")
    assert "3 partitions, not 1" in tubes.fails("SELECT tube_pods_delete('pods', 1, 0, '{1}')")
    indexes = "SELECT count(*) FROM pg_indexes WHERE schemaname = 'tube' AND indexdef ~ 'shard %'"
    assert tubes.rows(indexes) == [4]


def test_reading_and_deleting_needs_rights_on_the_tubes_name_alone(tubes_16: TubeDatabase) -> None:
    tubes = tubes_16
    tubes.run(ITEM)
    tubes.attach()
    role = f"reader_{tubes.name}"
    tubes.run("INSERT INTO item VALUES (1)", f"CREATE ROLE {role} LOGIN")
    tubes.run(
        f"GRANT USAGE ON SCHEMA tube TO {role}", f"GRANT SELECT, DELETE ON tube.pods TO {role}"
    )
    try:
        with tubes.connect(user=role) as reader:
            (statement,) = reader.execute("SELECT tube_pods_sql('pods', 1, 0)").fetchone()
            ((seq, *_),) = reader.execute(statement.encode()).fetchall()
            tubes.run("SELECT setval('tube._tube_1_slot', 1001)")  # nobody has looked for long
            deleted = reader.execute(
                "SELECT tube_pods_delete('pods', 1, 0, %s)", ([seq],)
            ).fetchone()
            assert deleted == (1,)
            assert reader.execute("SELECT count(*) FROM tube_list()").fetchone() == (1,)
            assert reader.execute("SELECT count(*) FROM tube_stats()").fetchone() == (1,)
    finally:
        tubes.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_no_pod_is_lost_while_writers_drain_and_rotation_go_on(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach()
    failed: list[BaseException] = []

    def write(first: int) -> None:
        try:
            with tubes.connect() as writer:
                writer.execute("SET lock_timeout = '60s'")
                for number in range(first, first + 150):
                    writer.execute("INSERT INTO item VALUES (%s)", (number,))
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(1000 * n,)) for n in range(3)]
    for writer in writers:
        writer.start()
    seen: list[int] = []
    truncated = 0
    try:
        while True:
            is_last = not any(writer.is_alive() for writer in writers)
            found = tubes.rows(tubes.rows("SELECT tube_pods_sql('pods', 1, 0)")[0])
            seen += [int(number) for row in found for number in row[3].strip("{}").split(",")]
            seqs = [row[0] for row in found]
            tubes.rows("SELECT tube_pods_delete('pods', 1, 0, %s::bigint[])", seqs)
            truncated += tubes.rows(ROTATE)[0]
            if is_last:
                break
        truncated += tubes.rows(ROTATE)[0] + tubes.rows(ROTATE)[0]
    finally:
        for writer in writers:
            writer.join()
    assert failed == []
    assert sorted(seen) == [1000 * n + i for n in range(3) for i in range(150)]
    assert truncated > 0
