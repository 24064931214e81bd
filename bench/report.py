"""The result of a benchmark: runs, medians, ratios; as JSON, as a table, as markdown.

Invariant: only runs whose copy was found right enter a median. A ratio with a side that has no
right run in a common round has no value and says why.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RIGHT, WRONG, DID_NOT_RUN = "right", "wrong", "did not run"
LOWER, HIGHER = "lower", "higher"
# The figure that says how fast the machine was during the run; nothing is decided on it.
YARDSTICK = "yardstick_ms"


@dataclass(frozen=True)
class Run:
    """One contestant in one round; `figures` are seconds and bytes by name."""

    data_set: str
    contestant: str
    round: int
    outcome: str
    reason: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ratio:
    """One measured against another; without a goal it is there for comparison.

    `value` is the median over the rounds, as measured; `least` and `most` are its spread.
    """

    value: float | None
    goal: float | None = None
    better: str = LOWER
    reason: str = ""
    least: float | None = None
    most: float | None = None
    # Who it was measured against.
    theirs: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None or self.goal is None:
            return None
        if self.better == HIGHER:
            return self.value >= self.goal
        return self.value <= self.goal


@dataclass(frozen=True)
class Comparison:
    """What makes a ratio: `figure` of `ours` over `figure` of `theirs`, round by round.

    Contestants take turns, so those of one round met the machine in about the same state.
    """

    name: str
    figure: str
    ours: tuple[str, str]
    theirs: tuple[str, str]
    goal: float | None = None
    better: str = LOWER

    def ratio(self, runs: Sequence[Run]) -> Ratio:
        ours, theirs = (_by_round(runs, *side, self.figure) for side in (self.ours, self.theirs))
        found = [ours[number] / theirs[number] for number in ours if theirs.get(number)]
        if not found:
            missing = self.theirs if ours else self.ours
            reason = f"no {self.figure} of {missing[1]} on {missing[0]}"
            return Ratio(None, self.goal, self.better, reason)
        return Ratio(
            statistics.median(found),
            self.goal,
            self.better,
            least=min(found),
            most=max(found),
            theirs=self.theirs[1],
        )


# Figures in the tables, with their headings; the JSON has all of them.
COLUMNS = {
    "rows_per_second": "rows/s",
    "ids_per_second": "ids/s",
    "pods_per_second": "pods/s",
    "events_per_second": "events/s",
    "cpu_us_per_row": "CPU µs a row",
    "delivery_p50_ms": "p50 ms",
    "delivery_p99_ms": "p99 ms",
    "dead_rows": "dead rows",
    "slots": "slots",
    "timed_seconds": "timed s",
    "whole_seconds": "with start s",
    "load_rows_per_second": "load rows/s",
    "lag_p50_seconds": "lag p50 s",
    "lag_p99_seconds": "lag p99 s",
    "idle_cpu_share": "share of a core",
    "idle_mb_per_source": "MB a source",
    "start_ms": "start ms",
    "cpu_ms": "CPU ms",
    "wall_seconds": "wall s",
    "wall_without_spark_seconds": "without Spark's start s",
    "copy_seconds": "copy s",
    "copy_cpu_seconds": "copy CPU s",
    "client_cpu_seconds": "client CPU s",
    "run_cpu_seconds": "without start CPU s",
    "source_cpu_seconds": "source CPU s",
    "target_cpu_seconds": "target CPU s",
    "other_cpu_seconds": "other CPU s",
    YARDSTICK: "yardstick ms",
    "peak_memory_bytes": "peak MB",
    "peak_beside_jvm_bytes": "beside the JVM MB",
}


def median(runs: Iterable[Run], data_set: str, contestant: str, figure: str) -> float | None:
    values = _by_round(runs, data_set, contestant, figure).values()
    return statistics.median(values) if values else None


def _by_round(runs: Iterable[Run], data_set: str, contestant: str, figure: str) -> dict[int, float]:
    """The figure of each round whose copy was right."""
    return {
        run.round: run.figures[figure]
        for run in runs
        if (run.data_set, run.contestant, run.outcome) == (data_set, contestant, RIGHT)
        and figure in run.figures
    }


def medians(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """Data set, contestant, figure: the contestants in order of their first run."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for run in runs:
        of_set = result.setdefault(run.data_set, {})
        if run.contestant not in of_set:
            found = {c: median(runs, run.data_set, run.contestant, c) for c in COLUMNS}
            of_set[run.contestant] = {c: v for c, v in found.items() if v is not None}
    return result


def assemble(
    name: str, runs: Sequence[Run], ratios: Mapping[str, Ratio], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of a result file; all benchmarks write the same shape."""
    return {
        "bench": name,
        **facts,
        "ratios": {key: asdict(ratio) for key, ratio in ratios.items()},
        "medians": medians(runs),
        "runs": [asdict(run) for run in runs],
    }


def replace_part(
    whole: Mapping[str, Any],
    part: Mapping[str, Any],
    ratios: Callable[[Sequence[Run]], Mapping[str, Ratio]],
) -> dict[str, Any]:
    """An earlier result whose data sets that were measured again are replaced."""
    measured = {run["data_set"] for run in part["runs"]}
    kept = [run for run in whole["runs"] if run["data_set"] not in measured]
    runs = [Run(**fields) for fields in (*kept, *part["runs"])]
    return assemble(part["bench"], runs, ratios(runs), part)


def write_json(result: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def last_words(log: Path) -> str:
    """The last words of a contestant, on one line."""
    return " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])


def first_of(wrong: Sequence[str], shown: int = 3) -> str:
    """What is wrong with a copy, for its run's reason."""
    more = [f"and {len(wrong) - shown} more"] if len(wrong) > shown else []
    return "; ".join([*wrong[:shown], *more])


def say(line: str) -> None:
    """To those who watch a benchmark run."""
    print(line.rstrip(), file=sys.stderr, flush=True)


def print_result(result: Mapping[str, Any], console: Console) -> None:
    for title, heading, rows in _tables(result):
        table = Table(title=title, title_justify="left")
        for number, text in enumerate(heading):
            table.add_column(text, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in _failures(result):
        console.print(line, style="red", markup=False, highlight=False)


def render_markdown(result: Mapping[str, Any]) -> str:
    """The section of docs/benchmarks.md for this result."""
    lines = [f"## {result['bench']}", "", _setting(result), ""]
    for title, heading, rows in _tables(result):
        lines += [f"### {title}", "", _markdown_row(heading)]
        lines.append(_markdown_row(["---", *["---:"] * (len(heading) - 1)]))
        lines += [_markdown_row(row) for row in rows]
        lines.append("")
    lines += [f"- {line}" for line in _failures(result)]
    return "\n".join(lines).rstrip() + "\n"


def _tables(result: Mapping[str, Any]) -> Iterable[tuple[str, list[str], list[list[str]]]]:
    for data_set, contestants in result["medians"].items():
        columns = [c for c in COLUMNS if any(c in figures for figures in contestants.values())]
        rows = [
            [name, *(_cell(column, figures.get(column)) for column in columns)]
            for name, figures in contestants.items()
        ]
        title = f"{data_set}: {result['data_sets'][data_set]['title']}"
        yield title, ["contestant", *(COLUMNS[column] for column in columns)], rows
    ratios = {name: Ratio(**fields) for name, fields in result["ratios"].items()}
    is_mixed = any(ratio.better == HIGHER for ratio in ratios.values())
    versions = result["machine"]["versions"]
    rows = [_ratio_row(name, ratio, versions, is_mixed=is_mixed) for name, ratio in ratios.items()]
    title = "Ratios" if is_mixed else "Ratios, lower is better"
    yield title, ["ratio", "median", "least to most", "against", "goal", "met"], rows


def _ratio_row(
    name: str, ratio: Ratio, versions: Mapping[str, str | None], *, is_mixed: bool
) -> list[str]:
    value = "" if ratio.value is None else f"{ratio.value:.2f}"
    spread = "" if ratio.least is None else f"{ratio.least:.2f} to {ratio.most:.2f}"
    goal = "" if ratio.goal is None else f"{ratio.goal:g}"
    if goal and is_mixed:
        goal = f"{'≥' if ratio.better == HIGHER else '≤'} {goal}"
    against = _with_version(ratio.theirs, versions)
    return [name, value, spread, against, goal, {True: "yes", False: "no", None: ""}[ratio.met]]


def _with_version(contestant: str, versions: Mapping[str, str | None]) -> str:
    """A peer without a version of its own is the server's."""
    if not contestant or contestant.startswith("millrace"):
        return contestant
    own = next((v for name, v in versions.items() if v and contestant.startswith(name)), None)
    server = versions.get("postgres")
    return f"{contestant} {own}" if own else f"{contestant} (PostgreSQL {server})"


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column.endswith("_bytes"):
        return f"{value / 1e6:.0f}"
    if column.endswith("_per_second"):
        return f"{value:,.0f}"
    return f"{value:.2f}" if column.startswith(("lag_", YARDSTICK)) else f"{value:.1f}"


def _failures(result: Mapping[str, Any]) -> list[str]:
    """One line for each kind of failure, with the rounds in which it happened."""
    rounds: dict[tuple[str, ...], list[str]] = {}
    for run in result["runs"]:
        if run["outcome"] != RIGHT:
            key = run["data_set"], run["contestant"], run["outcome"], run["reason"]
            rounds.setdefault(key, []).append(str(run["round"]))
    return [
        f"{contestant} on {data_set}: {outcome}: {reason} (round {', '.join(numbers)})"
        for (data_set, contestant, outcome, reason), numbers in rounds.items()
    ]


def _setting(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    sizes = "; ".join(
        f"{name}: {facts['title']}{_size(facts)}" for name, facts in result["data_sets"].items()
    )
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_bytes'] / 1e9:.0f} GB of "
        f"memory; {versions}. Median of {result['rounds']} "
        f"{'round' if result['rounds'] == 1 else 'rounds'}. {sizes}.{_disturbance(result)}"
    )


def _disturbance(result: Mapping[str, Any]) -> str:
    """So that nobody trusts figures from a machine that did other things as well."""
    runs = result.get("disturbed_runs")
    if not runs:
        return ""
    return (
        f" **In {runs} of {len(result['runs'])} runs other programs took more than a tenth of the "
        f"machine (load average at the start: {result['machine']['load_average']:.1f}).**"
    )


def _size(facts: Mapping[str, Any]) -> str:
    if "changed_rows" not in facts:
        return (
            f", {facts['heap_bytes'] / 1e9:.2f} GB of rows and "
            f"{facts['index_bytes'] / 1e9:.2f} GB of indexes"
        )
    if not facts["changed_rows"]:
        return ""
    return f", {facts['changed_rows']:,} rows changed, {facts['wal_bytes'] / 1e9:.2f} GB of WAL"


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
