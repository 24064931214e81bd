"""What `bench tube` compares, and what it holds against its goals."""

from __future__ import annotations

from typing import Any

from bench import tube
from bench.report import HIGHER, RIGHT, WRONG, Run, assemble, render_markdown
from bench.tube_drain import HELD, LAG, deliver_set, worker_name
from bench.tube_writes import ATTACHED, PLAIN, SYNCS, TABLES, WRITES, comparisons


def run(data_set: str, contestant: str, outcome: str = RIGHT, **figures: Any) -> Run:
    return Run(data_set, contestant, 1, outcome, figures=figures)


def test_every_side_of_a_comparison_takes_part() -> None:
    taking_part = {
        (write.data_set(sync), one) for write in WRITES for sync in SYNCS for one in TABLES
    }
    for comparison in comparisons():
        assert {comparison.ours, comparison.theirs} <= taking_part


def test_goals_are_for_commits_that_wait_for_the_disk() -> None:
    runs = [
        run(write.data_set(sync), contestant, rows_per_second=rate)
        for write in WRITES
        for sync in SYNCS
        for contestant, rate in ((PLAIN, 100.0), (ATTACHED, 85.0))
    ]
    found = tube.ratios(runs)
    assert found["insert_1_sync_on_tube_vs_none"].met is True
    assert found["insert_1000_sync_on_tube_vs_none"].met is False
    assert found["insert_1_sync_off_tube_vs_none"].met is None
    assert found["insert_1_sync_on_tube_vs_pgq"].value is None


def test_drain_lag_and_held_snapshot_are_held_against_their_goals() -> None:
    runs = [
        run(deliver_set(250), worker_name(1), ids_per_second=40_000.0),
        run(deliver_set(250), worker_name(2), ids_per_second=60_000.0),
        run(deliver_set(250), worker_name(4), WRONG, ids_per_second=90_000.0),
        run(LAG, worker_name(1), delivery_p50_ms=51.0, delivery_p99_ms=900.0),
        run(HELD, tube.BEFORE, ids_per_second=100.0, dead_rows=0.0),
        run(HELD, tube.DURING, ids_per_second=95.0, dead_rows=1_000.0),
    ]
    found = tube.ratios(runs)
    assert found["ids_per_second_pods_of_250"].value == 60_000.0
    assert found["ids_per_second_pods_of_250"].better == HIGHER
    met = {name: ratio.met for name, ratio in found.items() if ratio.met is not None}
    assert met == {
        "ids_per_second_pods_of_250": True,
        "delivery_p50_ms": False,
        "delivery_p99_ms": True,
        "held_snapshot_drain_vs_before": True,
        "held_snapshot_dead_rows": True,
    }
    titles = {
        name: {"title": title, "changed_rows": 0} for name, title in tube.titles(9, 1).items()
    }
    machine = {"cores": 2, "cpu": "", "memory_bytes": 0, "versions": {"postgres": "15"}}
    facts = {"rounds": 1, "machine": machine, "data_sets": titles}
    assert "60,000" in render_markdown(assemble("tube", runs, found, facts))
