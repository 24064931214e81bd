"""All databases of a server: each is a clone of its own.

Invariant: every database has its own run, in a directory of its own, under a snapshot of its own;
a database that the target has already is used as it is.

There is no instant that all of them share: PostgreSQL has no snapshot over several databases.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from millrace.clone.directory import catalog_path
from millrace.clone.ready import find_dump_tools
from millrace.clone.schema.roles import copy_roles
from millrace.clone.settings import CloneSettings
from millrace.postgres.catalog.inventory import read_databases
from millrace.postgres.quote import ident, literal
from millrace.postgres.wire.connect import connect, resolve, translated

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]
PROVIDERS = {"c": "libc", "i": "icu", "b": "builtin"}


def plan_databases(settings: CloneSettings) -> dict[str, CloneSettings]:
    """For each database of the source's server, the largest first, what its clone is asked for."""
    source, target = resolve(settings.source), resolve(settings.target)
    with connect(source, "databases") as connection, translated("reading the databases"):
        names = [database.name for database in read_databases(connection)]
        closed = connection.execute(
            "SELECT datname FROM pg_database WHERE datname <> ALL(%s)"
            " AND datname NOT IN ('template0', 'template1') ORDER BY 1",
            (names,),
        ).fetchall()
    for (name,) in closed:
        log.warning("database %s is left out: it is a template, or closed to connections", name)
    return {
        name: _settings_of(
            replace(
                settings,
                route=replace(
                    settings.route,
                    source=source.with_(dbname=name),
                    target=target.with_(dbname=name),
                    directory=directory_of(settings.directory, name),
                ),
                roles=False,  # they belong to the whole server, and are copied once
            )
        )
        for name in names
    }


def directory_of(directory: Path, name: str) -> Path:
    """Where the run of a database is kept; any name is one path component."""
    return directory / quote(name, safe=" ").replace(".", "%2E")


def _settings_of(settings: CloneSettings) -> CloneSettings:
    """Whoever goes on, or starts anew, begins those databases that were not begun."""
    is_begun = catalog_path(settings.directory).exists()
    return replace(
        settings, resume=settings.resume and is_begun, restart=settings.restart and is_begun
    )


def read_missing(settings: CloneSettings, names: Mapping[str, object]) -> list[str]:
    """The databases that the target lacks."""
    with connect(settings.target, "databases") as target, translated("reading the databases"):
        known = {row[0] for row in target.execute("SELECT datname FROM pg_database")}
    return [name for name in names if name not in known]


def prepare_target(settings: CloneSettings, missing: list[str]) -> None:
    """Roles, if they are asked for, then the databases that the target lacks."""
    with (
        connect(settings.source, "databases") as source,
        connect(settings.target, "databases") as target,
    ):
        if settings.roles:
            versions = (c.info.server_version // 10000 for c in (source, target))
            tools = find_dump_tools(*versions, tls=source.pgconn.ssl_in_use)
            copy_roles(tools, settings, target)
        with translated("reading the target's roles"):
            roles = {row[0] for row in target.execute("SELECT rolname FROM pg_roles")}
        for name in missing:
            with translated(f"reading the properties of database {name}"):
                row = source.execute(
                    "SELECT to_jsonb(d), pg_encoding_to_char(d.encoding), pg_get_userbyid(d.datdba)"
                    " FROM pg_database d WHERE datname = %s",
                    (name,),
                ).fetchone()
            if row is None:
                continue  # dropped meanwhile: connecting to it will show that
            facts, encoding, owner = row
            if settings.schema.no_owner or owner not in roles:
                owner = None
            log.info("creating database %s", name)
            statement = create_sql(
                facts, encoding, owner, target_major=target.info.server_version // 10000
            )
            with translated(f"creating database {name} (or create it yourself: it is used then)"):
                target.execute(statement.encode())


def create_sql(
    facts: Mapping[str, Any], encoding: str, owner: str | None, *, target_major: int
) -> str:
    """CREATE DATABASE with the encoding and the locale of a row of pg_database."""
    options = {
        "TEMPLATE": "template0",
        "ENCODING": literal(encoding),
        "LC_COLLATE": literal(facts["datcollate"]),
        "LC_CTYPE": literal(facts["datctype"]),
    }
    if owner is not None:
        options["OWNER"] = ident(owner)
    if facts["datconnlimit"] >= 0:
        options["CONNECTION LIMIT"] = str(facts["datconnlimit"])
    # Version 15 has other providers than libc, 16 rules for ICU, 17 one name for all locales.
    provider = facts.get("datlocprovider", "c")
    if target_major >= 15:
        options["LOCALE_PROVIDER"] = PROVIDERS[provider]
    locale = str(facts.get("datlocale") or facts.get("daticulocale"))
    if provider == "i":
        options["ICU_LOCALE"] = literal(locale)
        if facts.get("daticurules"):
            options["ICU_RULES"] = literal(facts["daticurules"])
    elif provider == "b":
        options["BUILTIN_LOCALE"] = literal(locale)
    given = " ".join(f"{name} {value}" for name, value in options.items())
    return f"CREATE DATABASE {ident(facts['datname'])} {given}"
