"""Figures of `bench consolidate`."""

from __future__ import annotations

import pytest
from bench.consolidate import CATCH_UP, IDLE, MILLRACE, NATIVE, PACES, _lags_of, ratios
from bench.report import RIGHT, WRONG, Run


def test_the_lag_of_a_beat_ends_when_its_source_shows_it() -> None:
    looks = [(1.0, [0, 9]), (2.0, [1, 9]), (3.0, [3, 9])]
    assert _lags_of({1: 0.5, 3: 2.9, 2: 0.7}, looks, 0) == pytest.approx([1.5, 2.3, 0.1])
    assert _lags_of({9: 1.5}, looks, 1) == [0.0]


def test_goals_are_judged_by_right_runs() -> None:
    runs = [
        Run(CATCH_UP, MILLRACE, 1, RIGHT, "", {"rows_per_second": 150.0}),
        Run(CATCH_UP, MILLRACE, 2, WRONG, "", {"rows_per_second": 900.0}),
        Run(CATCH_UP, NATIVE, 1, RIGHT, "", {"rows_per_second": 100.0}),
        Run(CATCH_UP, NATIVE, 2, RIGHT, "", {"rows_per_second": 100.0}),
        *(Run(f"{p} rows/s", MILLRACE, 1, RIGHT, "", {"lag_p99_seconds": 6.0}) for p in PACES),
        Run(IDLE, MILLRACE, 1, RIGHT, "", {"idle_cpu_share": 0.09, "idle_mb_per_source": 41.0}),
    ]
    found = ratios(runs)
    assert found["consolidate_vs_ten_subscriptions"].met
    assert found["consolidate_vs_ten_subscriptions"].value == 1.5
    assert found["lag_p99_seconds_at_100"].met is False
    assert found["idle_cpu_share"].met
    assert found["idle_mb_per_source"].met is False
