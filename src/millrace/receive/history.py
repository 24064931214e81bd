"""Whether a server continues what was received before, perhaps from another one.

Invariant: nothing is received from a server whose history lacks a part of what the spool holds or
the target has. Such a server would send other transactions under positions that were passed
already, and they would be taken for old ones.

Each promotion of a standby begins a timeline, and leaves the one before it at some position. What
was received beyond that position has never happened there.

Facts: PostgreSQL documentation, "Timelines"; snapbuild.c, SnapBuildXactNeedsSkip(): a transaction
before the position that was asked for is left out.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import psycopg
from psycopg.pq.abc import PGconn

from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, MillraceError, ServerError, SourceDiverged
from millrace.lsn import render_lsn
from millrace.postgres.wire.connect import connect, translated
from millrace.postgres.wire.walsender import (
    STARTED_AT,
    SystemState,
    identify_system,
    open_replication,
)
from millrace.workdir.sentinel import Sentinel, SourceRecord

log = logging.getLogger(__name__)

# A source that is a standby is asked this often whether it still is.
ROLE_SECONDS = 5.0
# At the end of a page the next record begins only after the next page's header.
_PAGE_BYTES = 8192
_PAGE_HEADER_BYTES = 40


class SourceServer:
    """The server that a stream is received from, of all that may answer."""

    def __init__(self, dsn: Dsn, sentinel: Sentinel | None) -> None:
        self._dsn = dsn
        self._sentinel = sentinel
        self._system: SystemState | None = None
        self._looked_at = time.monotonic()
        # Of the postmaster that answered last.
        self.started_at: str | None = None

    def see(self, connection: psycopg.Connection[Any]) -> None:
        """Note which server answers; the next connection must be to the same."""
        row = connection.execute(f"SELECT {STARTED_AT}").fetchone()
        self.started_at = row[0] if row else None

    def check(self, connection: PGconn, held_lsn: int) -> None:
        """Raise if the server of a new connection does not continue the stream, of which the spool
        has everything up to `held_lsn`; remember it otherwise."""
        system = identify_system(connection)
        if self.started_at not in (None, system.started_at):
            raise ConnectionLost(
                "the source was replaced by another server (failover)", sqlstate=None
            )
        if self._sentinel is None:
            require_continuation(system, SourceRecord(), held_lsn, 0)
        else:
            self._require_cluster(self._sentinel, system.identifier)
            known = self._sentinel.read_source()
            applied_lsn = self._sentinel.read().applied_lsn or 0
            require_continuation(system, known, held_lsn, applied_lsn)
            if (known.timeline, known.started_at) != (system.timeline, system.started_at):
                self._sentinel.write_source(system.timeline, system.started_at)
        self._system = system

    def _require_cluster(self, sentinel: Sentinel, identifier: str) -> None:
        """LSNs mean something on one cluster and its standbys only."""
        setup = sentinel.read_setup()
        if setup is None:
            return
        if not setup.system_identifier:
            sentinel.write_system_identifier(identifier)
        elif setup.system_identifier != identifier:
            raise ServerError(
                f"{self._dsn} is another cluster ({identifier}) than the one this stream began "
                f"with ({setup.system_identifier})",
                hint="check --source and --dir",
            )

    def look(self, now: float) -> None:
        """A standby that is promoted keeps sending, on another timeline: raise ConnectionLost, so
        that connecting again writes that down before another server could be taken for it."""
        system = self._system
        if system is None or not system.is_standby or now - self._looked_at < ROLE_SECONDS:
            return
        self._looked_at = now
        with connect(self._dsn, "receive") as connection, translated("asking the source"):
            row = connection.execute(f"SELECT {STARTED_AT}, pg_is_in_recovery()").fetchone()
        if row == (system.started_at, False):
            raise ConnectionLost("the source was promoted", sqlstate=None)


def require_history(dsn: Dsn, sentinel: Sentinel, held_lsn: int) -> None:
    """Raise if the source has diverged from what is about to be applied; one that can't be asked
    now is asked by the receiver."""
    try:
        connection = open_replication(dsn, "receive", "UTF8")
    except MillraceError as error:
        log.debug("%s", error)
        return
    try:
        SourceServer(dsn, sentinel).check(connection, held_lsn)
    except ConnectionLost as error:
        log.debug("%s", error)
    finally:
        connection.finish()


def require_continuation(
    system: SystemState, known: SourceRecord, held_lsn: int, applied_lsn: int
) -> None:
    """Raise if the server's history lacks something that was received or applied."""
    have_lsn = max(held_lsn, applied_lsn)
    have = f"the spool holds changes up to {render_lsn(held_lsn)}"
    if applied_lsn:
        have += f", of which those up to {render_lsn(min(applied_lsn, have_lsn))} are applied"
    is_same_server = known.started_at == system.started_at
    if known.timeline is not None and known.timeline != system.timeline and not is_same_server:
        _require_ancestor(system, known.timeline, have_lsn, have)
    if _reaches(system.flushed_lsn, have_lsn):
        return
    if system.is_standby:
        raise ConnectionLost(
            f"the source, a standby, has replayed up to {render_lsn(system.flushed_lsn)} only, and "
            f"{have}",
            hint="wait until it has caught up with its primary",
            sqlstate=None,
        )
    raise _diverged(
        f"the source ends at {render_lsn(system.flushed_lsn)} on timeline {system.timeline}, but "
        f"{have}: it was restored from an older copy, or was promoted before it had everything",
        system,
        have_lsn,
    )


def _require_ancestor(system: SystemState, timeline: int, have_lsn: int, have: str) -> None:
    ends = {one.timeline: one.end_lsn for one in system.history}
    if timeline not in ends:
        raise _diverged(
            f"the source is on timeline {system.timeline}, which does not come from timeline "
            f"{timeline}, the one that this stream was received from; {have}",
            system,
            have_lsn,
        )
    if not _reaches(ends[timeline], have_lsn):
        raise _diverged(
            f"the source is on timeline {system.timeline}, which left timeline {timeline} at "
            f"{render_lsn(ends[timeline])}, but {have}: the server was promoted without the last "
            "transactions of its primary",
            system,
            have_lsn,
        )


def _reaches(lsn: int, have_lsn: int) -> bool:
    if lsn % _PAGE_BYTES == 0:
        lsn += _PAGE_HEADER_BYTES
    return lsn >= have_lsn


def _diverged(message: str, system: SystemState, have_lsn: int) -> SourceDiverged:
    return SourceDiverged(
        message,
        hint="connect to the server that has them, if it still exists; otherwise the target may "
        "hold transactions that the source has lost: compare them, and begin again with "
        "`millrace clone --follow --restart`",
        timeline=system.timeline,
        source_lsn=render_lsn(system.flushed_lsn),
        held_lsn=render_lsn(have_lsn),
    )
