"""Whether a clone can begin or continue: checks of directory, target and servers.

Invariant: nothing is changed on either server, nor in the directory.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from millrace.clone import preflight
from millrace.clone.claim import claim_target
from millrace.clone.directory import catalog_path, read_setup, require_usable
from millrace.clone.problem import Problem
from millrace.clone.run_record import RunRecords, rows_left
from millrace.clone.settings import CloneSettings
from millrace.clone.shared_database import read_filled_schemas
from millrace.errors import PreflightError, WorkDirError
from millrace.postgres.program.binaries import Installation, find_tools
from millrace.postgres.wire.connect import connect, resolve, server_encoding, translated
from millrace.workdir.store import Store

log = logging.getLogger(__name__)


def require_ready(settings: CloneSettings) -> None:
    """Raise what `clone` would refuse, for those who make something for it first."""
    settings = resolved(settings)
    if settings.resume and settings.restart:
        raise WorkDirError("--resume and --restart cannot be used together")
    setup = require_usable(settings, continues=settings.resume)
    owned = settings.restart and owns_target(settings)
    run_id = setup["run_id"] if setup else secrets.token_hex(4)
    with claim(settings, run_id, read_schemas(settings), takes_over=owned):
        check_servers(settings, continues=setup is not None or owned, is_first=False)


def is_finished(directory: Path) -> bool:
    """Whether the clone of this directory is done."""
    setup = read_setup(directory)
    return setup is not None and bool(setup["finished_at"])


def has_every_row(settings: CloneSettings) -> bool:
    """Whether the run of the directory has committed all rows: then it needs no snapshot."""
    setup = read_setup(settings.directory)
    if setup is None or not setup["snapshot"]:
        return False
    if setup["finished_at"]:
        return True
    store = Store(catalog_path(settings.directory), read_only=True)
    try:
        return not rows_left(store, RunRecords(settings, setup["run_id"]).parts(), settings)
    finally:
        store.close()


def read_schemas(settings: CloneSettings) -> frozenset[str]:
    with (
        connect(settings.source, "preflight") as source,
        translated("reading the source's schemas"),
    ):
        return read_filled_schemas(source, settings)


@contextmanager
def claim(
    settings: CloneSettings, run_id: str, schemas: frozenset[str], *, takes_over: bool
) -> Iterator[None]:
    """Be the one run, alive or dead, that fills these schemas; with `takes_over`, the one alive."""
    with claim_target(settings.target, run_id, settings.directory, schemas):
        if not (takes_over or settings.drop_if_exists):
            RunRecords(settings, run_id).check_owner(schemas)
        yield


def resolved(settings: CloneSettings) -> CloneSettings:
    route = settings.route
    route = replace(route, source=resolve(route.source), target=resolve(route.target))
    return replace(settings, route=route)


def check_servers(
    settings: CloneSettings, *, continues: bool, is_first: bool = True
) -> tuple[list[Problem], Installation, str]:
    """(warnings, programs, the target's encoding); raises if a server is not ready."""
    with (
        connect(settings.source, "preflight") as source,
        connect(settings.target, "preflight") as target,
    ):
        problems = preflight.check(source, target, settings, continues=continues)
        versions = [c.info.server_version // 10000 for c in (source, target)]
        encoding = server_encoding(target)
        tls = source.pgconn.ssl_in_use
    try:
        tools = find_dump_tools(*versions, tls=tls)
    except PreflightError as error:
        problems.append(Problem("programs", error.message, error.hint))
    warnings = [problem for problem in problems if problem.is_warning]
    for problem in warnings if is_first else ():
        log.warning("%s: %s", problem.side, problem.what)
    preflight.raise_problems(problems)
    return warnings, tools, encoding


def find_dump_tools(source_version: int, target_version: int, *, tls: bool) -> Installation:
    """pg_dump must not be older than the source; the target's writes best for the target."""
    programs = ("pg_dump", "pg_restore", "pg_dumpall")
    try:
        return find_tools(max(source_version, target_version), *programs, tls=tls)
    except PreflightError:
        return find_tools(source_version, *programs, tls=tls)


def owns_target(settings: CloneSettings) -> bool:
    """Whether the target holds records of the run in the work directory: only then may --restart
    empty it."""
    setup = read_setup(settings.directory)
    return setup is not None and RunRecords(settings, setup["run_id"]).exists()
