"""Pods leave a tube, enriched, in order, and only when they are delivered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.tube.tube_source import LIMITS, ROUTED, fill
from tests.fixtures.tube.tube_source import TubeSource as Source
from tests.fixtures.wait import wait_for

from millrace import failpoint
from millrace.errors import ConfigError, PreflightError, SinkError
from millrace.tube.delivery import worker
from millrace.tube.delivery.dead import read_dead, retry_dead
from millrace.tube.delivery.pod import PodReader, delete_pods
from millrace.tube.delivery.run import check_delivery, run_delivery
from millrace.tube.delivery.tube import find_tube
from millrace.tube.delivery.worker import Worker, WorkerTask


@pytest.fixture
def source(source_db: str) -> Iterator[Source]:
    found = Source(source_db)
    with closing(found.connection):
        yield found


def test_rows_that_were_touched_arrive_and_those_that_are_gone_go(source: Source) -> None:
    source.run("SELECT tube_ensure_exists('t')", "SELECT tube_table_attach('t', 'article', 1)")
    fill(source)
    assert source.deliver().ids == 1000
    source.assert_equal()
    source.run(
        "UPDATE article SET title = 'hidden' WHERE id < 10",
        "UPDATE article SET title = E'odd, \"one\"\\n\\\\.' WHERE id = 20",
        "UPDATE article SET title = '', stars = NULL WHERE id = 21",
        "DELETE FROM article WHERE id BETWEEN 30 AND 40",
        "UPDATE article SET id = -id WHERE id = 50",
    )
    counts = source.deliver()
    assert (counts.deleted, counts.dead) == (9 + 11 + 1, 0)
    source.assert_equal()


def test_a_backlog_is_read_in_pieces_by_its_index(source: Source) -> None:
    source.run("SELECT tube_ensure_exists('t', 2)", "SELECT tube_table_attach('t', 'article', 1)")
    source.run("SELECT t_touch(1, ARRAY(SELECT generate_series(1, 2000)), 'T', NULL, 1)")
    source.run("SELECT t_touch(1, '{7}', 'B')")
    tube = find_tube(source.connection, "t")
    first = PodReader(source.connection).fetch(tube, 1, 500)
    assert [pod.keys for pod in first] == [(str(n),) for n in range(1, 501)]
    rest = PodReader(source.connection).fetch(tube, 1, 5000, after=first[-1].seq)
    assert [pod.keys[0] for pod in rest] == [*map(str, range(501, 2001)), "7"]
    before = count_pods_read(source)
    PodReader(source.connection).fetch(tube, 1, 10, after=first[-1].seq)
    assert count_pods_read(source) - before <= 20


def count_pods_read(source: Source) -> int:
    """By this session, in the tube's slots, as the server counts them."""
    source.rows("SELECT pg_stat_force_next_flush()")
    ((read,),) = source.rows(
        "SELECT sum(coalesce(idx_tup_fetch, 0) + seq_tup_read)::int FROM pg_stat_user_tables"
        " WHERE relname LIKE 't~_'"
    )
    return int(read)


def test_a_touch_that_commits_late_is_delivered_from_within_a_backlog(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.run("SELECT tube_ensure_exists('t')", "SELECT tube_table_attach('t', 'article', 1)")
    with psycopg.connect(source.uri) as late:
        late.execute("INSERT INTO article VALUES (0, 'late', 1, 1)")
        for start in range(0, 400, 50):
            fill_one = (
                f"SELECT i, 'title ' || i, 1, 1 FROM generate_series({start + 1}, {start + 50}) i"
            )
            source.run(
                f"INSERT INTO article {fill_one}",
                "SELECT article_touch(ARRAY(SELECT id FROM article), chunk_size => 1)",
            )
        deleted = 0

        def delete(connection: Any, tube: Any, partition: int, seqs: list[int]) -> None:
            nonlocal deleted
            delete_pods(connection, tube, partition, seqs)
            deleted += 1
            if deleted == 2:
                late.commit()

        monkeypatch.setattr(worker, "delete_pods", delete)
        source.deliver(limits=replace(LIMITS, batch_ids=50))
    assert deleted > 10
    source.assert_equal()


def test_many_workers_serve_the_partitions_of_routed_rows(source: Source) -> None:
    source.run("SELECT tube_ensure_exists('t', 3)", ROUTED)
    fill(source, 5000)
    source.run(
        "UPDATE article SET region = region + 1 WHERE id % 3 = 0",
        "DELETE FROM article WHERE id % 10 = 1",
    )
    with pytest.raises(ConfigError, match="more than the 3 partitions"):
        source.deliver(workers=4)
    source.deliver(workers=3)
    source.assert_equal()


def test_keys_of_several_columns_and_of_any_type(source: Source) -> None:
    source.run(
        "CREATE TYPE mood AS ENUM ('ok', 'it''s, \"odd\"')",
        "CREATE TABLE felt (m mood, at uuid, v jsonb, PRIMARY KEY (m, at))",
        "CREATE TABLE felt_docs (a text, b uuid, v jsonb, PRIMARY KEY (a, b))",
        "SELECT tube_ensure_exists('t')",
        "SELECT tube_table_attach('t', 'felt', -4)",
        "INSERT INTO felt SELECT m, gen_random_uuid(), jsonb_build_object('n', i)"
        " FROM unnest(enum_range(NULL::mood)) m, generate_series(1, 50) i",
    )
    enrich = (
        "SELECT f.m::text AS a, f.at AS b, v FROM felt f"
        " JOIN unnest($1, $2) AS k (m, at) USING (m, at)"
    )
    sink = source.sink().replace("docs", "felt_docs")
    source.deliver(enrich=enrich, sink=sink)
    source.run("DELETE FROM felt WHERE (v->>'n')::int < 20 AND m <> 'ok'")
    source.deliver(enrich=enrich, sink=sink)
    assert source.rows("SELECT a, b, v FROM felt_docs ORDER BY 1, 2") == source.rows(
        "SELECT m::text, at, v FROM felt ORDER BY 1, 2"
    )


def test_a_backfill_brings_what_nobody_touched_and_collects_what_is_gone(source: Source) -> None:
    fill(source)
    source.run(
        "SELECT tube_ensure_exists('t', 2)",
        "SELECT tube_table_attach('t', 'article', 1)",
        "INSERT INTO article VALUES (2000, 'new', 1, 1), (2001, 'gone', 1, 1)",
    )
    source.deliver(workers=2)
    assert source.rows("SELECT count(*) FROM docs") == [(2,)]
    source.run("ALTER TABLE article DISABLE TRIGGER USER", "DELETE FROM article WHERE id = 2001")
    source.run("SELECT tube_backfill_schedule('t', 'id', -10, 10)")
    counts = source.deliver(workers=2)
    assert counts.collected == 1
    source.assert_equal()


def test_truncate_takes_the_way_of_garbage(source: Source) -> None:
    source.run("SELECT tube_ensure_exists('t', 2)", ROUTED)
    fill(source)
    source.deliver()
    source.run("TRUNCATE article", "INSERT INTO article VALUES (5, 'back', 1, 1)")
    source.deliver()
    source.assert_equal()
    assert source.rows("SELECT count(*) FROM docs") == [(1,)]


@pytest.mark.parametrize("place", ["tube.before_write", "tube.after_commit", "tube.before_delete"])
def test_a_worker_that_fails_anywhere_is_sent_again(
    source: Source, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.run("SELECT tube_ensure_exists('t')", "SELECT tube_table_attach('t', 'article', 1)")
    fill(source)
    monkeypatch.setenv(failpoint.VARIABLE, f"{place}=error*1")
    source.deliver()
    source.assert_equal()


def test_an_id_that_can_not_be_delivered_is_a_dead_letter_and_the_others_arrive(
    source: Source,
) -> None:
    source.run(
        "ALTER TABLE docs ADD CHECK (title <> 'title 77')",
        "SELECT tube_ensure_exists('t')",
        "SELECT tube_table_attach('t', 'article', 1)",
    )
    fill(source, 200)
    assert source.deliver().dead == 1
    tube = find_tube(source.connection, "t")
    (letter,) = read_dead(source.connection, tube)
    assert (letter.table, letter.key, letter.tries) == ("public.article", "77", 2)
    assert "docs_title_check" in letter.error
    source.assert_equal("id <> 77")
    source.run("ALTER TABLE docs DROP CONSTRAINT docs_title_check")
    source.run("UPDATE article SET stars = 9 WHERE id = 77")
    source.deliver()
    source.assert_equal()
    assert read_dead(source.connection, tube) == []
    source.run("ALTER TABLE docs ADD CHECK (title <> 'title 78') NOT VALID")
    source.run("UPDATE article SET stars = 9 WHERE id = 78")
    source.deliver()
    source.run("ALTER TABLE docs DROP CONSTRAINT docs_title_check")
    assert retry_dead(source.connection, tube, None) == 1
    source.deliver()
    source.assert_equal()


def test_a_second_driver_waits_for_the_first(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.run("SELECT tube_ensure_exists('t')", "SELECT tube_table_attach('t', 'article', 1)")
    stop = threading.Event()
    delivery = source.delivery(until_empty=False)
    first = Worker(WorkerTask(delivery, 0, 1), should_stop=stop.is_set)
    thread = threading.Thread(target=first.run)
    thread.start()
    try:
        fill(source, 10)
        wait_for(lambda: source.rows("SELECT count(*) FROM docs") == [(10,)])
        second = threading.Thread(target=lambda: source.deliver())
        second.start()
        wait_for(lambda: "is served by process" in caplog.text)
        assert second.is_alive()
    finally:
        stop.set()
        thread.join()
    second.join()
    source.assert_equal()


def test_another_number_of_partitions_and_another_table_are_picked_up(source: Source) -> None:
    source.run("SELECT tube_ensure_exists('t')", ROUTED)
    stop = threading.Event()
    worker = Worker(WorkerTask(source.delivery(until_empty=False), 0, 1), should_stop=stop.is_set)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        fill(source, 100)
        source.run("SELECT tube_ensure_exists('t', 4)")
        fill_more = "INSERT INTO article SELECT i, 'b', 1, i % 9 FROM generate_series(500, 900) i"
        source.run(fill_more)
        wait_for(lambda: source.pods() == 0)
    finally:
        stop.set()
        thread.join()
    source.assert_equal()


@pytest.mark.parametrize(
    ("enrich", "said"),
    [
        ("SELECT id FROM article", r"parameters none, expected \$1"),
        ("SELECT id FROM article WHERE id = ANY($1) AND id > $2", r"expected \$1"),
        ("SELECT id, nothing FROM article WHERE id = ANY($1)", "does not compile"),
        ("SELECT id, stars AS id FROM article WHERE id = ANY($1)", "two columns called id"),
        ("SELECT id, title FROM none WHERE id = ANY($1)", "does not compile"),
    ],
)
def test_an_enrichment_that_can_not_work_is_refused(source: Source, enrich: str, said: str) -> None:
    source.run("SELECT tube_ensure_exists('t')", "SELECT tube_table_attach('t', 'article', 1)")
    fill(source, 10)
    with pytest.raises(ConfigError, match=said):
        source.deliver(enrich=enrich)
    assert source.pods() == 1


@pytest.mark.parametrize(
    ("enrich", "said"),
    [
        ("SELECT id + 1 AS id, title, stars FROM article WHERE id = ANY($1)", "not asked for"),
        (
            "SELECT a.id, a.title, 1 AS stars FROM article a, article b WHERE a.id = ANY($1)",
            "twice",
        ),
    ],
)
def test_an_enrichment_that_returns_other_keys_is_a_dead_letter(
    source: Source, enrich: str, said: str
) -> None:
    source.run("SELECT tube_ensure_exists('t')", "SELECT tube_table_attach('t', 'article', 1)")
    fill(source, 3)
    assert source.deliver(enrich=enrich).dead == 3
    assert all(
        said in one.error for one in read_dead(source.connection, find_tube(source.connection, "t"))
    )


def test_touches_of_children_bring_their_parents(source: Source) -> None:
    source.run(
        "CREATE TABLE note (tag uuid PRIMARY KEY DEFAULT gen_random_uuid(), article bigint)",
        "SELECT tube_ensure_exists('t')",
        "SELECT tube_table_attach('t', 'note', 1)",
    )
    fill(source, 100)
    source.run("INSERT INTO note (article) SELECT i % 20 + 1 FROM generate_series(1, 200) i")
    delivery = source.delivery()
    fan_out = "SELECT tag, article FROM note WHERE tag = ANY($1)"
    tables = {"public.note": replace(delivery.tables[""], fan_out=fan_out)}
    delivery = check_delivery(replace(delivery, tables=tables), 1)
    counts = run_delivery(delivery, 1, DirectEngine(), stop=threading.Event())
    assert counts.ids == 20
    source.assert_equal("id <= 20")


def test_a_touch_that_names_no_table_reaches_every_table_of_the_tube(source: Source) -> None:
    source.run(
        "CREATE TABLE other (id bigint PRIMARY KEY)",
        "SELECT tube_ensure_exists('t')",
        "SELECT tube_table_attach('t', 'article', 1)",
        "SELECT tube_table_attach('t', 'other', 1)",
    )
    fill(source, 10)
    source.deliver()
    source.run("UPDATE docs SET title = 'wrong'", "SELECT t_touch(1, ARRAY[3, 4], 'T')")
    source.deliver()
    assert source.rows("SELECT id FROM docs WHERE title <> 'wrong'") == [(3,), (4,)]


def test_tubes_that_are_not_there_are_one_clear_error(source: Source) -> None:
    for wanted, said in (("t", "there is no tube t"),):
        with pytest.raises(ConfigError, match=said):
            find_tube(source.connection, wanted)
    with pytest.raises(PreflightError, match="not installed in schema other"):
        find_tube(source.connection, "t", "other")
    source.run("SELECT tube_ensure_exists('t')", "SELECT tube_table_attach('t', 'article', 1)")
    with pytest.raises(SinkError, match="no table"):
        source.deliver(sink=f"{source.uri}&table=nowhere")


def enrich_in_python(keys: pa.RecordBatch) -> pa.Table:
    ids = [int(one) for one in keys["id"].to_pylist()]
    kept = [one for one in ids if one % 2]
    titles = pa.array([f"python {one}" for one in kept], pa.string())
    columns = {"id": pa.array(kept, pa.int64()), "title": titles}
    return pa.table({**columns, "stars": pa.array([1] * len(kept), pa.int64())})


def test_a_function_may_enrich(source: Source, tmp_path: Path) -> None:
    source.run("SELECT tube_ensure_exists('t')", "SELECT tube_table_attach('t', 'article', 1)")
    fill(source, 10)
    source.deliver(enrich=f"python:{__name__}:enrich_in_python", sink=f"jsonl:{tmp_path / 'out'}")
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert {one["id"] for one in lines if one["deleted"]} == {"2", "4", "6", "8", "10"}
    assert {one["body"]["title"] for one in lines if not one["deleted"]} >= {"python 1"}
