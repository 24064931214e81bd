"""What the driver does to the target besides restoring the schema.

Invariant: only what the source has too, and what is cloned of that, is dropped or changed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import psycopg

from millrace.clone.settings import CloneSettings
from millrace.errors import ServerError
from millrace.filter.decide import PG_CLASS_OID, Key
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.catalog.schemas import USER_PUBLICATION, USER_SCHEMA
from millrace.postgres.quote import ident, literal, qualified
from millrace.postgres.schema_rename import ALONE
from millrace.postgres.wire.connect import connect, translated
from millrace.route import Route

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]
# Schema and name of a relation.
Name = tuple[str, str]

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


def drop_existing(target: Connection, route: Route, excluded: Collection[Key] = ()) -> None:
    """Drop the relations, event triggers, publications and subscriptions the source has too, but
    for those that filters leave out of the clone."""
    with connect(route.source, "drop-list") as connection, translated("reading the objects"):
        found = {
            route.naming.target(schema, name): ((PG_CLASS_OID, oid) in excluded, is_partition)
            for oid, schema, name, is_partition in connection.execute(_RELATIONS)
        }
        others = [
            (kind, name)
            for kind, catalog_oid, oid, name in connection.execute(_OTHERS)
            if (catalog_oid, oid) not in excluded
        ]
        subscriptions = {
            name
            for name, catalog_oid, oid in connection.execute(_RESTORED_SUBSCRIPTIONS)
            if (catalog_oid, oid) not in excluded
        }
    spared = {name for name, (is_excluded, _) in found.items() if is_excluded}
    with translated("dropping what the source has too"):
        there = {
            (schema, name): kind
            for kind, schema, name in target.execute(
                "SELECT c.relkind, n.nspname, c.relname FROM pg_class c"
                " JOIN pg_namespace n ON n.oid = c.relnamespace"
            )
        }
        for kind, name in others:
            target.execute(f"DROP {kind} IF EXISTS {ident(name)}")
        for name, *_ in target.execute(_SUBSCRIPTIONS).fetchall():
            if name in subscriptions:
                _drop_subscription(target, name)
        _detach(target, spared, found.keys() - spared)
        for full_name, (is_excluded, is_partition) in found.items():
            kind = _KINDS.get(there.get(full_name, ""))
            if kind and not is_excluded and not is_partition:
                target.execute(f"DROP {kind} IF EXISTS {qualified(*full_name)} CASCADE")


def read_shared_tables(target: Connection, route: Route) -> list[str]:
    """The tables of the target, by name, that the source has too."""
    with connect(route.source, "drop-list") as connection, translated("reading the objects"):
        rows = connection.execute(_RELATIONS)
        names = {route.naming.target(schema, name).label for _, schema, name, _ in rows}
    with translated("reading the target's tables"):
        found = target.execute(
            "SELECT n.nspname || '.' || c.relname FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p')"
        )
        return sorted(name for (name,) in found if name in names)


def _drop_subscription(target: Connection, name: str) -> None:
    """Without its slot: on the publisher that is the source's, which keeps using it."""
    target.execute(f"ALTER SUBSCRIPTION {ident(name)} DISABLE")
    target.execute(f"ALTER SUBSCRIPTION {ident(name)} SET (slot_name = NONE)")
    target.execute(f"DROP SUBSCRIPTION {ident(name)}")


def _detach(target: Connection, spared: Collection[Name], dropped: Collection[Name]) -> None:
    """Part tables that stay from parents that go: DROP TABLE would take them along."""
    for schema, name, is_partition, *parent in target.execute(_CHILDREN).fetchall():
        if (schema, name) in spared and tuple(parent) in dropped:
            child, above = qualified(schema, name), qualified(*parent)
            target.execute(
                f"ALTER TABLE {above} DETACH PARTITION {child}"
                if is_partition
                else f"ALTER TABLE {child} NO INHERIT {above}"
            )


# Not those of extensions.
_RELATIONS = f"""
SELECT c.oid::int8, n.nspname, c.relname, c.relispartition
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND {USER_SCHEMA}
   AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.objid = c.oid
                   AND e.classid = 'pg_class'::regclass AND e.deptype = 'e')"""

_OTHERS = f"""
SELECT 'EVENT TRIGGER', 'pg_event_trigger'::regclass::oid::int8, oid::int8, evtname
  FROM pg_event_trigger
UNION ALL
SELECT 'PUBLICATION', 'pg_publication'::regclass::oid::int8, p.oid::int8, p.pubname
  FROM pg_publication p WHERE {USER_PUBLICATION}"""

# Their names are what everyone may read.
_SUBSCRIPTIONS = """
SELECT s.subname, 'pg_subscription'::regclass::oid::int8, s.oid::int8
  FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid
 WHERE d.datname = current_database()"""
# pg_dump leaves them out for anyone else: what does not come back is not dropped.
_RESTORED_SUBSCRIPTIONS = f"{_SUBSCRIPTIONS} AND current_setting('is_superuser') = 'on'"

_CHILDREN = """
SELECT n.nspname, c.relname, c.relispartition, pn.nspname, p.relname
  FROM pg_inherits i
  JOIN pg_class c ON c.oid = i.inhrelid AND c.relkind IN ('r', 'p', 'f')
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_class p ON p.oid = i.inhparent
  JOIN pg_namespace pn ON pn.oid = p.relnamespace"""


def set_database_properties(
    target: Connection, settings: CloneSettings, *, is_shared: bool = False
) -> None:
    """ALTER DATABASE SET, ALTER ROLE IN DATABASE SET, and the database's comment. In a database
    that is shared with others, what is set to something else stays, and is reported."""
    with connect(settings.source, "properties") as source, translated("reading properties"):
        found = catalog.read_database_settings(source)
        comment = None if settings.schema.no_comments else catalog.read_database_comment(source)
    with target.transaction():
        target.execute(ALONE)
        _set_values(target, settings, found, is_shared=is_shared)
        if comment is not None:
            before = catalog.read_database_comment(target) if is_shared else None
            if before not in (None, comment):
                log.warning("the comment on the target database stays: others use it too")
                return
            with translated("commenting on the target database"):
                target.execute(
                    f"COMMENT ON DATABASE {ident(target.info.dbname)} IS {literal(comment)}"
                )


def _set_values(
    target: Connection,
    settings: CloneSettings,
    found: Iterable[tuple[str | None, list[str]]],
    *,
    is_shared: bool,
) -> None:
    database = ident(target.info.dbname)
    roles = {row[0] for row in target.execute("SELECT rolname FROM pg_roles")}
    before = {
        (role, value.partition("=")[0]): value
        for role, values in (catalog.read_database_settings(target) if is_shared else ())
        for value in values
    }
    for role, values in found:
        if role is not None and role not in roles:
            log.warning("settings of role %s are left out: it is not on the target", role)
            continue
        head = (
            f"ALTER ROLE {ident(role)} IN DATABASE {database}"
            if role
            else f"ALTER DATABASE {database}"
        )
        for value in map(settings.naming.setting, values):
            name = value.partition("=")[0]
            # A server quotes the names of a search path only where it must.
            if before.get((role, name), value).replace('"', "") != value.replace('"', ""):
                log.warning(
                    "%s stays as it is on the target database: others use it too; the source's "
                    "would be: %s SET %s",
                    name,
                    head,
                    catalog.render_setting(value),
                )
                continue
            with translated(f"setting {name} on the target database"):
                target.execute(f"{head} SET {catalog.render_setting(value)}")
