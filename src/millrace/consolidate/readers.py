"""Roles that may read what is consolidated.

Invariant: grants only widen: what somebody else granted or revoked by hand on a table stays, but
for SELECT of the readers.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.config.dsn import Dsn
from millrace.name import Naming
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import connect, translated


def grant_to_readers(target: Dsn, naming: Naming, readers: Sequence[str]) -> None:
    """Let them read every table of these schemas, also those that are made later by our role."""
    if not readers:
        return
    roles = ", ".join(ident(one) for one in readers)
    with (
        connect(target, "consolidate") as connection,
        translated("granting SELECT to the readers"),
        connection.transaction(),
    ):
        for schema in sorted(set(naming.schemas.values())):
            name = ident(schema)
            connection.execute(
                f"GRANT USAGE ON SCHEMA {name} TO {roles};"
                f"GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO {roles};"
                f"ALTER DEFAULT PRIVILEGES IN SCHEMA {name} GRANT SELECT ON TABLES TO"
                f" {roles}".encode()
            )
