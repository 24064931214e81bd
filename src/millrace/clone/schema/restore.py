"""The schema's steps on the target: dump, restore before and after the data, foreign keys.

Invariant: the entries of the archive are restored in transactions that record themselves; a
transaction found recorded is not run again. Materialized views are filled in one that finds all
rows recorded.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from millrace import failpoint
from millrace.clone.finish.constraint import add_foreign_key, run_disjoint
from millrace.clone.finish.session_pool import SessionPool
from millrace.clone.plan import Plan
from millrace.clone.run_state import Run
from millrace.clone.schema.database import read_schema_names, set_schema_owners
from millrace.clone.schema.entries import RestoreLists, chunks, plan_restore
from millrace.clone.schema.mapping import run_mapped
from millrace.clone.schema.requirements import pin_versions
from millrace.clone.shared_database import read_used_extensions
from millrace.clone.trigger_silence import empty_sql
from millrace.filter.apply import filter_entries
from millrace.filter.decide import Decision
from millrace.postgres import run_record as record
from millrace.postgres.catalog.depend import read_entry_depends
from millrace.postgres.program.dump import Archive, Entry, dump_schema
from millrace.postgres.program.script import run_script
from millrace.postgres.quote import ident, literal
from millrace.postgres.schema_rename import ALONE
from millrace.postgres.wire.connect import connect, translated
from millrace.relation import Extension, ForeignKey, SourceCatalog

log = logging.getLogger(__name__)

# Names of extensions, as JSON: what the run found that others use.
_USED_EXTENSIONS = "extensions used by others"
# pg_dump prints constants of type money as the source's database does, not as our sessions do.
_OWN_CURRENCY = "RESET lc_monetary;\n"


def archive_path(directory: Path) -> Path:
    """Where the dumped schema is kept."""
    return directory / "schema" / "schema.dump"


def open_archive(run: Run, snapshot: str | None) -> Archive:
    """The dumped schema: the file from before if the run is continued, else a new one."""
    path = archive_path(run.settings.directory)
    if path.exists():
        return Archive(path, run.tools)
    role = run.role("schema")
    archive = dump_schema(run.tools, run.settings.source, snapshot, path, role=role)
    failpoint.hit("schema.dumped")
    return archive


def plan_lists(
    run: Run, archive: Archive, catalog: SourceCatalog, decision: Decision
) -> RestoreLists:
    """What is restored when; the same for every process of a run."""
    pre_data, post_data = archive.entries("pre-data"), archive.entries("post-data")
    if not run.settings.filters.is_empty:
        depends = read_entry_depends(archive)
        pre_data = filter_entries(pre_data, decision, depends)
        post_data = filter_entries(post_data, decision, depends)
    if run.replaces:
        pre_data = [one for one in pre_data if not _is_used_extension(run, one, catalog)]
    return plan_restore(
        pre_data,
        post_data,
        catalog,
        run.settings.schema,
        existing_schema_oids=run.store.read_existing_schemas(),
    )


def _is_used_extension(run: Run, entry: Entry, catalog: SourceCatalog) -> bool:
    """Whether others use an extension, which must not be dropped and made again."""
    if entry.description != "EXTENSION":
        return False
    used = json.loads(run.store.read_kept(_USED_EXTENSIONS) or "[]")
    return any(one.oid == entry.object_oid and one.name in used for one in catalog.extensions)


def note_existing(run: Run, catalog: SourceCatalog) -> None:
    """Remember which schemas the target has before we make any, and which extensions stay."""
    naming = run.settings.naming
    with connect(run.settings.target, run.role("schema")) as target:
        names = read_schema_names(target)
        used = read_used_extensions(
            target, [naming.schema(one) for one in catalog.schemas.values()]
        )
    run.store.write_kept(_USED_EXTENSIONS, json.dumps(sorted(used)))
    # Those with another name on the target are made by us (`mapping.create_schemas`).
    run.store.write_existing_schemas(
        oid
        for oid, name in catalog.schemas.items()
        if name in naming.renamed_schemas or name in names
    )


def own_schemas(run: Run, lists: RestoreLists, catalog: SourceCatalog) -> None:
    """Set the owners of the schemas that the target had before."""
    existing = {entry.object_oid for entry in lists.existing}
    owners = {
        run.settings.naming.schema(catalog.schemas[oid]): owner
        for oid, owner in catalog.schema_owners.items()
        if oid in existing
    }
    if owners and not run.settings.schema.no_owner:
        with connect(run.settings.target, run.role("schema")) as target:
            set_schema_owners(target, owners)


def restore(
    run: Run,
    archive: Archive,
    entries: list[Entry],
    name: str,
    *,
    extensions: Sequence[Extension] = (),
    check: str = "",
) -> None:
    """Restore entries, a transaction for some hundred of them; `extensions` may be among them.

    `check` is SQL that fails in such a transaction if it must not happen.
    """
    names = {extension.oid: extension.name for extension in extensions}
    # Filling views changes no schema, and may take hours.
    alone = "" if name == "refresh" else ALONE
    options = run.settings.schema.restore_options()
    if run.replaces:
        options += ["--clean", "--if-exists"]
    for number, (step, piece) in enumerate(_pieces(entries, name), start=1):
        if step in run.done:
            continue
        fence, done = record.fenced_step_sql(run.run_id, run.epoch, step)
        failpoint.hit(f"{name}.begin")
        created = [
            names[entry.object_oid]
            for entry in piece
            if entry.description == "EXTENSION" and entry.object_oid in names
        ]
        script = archive.script(piece, f"{name}-{number}", options)
        run_mapped(
            run,
            pin_versions(script, created, run.settings.requirements),
            f"restoring {name}",
            before=_OWN_CURRENCY + alone + fence + check,
            after=done,
        )
        run.done.add(step)
        failpoint.hit(f"{name}.done")


def can_refresh(
    run: Run,
    lists: RestoreLists,
    plan: Plan,
    recorded: Collection[record.PartKey],
    *,
    was_finished: bool,
) -> bool:
    """Whether materialized views can be filled: every row has its place, and the schema is whole,
    a part of which they may rest on. It is in a run that `was_finished`, whose records are gone."""
    planned = {(part.table_oid, part.number) for part in plan.every_part}
    return planned <= set(recorded) and (
        was_finished or all(step in run.done for step, _ in _pieces(lists.after, "post-data"))
    )


def refresh(run: Run, archive: Archive, lists: RestoreLists, plan: Plan) -> None:
    """Fill the materialized views: once in a run, and not while a crash of the target has emptied
    tables that they are made of."""
    unlogged = {table.oid for table in plan.catalog.tables if table.is_unlogged}
    parts = sum(len(plan.parts[oid]) for oid in unlogged)
    check = record.unlogged_parts_sql(run.run_id, unlogged, parts) if unlogged else ""
    restore(run, archive, lists.refresh, "refresh", check=check)


def _pieces(entries: list[Entry], name: str) -> list[tuple[str, list[Entry]]]:
    """The transactions, each with the step that it is recorded as."""
    pieces = chunks(entries)
    return [(f"{name} {at}/{len(pieces)}", piece) for at, piece in enumerate(pieces, start=1)]


def empty_shared_tables(run: Run, plan: Plan) -> None:
    """Empty the tables that several tasks fill: once in a run."""
    step = "empty shared tables"
    tables = plan.shared_tables()
    if step in run.done or not tables:
        return
    fence, done = record.fenced_step_sql(run.run_id, run.epoch, step)
    failpoint.hit("shared-tables.begin")
    statements = "".join(
        f"{empty_sql(table, is_guarded=table.oid in run.guarded)};\n" for table in tables
    )
    run_script(
        run.settings.target,
        statements.encode(),
        "emptying tables on the target",
        role=run.role("schema"),
        before=fence,
        after=done,
    )
    run.done.add(step)
    failpoint.hit("shared-tables.done")


def add_foreign_keys(run: Run, catalog: SourceCatalog) -> None:
    """All foreign keys, at once where they can't meet."""
    settings = run.settings
    pool = SessionPool(
        settings.target,
        run.role("constraint"),
        settings.restore_jobs,
        maintenance_work_mem=settings.maintenance_work_mem,
    )

    def add(key: ForeignKey) -> None:
        began = time.monotonic()
        failpoint.hit("foreign-key.begin")
        pool.submit(lambda connection: add_foreign_key(connection, key)).result()
        failpoint.hit("foreign-key.done")
        label = f"{key.schema}.{key.table} {key.name}"
        run.store.write_timing("foreign key", label, time.monotonic() - began, oid=key.oid)

    try:
        run_disjoint(
            catalog.foreign_keys, add, jobs=settings.restore_jobs, families=catalog.families
        )
    except BaseException:
        pool.close(cancel=True)
        raise
    pool.close()


def create_extensions(run: Run, catalog: SourceCatalog) -> None:
    """The source's extensions, by themselves."""
    with connect(run.settings.target, run.role("extensions")) as target:
        for extension in catalog.extensions:
            name, schema = ident(extension.name), ident(extension.schema)
            version = run.settings.requirements.get(extension.name)
            pin = f" VERSION {literal(version)}" if version else ""
            with translated(f"creating extension {extension.name}"):
                if not extension.schema.startswith("pg_"):
                    target.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
                target.execute(
                    f"CREATE EXTENSION IF NOT EXISTS {name} SCHEMA {schema}{pin} CASCADE".encode()
                )
