"""The benchmark's arithmetic: medians, ratios, and the tables made of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from bench.report import (
    DID_NOT_RUN,
    HIGHER,
    RIGHT,
    WRONG,
    YARDSTICK,
    Comparison,
    Ratio,
    Run,
    assemble,
    median,
    medians,
    print_result,
    render_markdown,
    replace_part,
    write_json,
)
from rich.console import Console

WHOLE = Comparison("whole", "wall_seconds", ("A", "we"), ("A", "they"), 0.9)
FACTS = {
    "rounds": 3,
    "machine": {
        "cores": 2,
        "cpu": "a cpu",
        "memory_bytes": 8e9,
        "versions": {"python": "3.11", "they": "2.1"},
    },
    "data_sets": {"A": {"title": "a title", "heap_bytes": 3e9, "index_bytes": 1e9}},
}


def run(contestant: str, wall: float, number: int = 1, outcome: str = RIGHT) -> Run:
    return Run("A", contestant, number, outcome, figures={"wall_seconds": wall})


@pytest.fixture
def result() -> dict[str, Any]:
    refused = Run("A", "a | b", 1, DID_NOT_RUN, "not installed")
    runs = [run("we", 9.0), run("they", 12.0), refused, replace(refused, round=2)]
    return assemble("clone", runs, {"whole": WHOLE.ratio(runs)}, FACTS)


def test_median_is_taken_over_the_rounds() -> None:
    runs = [run("we", 9.0, 1), run("we", 30.0, 2), run("we", 10.0, 3), run("they", 1.0)]
    assert median(runs, "A", "we", "wall_seconds") == 10.0


def test_wrong_run_enters_no_median() -> None:
    runs = [run("we", 1.0, 1, WRONG), run("we", 9.0, 2)]
    assert median(runs, "A", "we", "wall_seconds") == 9.0


def test_contestant_without_a_right_run_is_listed_without_figures() -> None:
    assert medians([run("we", 1.0, 1, WRONG)]) == {"A": {"we": {}}}


def test_ratio_is_ours_over_theirs() -> None:
    ratio = WHOLE.ratio([run("we", 9.0), run("they", 12.0)])
    assert ratio == Ratio(0.75, 0.9, least=0.75, most=0.75, theirs="they")
    assert ratio.met


def test_ratio_is_the_median_of_the_rounds_with_its_spread() -> None:
    """A machine that is twice as slow in one round changes both sides of it, and no ratio."""
    ours = [run("we", 9.0, 1), run("we", 20.0, 2), run("we", 12.0, 3), run("we", 1.0, 4)]
    theirs = [run("they", 12.0, 1), run("they", 20.0, 2), run("they", 10.0, 3)]
    ratio = WHOLE.ratio([*ours, *theirs])
    assert ratio == Ratio(1.0, 0.9, least=0.75, most=1.2, theirs="they")


def test_yardstick_is_shown_and_decides_nothing() -> None:
    ours = replace(run("we", 18.0), figures={"wall_seconds": 18.0, YARDSTICK: 2.0})
    theirs = replace(run("they", 12.0), figures={"wall_seconds": 12.0, YARDSTICK: 1.0})
    assert WHOLE.ratio([ours, theirs]).value == 1.5
    assert medians([ours])["A"]["we"][YARDSTICK] == 2.0


@pytest.mark.parametrize("present", ["we", "they"])
def test_ratio_with_one_side_has_no_value_but_a_reason(present: str) -> None:
    ratio = WHOLE.ratio([run(present, 9.0)])
    assert ratio.value is None
    assert ratio.met is None
    assert ("they" if present == "we" else "we") in ratio.reason


def test_ratio_above_its_goal_is_not_met() -> None:
    assert Ratio(1.0, 0.9).met is False
    assert Ratio(1.0).met is None


def test_rate_below_its_goal_is_not_met() -> None:
    faster = replace(WHOLE, goal=1.3, better=HIGHER)
    assert faster.ratio([run("we", 13.0), run("they", 10.0)]).met is True
    assert faster.ratio([run("we", 12.0), run("they", 10.0)]).met is False
    assert faster.ratio([]).better == HIGHER


def test_goals_of_both_directions_show_theirs(result: dict[str, Any]) -> None:
    result["ratios"]["rate"] = asdict(Ratio(1.5, 1.3, HIGHER))
    lines = render_markdown(result).splitlines()
    assert "### Ratios" in lines
    assert "| whole | 0.75 | 0.75 to 0.75 | they 2.1 | ≤ 0.9 | yes |" in lines
    assert "| rate | 1.50 |  |  | ≥ 1.3 | yes |" in lines


def test_rates_and_lags_are_shown_in_their_own_precision() -> None:
    figures = {"rows_per_second": 123456.7, "lag_p50_seconds": 0.123}
    sets = {"A": {"title": "a title", "changed_rows": 2000, "wal_bytes": 1.5e9}}
    runs = [Run("A", "we", 1, RIGHT, figures=figures)]
    lines = render_markdown(assemble("follow", runs, {}, FACTS | {"data_sets": sets})).splitlines()
    assert "| we | 123,457 | 0.12 |" in lines
    assert "A: a title, 2,000 rows changed, 1.50 GB of WAL." in lines[2]


def test_result_file_has_runs_ratios_and_facts(result: dict[str, Any], tmp_path: Any) -> None:
    file = tmp_path / "results" / "clone.json"
    write_json(result, file)
    read = json.loads(file.read_text())
    assert read["ratios"]["whole"] == {
        "value": 0.75,
        "goal": 0.9,
        "better": "lower",
        "reason": "",
        "least": 0.75,
        "most": 0.75,
        "theirs": "they",
    }
    assert [r["contestant"] for r in read["runs"]] == ["we", "they", "a | b", "a | b"]
    assert read["machine"]["cores"] == 2


def test_markdown_has_each_contestant_each_ratio_and_each_failure(result: dict[str, Any]) -> None:
    lines = render_markdown(result).splitlines()
    assert "| contestant | wall s |" in lines
    assert "| we | 9.0 |" in lines
    assert r"| a \| b |  |" in lines
    assert "| whole | 0.75 | 0.75 to 0.75 | they 2.1 | 0.9 | yes |" in lines
    assert lines[-1] == "- a | b on A: did not run: not installed (round 1, 2)"


def test_figures_of_a_busy_machine_say_so(result: dict[str, Any]) -> None:
    assert "other programs" not in render_markdown(result)
    result["disturbed_runs"] = 3
    result["machine"] = result["machine"] | {"load_average": 8.0}
    assert "In 3 of 4 runs other programs took" in render_markdown(result)


def test_printed_tables_name_what_did_not_run(result: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=140)
    print_result(result, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.75" in printed
    assert "did not run: not installed" in printed


def test_a_part_that_is_measured_again_replaces_its_data_sets_and_keeps_the_others() -> None:
    facts = {"rounds": 1}
    old = [Run("A", "us", 1, RIGHT, figures={"wall_seconds": 9.0})]
    kept = [Run("B", "us", 1, RIGHT, figures={"wall_seconds": 2.0})]
    new = [Run("A", "us", 1, RIGHT, figures={"wall_seconds": 3.0})]

    def ratios(runs: Sequence[Run]) -> dict[str, Ratio]:
        return {"r": Comparison("r", "wall_seconds", ("A", "us"), ("B", "us")).ratio(runs)}

    whole = assemble("x", [*old, *kept], ratios([*old, *kept]), facts)
    part = assemble("x", new, ratios(new), facts)
    found = replace_part(whole, part, ratios)
    assert found["ratios"]["r"]["value"] == 1.5
    assert [run["data_set"] for run in found["runs"]] == ["B", "A"]
