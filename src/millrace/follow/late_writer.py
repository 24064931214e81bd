"""Whether somebody still wrote to the source after the end position of a cut-over.

Invariant: everything that was committed before the question is looked at. The stream's own slot
says what is followed, and is left where it is.

Facts: pg_logical_slot_peek_binary_changes(); pgoutput, "Logical Replication Message Formats".
"""

from __future__ import annotations

from typing import Any

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import MismatchError
from millrace.lsn import render_lsn
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import connect, translated
from millrace.postgres.wire.wal_end import read_end
from millrace.workdir.sentinel import StreamSetup

Connection = psycopg.Connection[tuple[Any, ...]]

# Of a transaction that committed after the position: the begin message has the commit's.
_PGOUTPUT = """
WITH message AS MATERIALIZED (
    SELECT lsn, xid, get_byte(data, 0) AS kind, substr(data, 2, 8) AS commit_lsn
      FROM pg_logical_slot_peek_binary_changes(%(slot)s, %(end)s::pg_lsn, NULL, 'proto_version',
               '1', 'publication_names', %(publications)s)),
late AS (
    SELECT xid FROM message
     WHERE kind = ascii('B') AND commit_lsn >= decode(%(after_hex)s, 'hex'))
SELECT count(*), min(lsn)::text FROM message JOIN late USING (xid)
 WHERE kind IN (ascii('I'), ascii('U'), ascii('D'), ascii('T'))
"""
# The others end a transaction with a row of its end; rows that begin or end one are no changes.
_TEXT = """
WITH message AS MATERIALIZED (
    SELECT lsn, xid, data FROM pg_logical_slot_peek_changes(%(slot)s, %(end)s::pg_lsn, NULL)),
late AS (SELECT xid FROM message GROUP BY xid HAVING max(lsn) > %(after)s::pg_lsn)
SELECT count(*), min(lsn)::text FROM message JOIN late USING (xid)
 WHERE data ~ '^table ' OR data ~ '"kind":|"action":"[IUDT]"'
"""


def require_silence_since(source: Dsn, setup: StreamSetup, endpos: int) -> int:
    """The position up to which nothing followed was changed after `endpos`; raises MismatchError
    if something was."""
    with connect(source, "cutover") as connection:
        end = read_end(connection)
        count, first = _count(connection, setup, endpos, end)
    if count:
        raise MismatchError(
            f"{count:,} changes were made on the source after the end position "
            f"{render_lsn(endpos)}, the first at {first}: something still writes to it",
            hint="stop every writer (--pause read-only does), then run the same command again",
        )
    return end


def _count(
    connection: Connection, setup: StreamSetup, after: int, end: int
) -> tuple[int, str | None]:
    with translated("looking for changes after the end position"):
        row = connection.execute(
            _PGOUTPUT if setup.plugin == "pgoutput" else _TEXT,
            {
                "slot": setup.slot_name,
                "end": render_lsn(end),
                "after": render_lsn(after),
                "after_hex": f"{after:016x}",
                "publications": ",".join(map(ident, publication_names(setup.slot_name))),
            },
        ).fetchone()
    assert row is not None
    return int(row[0]), row[1]
