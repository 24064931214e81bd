"""A schema restored under other names.

Invariant: no SQL is rewritten. Text of the source runs while the target's schemas have the
source's names, in transactions that rename them in and back (`postgres.schema_rename`). What must
run on its own, index builds and constraints, is printed by the target: it builds all of it on
the empty tables, prints it under the new names, and rolls back.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import psycopg

from millrace.clone.kept_view import decode_plain, encode_plain
from millrace.clone.plan import Plan, by_table
from millrace.clone.run_state import Run
from millrace.clone.schema.entries import RestoreLists, SchemaSettings
from millrace.errors import InvariantError, ServerError
from millrace.name import Naming
from millrace.postgres.catalog.relations import (
    owner_of_public,
    read_indexes,
    render_setting,
)
from millrace.postgres.program.dump import Archive, Entry
from millrace.postgres.program.script import plain_script, run_script
from millrace.postgres.quote import ident
from millrace.postgres.run_record import fenced_step_sql
from millrace.postgres.schema_rename import (
    LOCK_SECONDS,
    rename_back_sql,
    rename_in_sql,
)
from millrace.postgres.wire.connect import connect, translated
from millrace.relation import Index, SourceCatalog, Table
from millrace.retry import with_retries

Connection = psycopg.Connection[tuple[Any, ...]]
log = logging.getLogger(__name__)

# Indexes printed in one transaction: with its table, each takes some locks.
INDEXES_IN_ONE_TRANSACTION = 250
# Together some minutes.
ATTEMPTS = 20
# What the server says, without an SQLSTATE of its own, when somebody else altered a schema.
_OTHER_RENAMER = "tuple concurrently updated"
_SERIALIZATION_FAILURE = "40001"
_KEPT = "mapped indexes"
_NO_TIMEOUT = b"SET lock_timeout = 0;"
_TIMEOUT = f"SET lock_timeout = '{LOCK_SECONDS}s';".encode()


def create_schemas(run: Run, catalog: SourceCatalog) -> None:
    """Make the schemas that have another name on the target, as the source's text expects them:
    `public` is not created by a dump, and its usual grants are not in it."""
    naming = run.settings.naming
    renamed = [name for name in catalog.schemas.values() if name in naming.renamed_schemas]
    if not renamed:
        return
    with connect(run.settings.source, run.role("schema")) as source:
        public_grants = "USAGE" if source.info.server_version >= 150000 else "USAGE, CREATE"
    with connect(run.settings.target, run.role("schema")) as target:
        for name in renamed:
            new = naming.schema(name)
            with translated(f"creating schema {new}"), target.transaction():
                query = "SELECT FROM pg_namespace WHERE nspname = %s"
                if target.execute(query, (new,)).fetchone() is not None:
                    continue
                target.execute(f"CREATE SCHEMA {ident(new)}")
                if name == "public":
                    _make_public(target, new, public_grants, run.settings.schema)


def _make_public(target: Connection, name: str, grants: str, settings: SchemaSettings) -> None:
    """Give a schema what initdb gives `public`: a dump holds what differs from that."""
    if not settings.no_acl:
        target.execute(f"GRANT {grants} ON SCHEMA {ident(name)} TO PUBLIC")
    if not settings.no_comments:
        target.execute(f"COMMENT ON SCHEMA {ident(name)} IS 'standard public schema'")
    owner = owner_of_public(target.info.server_version)
    row = target.execute(
        "SELECT rolname FROM pg_roles WHERE oid = %s AND pg_has_role(oid, 'MEMBER')", (owner,)
    ).fetchone()
    if row is not None and not settings.no_owner:
        target.execute(f"ALTER SCHEMA {ident(name)} OWNER TO {ident(row[0])}")


def map_function_settings(run: Run, catalog: SourceCatalog) -> None:
    """Give functions with a search path of their own one of the target's names: once in a run."""
    naming, step = run.settings.naming, "search paths of functions"
    if naming.is_identity or step in run.done:
        return
    with (
        connect(run.settings.target, run.role("schema")) as target,
        translated("reading the settings of functions on the target"),
    ):
        rows = target.execute(
            "SELECT p.oid::regprocedure::text, c.setting FROM pg_proc p, unnest(p.proconfig)"
            " AS c (setting), pg_namespace n WHERE n.oid = p.pronamespace"
            " AND n.nspname = ANY(%s)",
            ([naming.schema(name) for name in catalog.schemas.values()],),
        ).fetchall()
    statements = [
        f"ALTER ROUTINE {routine} SET {render_setting(naming.setting(setting))};\n"
        for routine, setting in rows
        if naming.setting(setting) != setting
    ]
    fence, done = fenced_step_sql(run.run_id, run.epoch, step)
    run_script(
        run.settings.target,
        "".join(statements).encode(),
        "setting the search paths of functions",
        role=run.role("schema"),
        before=fence,
        after=done,
    )
    run.done.add(step)


def run_mapped(run: Run, script: bytes, what: str, *, before: str, after: str) -> None:
    """Run a script of the source on the target, under the names of the source."""
    naming = run.settings.naming
    if not naming.is_identity:
        script = script.replace(_NO_TIMEOUT, _TIMEOUT, 1)
    before += rename_in_sql(naming, run.extension_homes)
    after = rename_back_sql(naming, run.extension_homes) + after

    def attempt() -> None:
        try:
            run_script(
                run.settings.target,
                script,
                what,
                role=run.role("schema"),
                before=before,
                after=after,
            )
        except ServerError as error:
            if _OTHER_RENAMER in error.message:
                error.facts["sqlstate"] = _SERIALIZATION_FAILURE
            raise

    if naming.is_identity:
        attempt()
    else:
        with_retries(attempt, attempts=ATTEMPTS, on_retry=_log_retry)


def _log_retry(error: BaseException, pause: float) -> None:
    log.warning("%s; another session may hold a lock; trying again in %.1f s", error, pause)


def to_target(run: Run, plan: Plan, archive: Archive, lists: RestoreLists) -> Plan:
    """The plan with the target's names; tables keep the source's, and know their new ones.

    The indexes are printed once in a run, before the first row is copied.
    """
    naming = run.settings.naming
    if naming.is_identity:
        return plan
    catalog = plan.catalog
    kept = run.store.read_kept(_KEPT)
    if kept is None:
        indexes = _print_indexes(run, catalog, archive, lists)
        run.store.write_kept(_KEPT, encode_plain(SourceCatalog(indexes=indexes)))
    else:
        indexes = decode_plain(SourceCatalog, kept).indexes
    mapped = _with_names(replace(catalog, indexes=indexes), naming)
    return Plan(mapped, plan.parts, by_table(mapped.indexes))


def _with_names(catalog: SourceCatalog, naming: Naming) -> SourceCatalog:
    return replace(
        catalog,
        tables=tuple(_renamed_table(table, naming) for table in catalog.tables),
        foreign_keys=tuple(
            replace(
                key,
                schema=naming.target(key.schema, key.table).schema,
                table=naming.target(key.schema, key.table).name,
                search_path=None if key.search_path is None else naming.schema(key.search_path),
            )
            for key in catalog.foreign_keys
        ),
        sequences=tuple(
            replace(one, schema=naming.schema(one.schema)) for one in catalog.sequences
        ),
        partitioned_tables=tuple(
            (oid, *naming.target(schema, name)) for oid, schema, name in catalog.partitioned_tables
        ),
    )


def _renamed_table(table: Table, naming: Naming) -> Table:
    through = table.load_via
    return replace(
        table,
        renamed=naming.target(table.schema, table.name),
        load_via=(through[0], *naming.target(*through[1:])) if through else None,
    )


def _print_indexes(
    run: Run, catalog: SourceCatalog, archive: Archive, lists: RestoreLists
) -> tuple[Index, ...]:
    """The indexes as the target prints them, with the source's OIDs and sizes."""
    naming = run.settings.naming
    entries = [one for one in lists.built_by_us if one.description != "FK CONSTRAINT"]
    printed: dict[tuple[str, str], Index] = {}
    for at in range(0, len(entries), INDEXES_IN_ONE_TRANSACTION):
        piece = entries[at : at + INDEXES_IN_ONE_TRANSACTION]
        number = at // INDEXES_IN_ONE_TRANSACTION + 1
        for index in _print_piece(run, archive, piece, f"indexes-{number}"):
            printed[index.schema, index.name] = index
    found = []
    for index in catalog.indexes:
        theirs = printed.get((naming.schema(index.schema), index.name))
        if theirs is None:
            raise InvariantError(f"the target did not print index {index.schema}.{index.name}")
        found.append(
            replace(
                theirs,
                oid=index.oid,
                table_oid=index.table_oid,
                constraint_oid=index.constraint_oid,
                bytes=index.bytes,
            )
        )
    return tuple(found)


def _print_piece(run: Run, archive: Archive, entries: list[Entry], name: str) -> list[Index]:
    naming, settings = run.settings.naming, run.settings
    script = archive.script(entries, name, settings.schema.restore_options())

    def attempt() -> list[Index]:
        with (
            connect(settings.target, run.role("schema")) as target,
            translated("printing indexes on the target"),
            target.transaction(force_rollback=True),
        ):
            before = rename_in_sql(naming, run.extension_homes)
            text = plain_script(script, target.info.server_version)
            target.execute(before.encode() + text.replace(_NO_TIMEOUT, _TIMEOUT, 1))
            target.execute(rename_back_sql(naming, run.extension_homes).encode())
            target.execute("SET LOCAL search_path = pg_catalog")
            return read_indexes(target)

    return with_retries(attempt, attempts=ATTEMPTS, on_retry=_log_retry)
