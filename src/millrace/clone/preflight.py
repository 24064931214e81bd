"""Are both servers ready? Every problem in one report, before anything is touched.

Invariant: reads only. Each problem comes with what fixes it, a statement where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import psycopg

from millrace.clone.naming_check import check_naming
from millrace.clone.problem import Problem, render_problems
from millrace.clone.settings import CloneSettings
from millrace.clone.shared_database import check_database, read_filled_schemas
from millrace.clone.step import Step
from millrace.errors import PreflightError
from millrace.filter.apply import read_left_out_extensions, read_left_out_schemas
from millrace.postgres.catalog.inventory import Available, read_available_extensions
from millrace.postgres.catalog.schemas import OWN_SCHEMA, USER_SCHEMA
from millrace.postgres.own_schema import is_foreign
from millrace.postgres.quote import ident, literal, qualified
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

SOURCE_VERSIONS = range(13, 19)
TARGET_VERSIONS = range(14, 19)
# Names listed one by one in a report; more are counted.
LISTED = 5


def check(
    source: Connection, target: Connection, settings: CloneSettings, *, continues: bool = False
) -> list[Problem]:
    """Every problem and warning of both servers; a continued run finds its own work there."""
    with translated("checking the servers"):
        problems = [
            *_check_versions(source, target),
            *_check_same_database(source, target),
            *_check_source_rights(source),
            *_check_source_policies(source),
            *_check_connections(source, target, settings),
            *_check_locks(source),
            *_check_target_rights(target),
            *_check_record_schema(source, target, settings),
            *([] if continues else _check_target_empty(source, target, settings)),
            *check_database(source, target, settings, continues=continues),
            *_check_extensions(source, target, settings),
            *check_naming(source, target, settings, continues=continues),
            *_check_roles(source, target, settings),
            *_check_owners(source, target, settings),
            *_check_large_object_rights(source, settings),
            *_check_standby(source),
            *_check_tablespaces(source, target, settings),
            *_check_encoding(source, target),
        ]
    return problems


def raise_problems(problems: Iterable[Problem]) -> None:
    """PreflightError with every problem, if there is any that is not a warning."""
    found = [problem for problem in problems if not problem.is_warning]
    if not found:
        return
    count, lines = render_problems(found)
    raise PreflightError(
        f"{count} found before anything was touched:\n{lines}",
        hint="fix them, then run the same command again",
        problems=[asdict(problem) for problem in found],
    )


def _check_versions(source: Connection, target: Connection) -> Iterable[Problem]:
    majors = [c.info.server_version // 10000 for c in (source, target)]
    for side, major, versions in zip(
        ("source", "target"), majors, (SOURCE_VERSIONS, TARGET_VERSIONS), strict=True
    ):
        if major not in versions:
            yield Problem(
                side,
                f"PostgreSQL {major} is not supported",
                f"use a server of version {versions[0]} to {versions[-1]}",
                is_warning=major > versions[-1],
            )
    if majors[1] < majors[0]:
        yield Problem(
            "target",
            f"PostgreSQL {majors[1]} is older than the source's {majors[0]}: what the source "
            "uses of newer features will fail to restore",
            f"use a target of version {majors[0]} or later",
            is_warning=True,
        )


def _check_same_database(source: Connection, target: Connection) -> Iterable[Problem]:
    query = (
        "SELECT pg_postmaster_start_time(), oid, pg_is_in_recovery() FROM pg_database"
        " WHERE datname = current_database()"
    )
    one, other = source.execute(query).fetchone(), target.execute(query).fetchone()
    if one == other:
        yield Problem(
            "target",
            "source and target are the same database",
            "check the two connection strings",
        )
    if other and other[2]:
        yield Problem("target", "the server is a standby: read only", "connect to its primary")


def _check_source_rights(source: Connection) -> Iterable[Problem]:
    for kind, right in (("r", "SELECT"), ("S", "SELECT")):
        rows = source.execute(
            f"""SELECT n.nspname, c.relname FROM pg_class c
                 JOIN pg_namespace n ON n.oid = c.relnamespace
                 WHERE c.relkind = '{kind}' AND c.relpersistence <> 't' AND {USER_SCHEMA}
                 AND NOT (has_schema_privilege(n.oid, 'USAGE')
                     AND has_table_privilege(c.oid, '{right}'))
                 AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.objid = c.oid
                     AND e.classid = 'pg_class'::regclass AND e.deptype = 'e')
                 ORDER BY 1, 2"""
        ).fetchall()
        if not rows:
            continue
        what = "table" if kind == "r" else "sequence"
        user = ident(source.info.user)
        yield Problem(
            "source",
            f"no right to read {_some([f'{s}.{n}' for s, n in rows], what)}",
            "; ".join(
                f"GRANT {right} ON {'SEQUENCE ' if kind == 'S' else ''}{qualified(s, n)} TO {user}"
                for s, n in rows[:LISTED]
            )
            + ("; ..." if len(rows) > LISTED else "")
            + "; and GRANT USAGE ON SCHEMA where missing; or, from 14 on:"
            f" GRANT pg_read_all_data TO {user}",
        )


def _check_source_policies(source: Connection) -> Iterable[Problem]:
    rows = source.execute(
        f"""SELECT n.nspname || '.' || c.relname FROM pg_class c
             JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE c.relkind = 'r' AND {USER_SCHEMA} AND row_security_active(c.oid)
             ORDER BY 1"""
    ).fetchall()
    # row_security is off in our sessions, and row_security_active says what would happen then:
    # it is true where a query would be refused.
    if rows:
        yield Problem(
            "source",
            f"row-level security hides rows of {_some([r[0] for r in rows], 'table')}",
            f"ALTER ROLE {ident(source.info.user)} BYPASSRLS, or connect as the owner",
        )


def _check_connections(
    source: Connection, target: Connection, settings: CloneSettings
) -> Iterable[Problem]:
    needs = settings.connections_needed()
    for side, connection, need in zip(("source", "target"), (source, target), needs, strict=True):
        row = connection.execute(
            "SELECT current_setting('max_connections')::int"
            " - current_setting('superuser_reserved_connections')::int"
            " - coalesce(current_setting('reserved_connections', true)::int, 0),"
            " (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')"
        ).fetchone()
        assert row is not None
        room = row[0] - row[1]
        if room < need:
            yield Problem(
                side,
                f"the jobs need {need} connections, {max(room, 0)} are free",
                f"ALTER SYSTEM SET max_connections = {row[1] + need + 10} and restart the server, "
                "or use fewer jobs (--table-jobs, --index-jobs, --restore-jobs, "
                "--large-objects-jobs)",
            )


def _check_locks(source: Connection) -> Iterable[Problem]:
    row = source.execute(
        f"""SELECT current_setting('max_locks_per_transaction')::int
                 * (current_setting('max_connections')::int
                    + current_setting('max_prepared_transactions')::int),
                 current_setting('max_locks_per_transaction')::int,
                 (SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE c.relkind IN ('r', 'p') AND {USER_SCHEMA})"""
    ).fetchone()
    assert row is not None
    slots, setting, tables = row
    # We lock every table against DROP and TRUNCATE, and so does pg_dump beside us.
    if 2 * tables > slots * 0.9:
        wanted = max(64, -(-setting * 2 * tables * 10 // (slots * 9)) + 16)
        yield Problem(
            "source",
            f"{tables} tables have to be locked against DROP, the lock table has {slots} slots",
            f"ALTER SYSTEM SET max_locks_per_transaction = {wanted} and restart the server",
        )


def _check_target_rights(target: Connection) -> Iterable[Problem]:
    row = target.execute(
        "SELECT has_database_privilege(current_database(), 'CREATE'),"
        " has_database_privilege(current_database(), 'TEMP'), current_database(), current_user"
    ).fetchone()
    assert row is not None
    may_create, may_temp, database, user = row
    for allowed, right in ((may_create, "CREATE"), (may_temp, "TEMP")):
        if not allowed:
            yield Problem(
                "target",
                f"no right {right} on database {database}",
                f"GRANT {right} ON DATABASE {ident(database)} TO {ident(user)}",
            )


def _check_record_schema(
    source: Connection, target: Connection, settings: CloneSettings
) -> Iterable[Problem]:
    """A clone keeps its records in a schema of the target, and drops that when it is done."""
    rename = f"ALTER SCHEMA {OWN_SCHEMA} RENAME TO ..."
    if is_foreign(source) and OWN_SCHEMA not in read_left_out_schemas(source, settings.filters):
        yield Problem(
            "source",
            f"it has a schema {OWN_SCHEMA} of its own: on the target, a clone keeps its records "
            "in a schema of that name",
            f"{rename}; or leave it out: [exclude-schema] {OWN_SCHEMA} in --filters",
        )
    if is_foreign(target):
        yield Problem(
            "target",
            f"it has a schema {OWN_SCHEMA} that millrace did not make, where a clone keeps its "
            "records",
            rename,
        )


def _check_target_empty(
    source: Connection, target: Connection, settings: CloneSettings
) -> Iterable[Problem]:
    """The schemas that are filled are empty. Large objects alone are in nobody's way."""
    if settings.drop_if_exists or settings.steps == {Step.LARGE_OBJECTS}:
        return
    rows = target.execute(
        f"""SELECT n.nspname || '.' || c.relname FROM pg_class c
             JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f') AND c.relpersistence <> 't'
             AND {USER_SCHEMA} AND n.nspname = ANY(%s)
             AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.objid = c.oid
                 AND e.classid = 'pg_class'::regclass AND e.deptype = 'e')
             ORDER BY 1""",
        (list(read_filled_schemas(source, settings)),),
    ).fetchall()
    if rows:
        yield Problem(
            "target",
            "schemas that the source has too are not empty: they have "
            f"{_some([r[0] for r in rows], 'relation')}",
            "give an empty database (CREATE DATABASE ...), or --rename-schema to fill schemas of "
            "other names, or --drop-if-exists to replace what the source has too",
        )


def _check_extensions(
    source: Connection, target: Connection, settings: CloneSettings
) -> Iterable[Problem]:
    if settings.schema.skip_extensions:
        return
    available = read_available_extensions(target)
    left_out = read_left_out_extensions(source, settings.filters)
    rows = source.execute("SELECT extname FROM pg_extension ORDER BY 1").fetchall()
    for (name,) in rows:
        if name in left_out:
            continue
        if name not in available:
            yield Problem(
                "target",
                f"extension {name} is not available",
                "install its package on the target server; or, if nothing depends on it, "
                "[exclude-extension] in --filters, or --skip-extensions",
            )
        elif name in settings.requirements:
            yield from _check_version(name, settings.requirements[name], available[name])
    unknown = sorted(settings.requirements.keys() - {name for (name,) in rows})
    if unknown:
        yield Problem(
            "source",
            f"--requirements names what it does not have: {_some(unknown, 'extension')}",
            "check the names: `millrace list extensions`",
            is_warning=True,
        )


def _check_version(name: str, wanted: str, offered: Available) -> Iterable[Problem]:
    """--requirements can be met, and is not broken already."""
    if offered.installed_version not in (None, wanted):
        yield Problem(
            "target",
            f"extension {name} has version {offered.installed_version} there, "
            f"--requirements says {wanted}",
            f"ALTER EXTENSION {ident(name)} UPDATE TO {literal(wanted)}, or DROP EXTENSION",
        )
    elif wanted not in offered.versions:
        yield Problem(
            "target",
            f"extension {name} is not available in version {wanted}",
            f"install that version's package, or require one of {', '.join(offered.versions)}",
        )


def _check_roles(
    source: Connection, target: Connection, settings: CloneSettings
) -> Iterable[Problem]:
    schema = settings.schema
    if settings.roles or (schema.no_owner and schema.no_acl):
        return
    kinds = ("" if schema.no_owner else "o") + ("" if schema.no_acl else "ar")
    needed = _owners(source, kinds)
    known = {row[0] for row in target.execute("SELECT rolname FROM pg_roles")}
    missing = sorted(needed - known)
    if missing:
        yield Problem(
            "target",
            f"owners or grantees of the source do not exist: {_some(missing, 'role')}",
            "; ".join(f"CREATE ROLE {ident(role)}" for role in missing)
            + "; or --roles to copy roles, or --no-owner and --no-acl",
        )


def _owners(source: Connection, kinds: str) -> set[str]:
    """Roles that own things (kind o), have grants (a) or policies (r) in this database."""
    # pg_shdepend does not list the first superuser, who usually owns most.
    rows = source.execute(
        "SELECT pg_get_userbyid(s.refobjid) FROM pg_shdepend s JOIN pg_database d"
        " ON d.oid = s.dbid AND d.datname = current_database()"
        " WHERE s.refclassid = 'pg_authid'::regclass AND strpos(%(kinds)s, s.deptype) > 0"
        " UNION SELECT pg_get_userbyid(relowner) FROM pg_class WHERE strpos(%(kinds)s, 'o') > 0"
        f" AND relnamespace IN (SELECT oid FROM pg_namespace n WHERE {USER_SCHEMA})",
        {"kinds": kinds},
    )
    return {row[0] for row in rows}


def _check_owners(
    source: Connection, target: Connection, settings: CloneSettings
) -> Iterable[Problem]:
    """ALTER ... OWNER TO needs membership in the new owner."""
    if settings.schema.no_owner:
        return
    owners = _owners(source, "o")
    rows = target.execute(
        "SELECT rolname FROM pg_roles WHERE rolname = ANY(%s) AND NOT pg_has_role(oid, 'MEMBER')"
        " ORDER BY 1",
        (sorted(owners),),
    ).fetchall()
    if rows:
        names = [row[0] for row in rows]
        user = ident(target.info.user)
        yield Problem(
            "target",
            f"{target.info.user} is not a member of {_some(names, 'role')}, so ALTER ... OWNER TO"
            " would fail",
            "; ".join(f"GRANT {ident(name)} TO {user}" for name in names) + "; or --no-owner",
        )


def _check_large_object_rights(source: Connection, settings: CloneSettings) -> Iterable[Problem]:
    if settings.skip_large_objects:
        return
    row = source.execute(
        "SELECT count(*), min(oid)::int8 FROM pg_largeobject_metadata m"
        " WHERE NOT pg_has_role(m.lomowner, 'USAGE') AND NOT EXISTS ("
        " SELECT FROM aclexplode(m.lomacl) a WHERE a.privilege_type = 'SELECT' AND"
        " (a.grantee = 0 OR pg_has_role(a.grantee, 'USAGE')))"
    ).fetchone()
    if row and row[0]:
        user = ident(source.info.user)
        yield Problem(
            "source",
            f"no right to read {row[0]} large objects, the first is {row[1]}",
            f"GRANT SELECT ON LARGE OBJECT {row[1]}, ... TO {user}, or --skip-large-objects",
        )


def _check_standby(source: Connection) -> Iterable[Problem]:
    row = source.execute(
        "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE pg_is_in_recovery() AND c.relkind = 'r' AND c.relpersistence = 'u'"
        f" AND {USER_SCHEMA}"
    ).fetchone()
    if row and row[0]:
        yield Problem(
            "source",
            f"it is a standby: {row[0]} unlogged tables can't be read there and arrive empty",
            "copy from the primary if their rows matter",
            is_warning=True,
        )


def _check_tablespaces(
    source: Connection, target: Connection, settings: CloneSettings
) -> Iterable[Problem]:
    if settings.schema.no_tablespaces:
        return
    used = {
        row[0]
        for row in source.execute(
            "SELECT DISTINCT t.spcname FROM pg_class c JOIN pg_tablespace t"
            " ON t.oid = c.reltablespace WHERE t.spcname !~ '^pg_'"
        )
    }
    known = {row[0] for row in target.execute("SELECT spcname FROM pg_tablespace")}
    for name in sorted(used - known):
        yield Problem(
            "target",
            f"tablespace {name} does not exist",
            f"CREATE TABLESPACE {ident(name)} LOCATION '...', or --no-tablespaces",
        )


def _check_encoding(source: Connection, target: Connection) -> Iterable[Problem]:
    query = "SELECT current_setting('server_encoding')"
    one, other = (str((c.execute(query).fetchone() or ("",))[0]) for c in (source, target))
    if one != other:
        yield Problem(
            "target",
            f"its encoding is {other}, the source's is {one}: text is converted, and a character "
            f"that {other} lacks stops the copy",
            f"CREATE DATABASE ... ENCODING '{one}' TEMPLATE template0",
            is_warning=True,
        )


def _some(names: list[str], noun: str) -> str:
    shown = ", ".join(names[:LISTED])
    if len(names) == 1:
        return f"{noun} {shown}"
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {noun}s: {shown}{more}"
