"""A source given up: its stream, and its schemas on the target.

Invariant: nothing of the analysts' is dropped unless it was asked for by --cascade: what depends on
the source's tables is looked up first, listed, and refused.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from millrace.clone.directory import read_setup
from millrace.clone.ready import owns_target
from millrace.config.dsn import Dsn
from millrace.consolidate.registry import Registry, source_directory
from millrace.consolidate.settings import SourceSettings
from millrace.ddl.renaming import read_target_schemas
from millrace.errors import PreflightError, WorkDirError
from millrace.follow.bound_copy import read_stream
from millrace.follow.slot import cleanup
from millrace.follow.slot_making import read_record
from millrace.name import Naming
from millrace.postgres.origin import stream_prefix
from millrace.postgres.quote import ident
from millrace.postgres.run_record import drop_records
from millrace.postgres.wire.connect import cancel_sessions, connect, resolve, translated
from millrace.workdir.lock import read_holder

log = logging.getLogger(__name__)

STOP_SECONDS = 120.0
POLL_SECONDS = 0.2
LISTED = 10

# Relations and routines outside these schemas that depend on something in them.
_DEPENDENTS = """
SELECT DISTINCT pg_describe_object(d.classid, d.objid, 0) FROM (
    SELECT DISTINCT coalesce(r.ev_class, d.objid) AS objid,
           CASE WHEN r.ev_class IS NULL THEN d.classid ELSE 'pg_class'::regclass END AS classid
      FROM pg_depend d LEFT JOIN pg_rewrite r
           ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
     WHERE d.deptype IN ('n', 'a') AND (
           d.refclassid = 'pg_class'::regclass AND d.refobjid IN (
               SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = ANY(%(schemas)s))
        OR d.refclassid = 'pg_type'::regclass AND d.refobjid IN (
               SELECT t.oid FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
                WHERE n.nspname = ANY(%(schemas)s))
        OR d.refclassid = 'pg_proc'::regclass AND d.refobjid IN (
               SELECT p.oid FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
                WHERE n.nspname = ANY(%(schemas)s)))) d
 WHERE d.classid = 'pg_class'::regclass AND NOT EXISTS (
           SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE c.oid = d.objid AND (n.nspname = ANY(%(schemas)s) OR n.nspname ~ '^pg_'))
    OR d.classid = 'pg_proc'::regclass AND NOT EXISTS (
           SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
            WHERE p.oid = d.objid AND n.nspname = ANY(%(schemas)s))
 ORDER BY 1
"""


def take_back(settings: SourceSettings) -> None:
    """Remove what an interrupted base copy has left on both servers and in its directory, so that
    it can be made anew; refused if somebody has made use of it already."""
    route, directory = settings.route, settings.directory
    if owns_target(settings.clone()):
        require_no_dependents(settings.name, route.target, route.naming)
        run = read_setup(directory)
        assert run is not None
        for server in (route.source, route.target):
            cancel_sessions(server, [run["run_id"]])
        _remove_stream(route.source, route.target, directory, route.naming)
        _drop_schemas(route.target, directory, route.naming)
    else:
        _remove_stream(route.source, route.target, directory, route.naming)
    shutil.rmtree(directory, ignore_errors=True)


def require_no_dependents(name: str, target: Dsn, naming: Naming) -> None:
    """Raise if others have made something of a source's tables."""
    dependents = read_dependents(target, naming)
    if dependents:
        count = len(dependents)
        what = "1 object depends" if count == 1 else f"{count} objects depend"
        raise PreflightError(
            f"{what} on source {name}: {', '.join(dependents[:LISTED])}",
            hint="drop them yourself, or give --cascade to `millrace consolidate remove`, which "
            "drops them too",
            dependents=dependents,
        )


def remove_source(
    source: Dsn | None, target: Dsn, directory: Path, name: str, *, cascades: bool
) -> list[str]:
    """What was removed. `source`: None if the file has it no longer; its slot stays then."""
    with Registry(directory) as registry:
        record = registry.require(name)
        if record.is_gone:
            raise WorkDirError(f"source {name} is removed already", hint="take it out of the file")
        naming = record.plan.naming
        if not cascades:
            require_no_dependents(name, target, naming)
        registry.set_removed(name)
        _wait_until_released(registry, directory, name)
        came = _read_later_schemas(target, source_directory(directory, name))
        removed = _remove_stream(source, target, source_directory(directory, name), naming)
        removed += _drop_schemas(target, source_directory(directory, name), naming, came)
        shutil.rmtree(source_directory(directory, name), ignore_errors=True)
        registry.bury(name)
    return removed


def read_dependents(target: Dsn, naming: Naming) -> list[str]:
    """What others have made of these schemas."""
    with connect(target, "consolidate") as connection, translated("looking for dependent objects"):
        rows = connection.execute(_DEPENDENTS, {"schemas": _schemas(naming)}).fetchall()
    return [row[0] for row in rows]


def _schemas(naming: Naming) -> list[str]:
    return sorted(set(naming.schemas.values()))


def _wait_until_released(registry: Registry, directory: Path, name: str) -> None:
    """The process that runs the source, if there is one, lets go of it."""
    deadline = time.monotonic() + STOP_SECONDS
    while read_holder(directory) is not None and not registry.require(name).is_released:
        if time.monotonic() > deadline:
            raise WorkDirError(
                f"source {name} is still being followed",
                hint="stop `millrace consolidate run`, then try again",
            )
        time.sleep(POLL_SECONDS)


def _remove_stream(source: Dsn | None, target: Dsn, directory: Path, naming: Naming) -> list[str]:
    setup, making = read_stream(directory), read_record(directory)
    if setup is not None:
        slot, identity = setup.slot_name, setup.source
    elif making is not None:
        # Whoever made it was killed before the directory knew of it.
        slot, identity = making.slot, making.source
    else:
        return []
    if source is None:
        log.warning(
            "slot %s stays on the source, which keeps WAL for it until it is dropped: SELECT "
            "pg_drop_replication_slot('%s')",
            slot,
            slot,
        )
        return []
    with connect(resolve(source), "cleanup") as here, connect(target, "cleanup") as there:
        return cleanup(here, there, slot, identity, naming)


def _read_later_schemas(target: Dsn, directory: Path) -> list[str]:
    """Schemas that came with the source's DDL."""
    setup = read_stream(directory)
    if setup is None:
        return []
    with connect(target, "consolidate") as connection:
        return read_target_schemas(connection, stream_prefix(setup.source, setup.slot_name))


def _drop_schemas(
    target: Dsn, directory: Path, naming: Naming, later: Sequence[str] = ()
) -> list[str]:
    removed = []
    setup = read_setup(directory)
    with connect(target, "consolidate") as connection:
        for schema in dict.fromkeys((*_schemas(naming), *later)):
            with translated(f"dropping schema {schema}"):
                query = "SELECT FROM pg_namespace WHERE nspname = %s"
                if connection.execute(query, (schema,)).fetchone() is None:
                    continue
                connection.execute(f"DROP SCHEMA {ident(schema)} CASCADE".encode())
                removed.append(f"schema {schema} on the target")
        if setup is not None:
            # Last: as long as they are there, the schemas are known to be ours.
            drop_records(connection, setup["run_id"])
    return removed
