"""What the driver does to the target besides restoring the schema.

Invariant: only what the source has too is dropped or changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import psycopg

from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.postgres import catalog
from millrace.postgres.connect import connect, translated
from millrace.postgres.quote import ident, literal, qualified
from millrace.postgres.schemas import USER_SCHEMA

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

_KINDS = {"r": "TABLE", "p": "TABLE", "v": "VIEW", "m": "MATERIALIZED VIEW", "f": "FOREIGN TABLE"}


def read_schema_names(target: Connection) -> set[str]:
    """Schemas that are there already."""
    with translated("reading the target's schemas"):
        return {row[0] for row in target.execute("SELECT nspname FROM pg_namespace")}


def set_schema_owners(target: Connection, owners: Mapping[str, str]) -> None:
    """Give schemas that were there to the owners, by name, that they have on the source."""
    with translated("reading the target's schemas"):
        found = target.execute("SELECT nspname, pg_get_userbyid(nspowner) FROM pg_namespace")
        now = {schema: owner for schema, owner in found}
        roles = {row[0] for row in target.execute("SELECT rolname FROM pg_roles")}
    for schema, owner in owners.items():
        if now.get(schema) in (None, owner):
            continue
        reason = "it is not on the target"
        if owner in roles:
            try:
                with translated(f"setting the owner of schema {schema}"):
                    target.execute(f"ALTER SCHEMA {ident(schema)} OWNER TO {ident(owner)}")
                continue
            except ServerError as error:
                # A schema made by somebody with more rights: its owner is no reason to stop.
                if error.facts.get("sqlstate") != "42501":
                    raise
                reason = error.message
        log.warning(
            "schema %s stays with %s, on the source it is %s's: %s",
            schema,
            now[schema],
            owner,
            reason,
        )


def drop_existing(target: Connection, source: Dsn) -> None:
    """Drop the relations, event triggers and publications the source has too."""
    with connect(source, "drop-list") as connection, translated("reading the source's objects"):
        relations = connection.execute(
            "SELECT c.relkind, n.nspname, c.relname FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT c.relispartition"
            f" AND {USER_SCHEMA}"
            " AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.objid = c.oid"
            " AND e.classid = 'pg_class'::regclass AND e.deptype = 'e')"
        ).fetchall()
        triggers = connection.execute("SELECT evtname FROM pg_event_trigger").fetchall()
        publications = connection.execute("SELECT pubname FROM pg_publication").fetchall()
    with translated("dropping what the source has too"):
        there = {
            (schema, name): kind
            for kind, schema, name in target.execute(
                "SELECT c.relkind, n.nspname, c.relname FROM pg_class c"
                " JOIN pg_namespace n ON n.oid = c.relnamespace"
            )
        }
        for (name,) in triggers:
            target.execute(f"DROP EVENT TRIGGER IF EXISTS {ident(name)}")
        for (name,) in publications:
            target.execute(f"DROP PUBLICATION IF EXISTS {ident(name)}")
        for _, schema, name in relations:
            kind = _KINDS.get(there.get((schema, name), ""))
            if kind:
                target.execute(f"DROP {kind} IF EXISTS {qualified(schema, name)} CASCADE")


def set_database_properties(target: Connection, settings: CloneSettings) -> None:
    """ALTER DATABASE SET, ALTER ROLE IN DATABASE SET, and the database's comment."""
    with connect(settings.source, "properties") as source, translated("reading properties"):
        found = catalog.read_database_settings(source)
        comment = None if settings.schema.no_comments else catalog.read_database_comment(source)
    database = ident(target.info.dbname)
    roles = {row[0] for row in target.execute("SELECT rolname FROM pg_roles")}
    for role, values in found:
        if role is not None and role not in roles:
            log.warning("settings of role %s are left out: it is not on the target", role)
            continue
        head = (
            f"ALTER ROLE {ident(role)} IN DATABASE {database}"
            if role
            else f"ALTER DATABASE {database}"
        )
        for value in values:
            with translated(f"setting {value.partition('=')[0]} on the target database"):
                target.execute(f"{head} SET {catalog.render_setting(value)}")
    if comment is not None:
        with translated("commenting on the target database"):
            target.execute(f"COMMENT ON DATABASE {database} IS {literal(comment)}")
