"""REPLICA IDENTITY FULL, set by us on tables that have no identity, and put back.

Invariant: what a table had before is written down in the transaction that changes it, on the source
itself: in the comment of the slot's second publication, behind the first line. So whoever removes
the publications puts it back, from whichever directory. A table that somebody has changed since is
left as it is. While a table is in the publication of updates it has an identity: it leaves both at
once, so that no statement of the source fails.

With FULL every update and delete writes the whole old row into the WAL.

Facts: PostgreSQL documentation, "ALTER TABLE", REPLICA IDENTITY: it takes an ACCESS EXCLUSIVE lock,
for a moment; whoever comes after a session that waits for it waits, too.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import psycopg

from millrace.errors import PreflightError, ServerError
from millrace.follow.published_table import PublishedTable
from millrace.name import Naming
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.quote import ident, literal, qualified
from millrace.postgres.wire.connect import translated

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

# A lock that is not given within this is asked for again a little later: nobody is to wait long
# behind us.
LOCK_TIMEOUT: Final = "1s"
LOCK_ATTEMPTS = 20
LOCK_PAUSE_SECONDS = 1.0
_RELATIONS = """
SELECT c.oid::int8, n.nspname, c.relname, c.relreplident::text, x.relname
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisreplident
  LEFT JOIN pg_class x ON x.oid = i.indexrelid
 WHERE c.oid = ANY(%s::int8[]::oid[])
"""


@dataclass(frozen=True)
class FormerIdentity:
    """What a table had before it was set to FULL."""

    oid: int
    schema: str
    name: str
    # As in pg_class.relreplident.
    identity: str
    # With USING INDEX.
    index: str | None = None

    @property
    def label(self) -> str:
        return qualified(self.schema, self.name)


def set_full(connection: Connection, slot: str, tables: Collection[PublishedTable]) -> list[str]:
    """Set it on tables that have no identity, and on their partitions; the names of those that were
    set. The slot's publications must be there, and the slot must not."""
    wanted = [oid for t in tables if not t.is_full_refused for oid in t.bare]
    with translated("reading replica identities"):
        found = [FormerIdentity(*row) for row in connection.execute(_RELATIONS, (wanted,))]
    for former in found:
        _with_lock(connection, former.label, partial(_set, connection, slot, former))
        log.info("set REPLICA IDENTITY FULL on %s", former.label)
    return [former.label for former in found]


def read_former(connection: Connection, slot: str) -> list[FormerIdentity]:
    """The tables that were set for this slot."""
    note = _read_note(connection, slot)
    return [FormerIdentity(**one) for one in json.loads(note)] if note else []


def put_back(connection: Connection, slot: str) -> list[FormerIdentity]:
    """Give the source's tables the identity that they had; those that there were. Must come before
    the publications go, with the note."""
    former = read_former(connection, slot)
    for one in former:
        _with_lock(connection, one.label, partial(_put_back, connection, slot, one))
    return former


def put_back_copies(target: Connection, former: Collection[FormerIdentity], naming: Naming) -> None:
    """The same for tables of the target, which a clone has given the source's identity."""
    for one in former:
        name = naming.target(one.schema, one.name)
        query = "SELECT to_regclass(%s)::oid::int8"
        row = target.execute(query, (qualified(*name),)).fetchone()
        if row and row[0]:
            here = FormerIdentity(row[0], *name, one.identity, one.index)
            _with_lock(target, here.label, partial(_restore, target, here))


def _set(connection: Connection, slot: str, former: FormerIdentity) -> None:
    connection.execute(f"ALTER TABLE {former.label} REPLICA IDENTITY FULL")
    note = [*read_former(connection, slot), former]
    _write_note(connection, slot, json.dumps([asdict(one) for one in note]))


def _put_back(connection: Connection, slot: str, former: FormerIdentity) -> None:
    """Out of the publications first: it, or the root that is published for it."""
    rows = connection.execute(
        "SELECT p.pubname, n.nspname, c.relname FROM pg_publication p"
        " JOIN pg_publication_rel r ON r.prpubid = p.oid JOIN pg_class c ON c.oid = r.prrelid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE p.pubname = %s AND c.oid IN (%s, coalesce(pg_partition_root(%s), 0))",
        (publication_names(slot)[0], former.oid, former.oid),
    ).fetchall()
    for name, schema, table in rows:
        listed = f"TABLE ONLY {qualified(schema, table)}"
        connection.execute(f"ALTER PUBLICATION {ident(name)} DROP {listed}")
    _restore(connection, former)


def _restore(connection: Connection, former: FormerIdentity) -> None:
    """Unless it is gone, or somebody has changed it."""
    rows = connection.execute(_RELATIONS, ([former.oid],)).fetchall()
    if not rows or rows[0][3] != "f":
        return
    index = former.identity == "i" and former.index
    if index and _has_index(connection, former):
        how = f"USING INDEX {ident(index)}"
    else:
        # An index that is gone leaves a table with nothing.
        how = {"d": "DEFAULT"}.get(former.identity, "NOTHING")
    connection.execute(f"ALTER TABLE {qualified(*rows[0][1:3])} REPLICA IDENTITY {how}")


def _has_index(connection: Connection, former: FormerIdentity) -> bool:
    row = connection.execute(
        "SELECT FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid"
        " WHERE i.indrelid = %s AND x.relname = %s",
        (former.oid, former.index),
    ).fetchone()
    return row is not None


def _read_note(connection: Connection, slot: str) -> str:
    with translated("reading publications"):
        row = connection.execute(
            "SELECT obj_description(oid, 'pg_publication') FROM pg_publication WHERE pubname = %s",
            (publication_names(slot)[1],),
        ).fetchone()
    return str((row and row[0]) or "").partition("\n")[2]


def _write_note(connection: Connection, slot: str, note: str) -> None:
    name = publication_names(slot)[1]
    row = connection.execute(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_publication WHERE pubname = %s",
        (name,),
    ).fetchone()
    first = str(row[0] if row else "").partition("\n")[0]
    connection.execute(f"COMMENT ON PUBLICATION {ident(name)} IS {literal(first + chr(10) + note)}")


def _with_lock(connection: Connection, label: str, work: Callable[[], None]) -> None:
    """In one transaction, which never waits long for its lock."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            with _changing(connection, label):
                work()
            return
        except psycopg.errors.LockNotAvailable:
            log.info("%s is locked by others; trying again", label)
            time.sleep(LOCK_PAUSE_SECONDS)
    raise ServerError(
        f"{label} was locked by others all the time: its replica identity could not be changed",
        hint="run the same command again when no long transaction uses it",
    )


@contextmanager
def _changing(connection: Connection, label: str) -> Iterator[None]:
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
            yield
    except psycopg.errors.LockNotAvailable:
        raise
    except psycopg.errors.InsufficientPrivilege as error:
        raise PreflightError(
            f"{connection.info.user} may not change the replica identity of {label}",
            hint="connect as the owner of the table, or leave out --replica-identity-full",
        ) from error
    except psycopg.Error:
        with translated(f"changing the replica identity of {label}"):
            raise
