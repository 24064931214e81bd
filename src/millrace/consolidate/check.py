"""Can these sources be consolidated? Every problem of every server, before anything is touched.

Invariant: reads only. A server that can't be reached is a problem like any other, and hides none of
the others'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from millrace.clone import preflight
from millrace.clone.problem import Problem
from millrace.clone.ready import is_finished
from millrace.consolidate.column_check import check_hashes, check_left_out
from millrace.consolidate.config import Consolidation, SourceConfig
from millrace.consolidate.plan import SourcePlan, read_plan
from millrace.consolidate.registry import source_directory
from millrace.consolidate.settings import source_settings
from millrace.consolidate.status import read_records
from millrace.errors import MillraceError
from millrace.follow.setup import require_silence
from millrace.log import LogSettings
from millrace.postgres.catalog.schemas import USER_SCHEMA
from millrace.postgres.wire.connect import connect, translated
from millrace.receive.plugin_check import require_plugin

Connection = psycopg.Connection[tuple[Any, ...]]

_SLOTS = """
SELECT current_setting('wal_level'),
       current_setting('max_replication_slots')::int
           - (SELECT count(*) FROM pg_replication_slots)::int,
       current_setting('max_wal_senders')::int
           - (SELECT count(*) FROM pg_stat_replication)::int
"""
_LEFT_OUT = f"""
SELECT (SELECT count(DISTINCT p.polrelid) FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid
          JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.relrowsecurity AND {USER_SCHEMA})::int,
       (SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.relkind = 'f' AND {USER_SCHEMA})::int
"""
# A temporary slot for tables that are copied again, beside the stream's own.
SLOTS_NEEDED = 2


@dataclass(frozen=True)
class SourceProblem:
    """A problem, and whose it is; "" for the target's own."""

    source: str
    problem: Problem

    def to_dict(self) -> dict[str, Any]:
        one = self.problem
        return {
            "source": self.source,
            "side": one.side,
            "problem": one.what,
            "fix": one.fix,
            "warning": one.is_warning,
        }


def check_all(consolidation: Consolidation, directory: Path) -> list[SourceProblem]:
    """Every problem; warnings too."""
    found: list[SourceProblem] = []
    begun = {name: one for name, one in read_records(directory).items() if one.is_planned}
    plans = {name: record.plan for name, record in begun.items()}
    for name, source in consolidation.sources.items():
        if name in begun and is_finished(source_directory(directory, name)):
            continue  # it was checked when it began, and finds its own work on both sides
        problems: list[Problem] = []
        try:
            plan = plans.setdefault(name, _plan(source))
            problems += _check_source(
                consolidation, source, plan, directory, is_begun=name in begun
            )
        except MillraceError as error:
            problems.append(Problem("source", error.message, error.hint or "see the message"))
        found += [SourceProblem(name, one) for one in problems]
    found += _shared_names(plans)
    found += [SourceProblem("", one) for one in _check_target(consolidation, begun.keys())]
    return found


def _plan(source: SourceConfig) -> SourcePlan:
    with connect(source.dsn, "check") as connection:
        return read_plan(connection, source)


def _check_source(
    consolidation: Consolidation,
    source: SourceConfig,
    plan: SourcePlan,
    directory: Path,
    *,
    is_begun: bool,
) -> Iterator[Problem]:
    settings = source_settings(
        source, consolidation, plan, directory, LogSettings(), makes_key=False
    )
    with (
        connect(settings.route.source, "check") as here,
        connect(settings.route.target, "check") as there,
    ):
        yield from preflight.check(here, there, settings.clone(), continues=is_begun)
        yield from _check_slots(here)
        yield from _warn_of_left_out(here)
        yield from check_hashes(here, settings.route.filters)
        yield from check_left_out(here, settings.route.filters)
        try:
            require_plugin(here, source.plugin)
        except MillraceError as error:
            yield Problem("source", error.message, error.hint)


def _check_slots(source: Connection) -> Iterator[Problem]:
    with translated("checking the source's slots"):
        row = source.execute(_SLOTS).fetchone()
    assert row is not None
    level, slots, senders = row
    if level != "logical":
        yield Problem(
            "source",
            f"wal_level is {level}, and following changes needs logical",
            "ALTER SYSTEM SET wal_level = logical, then restart the server",
        )
    for what, setting, left in (
        ("replication slots", "max_replication_slots", slots),
        ("WAL senders", "max_wal_senders", senders),
    ):
        if left < SLOTS_NEEDED:
            yield Problem(
                "source",
                f"{max(left, 0)} {what} are left, and {SLOTS_NEEDED} are needed: one for the "
                "stream, one for tables that are copied again",
                f"ALTER SYSTEM SET {setting} = ..., then restart the server",
            )


def _warn_of_left_out(source: Connection) -> Iterator[Problem]:
    """What readers of the target might expect and will not find: `plan` leaves it out."""
    with translated("reading what is left out of the source"):
        row = source.execute(_LEFT_OUT).fetchone()
    assert row is not None
    policies, foreign = row
    if policies:
        yield Problem(
            "source",
            f"policies of {policies} tables are left out: `readers` see every row of them",
            "[exclude-table] in `filters`, or `columns`, leave out what must not be seen",
            is_warning=True,
        )
    if foreign:
        yield Problem(
            "source",
            f"{foreign} foreign tables are left out, and with them the views that read them",
            "make the server they are from a source of its own, if they are needed",
            is_warning=True,
        )


def _shared_names(plans: dict[str, SourcePlan]) -> Iterator[SourceProblem]:
    taken: dict[str, str] = {}
    for name, plan in plans.items():
        for schema in plan.naming.schemas.values():
            other = taken.setdefault(schema, name)
            if other != name:
                yield SourceProblem(
                    name,
                    Problem(
                        "target",
                        f"schema {schema} would be that of source {other}, too",
                        f'[source.{name}] schemas = {{ ... = "another name" }}',
                    ),
                )


def _check_target(consolidation: Consolidation, begun: Collection[str]) -> Iterator[Problem]:
    """Origins, roles, and triggers that must stay silent."""
    try:
        require_silence(consolidation.target)
        with connect(consolidation.target, "check") as target, translated("checking the target"):
            new = [one for name, one in consolidation.sources.items() if name not in begun]
            yield from _check_origins(target, sum(map(consolidation.workers_of, new)))
            for role in consolidation.readers:
                if target.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).rowcount < 1:
                    yield Problem(
                        "target",
                        f"there is no role {role}, which `readers` names",
                        f'CREATE ROLE "{role}"',
                    )
    except MillraceError as error:
        yield Problem("target", error.message, error.hint or "see the message")


def _check_origins(target: Connection, workers: int) -> Iterator[Problem]:
    setting = (
        "max_active_replication_origins"
        if target.info.server_version >= 180000
        else "max_replication_slots"
    )
    row = target.execute(
        "SELECT current_setting(%s)::int, (SELECT count(*) FROM pg_replication_origin_status)::int,"
        " has_function_privilege('pg_replication_origin_create(text)', 'EXECUTE')",
        (setting,),
    ).fetchone()
    assert row is not None
    most, used, uses_origins = row
    if uses_origins and most - used < workers:
        yield Problem(
            "target",
            f"{setting} is {most}, {used} are in use, and {workers} more origins are needed: one "
            "for each source, or for each worker of a source that is applied by table",
            f"ALTER SYSTEM SET {setting} = {2 * (used + workers)}, then restart the server",
        )
