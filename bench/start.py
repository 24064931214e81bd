"""How long the program takes to start, for somebody who waits for `--help`.

Every command line runs in turn, in a process of its own; the first round only fills the caches.
Python with typer and rich, which print the help, is the floor. On a quiet machine `millrace --help`
is to take less than 300 ms.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.clone import Options
from bench.machine import machine_facts
from bench.report import DID_NOT_RUN, RIGHT, Comparison, Run, assemble

_SET = "start"
_FLOOR = "python with typer and rich"
_PROGRAM = ("-m", "millrace")
CONTESTANTS = {
    "millrace --help": (*_PROGRAM, "--help"),
    "millrace version": (*_PROGRAM, "version"),
    "millrace list tables --help": (*_PROGRAM, "list", "tables", "--help"),
    "millrace clone --help": (*_PROGRAM, "clone", "--help"),
    _FLOOR: ("-c", "import typer.main, typer.rich_utils"),
}
HELP_VS_FLOOR = Comparison(
    "start_help_vs_typer", "start_ms", (_SET, "millrace --help"), (_SET, _FLOOR)
)


def run(options: Options) -> dict[str, Any]:
    """The whole benchmark; the result is what the JSON file holds."""
    rounds = options.rounds or (5 if options.quick else 20)
    runs = [
        _measure(name, number, arguments)
        for number in range(rounds + 1)
        for name, arguments in CONTESTANTS.items()
    ]
    runs = [one for one in runs if one.round]
    facts = {
        "quick": options.quick,
        "rounds": rounds,
        "machine": machine_facts(Path(), Path()),
        "data_sets": {_SET: {"title": "the start of the program"}},
    }
    return assemble("start", runs, {HELP_VS_FLOOR.name: HELP_VS_FLOOR.ratio(runs)}, facts)


def _measure(name: str, number: int, arguments: tuple[str, ...]) -> Run:
    source = Path(__file__).resolve().parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    before, began_at = os.times(), time.perf_counter()
    ended = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
    seconds, after = time.perf_counter() - began_at, os.times()
    if ended.returncode:
        return Run(_SET, name, number, DID_NOT_RUN, ended.stderr.strip()[-200:])
    cpu = sum(after[2:4]) - sum(before[2:4])
    return Run(_SET, name, number, RIGHT, "", {"start_ms": 1000 * seconds, "cpu_ms": 1000 * cpu})
