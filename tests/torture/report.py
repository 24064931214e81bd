"""`python -m tests.torture.report [FILE ...]`: the figures of campaigns, by default of the last
ones, into docs/reliability.md.

Invariant: what stands between the marks in the page comes from a run's JSON and from nowhere else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FIGURES = tuple(
    Path("build") / f"torture{one}.json" for one in ("", "-follow", "-tube", "-consolidate")
)
PAGE = Path("docs/reliability.md")
# Clones, streams, tubes and consolidations have a place each.
MARKS = {
    "clone": ("<!-- figures: begin -->\n", "<!-- figures: end -->\n"),
    "follow": ("<!-- figures of streams: begin -->\n", "<!-- figures of streams: end -->\n"),
    "tube": ("<!-- figures of tubes: begin -->\n", "<!-- figures of tubes: end -->\n"),
    "consolidate": (
        "<!-- figures of consolidations: begin -->\n",
        "<!-- figures of consolidations: end -->\n",
    ),
}
NAMES = {
    "clone": "clones",
    "follow": "streams",
    "tube": "tubes",
    "consolidate": "consolidation",
}

Figures = dict[str, Any]


def render(figures: Figures) -> str:
    """The figures as markdown."""
    kind = kind_of(figures)
    make = {
        "clone": _clone_rows,
        "follow": _follow_rows,
        "tube": _tube_rows,
        "consolidate": _consolidate_rows,
    }[kind]
    lines = [
        f"{figures['date']}, {figures['machine']}, {figures['seconds'] / 60:.0f} minutes of "
        f"{NAMES[kind]}, commit {figures['commit']}, "
        f"seed {figures['seed']}:",
        "",
        "| | |",
        "| --- | ---: |",
        *(f"| {name} | {count:,} |" for name, count in make(figures)),
    ]
    if figures.get("failure"):
        lines += ["", f"It ended with a failure: {figures['failure'].splitlines()[0]}"]
    return "\n".join(lines) + "\n"


def kind_of(figures: Figures) -> str:
    """Which place of the page they go to."""
    return str(figures.get("what", "clone"))


def put(page: str, figures: str, kind: str = "clone") -> str:
    """The page with these figures between their marks."""
    begin, end = MARKS[kind]
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}{figures}{end}{tail}"


def _clone_rows(figures: Figures) -> list[tuple[str, int]]:
    return [
        ("clones", figures["clones"]),
        ("processes of `millrace clone`", figures["processes"]),
        *_interruptions(figures),
        ("most in a row of the same clone", figures["most_in_one_clone"]),
        ("tables compared under the snapshot", figures["tables_compared"]),
        ("rows compared", figures["rows_compared"]),
        ("transactions on the source meanwhile", figures["transactions_meanwhile"]),
        ("**differences**", figures["differences"]),
    ]


def _follow_rows(figures: Figures) -> list[tuple[str, int]]:
    return [
        ("streams", figures["streams"]),
        ("rounds, each ended and compared", figures["rounds"]),
        ("processes of `millrace`", figures["processes"]),
        *_interruptions(figures),
        ("columns added in mid-stream", figures["columns_added"]),
        *figures.get("ingredients", {}).items(),
        ("transactions on the source meanwhile", figures["transactions_meanwhile"]),
        ("rows changed by them", figures["rows_changed"]),
        ("transactions rolled back", figures["transactions_rolled_back"]),
        ("looks at the target for half a transaction", figures["torn_looks"]),
        ("tables compared", figures["tables_compared"]),
        ("rows compared", figures["rows_compared"]),
        ("**differences**", figures["differences"]),
    ]


def _tube_rows(figures: Figures) -> list[tuple[str, int]]:
    return [
        ("rounds, each with a table of its own, brought to rest and compared", figures["rounds"]),
        ("processes of `millrace tube run`", figures["processes"]),
        *_interruptions(figures),
        *figures["ingredients"].items(),
        ("documents compared", figures["rows_compared"]),
        ("**differences**", figures["differences"]),
    ]


def _consolidate_rows(figures: Figures) -> list[tuple[str, int]]:
    return [
        ("sources", figures["sources"]),
        ("rounds, each with all sources compared", figures["rounds"]),
        ("processes of `millrace consolidate`", figures["processes"]),
        *_interruptions(figures),
        *figures["ingredients"].items(),
        ("transactions on the sources meanwhile", figures["transactions_meanwhile"]),
        ("rows changed by them", figures["rows_changed"]),
        ("tables compared", figures["tables_compared"]),
        ("rows compared", figures["rows_compared"]),
        ("**differences**", figures["differences"]),
    ]


def _interruptions(figures: Figures) -> list[tuple[str, int]]:
    kinds = sorted(figures["interruptions"].items(), key=lambda pair: -pair[1])
    return [*kinds, ("**interruptions**", figures["total_interruptions"])]


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or [path for path in FIGURES if path.exists()]
    found = [json.loads(path.read_text()) for path in paths]
    page = PAGE.read_text(encoding="utf-8")
    for kind in MARKS:
        text = "\n".join(render(one) for one in found if kind_of(one) == kind)
        if text:
            page = put(page, text, kind)
            sys.stdout.write(text)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
