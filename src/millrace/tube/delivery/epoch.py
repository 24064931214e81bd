"""The epoch of versions, settled before a session writes its first document.

Invariant: documents that are written through a session carry an epoch of the server that the
session is on. A copy of the database that may be behind (a promoted standby, a restored backup, a
clone) has numbers that were drawn before: it tells by its timeline, its system identifier or its
database, and gets a higher epoch first. A session stays on one timeline, so once is enough.

Facts: PostgreSQL documentation, Timelines: a promotion begins a new one, and ends sessions of none;
but a standby's sessions are refused here. pg_control_system(): the identifier made by initdb.
"""

from __future__ import annotations

import logging

from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import translated
from millrace.sink.document import Version
from millrace.tube.delivery.tube import Connection
from millrace.tube.install import require_primary

log = logging.getLogger(__name__)


def settle_epoch(connection: Connection, schema: str) -> int:
    """The epoch of this server; it rises if the server is another one than it was noted on."""
    require_primary(connection)
    here = ident(schema)
    with translated("reading the epoch"):
        before = connection.execute(f"SELECT epoch FROM {here}._tube_epoch".encode()).fetchone()
        after = connection.execute(f"SELECT {here}._tube_current_epoch()".encode()).fetchone()
    assert before is not None
    assert after is not None
    if before != after:
        log.warning(
            "the source is another server than before, or was restored: versions of documents are"
            " in epoch %d from now on",
            after[0],
        )
    return int(after[0])


def raise_epoch(connection: Connection, schema: str) -> int:
    """A higher one, because somebody knows that the source was restored."""
    with translated("raising the epoch"):
        row = connection.execute(f"SELECT {ident(schema)}.tube_epoch(true)".encode()).fetchone()
    assert row is not None
    return int(row[0])


def draw_version(connection: Connection, schema: str) -> Version:
    """For what is read under snapshots that are taken after this."""
    here = ident(schema)
    with translated("drawing a version"):
        row = connection.execute(
            f"SELECT epoch, nextval(%s::regclass) FROM {here}._tube_epoch".encode(),
            (f"{here}.tube_seq",),
        ).fetchone()
    assert row is not None
    return (row[0], row[1])
