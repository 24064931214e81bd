"""The target under the names of a source, around one command; schemas that come and go with it.

Invariant: between `enter` and `leave` a name of the source means the source's object and nothing of
the target's own; after `leave` every schema of the source has the name that its naming gives it,
also those that the command has created or renamed, and these are written down with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg.pq.abc import PGconn

from millrace.name import Naming
from millrace.postgres.own_schema import DDL_SCHEMA, has_table
from millrace.postgres.quote import ident, literal
from millrace.postgres.schema_rename import LOCK_SECONDS, rename_back_sql, rename_in_sql
from millrace.postgres.wire.connect import translated
from millrace.postgres.wire.libpq import execute, fetch

Connection = psycopg.Connection[tuple[Any, ...]]

SCHEMA_DEFINITION: Final = """(
    stream text NOT NULL,
    schema_name text NOT NULL,
    target_name text NOT NULL,
    PRIMARY KEY (stream, schema_name)
)"""
# A transaction of another source may be in the middle of the same; each of its statements waits for
# a lock two seconds at most, but rows come with it.
_ALONE_SECONDS: Final = 60
# What a schema of the source that is left out is called on the target: nothing.
_NOWHERE: Final = "_millrace_out_"
_SCHEMAS: Final = (
    "SELECT oid, nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <>"
    " 'information_schema'"
)


class Renaming:
    """For one stream, on one session, command after command."""

    def __init__(
        self,
        session: PGconn,
        stream: str,
        naming: Naming,
        out: Collection[str],
        readers: Sequence[str],
    ) -> None:
        self._session = session
        self._stream = stream
        self._naming = naming
        self._out = frozenset(out)
        self._readers = readers
        self._inside: Naming = Naming()
        self._extensions: Mapping[str, str] = {}
        self._before: set[str] = set()
        # By OID: the source's schemas as the command found them.
        self._ours: dict[str, str] = {}

    def enter(self, schemas: Collection[str], extensions: Mapping[str, str]) -> None:
        """`schemas`: those that the command names, of which some may be new."""
        if self._naming.is_identity:
            self._look_identity()
            return
        pairs = dict(self._naming.schemas) | read_schemas(self._session, self._stream)
        pairs |= {one: self._naming.schema(one) for one in schemas if one and one not in pairs}
        pairs |= {one: f"{_NOWHERE}{number}" for number, one in enumerate(sorted(self._out))}
        self._inside = Naming({old: new for old, new in pairs.items() if _is_users(old)})
        self._extensions = extensions
        self._before = {oid for oid, _ in self._read()}
        execute(self._session, f"SET LOCAL lock_timeout = '{_ALONE_SECONDS}s'")
        execute(self._session, rename_in_sql(self._inside, extensions) or "SELECT")
        execute(self._session, f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
        names = set(self._inside.schemas) - self._out
        self._ours = {oid: name for oid, name in self._read() if name in names}

    def _look_identity(self) -> None:
        execute(self._session, f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
        found = self._read()
        self._before = {oid for oid, _ in found}
        self._ours = {oid: name for oid, name in found if name not in self._out}

    @property
    def schemas(self) -> list[str]:
        """Those of the source, by the names they have inside."""
        return sorted(self._ours.values())

    @property
    def oids(self) -> list[str]:
        return sorted(self._ours)

    def leave(self) -> None:
        """Back to the target's names, those too that were created or renamed meanwhile."""
        if self._naming.is_identity:
            execute(self._session, "SET LOCAL lock_timeout = 0")
            return
        now = dict(self._read())
        came = {
            name
            for oid, name in now.items()
            if oid not in self._before or (oid in self._ours and self._ours[oid] != name)
        }
        gone = {name for oid, name in self._ours.items() if oid not in now} - set(now.values())
        pairs = dict(self._inside.schemas)
        pairs |= {one: self._naming.schema(one) for one in came}
        execute(self._session, rename_back_sql(Naming(pairs), self._extensions) or "SELECT")
        execute(self._session, "SET LOCAL lock_timeout = 0")
        self._write(came, gone)

    def _write(self, came: Collection[str], gone: Collection[str]) -> None:
        for name in sorted(came):
            values = (self._stream, name, self._naming.schema(name))
            execute(
                self._session,
                f"INSERT INTO {DDL_SCHEMA.label} VALUES ({', '.join(map(literal, values))})"
                " ON CONFLICT (stream, schema_name) DO UPDATE SET target_name ="
                " excluded.target_name",
            )
            self._grant(self._naming.schema(name))
        for name in sorted(gone):
            execute(
                self._session,
                f"DELETE FROM {DDL_SCHEMA.label} WHERE stream = {literal(self._stream)}"
                f" AND schema_name = {literal(name)}",
            )

    def _grant(self, schema: str) -> None:
        """What `consolidate.readers` grants on schemas that were copied."""
        if self._readers:
            roles, name = ", ".join(map(ident, self._readers)), ident(schema)
            execute(
                self._session,
                f"GRANT USAGE ON SCHEMA {name} TO {roles};"
                f" GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO {roles};"
                f" ALTER DEFAULT PRIVILEGES IN SCHEMA {name} GRANT SELECT ON TABLES TO {roles}",
            )

    def _read(self) -> list[tuple[str, str]]:
        return [(str(oid), str(name)) for oid, name in fetch(self._session, _SCHEMAS)]


def read_schemas(session: PGconn, stream: str) -> dict[str, str]:
    """The schemas that came with DDL, and what they are called on the target."""
    rows = fetch(
        session,
        f"SELECT schema_name, target_name FROM {DDL_SCHEMA.label}"
        f" WHERE stream = {literal(stream)} ORDER BY 1",
    )
    return {str(old): str(new) for old, new in rows}


def read_target_schemas(connection: Connection, prefix: str) -> list[str]:
    """What the target calls the schemas that came with DDL, of streams whose names begin so."""
    with translated("reading schemas that came with DDL"):
        if not has_table(connection, DDL_SCHEMA):
            return []
        query = f"SELECT target_name FROM {DDL_SCHEMA.label} WHERE starts_with(stream, %s)"
        return [name for (name,) in connection.execute(query, (prefix,))]


def _is_users(schema: str) -> bool:
    return not schema.startswith("pg_") and schema != "information_schema"
