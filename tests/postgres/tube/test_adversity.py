"""What once made a tube lose a touch, keep a document, stop, or give up rows that are fine."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.port import free_port
from tests.fixtures.tube.tube_delivery import Delivered
from tests.fixtures.tube.tubes import TubeDatabase, open_tubes
from tests.fixtures.wait import wait_for

from millrace import failpoint
from millrace.config.dsn import Dsn
from millrace.errors import (
    ConfigError,
    ConnectionLost,
    EngineLost,
    MillraceError,
    ServerError,
    SinkError,
)
from millrace.postgres.program.embedded import open_cluster
from millrace.postgres.wire.connect import connect
from millrace.retry import is_transient
from millrace.sink.document import DocumentBatch
from millrace.sink.postgres_table import PostgresTableSink
from millrace.tube.delivery import writer
from millrace.tube.delivery.enrich import SqlEnrichment
from millrace.tube.delivery.run import run_delivery
from millrace.tube.delivery.tube import find_tube
from millrace.tube.delivery.worker import Worker, WorkerTask

ITEM = "CREATE TABLE item (id bigint PRIMARY KEY, v text, region int)"
DOCS = "CREATE TABLE docs (id bigint PRIMARY KEY, v text)"
ENRICH = "SELECT id, v FROM item WHERE id = ANY($1)"


@pytest.fixture
def delivered(tubes_16: TubeDatabase) -> Delivered:
    tubes_16.run(ITEM, DOCS)
    found = Delivered(tubes_16)
    found.into(ENRICH)
    return found


def assert_equal(delivered: Delivered) -> None:
    rows = delivered.tubes.rows
    assert rows("SELECT id, v FROM docs ORDER BY 1") == rows("SELECT id, v FROM item ORDER BY 1")
    delivered.assert_empty()


@pytest.mark.parametrize("again", ["2", "1, routing => 'region'"])
def test_truncate_after_another_shard_or_routing_takes_the_old_documents(
    delivered: Delivered, again: str
) -> None:
    tubes = delivered.tubes
    before = again if "routing" in again else "1"
    tubes.run("SELECT tube_ensure_exists('pods', 3)")
    tubes.run(f"SELECT tube_table_attach('pods', 'item', {before})")
    tubes.run("INSERT INTO item SELECT i, 'a', i FROM generate_series(1, 20) i")
    delivered.deliver(3)
    assert_equal(delivered)
    tubes.run(f"SELECT tube_table_attach('pods', 'item', {'2' if before != '1' else again})")
    tubes.run("TRUNCATE item", "INSERT INTO item VALUES (3, 'back', 3)")
    delivered.deliver(3)
    assert_equal(delivered)


def test_garbage_of_one_table_is_none_of_another_in_the_same_sink(delivered: Delivered) -> None:
    tubes = delivered.tubes
    tubes.run(
        "CREATE TABLE other (id bigint PRIMARY KEY, v text)",
        "SELECT tube_ensure_exists('pods')",
        "SELECT tube_table_attach('pods', 'item', 1)",
        "SELECT tube_table_attach('pods', 'other', 1)",
        "INSERT INTO item SELECT i, 'item' FROM generate_series(1, 10) i",
        "INSERT INTO other SELECT i, 'other' FROM generate_series(11, 20) i",
    )
    delivered.into(ENRICH.replace("item", "other"), label="public.other")
    delivered.deliver()
    tubes.run("TRUNCATE item")
    delivered.deliver()
    assert tubes.rows("SELECT v, count(*) FROM docs GROUP BY 1") == [("other", 10)]


@pytest.mark.parametrize("kind", ["char(10)", "bit(12)", "varchar(9)", "timestamptz", "bytea"])
def test_keys_of_types_that_have_a_length_or_print_by_settings(
    delivered: Delivered, kind: str
) -> None:
    tubes = delivered.tubes
    value = {"bit(12)": "i::bit(12)", "timestamptz": "to_timestamp(i)"}.get(kind)
    value = value or {"bytea": "decode(lpad(i::text, 8, '0'), 'hex')"}.get(kind, "'key ' || i")
    tubes.run(
        f"CREATE TABLE odd (k {kind} PRIMARY KEY, v int)",
        f"CREATE TABLE odd_docs (k {kind} PRIMARY KEY, v int)",
        f"ALTER DATABASE {tubes.name} SET timezone = 'Europe/Berlin'",
        "SELECT tube_ensure_exists('pods')",
        "SELECT tube_table_attach('pods', 'odd', 1)",
        f"INSERT INTO odd SELECT {value}, i FROM generate_series(1, 20) i",
    )
    delivered.into("SELECT k, v FROM odd WHERE k = ANY($1)", "odd_docs")
    for statement in ("SELECT 1", "DELETE FROM odd WHERE v < 5", "UPDATE odd SET v = -v"):
        tubes.run(statement)
        delivered.deliver()
        rows = "SELECT k, v FROM {} ORDER BY v"
        assert tubes.rows(rows.format("odd_docs")) == tubes.rows(rows.format("odd"))
    assert delivered.dead() == []


def test_touches_that_name_no_table_or_no_key_stop_nobody(delivered: Delivered) -> None:
    tubes = delivered.tubes
    tubes.run(
        "CREATE TABLE wide (a text, b int, v text, PRIMARY KEY (a, b))",
        "CREATE TABLE wide_docs (a text, b int, v text, PRIMARY KEY (a, b))",
        "SELECT tube_ensure_exists('pods')",
        "SELECT tube_table_attach('pods', 'item', 1)",
        "SELECT tube_table_attach('pods', 'wide', 1)",
        "INSERT INTO item VALUES (5, 'five', 1)",
        "INSERT INTO wide VALUES ('x', 1, 'one')",
        "SELECT pods_touch(1, ARRAY[5, 6], 'T')",
    )
    wide = "SELECT w.* FROM wide w JOIN unnest($1, $2) k (a, b) USING (a, b)"
    delivered.into(wide, "wide_docs", label="public.wide")
    delivered.deliver()
    assert delivered.dead() == []
    assert_equal(delivered)
    tubes.run("SELECT tube_touch('pods', 'wide', '{7,nothing,[],\"[\\\"x\\\"]\"}')")
    tubes.run("UPDATE wide SET v = 'two'")
    delivered.deliver()
    assert len(delivered.dead()) == 4
    assert tubes.rows("SELECT * FROM wide_docs") == [("x", 1, "two")]
    delivered.assert_empty()


def test_garbage_that_can_not_be_delivered_ends_as_a_dead_letter(delivered: Delivered) -> None:
    tubes = delivered.tubes
    tubes.run("SELECT tube_ensure_exists('pods')", "SELECT tube_table_attach('pods', 'item', 1)")
    tubes.run("INSERT INTO item SELECT i, 'v', 1 FROM generate_series(1, 10) i")
    delivered.deliver()
    # What the garbage looks at again is refused from now on.
    tubes.run("ALTER TABLE item DISABLE TRIGGER USER", "UPDATE item SET v = 'bad' WHERE id = 7")
    tubes.run("ALTER TABLE docs ADD CHECK (v <> 'bad')")
    tubes.run("DELETE FROM item WHERE id = 3")
    tubes.run("SELECT tube_table_attach('pods', 'item', 1)")
    tubes.run("SELECT tube._tube_control(t.id, 'T', 'truncate', nextval('tube_seq')::text)"
              " FROM tube._tube_tables t")  # fmt: skip
    delivered.deliver()
    assert [one.key for one in delivered.dead()] == ["7"]
    assert tubes.rows("SELECT count(*) FROM docs") == [9]
    delivered.assert_empty()


def test_an_empty_tube_is_empty_although_its_sink_was_away_for_a_moment(
    delivered: Delivered, monkeypatch: pytest.MonkeyPatch
) -> None:
    tubes = delivered.tubes
    tubes.run("SELECT tube_ensure_exists('pods')", "SELECT tube_table_attach('pods', 'item', 1)")
    tubes.run("TRUNCATE item")
    monkeypatch.setenv(failpoint.VARIABLE, "tube.before_list=error*1")
    delivered.deliver()
    assert_equal(delivered)


def test_a_sink_or_source_that_stays_away_ends_a_delivery_that_waits_for_an_empty_tube(
    delivered: Delivered,
) -> None:
    tubes = delivered.tubes
    tubes.run(ITEM.replace("item", "other"), "SELECT tube_ensure_exists('pods')")
    tubes.run(*(f"SELECT tube_table_attach('pods', '{one}', 1)" for one in ("other", "item")))
    tubes.run(*(f"INSERT INTO {one} VALUES (1, 'a')" for one in ("other", "item")))
    nowhere = f"postgresql://postgres@127.0.0.1:{free_port()}/none"
    delivered.into(ENRICH.replace("item", "other"), f"{nowhere}?table=docs", label="public.other")
    delivered.limits = replace(delivered.limits, away_seconds=0.3)
    with pytest.raises(SinkError, match=r"public.other could not be delivered for") as caught:
        run_delivery(delivered.delivery(), 1, DirectEngine(), stop=threading.Event())
    assert caught.value.exit_code == 8
    assert "still in the tube" in caught.value.hint
    assert tubes.rows("SELECT id FROM docs") == [1]
    assert tubes.rows("SELECT count(*) FROM pods") == [1]
    lost = replace(delivered.delivery(), source=Dsn.parse(nowhere))
    with pytest.raises(ConnectionLost):
        run_delivery(lost, 1, DirectEngine(), stop=threading.Event())


def test_a_dead_letter_of_a_child_stays_when_a_parent_of_that_number_is_collected(
    delivered: Delivered,
) -> None:
    tubes = delivered.tubes
    tubes.run("CREATE TABLE note (id bigint PRIMARY KEY, item bigint)")
    tubes.run("INSERT INTO item VALUES (1, 'a'), (2, 'b')", "SELECT tube_ensure_exists('pods')")
    tubes.run("SELECT tube_table_attach('pods', 'note', 1)")
    delivered.into(
        "SELECT id, (1 / (id - 2))::text AS v FROM item WHERE id = ANY($1)",
        fan_out="SELECT id, item FROM note WHERE id = ANY($1)",
    )
    tubes.run("INSERT INTO note VALUES (1, 2), (2, 1)")
    delivered.deliver()
    assert [one.key for one in delivered.dead()] == ["1"]
    tubes.run("SELECT tube._tube_control(t.id, 'T', 'truncate', nextval('tube_seq')::text)"
              " FROM tube._tube_tables t")  # fmt: skip
    assert delivered.deliver().collected == 1
    assert [one.key for one in delivered.dead()] == ["1"]


def test_children_that_are_deleted_or_moved_bring_their_parents_by_key_and_a_fan_out_says_it_cannot(
    delivered: Delivered, caplog: pytest.LogCaptureFixture
) -> None:
    tubes = delivered.tubes
    tubes.run("CREATE TABLE note (id bigint PRIMARY KEY, item bigint)")
    tubes.run("INSERT INTO item VALUES (1), (2), (3)", "SELECT tube_ensure_exists('pods')")
    tubes.run("SELECT tube_table_attach('pods', 'note', 1, key => '{item}')")
    count = "(SELECT count(*) FROM note WHERE item = item.id)::text AS v"
    enrich = f"SELECT id, {count} FROM item WHERE id = ANY($1)"
    delivered.into(enrich)
    tubes.run("INSERT INTO note VALUES (1, 1), (2, 2), (3, 3)")
    delivered.deliver()
    tubes.run("DELETE FROM note WHERE id = 1", "UPDATE note SET item = 3 WHERE id = 2")
    delivered.deliver()
    assert tubes.rows("SELECT v FROM docs ORDER BY id") == ["0", "0", "2"]
    tubes.run("SELECT tube_table_ensure_detached('pods', 'note')")
    tubes.run("SELECT tube_table_attach('pods', 'note', 1, key => '{id}')")
    delivered.into(enrich, fan_out="SELECT id, item FROM note WHERE id = ANY($1)")
    tubes.run("UPDATE note SET item = 1 WHERE id = 2")
    delivered.deliver()
    assert "no parent" not in caplog.text
    tubes.run("DELETE FROM note WHERE id = 3")
    delivered.deliver()
    assert "lead to no parent" in caplog.text


def test_large_documents_are_delivered_a_few_at_a_time(
    delivered: Delivered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is so many ids, and whatever they become has to fit into memory."""
    tubes = delivered.tubes
    sizes: list[int] = []
    write = PostgresTableSink.write_documents

    def note(sink: PostgresTableSink, batch: DocumentBatch) -> None:
        sizes.append(batch.body.nbytes)
        write(sink, batch)

    monkeypatch.setattr(PostgresTableSink, "write_documents", note)
    monkeypatch.setattr(writer, "_BATCH_BYTES", 100_000)
    tubes.run("SELECT tube_ensure_exists('pods')", "SELECT tube_table_attach('pods', 'item', 1)")
    tubes.run("INSERT INTO item SELECT i, repeat('x', 1000) FROM generate_series(1, 1000) i")
    delivered.deliver()
    assert_equal(delivered)
    assert max(sizes[1:]) <= 110_000
    assert len(sizes) < 12


def test_a_session_that_is_lost_while_an_enrichment_is_looked_at_is_no_mistake_of_the_enrichment(
    delivered: Delivered,
) -> None:
    tubes = delivered.tubes
    tubes.run("SELECT tube_ensure_exists('pods')", "SELECT tube_table_attach('pods', 'item', 1)")
    (table,) = find_tube(tubes.connection, "pods").tables
    with connect(Dsn.parse(tubes.uri), "test") as session:
        tubes.run(f"SELECT pg_terminate_backend({session.info.backend_pid}, 10000)")
        with pytest.raises(MillraceError) as caught:
            SqlEnrichment(session, ENRICH, table)
    assert is_transient(caught.value)


def test_a_scheduled_backfill_of_routed_rows_is_delivered_before_the_tube_is_empty(
    delivered: Delivered,
) -> None:
    tubes = delivered.tubes
    tubes.run("INSERT INTO item SELECT i, 'v', i FROM generate_series(1, 3000) i")
    tubes.run(
        "SELECT tube_ensure_exists('pods', 3)",
        "SELECT tube_table_attach('pods', 'item', 2, routing => 'region')",
        "SELECT tube_backfill_schedule('pods', 'id', 2, 2)",
    )
    delivered.deliver(3)
    assert_equal(delivered)


def test_a_backfill_that_waits_for_pods_of_another_partition_lets_all_workers_look_again(
    delivered: Delivered,
) -> None:
    """Its worker would wait for ever: the other one has found its partition empty, and ended."""
    tubes = delivered.tubes
    tubes.run("INSERT INTO item SELECT i, 'v', i FROM generate_series(1, 50) i")
    tubes.run(
        "SELECT tube_ensure_exists('pods', 2)",
        "SELECT tube_table_attach('pods', 'item', 1, routing => 'region')",
        "SELECT tube_backfill_schedule('pods', 'id', 1, 1)",
    )
    (backfill,) = tubes.rows("SELECT tube_backfill_begin('pods', 'item', 'id')")
    while tubes.rows(f"SELECT tube_backfill_page({backfill}, 1000)") != [True]:
        pass
    worker = Worker(WorkerTask(delivered.delivery(), 1, 2, lease_seconds=10))
    # Arrow keeps a pipe for signals if it reads in the main thread.
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(worker.run).result()
    assert outcome.is_empty
    assert outcome.has_spread
    assert tubes.rows("SELECT count(*) FROM pods WHERE payload->>'type' = 'backfill_schedule'") == [
        1
    ]
    delivered.deliver(2)
    assert_equal(delivered)


def broken_for_seven(keys: pa.RecordBatch) -> pa.Table:
    ids = [int(one) for one in keys["id"].to_pylist()]
    values = [{7: 1 // (7 - 7 * (one == 7))}.get(one, one) if one == 7 else one for one in ids]
    return pa.table({"id": pa.array(ids, pa.int64()), "v": pa.array(map(str, values), pa.string())})


def test_a_function_that_fails_for_one_id_leaves_the_others_alone(delivered: Delivered) -> None:
    tubes = delivered.tubes
    tubes.run("SELECT tube_ensure_exists('pods')", "SELECT tube_table_attach('pods', 'item', 1)")
    tubes.run("INSERT INTO item SELECT i, i::text, 1 FROM generate_series(1, 10) i")
    delivered.into(f"python:{__name__}:broken_for_seven")
    delivered.deliver()
    assert [one.key for one in delivered.dead()] == ["7"]
    assert "ZeroDivisionError" in delivered.dead()[0].error
    assert tubes.rows("SELECT count(*) FROM docs") == [9]


def test_a_backfill_has_its_turn_where_something_is_always_touched(delivered: Delivered) -> None:
    """Every document of row 1 touches it again, until the backfill has arrived."""
    tubes = delivered.tubes
    tubes.run("INSERT INTO item SELECT i, 'v', 1 FROM generate_series(1, 500) i")
    tubes.run(
        "SELECT tube_ensure_exists('pods')",
        "SELECT tube_table_attach('pods', 'item', 1)",
        "CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
        " IF NEW.id = 1 AND (SELECT count(*) FROM public.docs) < 500 THEN"
        " PERFORM tube.pods_touch(1, '{1}', 'T'); END IF; RETURN NEW; END$$",
        "CREATE TRIGGER again BEFORE INSERT OR UPDATE ON docs FOR EACH ROW"
        " EXECUTE FUNCTION again()",
        "SELECT tube_backfill_schedule('pods', 'id', 1, 1)",
        "SELECT pods_touch(1, '{1}', 'T')",
    )
    done = threading.Event()
    thread = threading.Thread(target=lambda: (delivered.deliver(), done.set()))
    thread.start()
    is_done = done.wait(60)
    tubes.run("DROP TRIGGER again ON docs")
    thread.join()
    assert is_done
    assert_equal(delivered)


def test_truncate_of_children_brings_their_parents(delivered: Delivered) -> None:
    tubes = delivered.tubes
    tubes.run(
        "CREATE TABLE note (tag uuid PRIMARY KEY DEFAULT gen_random_uuid(), item bigint)",
        "SELECT tube_ensure_exists('pods')",
        "SELECT tube_table_attach('pods', 'note', 1)",
        "INSERT INTO item SELECT i, 'v', 1 FROM generate_series(1, 5) i",
        "INSERT INTO note (item) SELECT i % 5 + 1 FROM generate_series(1, 20) i",
    )
    delivered.into(
        "SELECT id, (SELECT count(*) FROM note WHERE item = id)::text AS v FROM item"
        " WHERE id = ANY($1)",
        label="public.note",
        fan_out="SELECT tag, item FROM note WHERE tag = ANY($1)",
    )
    delivered.deliver()
    assert tubes.rows("SELECT v FROM docs") == ["4"] * 5
    tubes.run("TRUNCATE note")
    delivered.deliver()
    assert tubes.rows("SELECT v FROM docs") == ["0"] * 5
    delivered.assert_empty()


def test_a_table_that_changes_its_shard_is_delivered_by_one_worker(delivered: Delivered) -> None:
    """The first worker has an old pod in flight when new ones come to the other partition."""
    tubes = delivered.tubes
    tubes.run("SELECT tube_ensure_exists('pods', 2)", "SELECT tube_table_attach('pods', 'item', 0)")
    tubes.run(
        "CREATE VIEW slow AS SELECT id, v FROM item, (SELECT pg_advisory_xact_lock_shared(77)) g",
        "INSERT INTO item VALUES (1, 'old')",
    )
    delivered.into("SELECT id, v FROM slow WHERE id = ANY($1)")
    stop = threading.Event()
    delivery = delivered.delivery(until_empty=False)
    threads = [
        threading.Thread(target=Worker(WorkerTask(delivery, n, 2), should_stop=stop.is_set).run)
        for n in range(2)
    ]
    gate = tubes.connect()
    gate.execute("SELECT pg_advisory_lock(77)")
    try:
        for thread in threads:
            thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE objid = 77 AND NOT granted"
        wait_for(lambda: tubes.rows(waiting) == [1], "one is in flight")
        tubes.run("SELECT tube_table_attach('pods', 'item', 1)", "UPDATE item SET v = 'new'")
        # The other worker has looked at the pod, and left it, or forwarded one.
        refused = (
            "SELECT FROM pg_stat_activity WHERE state = 'idle' AND datname = current_database()"
            " AND query = 'SELECT pg_try_advisory_lock($1, $2)'"
        )
        wait_for(lambda: tubes.rows(refused) or tubes.rows(waiting) != [1], "the other has tried")
        assert tubes.rows(waiting) == [1]
        gate.execute("SELECT pg_advisory_unlock(77)")
        wait_for(lambda: not tubes.rows("SELECT * FROM tube.pods"), "all is delivered")
    finally:
        stop.set()
        gate.close()
        for thread in threads:
            thread.join()
    assert_equal(delivered)


def test_a_backfill_whose_pod_outlived_it_is_no_failure(delivered: Delivered) -> None:
    tubes = delivered.tubes
    tubes.run("INSERT INTO item SELECT i, 'v', 1 FROM generate_series(1, 10) i")
    tubes.run("SELECT tube_ensure_exists('pods')", "SELECT tube_table_attach('pods', 'item', 1)")
    tubes.run("SELECT tube_backfill_schedule('pods', 'id', 1, 1)")
    # As a worker leaves it that is killed when the last page is written.
    tubes.run("SELECT tube_backfill_begin('pods', 'item', 'id')")
    for _ in range(4):
        tubes.run("SELECT tube_backfill_page(1)")
    delivered.deliver()
    assert_equal(delivered)


def test_a_sink_that_is_gone_leaves_the_pods_and_the_others(delivered: Delivered) -> None:
    tubes = delivered.tubes
    tubes.run(
        "CREATE TABLE other (id bigint PRIMARY KEY, v text)",
        "CREATE TABLE other_docs (id bigint PRIMARY KEY, v text)",
        "SELECT tube_ensure_exists('pods')",
        "SELECT tube_table_attach('pods', 'item', 1)",
        "SELECT tube_table_attach('pods', 'other', 1)",
    )
    delivered.into(ENRICH.replace("item", "other"), "other_docs", label="public.other")
    stop = threading.Event()
    worker = Worker(
        WorkerTask(delivered.delivery(until_empty=False), 0, 1), should_stop=stop.is_set
    )
    tubes.run("DROP TABLE docs")
    # More pods than are looked at together.
    tubes.run("DO $$BEGIN FOR i IN 1..3000 LOOP INSERT INTO item VALUES (i, 'v'); END LOOP; END$$")
    tubes.run("INSERT INTO other VALUES (1, 'there')")
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_for(lambda: tubes.rows("SELECT * FROM other_docs"), "the other table goes on")
        tubes.run(DOCS)
        wait_for(lambda: tubes.rows("SELECT count(*) FROM docs") == [3000], "it is back")
        wait_for(lambda: not tubes.rows("SELECT * FROM tube.pods"), "the pods are gone")
    finally:
        stop.set()
        thread.join()
    assert delivered.dead() == []
    assert_equal(delivered)


def test_truncate_while_the_tube_is_repartitioned_reaches_every_partition(
    delivered: Delivered,
) -> None:
    tubes = delivered.tubes
    tubes.run("SELECT tube_ensure_exists('pods')")
    tubes.run("SELECT tube_table_attach('pods', 'item', 0, routing => 'region')")
    tubes.run("INSERT INTO item SELECT i, 'v', i FROM generate_series(1, 40) i")
    delivered.deliver()
    other = tubes.connect(autocommit=False)
    with other:
        other.execute("SELECT tube_ensure_exists('pods', 4)")
        thread = threading.Thread(target=lambda: tubes.run("TRUNCATE item"))
        thread.start()
        waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'TRUNCATE'"
        with psycopg.connect(tubes.uri, autocommit=True) as watch:
            wait_for(lambda: watch.execute(waits).fetchall(), "TRUNCATE waits")
        other.commit()
        thread.join()
    other.close()
    delivered.deliver(4)
    assert_equal(delivered)


def test_a_repartition_waits_for_writers_and_never_fails_one(delivered: Delivered) -> None:
    tubes = delivered.tubes
    tubes.run("SELECT tube_ensure_exists('pods')", "SELECT tube_table_attach('pods', 'item', 1)")
    writer = tubes.connect(autocommit=False)
    with writer:
        writer.execute("INSERT INTO item VALUES (1, 'v')")
        thread = threading.Thread(target=lambda: tubes.run("SELECT tube_ensure_exists('pods', 4)"))
        thread.start()
        waits = "SELECT FROM pg_stat_activity WHERE query ~ 'ensure_exists' AND state = 'active'"
        with psycopg.connect(tubes.uri, autocommit=True) as watch:
            wait_for(lambda: watch.execute(waits).fetchall(), "it waits")
        # Others write meanwhile, and the writer comes to the rest of the tube.
        with tubes.connect() as other:
            other.execute("SET statement_timeout = '60s'")
            other.execute("INSERT INTO item VALUES (2, 'v')")
        other.close()
        writer.execute("TRUNCATE item")
        writer.execute("INSERT INTO item VALUES (3, 'v')")
        writer.commit()
        thread.join()
    writer.close()
    assert tubes.rows("SELECT partitions FROM tube._tube_tubes") == [4]
    delivered.deliver(2)
    assert_equal(delivered)


class OneFails(DirectEngine):
    """The second worker's task can't be mended; the first one's ends when it is cancelled."""

    def __init__(self, error: MillraceError) -> None:
        super().__init__()
        self.error = error
        self.cancelled = threading.Event()

    def call(self, body: Any, argument: Any, description: str) -> Any:
        if description.endswith("worker 1"):
            raise self.error
        self.cancelled.wait()
        raise ServerError("cancelled")

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.mark.parametrize("error", [ConfigError("no way"), EngineLost("no way")])
def test_an_error_of_one_worker_ends_the_delivery_while_another_is_at_work(
    delivered: Delivered, error: MillraceError
) -> None:
    delivery, engine = delivered.delivery(until_empty=False), OneFails(error)
    with pytest.raises(type(error), match="no way"):
        run_delivery(delivery, 2, engine, stop=threading.Event())


def test_nothing_is_delivered_that_the_source_forgets_in_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
    with open_cluster(16, settings=settings) as cluster, open_tubes(cluster) as tubes:
        tubes.run(ITEM, "SELECT tube_ensure_exists('pods')")
        tubes.run("SELECT tube_table_attach('pods', 'item', 1)")
        delivered = Delivered(tubes)
        delivered.into(ENRICH, f"jsonl:{tmp_path / 'lines'}")
        crashes = iter((True,))

        def crash_once(place: str) -> None:
            if place == "tube.after_commit" and next(crashes, False):
                cluster.restart("immediate")

        monkeypatch.setattr(failpoint, "hit", crash_once)
        tubes.run("CHECKPOINT", "INSERT INTO item SELECT i FROM generate_series(1, 20) i")
        delivered.deliver()
        with closing(tubes.connect()) as source:
            rows = source.execute("SELECT id::text FROM item").fetchall()
        lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
        assert {one["id"] for one in lines} == {id_ for (id_,) in rows}
        assert next(crashes, False) is False
