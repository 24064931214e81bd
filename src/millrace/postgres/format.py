"""The format version of a table of ours on the target: its comment.

Invariant: what is written in a format that this program does not know is never read or changed. A
table without a version was made by a release before there were any, and is format 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from millrace.errors import WorkDirError
from millrace.postgres.quote import literal

Connection = psycopg.Connection[tuple[Any, ...]]

_COMMENT: Final = "millrace format"


@dataclass(frozen=True)
class Format:
    """A table, and the newest version of it that this program knows."""

    table: str
    version: int

    def read(self, connection: Connection) -> int | None:
        """The version that is there; None without the table. Raises for a newer one."""
        row = connection.execute(
            "SELECT c IS NOT NULL, obj_description(c, 'pg_class') FROM to_regclass(%s) AS c",
            (self.table,),
        ).fetchone()
        return self.parse(row[1]) if row and row[0] else None

    def parse(self, comment: str | None) -> int:
        """The version in the table's comment. Raises for a newer one."""
        found = re.fullmatch(rf"{_COMMENT} (\d+)", comment or "")
        version = int(found[1]) if found else 1
        if version > self.version:
            raise newer_format(f"table {self.table} on the target", version, self.version)
        return version

    def write_sql(self) -> str:
        """Say it, in the statements that make the table; who does not own it can't."""
        text = literal(f"{_COMMENT} {self.version}")
        return f"""DO $millrace$ BEGIN
    IF EXISTS (SELECT FROM pg_class c WHERE c.oid = '{self.table}'::regclass
               AND pg_has_role(c.relowner, 'USAGE')
               AND obj_description(c.oid, 'pg_class') IS DISTINCT FROM {text}) THEN
        COMMENT ON TABLE {self.table} IS {text};
    END IF;
END $millrace$;"""


def newer_format(what: str, version: int, known: int) -> WorkDirError:
    """For a directory, a spool or a table of ours alike."""
    return WorkDirError(
        f"{what} has format {version}, this millrace knows formats up to {known}",
        hint="it was made by a newer release: use that one, or a newer one still",
        version=version,
    )
