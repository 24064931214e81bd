"""Extensions of the source on the target: one for all, created and brought forward, never dropped.

Invariant: an extension stays where the target has it, and its version never goes back; others may
use it.
"""

from __future__ import annotations

from psycopg.pq.abc import PGconn

from millrace.ddl.entry import Entry
from millrace.errors import ApplyError
from millrace.postgres.quote import ident, literal
from millrace.postgres.wire.libpq import execute, fetch

# Where `consolidate` creates them.
_HOME = "public"


def follow_extension(session: PGconn, entry: Entry) -> str:
    """What ran; empty if nothing had to."""
    name = next(one.names[0] for one in entry.objects if one.type == "extension")
    if entry.tag == "DROP EXTENSION":
        return ""
    rows = fetch(
        session,
        "SELECT default_version, installed_version FROM pg_available_extensions"
        f" WHERE name = {literal(name)}",
    )
    if not rows:
        raise ApplyError(
            f"extension {name} is not available on the target",
            hint="install its package there; then `millrace consolidate ddl retry`",
        )
    default, installed = rows[0]
    if installed is None:
        statement = f"CREATE EXTENSION {ident(name)} SCHEMA {_HOME} CASCADE"
    elif entry.tag == "ALTER EXTENSION" and installed != default:
        statement = f"ALTER EXTENSION {ident(name)} UPDATE"
    else:
        return ""
    execute(session, statement)
    return statement
