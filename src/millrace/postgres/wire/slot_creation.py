"""Creating a replication slot: it says what it waits for, and can be stopped.

Invariant: a creation that is stopped, timed out or refused leaves no slot behind. If our process is
killed, the server notices within seconds and drops the slot that it was making.

The server makes a slot for good only when its consistent point is found, and until then drops it
with the session. A session that waits for a transaction looks for its client only if a timer is
set, and replication commands do not set it: a statement just before does.

Facts: walsender.c, CreateReplicationSlot(); slot.c, ReplicationSlotRelease(); postgres.c,
start_xact_command() and ProcessInterrupts(), CheckClientConnectionPending.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import psycopg
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from millrace.config.dsn import Dsn
from millrace.errors import MillraceError, ServerError
from millrace.lsn import parse_lsn
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.libpq import drain, execute, result_error
from millrace.postgres.wire.slot_wait import read_slot_wait

log = logging.getLogger(__name__)

# How soon a stop is noticed.
POLL_SECONDS: Final = 0.1
# A creation that takes longer says what it waits for; then every so often.
FIRST_WORD_SECONDS = 2.0
WORD_SECONDS = 10.0
# How long a server gets to let go of what we cancel.
CANCEL_SECONDS: Final = 10.0


class SlotSnapshot(StrEnum):
    """What becomes of the snapshot of a slot's consistent point."""

    EXPORT = "export"
    # For the transaction that the session has open.
    USE = "use"
    NOTHING = "nothing"


@dataclass(frozen=True)
class NewSlot:
    """A slot that was made."""

    name: str
    # It has every transaction that commits after this position; those before are in the snapshot.
    start_lsn: int
    # Of an exported snapshot: valid until the session runs another command.
    snapshot: str | None


def create_slot(
    connection: PGconn,
    dsn: Dsn,
    slot: str,
    plugin: str,
    *,
    snapshot: SlotSnapshot,
    is_temporary: bool = False,
    timeout_seconds: float | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> NewSlot:
    """Create a logical slot by a walsender of `dsn`, as `walsender.open_replication` gives it.

    Waits for the transactions that are open, and logs which they are. `is_stopped` is for threads;
    the main thread is stopped by its signals.
    """
    statement = _statement(connection, slot, plugin, snapshot, is_temporary=is_temporary)
    if snapshot != SlotSnapshot.USE:
        execute(connection, "SELECT 1")  # sets the timer; a transaction's first statement has
    watch = _Watch(dsn, connection.backend_pid, slot, timeout_seconds, is_stopped)
    try:
        connection.send_query(statement.encode())
        while _is_busy(connection):
            watch.look()
        result = _first(drain(connection), slot)
    except BaseException:
        _take_back(connection, slot)
        raise
    finally:
        watch.close()
    lsn, name = result.get_value(0, 1), result.get_value(0, 2)
    if not lsn or (snapshot == SlotSnapshot.EXPORT and not name):
        raise ServerError(f"replication slot {slot} came without a position or a snapshot")
    return NewSlot(slot, parse_lsn(lsn.decode()), name.decode() if name else None)


def _statement(
    connection: PGconn, slot: str, plugin: str, snapshot: SlotSnapshot, *, is_temporary: bool
) -> str:
    kind = "TEMPORARY LOGICAL" if is_temporary else "LOGICAL"
    statement = f"CREATE_REPLICATION_SLOT {ident(slot)} {kind} {ident(plugin)} "
    if connection.server_version < 150000:
        words = {
            SlotSnapshot.EXPORT: "EXPORT_SNAPSHOT",
            SlotSnapshot.USE: "USE_SNAPSHOT",
            SlotSnapshot.NOTHING: "NOEXPORT_SNAPSHOT",
        }
        return statement + words[snapshot]
    options = [f"SNAPSHOT '{snapshot}'"]
    # A standby that keeps slots in step (17+) takes this one over when it is promoted.
    may_fail_over = connection.server_version >= 170000 and not is_temporary
    if may_fail_over and snapshot != SlotSnapshot.USE and not _is_standby(connection):
        options.append("FAILOVER true")
    return f"{statement}({', '.join(options)})"


def _is_standby(connection: PGconn) -> bool:
    (result,) = execute(connection, "SELECT pg_is_in_recovery()")
    return result.get_value(0, 0) == b"t"


def _is_busy(connection: PGconn) -> bool:
    """Whether the answer is still to come, after a moment of waiting for it. Python waits, not
    libpq: there no signal would reach us."""
    try:
        if connection.is_busy():
            select.select([connection.socket], [], [], POLL_SECONDS)
            connection.consume_input()
        return bool(connection.is_busy())
    except psycopg.Error:
        return False  # the connection broke: the result says how


def _first(results: list[PGresult], slot: str) -> PGresult:
    if not results:
        raise ServerError(f"creating replication slot {slot}: the connection broke", sqlstate=None)
    if results[0].status != pq.ExecStatus.TUPLES_OK:
        raise result_error(results[0], f"creating replication slot {slot}")
    return results[0]


def _take_back(connection: PGconn, slot: str) -> None:
    """Cancel what is running; a slot that has come into being meanwhile is dropped again."""
    if connection.transaction_status != pq.TransactionStatus.ACTIVE:
        return  # it has failed, or the connection is gone
    log.info("stopping the creation of replication slot %s", slot)
    with suppress(psycopg.Error, MillraceError):
        connection.get_cancel().cancel()
        until = time.monotonic() + CANCEL_SECONDS
        while connection.is_busy() and time.monotonic() < until:
            select.select([connection.socket], [], [], POLL_SECONDS)
            connection.consume_input()
        if connection.is_busy():
            return  # the server notices that we are gone
        if any(result.status == pq.ExecStatus.TUPLES_OK for result in drain(connection)):
            execute(connection, f"DROP_REPLICATION_SLOT {ident(slot)}")


class _Watch:
    """Looks at a creation under way: is it stopped, is it late, what does it wait for?"""

    def __init__(
        self,
        dsn: Dsn,
        pid: int,
        slot: str,
        timeout_seconds: float | None,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._dsn = dsn
        self._pid = pid
        self._slot = slot
        self._timeout_seconds = timeout_seconds
        self._is_stopped = is_stopped
        self._began = time.monotonic()
        self._next_word = self._began + FIRST_WORD_SECONDS
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None

    def look(self) -> None:
        now = time.monotonic()
        if self._is_stopped():
            raise ServerError(f"creating replication slot {self._slot}: stopped")
        if self._timeout_seconds is not None and now - self._began >= self._timeout_seconds:
            raise ServerError(
                f"replication slot {self._slot} could not be created within "
                f"{self._timeout_seconds:g} seconds: it waits {self._reason()}",
                hint="end that transaction, or wait longer with --slot-timeout; then run the same "
                "command again",
                slot=self._slot,
            )
        if now >= self._next_word:
            self._next_word = now + WORD_SECONDS
            log.warning(
                "replication slot %s is not created yet, after %.0f s: it waits %s",
                self._slot,
                now - self._began,
                self._reason(),
            )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _reason(self) -> str:
        try:
            if self._connection is None or self._connection.closed:
                self._connection = connect(self._dsn, "slot wait")
            return read_slot_wait(self._connection, self._pid).describe()
        except MillraceError as error:
            log.debug("%s", error)
            return f"for the source, which can't be asked why ({error})"
