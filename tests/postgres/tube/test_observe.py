"""Deliveries are seen while they run: metrics, probes, statistics, a line of progress."""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.fixtures.port import free_port
from tests.fixtures.tube.tube_source import TubeSource, fill
from tests.fixtures.wait import wait_for

from millrace.cli.tube import stats
from millrace.cli.tube.observe import observing
from millrace.tube.delivery import observe, traffic
from millrace.tube.delivery.metrics import TubeMetrics
from millrace.tube.delivery.observe import ShardState, TubeState
from millrace.tube.delivery.report import CHANNEL, LeaseReporter, WorkerCounts
from millrace.tube.delivery.traffic import Traffic
from millrace.tube.delivery.worker import Worker, WorkerTask

ATTACH = "SELECT tube_ensure_exists('t', 2)", "SELECT tube_table_attach('t', 'article', -3)"


@pytest.fixture
def source(source_db: str) -> Iterator[TubeSource]:
    found = TubeSource(source_db)
    with closing(found.connection):
        yield found


@contextmanager
def serving(source: TubeSource) -> Iterator[None]:
    """A worker that goes on."""
    stop = threading.Event()
    task = WorkerTask(source.delivery(until_empty=False), 0, 1)
    thread = threading.Thread(target=Worker(task, should_stop=stop.is_set).run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metrics_of(port: int) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("millrace_tube_"), *sorted(sample.labels.values())): sample.value
        for family in parse(fetch(port, "/metrics")[1])
        for sample in family.samples
    }


def test_a_running_delivery_is_measured_and_turns_red_when_a_shard_is_stuck(
    source: TubeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(observe, "_REST_FACTOR", 1)
    monkeypatch.setattr(traffic, "RATE_SECONDS", 3600.0)
    source.run(*ATTACH)
    port = free_port()
    asked: dict[str, Any] = {"metrics_port": port, "metrics_host": "127.0.0.1", "ready_lag": 60.0}
    with observing([source.delivery()], quiet=True, **asked):
        with serving(source):
            fill(source, 300)
            source.run("DELETE FROM article WHERE id <= 10")
            # Shard -3 of 2 partitions is in partition 1.
            delivered, deleted = ("ids_delivered_total", "1", "t"), ("documents_deleted_total",)
            wait_for(lambda: metrics_of(port).get(delivered, 0) >= 300)
            wait_for(lambda: metrics_of(port)[(*deleted, "1", "t")] >= 10)
            wait_for(lambda: metrics_of(port)["ids_waiting", "-3", "1", "t"] == 0)
            assert metrics_of(port)["ids_per_second", "1", "t"] > 0
            assert fetch(port, "/readyz") == (200, "ok\n")
        source.run("INSERT INTO article SELECT i, 'b', 1, 1 FROM generate_series(900, 906) i")
        wait_for(lambda: metrics_of(port)["ids_waiting", "-3", "1", "t"] == 7)
        assert fetch(port, "/readyz")[0] == 200
        source.run("UPDATE t SET ts = ts - interval '75 s'")
        wait_for(lambda: fetch(port, "/readyz")[0] == 503)
        assert "the oldest pod of shard -3 has waited for 7" in fetch(port, "/readyz")[1]
        assert fetch(port, "/healthz") == (200, "ok\n")
        assert metrics_of(port)["oldest_pod_age_seconds", "-3", "1", "t"] >= 75
        # A backfill that waits, however long, is not a shard that is stuck.
        source.run("UPDATE t SET op = 'B'")
        wait_for(lambda: fetch(port, "/readyz")[0] == 200)
        assert metrics_of(port)["backfill_ids_waiting", "-3", "1", "t"] == 7


def test_tubes_that_come_and_go_are_measured_from_then_on_in_whatever_schema_they_are(
    source: TubeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(observe, "_REST_FACTOR", 1)
    source.run(*ATTACH, "SELECT tube_ensure_exists('later')", "SELECT later_touch(4, '{1}', 'T')")
    first = replace(source.delivery(), schema="")
    later = replace(first, tube="later")
    port = free_port()
    asked: dict[str, Any] = {"metrics_port": port, "metrics_host": "127.0.0.1", "ready_lag": 60.0}
    with observing([first], quiet=True, **asked) as rearrange:
        wait_for(lambda: fetch(port, "/readyz")[0] == 200)
        rearrange([first, later])
        wait_for(lambda: metrics_of(port).get(("ids_waiting", "0", "4", "later")) == 1)
        assert ("dead_letters", "t") in metrics_of(port)
        rearrange([later])
        assert ("dead_letters", "t") not in metrics_of(port)
        assert fetch(port, "/readyz")[0] == 200


def test_a_tube_that_is_not_seen_is_not_ready() -> None:
    metrics = TubeMetrics(["t"], 60.0)
    assert metrics.problems() == ["tube t: not looked at yet"]
    assert list(metrics.collect()) == []
    metrics.update(TubeState("t", (ShardState(0, 1),), looked_at=-100.0))
    (said,) = metrics.problems()
    assert said.startswith("tube t: not looked at for ")


def test_counts_of_leases_add_up_and_a_late_listener_takes_the_first_as_its_zero() -> None:
    def told(lease: str, ids: int) -> str:
        return json.dumps(["tube", "t", lease, 0, 1, ids, *[0] * 5])

    payloads = [told("a", 5), told("a", 9), "not ours", "[1]", told("b", 2), told("a", 10)]
    early, late = Traffic(), Traffic(is_late=True)
    for payload in payloads:
        early.absorb(payload)
        late.absorb(payload)
    assert early.counts("tube", "t") == {0: WorkerCounts(pods=2, ids=12)}
    assert late.counts("tube", "t") == {0: WorkerCounts(pods=0, ids=5)}
    assert early.ids_per_second("tube", "t", 0) == 1.2
    assert early.counts("tube", "other") == {}


def test_stats_show_what_waits_in_each_shard_and_the_rates_of_workers(
    source: TubeSource, capsys: pytest.CaptureFixture[str]
) -> None:
    source.run(*ATTACH)
    fill(source, 20)
    source.run("UPDATE t SET ts = ts - interval '1 hour'", "SELECT t_touch(4, '{1,2}', 'B')")
    source.run("SET search_path = tube, public")
    stats.show_once(source.connection, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [
        (row["partition"], row["shard"], row["pods"], row["ids"], row["backfill_ids"])
        for row in found["shards"]
    ] == [(0, 4, 0, 0, 2), (1, -3, 1, 20, 0)]
    assert found["shards"][1]["lag_seconds"] >= 3600
    assert found["partitions"][1]["inc_lag_seconds"] >= 3600
    stats.show_once(source.connection, as_json=False)
    assert "1h 00m" in capsys.readouterr().out
    reporter, looks = LeaseReporter("tube", "t"), itertools.count(1)
    deadline = time.monotonic() + 60
    with psycopg.connect(source.uri, autocommit=True) as worker:

        def is_over() -> bool:
            reporter.note(1, WorkerCounts(ids=100 * next(looks)))
            reporter.send(worker, is_last=True)
            lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            rates = [one["ids_per_second"] for line in lines for one in line["rates"]]
            assert time.monotonic() < deadline
            return any(rate > 0 for rate in rates)

        stats.watch_stats(source.connection, "tube", 0.1, as_json=True, is_over=is_over)


def test_what_can_not_be_told_does_not_stop_a_worker(source: TubeSource) -> None:
    reporter = LeaseReporter("tube", "t")
    reporter.note(0, WorkerCounts(ids=1))
    with psycopg.connect(source.uri) as closed:
        pass
    reporter.send(closed)
    source.run(f"LISTEN {CHANNEL}")
    reporter.note(0, WorkerCounts(ids=2))
    reporter.send(source.connection)  # within a second of the last one
    reporter.send(source.connection, is_last=True)
    told = [one.payload for one in source.connection.notifies(timeout=30, stop_after=1)]
    assert [json.loads(one)[4:6] for one in told] == [[0, 2]]
