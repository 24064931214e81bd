"""What `bench follow` compares, how it times a stream, and how it reckons with lag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import changes
from bench import followers as who
from bench.changes import BULK, OLTP, parse_tps, scaled_rows, transaction_ranges
from bench.follow import COMPARISONS, FIELD, LAGS, disturbed, rate, ratios, seconds_of
from bench.lag import Pace, Steady, lags_of, percentile
from bench.report import HIGHER, RIGHT, WRONG, Run
from bench.watch import Seen

COURSE = who.Course(Path("/bin"), "source", "target", "0/16B3748", 1, 60.0, Path("/work"))


def run(load: str, contestant: str, outcome: str = RIGHT, **figures: Any) -> Run:
    return Run(load, contestant, 1, outcome, figures={"peak_beside_jvm_bytes": 3e8} | figures)


def test_every_side_of_a_comparison_takes_part() -> None:
    taking_part = {(load.name, c.name) for load, field in FIELD for c in field}
    for comparison in COMPARISONS:
        assert {comparison.ours, comparison.theirs} <= taking_part


def test_higher_rate_is_the_better_one() -> None:
    runs = [
        run("updates", "subscription", rows_per_second=50_000.0),
        run("updates", "millrace", rows_per_second=70_000.0),
        run("updates", "millrace apply alone", rows_per_second=80_000.0),
    ]
    found = ratios(runs)
    assert found["updates_from_slot_vs_subscription"].value == 1.4
    assert found["updates_from_slot_vs_subscription"].better == HIGHER
    assert found["updates_from_slot_vs_subscription"].met is True
    assert found["updates_apply_alone_vs_subscription"].met is False
    assert found["bulk_from_slot_vs_subscription"].met is None


def test_lag_is_that_of_millrace_and_lower_is_better() -> None:
    figures = {"load_share": 1.0, "lag_p50_seconds": 0.4, "lag_p99_seconds": 3.5}
    found = ratios([run("lag oltp", "millrace", **figures)])
    assert found["lag_oltp_p50_seconds"].met is True
    assert found["lag_oltp_p99_seconds"].met is False
    assert found["lag_bulk_p50_seconds"].value is None


def test_memory_is_the_highest_of_all_our_right_runs() -> None:
    found = ratios(
        [
            run("one", "millrace", peak_beside_jvm_bytes=8e8),
            run("bulk", "millrace apply alone", peak_beside_jvm_bytes=9e8),
            run("bulk", "millrace", WRONG, peak_beside_jvm_bytes=2e9),
            run("one", "subscription", peak_beside_jvm_bytes=3e9),
        ]
    )
    assert found["peak_beside_jvm_gb"].value == 0.9


def test_without_runs_every_ratio_says_why_it_has_no_value() -> None:
    assert all(ratio.value is None and ratio.reason for ratio in ratios([]).values())


def test_rate_needs_rows_and_seconds() -> None:
    assert rate(1000, 2.0) == {"timed_seconds": 2.0, "rows_per_second": 500.0}
    assert rate(0, 2.0) == {}
    assert rate(1000, None) == {}


def test_stream_is_timed_from_the_taking_of_its_slot() -> None:
    seen = Seen(started_at=10.0)
    for now, is_taken, is_visible in ((11.0, False, False), (14.0, True, False),
                                      (20.0, True, True), (21.0, False, False)):  # fmt: skip
        seen.note(now, is_taken=is_taken, is_visible=is_visible)
    assert seconds_of(seen.windows(25.0)) == {
        "whole_seconds": 10.0,
        "catch_up_seconds": 6.0,
        "receive_seconds": 11.0,
    }


def test_slot_that_is_taken_again_was_taken_before() -> None:
    seen = Seen(started_at=0.0)
    for now, is_taken in ((1.0, True), (2.0, False), (3.0, True), (5.0, False)):
        seen.note(now, is_taken=is_taken, is_visible=False)
    assert seconds_of(seen.windows(6.0)) == {"receive_seconds": 5.0}


def test_what_was_not_seen_has_no_figure() -> None:
    assert Seen(started_at=1.0).windows(2.0) == {}


def test_lag_of_a_beat_ends_with_the_first_look_that_has_it() -> None:
    committed_at = {1: 1.0, 2: 1.5, 3: 2.0}
    looks = [(1.25, 0), (1.75, 2), (2.5, 2), (3.0, 3)]
    assert lags_of(committed_at, looks) == [0.75, 0.25, 1.0]


def test_beat_that_was_never_seen_has_no_lag() -> None:
    assert lags_of({1: 1.0, 2: 2.0}, [(3.0, 1)]) == [2.0]


def test_beat_seen_before_its_reply_has_no_negative_lag() -> None:
    assert lags_of({1: 2.0}, [(1.75, 1)]) == [0.0]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentile_is_one_of_the_values(share: float, value: int) -> None:
    assert percentile(range(100, 0, -1), share) == value


def test_percentiles_of_few_values_are_among_them() -> None:
    assert percentile([3.0], 0.5) == percentile([3.0], 0.99) == 3.0
    assert percentile([1.0, 2.0, 9.0], 0.99) == 9.0


def test_load_is_told_in_rows() -> None:
    figures = Steady(Pace(changes.LAG_OLTP, 2_000.0, 1.0), 450.0, [0.25, 0.5]).figures()
    assert figures["asked_tps"] == 500.0
    assert figures["load_rows_per_second"] == 1800.0
    assert figures["lag_max_seconds"] == 0.5


def test_bulk_load_has_a_thousand_rows_in_each_transaction() -> None:
    assert Pace(changes.LAG_BULK, 40_000.0, 1.0).tps == 40.0


def test_lag_under_a_smaller_load_meets_no_goal() -> None:
    figures = Steady(Pace(changes.LAG_BULK, 1e6, 1.0), 600.0, [0.25]).figures()
    found = ratios([run("lag bulk", "millrace", **figures)])
    assert found["lag_bulk_load_share"].value == 0.6
    assert found["lag_bulk_load_share"].met is False
    assert found["lag_bulk_p50_seconds"].value == 0.25
    assert found["lag_bulk_p50_seconds"].met is None


def test_runs_on_a_busy_machine_are_counted() -> None:
    busy = run("bulk", "millrace", other_cpu_share=0.4)
    quiet = run("bulk", "millrace", other_cpu_share=0.02)
    assert disturbed([busy, quiet, busy]) == 2
    assert disturbed([run("lag oltp", "millrace", other_cpu_share=0.4)]) == 0


def test_loads_are_whole_transactions() -> None:
    assert scaled_rows(BULK, 0.3) == 600_000
    assert scaled_rows(BULK, 1e-9) == 1_000
    assert list(transaction_ranges(2_000)) == [(1, 1_000), (1_001, 2_000)]


def test_rate_of_pgbench_is_read() -> None:
    said = "latency average = 1 ms\ntps = 1234.567890 (without initial connection time)\n"
    assert parse_tps(said) == 1234.56789
    with pytest.raises(ValueError, match="no tps"):
        parse_tps("pgbench: error: connection failed")


def test_both_receivers_ask_the_server_for_the_same() -> None:
    command = who.PG_RECVLOGICAL.command(COURSE)
    assert "binary=true" in command
    assert "publication_names=millrace,millrace_insert_only" in command
    assert who.PG_RECVLOGICAL.is_receiver
    assert who.MILLRACE_RECEIVE.is_receiver


def test_all_commands_end_at_the_same_position() -> None:
    for contestant in (who.MILLRACE, who.MILLRACE_COLD, who.MILLRACE_RECEIVE, who.PG_RECVLOGICAL):
        assert COURSE.endpos in contestant.command(COURSE)


def test_own_figures_of_a_contestant_that_wrote_none_are_empty(tmp_path: Path) -> None:
    assert who.own_figures(tmp_path) == {}


def test_loads_have_names_of_their_own() -> None:
    names = [load.name for load, _ in FIELD] + [load.name for load in LAGS]
    assert len(set(names)) == len(names)
    assert OLTP.name in names
