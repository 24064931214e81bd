"""`python -m tests.torture.report [FILE ...]`: the figures of campaigns, by default of the last,
into docs/reliability.md.

Invariant: what stands between the marks in the page comes from a run's JSON and from nowhere else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FIGURES = Path("build/torture.json")
PAGE = Path("docs/reliability.md")
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"


def render(figures: dict[str, Any]) -> str:
    """The figures as markdown."""
    kinds = sorted(figures["interruptions"].items(), key=lambda pair: -pair[1])
    rows = [
        ("clones", figures["clones"]),
        ("processes of `millrace clone`", figures["processes"]),
        *kinds,
        ("**interruptions**", figures["total_interruptions"]),
        ("most in a row of the same clone", figures["most_in_one_clone"]),
        ("tables compared under the snapshot", figures["tables_compared"]),
        ("rows compared", figures["rows_compared"]),
        ("transactions on the source meanwhile", figures["transactions_meanwhile"]),
        ("**differences**", figures["differences"]),
    ]
    lines = [
        f"{figures['date']}, {figures['machine']}, {figures['seconds'] / 60:.0f} minutes of "
        f"clones, commit {figures['commit']}, seed {figures['seed']}:",
        "",
        "| | |",
        "| --- | ---: |",
        *(f"| {name} | {count:,} |" for name, count in rows),
    ]
    if figures.get("failure"):
        lines += ["", f"It ended with a failure: {figures['failure'].splitlines()[0]}"]
    return "\n".join(lines) + "\n"


def put(page: str, figures: str) -> str:
    """The page with these figures between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{figures}{END}{tail}"


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or [FIGURES]
    text = "\n".join(render(json.loads(path.read_text())) for path in paths)
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
