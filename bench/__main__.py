"""python -m bench NAME [--quick] [--rounds N] [--part PART] [--json FILE]; NAME is listed below.

A benchmark is a module with `run(options)` that returns the content of its result file.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# Before any import of ours: the checkout may not be installed.
sys.path.insert(0, str(ROOT.parent / "src"))

BENCHES = ("clone", "consolidate", "ddl", "follow", "start", "tube")
# Without a terminal rich assumes 80 columns, which cuts the tables.
LOG_WIDTH = 140


def main() -> int:
    from rich.console import Console

    from bench.clone import Options
    from bench.report import WRONG, print_result, replace_part, write_json

    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--quick", action="store_true", help="a third of the data, one round")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--json", type=Path, help="default: bench/results/NAME[-quick].json")
    parser.add_argument("--scale", type=float, help="share of the full data, for development")
    parser.add_argument("--server-version", type=int, help="default: the newest all can copy")
    parser.add_argument(
        "--part", action="append", default=[], help="this part alone; the result keeps the others"
    )
    given = parser.parse_args()

    bench = import_module(f"bench.{given.name}")
    unknown = set(given.part) - set(getattr(bench, "PARTS", ()))
    if unknown:
        parser.error(f"{given.name} has no part {sorted(unknown)[0]!r}")
    options = Options(
        given.quick, given.rounds, given.scale, given.server_version, tuple(given.part)
    )
    result = bench.run(options)
    name = f"{given.name}-quick.json" if given.quick else f"{given.name}.json"
    file = given.json or ROOT / "results" / name
    if given.part and file.exists():
        result = replace_part(json.loads(file.read_text()), result, bench.ratios)
    write_json(result, file)
    console = Console()
    print_result(result, console if console.is_terminal else Console(width=LOG_WIDTH))
    return 1 if any(run["outcome"] == WRONG for run in result["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
