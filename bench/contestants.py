"""Who takes part: for each contestant its command, what it needs, and what it says about itself.

All get the same two databases and four jobs for tables and four for indexes, where they know such
a thing. pg_restore gathers no statistics; the other three end with VACUUM ANALYZE of each table.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

JOBS = "4"
PARTS = 4
# The bench runs from the checkout, whether Millrace is installed or not.
ROOT = Path(__file__).resolve().parent.parent
# Where Debian's libpostgresql-jdbc-java puts it; BENCH_JDBC_JAR names another.
JDBC_JAR = Path(os.environ.get("BENCH_JDBC_JAR", "/usr/share/java/postgresql.jar"))


@dataclass(frozen=True)
class Course:
    """What every contestant is given for one run."""

    bindir: Path
    source: str
    target: str
    source_jdbc: str
    target_jdbc: str
    largest_table: str
    largest_table_bytes: int
    work_dir: Path


@dataclass(frozen=True)
class Contestant:
    """`data_only`: it finds the tables on the target and is not expected to make indexes."""

    name: str
    command: Callable[[Course], list[str]]
    missing: Callable[[], str] = lambda: ""
    figures: Callable[[Path], dict[str, Any]] = lambda work_dir: {}
    data_only: bool = False


def environment(course: Course) -> dict[str, str]:
    """Ours, with the programs of the servers' version first and no PG* variable."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    env["PATH"] = f"{course.bindir}{os.pathsep}{env['PATH']}"
    paths = [str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return env


def _millrace(course: Course) -> list[str]:
    return [
        sys.executable, "-m", "millrace", "clone",
        "--source", course.source, "--target", course.target,
        "--dir", str(course.work_dir / "dir"),
        "--table-jobs", JOBS, "--index-jobs", JOBS,
    ]  # fmt: skip


def _millrace_split(course: Course) -> list[str]:
    # A little more than a fourth, so that rounding does not make a fifth part.
    threshold = course.largest_table_bytes * 51 // 50 // PARTS
    return [*_millrace(course), "--split-tables-larger-than", str(threshold)]


def _pgcopydb(course: Course) -> list[str]:
    return [
        "pgcopydb", "clone",
        "--source", course.source, "--target", course.target,
        "--dir", str(course.work_dir / "dir"),
        "--table-jobs", JOBS, "--index-jobs", JOBS,
    ]  # fmt: skip


def _pg_dump(course: Course) -> list[str]:
    folder = str(course.work_dir / "dump")
    dump = ["pg_dump", "-Fd", "-Z0", "-j", JOBS, "-f", folder, "-d", course.source]
    restore = ["pg_restore", "-j", JOBS, "-d", course.target, folder]
    return ["sh", "-c", f"{shlex.join(dump)} && {shlex.join(restore)}"]


def _floor(parts: int) -> Callable[[Course], list[str]]:
    return lambda course: [
        sys.executable, "-m", "bench.floor",
        str(course.bindir), course.source, course.target, str(parts),
    ]  # fmt: skip


def _jdbc(course: Course) -> list[str]:
    return [
        sys.executable, "-m", "bench.jdbc_copy", str(JDBC_JAR),
        course.source_jdbc, course.target_jdbc, course.largest_table, str(PARTS),
        str(course.work_dir / "figures.json"),
    ]  # fmt: skip


def _relay_cpu(side: str) -> Callable[[Course], list[str]]:
    return lambda course: [
        sys.executable, "-m", "bench.relay_cpu", side,
        str(course.bindir), course.source, course.target, str(course.work_dir / "figures.json"),
    ]  # fmt: skip


def _needs_module(name: str) -> Callable[[], str]:
    def missing() -> str:
        try:
            return "" if find_spec(name) else f"there is no {name}"
        except ModuleNotFoundError as error:
            return str(error)

    return missing


def _needs_program(name: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"{name} is not installed"


def _needs_file(path: Path) -> Callable[[], str]:
    return lambda: "" if path.exists() else f"there is no {path.name}"


def _own_figures(work_dir: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((work_dir / "figures.json").read_text())
    return figures


def _millrace_figures(work_dir: Path) -> dict[str, Any]:
    """The parts of summary.json we compare; a key that is not there stays away."""
    file = work_dir / "dir" / "summary.json"
    summary: Mapping[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    kept = ("seconds", "spark_start_seconds", "jvm_start_seconds", "steps")
    figures = {key: summary[key] for key in kept if key in summary}
    for step in summary.get("steps", ()):
        if step["name"] == "copy":
            figures["copy_seconds"] = step["seconds"]
    return figures


_MILLRACE_CLI = _needs_module("millrace.cli.main")

MILLRACE = Contestant("millrace", _millrace, _MILLRACE_CLI, _millrace_figures)
MILLRACE_SPLIT = Contestant("millrace split4", _millrace_split, _MILLRACE_CLI, _millrace_figures)
PGCOPYDB = Contestant("pgcopydb", _pgcopydb, _needs_program("pgcopydb"))
PG_DUMP = Contestant("pg_dump, pg_restore", _pg_dump)
FLOOR = Contestant("floor", _floor(1))
FLOOR_SPLIT = Contestant("floor split4", _floor(PARTS))
JDBC = Contestant("Spark JDBC", _jdbc, _needs_file(JDBC_JAR), _own_figures, data_only=True)
PSQL = Contestant("psql | psql", _relay_cpu("psql"), figures=_own_figures, data_only=True)
RELAY = Contestant(
    "relay",
    _relay_cpu("relay"),
    _needs_module("millrace.postgres.wire.relay"),
    _own_figures,
    data_only=True,
)
