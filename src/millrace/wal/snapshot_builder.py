"""From when on the catalog and the transactions are known well enough to decode.

Invariant: a change is decoded with the catalog its own transaction saw, and only transactions that
were seen from their first record on are emitted.

              running-xacts, nothing runs
    START ─────────────────────────────────────────────────────────┐
      │ running-xacts                                              │
      ▼                                                            ▼
    BUILDING_SNAPSHOT ── all that ran at START ──► FULL_SNAPSHOT ──► CONSISTENT
                         have ended                all that ran when it became
                                                   FULL have ended

The transitions happen at running-xacts records only, and look at their oldest running transaction,
never at their list: a listed transaction's commit may stand before the record.

A shutdown checkpoint is a running-xacts record, too: only prepared transactions outlive a shutdown.
The server does not use it as a start; nor does `strict`.

`missed` are transactions that the server's first snapshots do not show although they committed:
those that committed before FULL_SNAPSHOT without having run at START. `strict` hides them, too.

Facts: snapbuild.c, SnapBuildFindSnapshot(), SnapBuildProcessRunningXacts(), SnapBuildCommitTxn().
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import IntEnum

from millrace.lsn import render_lsn

log = logging.getLogger(__name__)

_HALF = 1 << 31
_MASK = (1 << 32) - 1


class BuilderState(IntEnum):
    """How much is known; the values are those of the server."""

    START = -1
    BUILDING_SNAPSHOT = 0
    FULL_SNAPSHOT = 1
    CONSISTENT = 2


def precedes(left: int, right: int) -> bool:
    """Whether a transaction id is older than another, on the circle of 32 bits."""
    return (left - right) & _MASK >= _HALF


@dataclass(frozen=True, slots=True)
class RunningXacts:
    """What a running-xacts record says."""

    next_xid: int
    oldest_running_xid: int
    is_suboverflowed: bool = False


@dataclass(slots=True)
class SnapshotBuilder:
    """The state machine of one decoder."""

    # Commits before this position are not emitted.
    start_decoding_at: int = 0
    strict: bool = False
    state: BuilderState = BuilderState.START
    next_phase_at: int = 0
    xmin: int = 0
    # Commits of catalog changes that the server's snapshots lack, as long as it lacks them.
    missed: set[int] = field(default_factory=set)
    # (since which position, what its snapshots lack)
    hidden: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    # Where it became consistent.
    consistent_lsn: int = 0

    @property
    def is_consistent(self) -> bool:
        return self.state == BuilderState.CONSISTENT

    def process_running_xacts(self, lsn: int, running: RunningXacts) -> None:
        """A running-xacts record, at which the state may change."""
        if not self.is_consistent and self._find_snapshot(lsn, running):
            return
        self.xmin = running.oldest_running_xid
        self.missed = {xid for xid in self.missed if not precedes(xid, self.xmin)}

    def process_shutdown(self, lsn: int, next_xid: int, oldest_prepared: int | None) -> None:
        """A shutdown checkpoint: of all transactions only prepared ones are left."""
        if not self.strict:
            oldest = next_xid if oldest_prepared is None else oldest_prepared
            self.process_running_xacts(lsn, RunningXacts(next_xid, oldest))

    def accepts_change(self, xid: int) -> bool:
        """Whether a change of the transaction is kept, because all of it may be seen."""
        if self.state < BuilderState.FULL_SNAPSHOT:
            return False
        return self.is_consistent or not precedes(xid, self.next_phase_at)

    def process_commit(self, lsn: int, catalog_xids: list[int]) -> None:
        """A commit; `catalog_xids` are those of its transaction ids that changed catalogs."""
        if not self.is_consistent:
            self.start_decoding_at = max(self.start_decoding_at, lsn + 1)
        if not catalog_xids:
            return
        if self.state < BuilderState.FULL_SNAPSHOT:
            self.missed.update(x for x in catalog_xids if not precedes(x, self.xmin))
        else:
            self._remember_hidden(lsn)

    def emits(self, commit_lsn: int) -> bool:
        return self.is_consistent and commit_lsn >= self.start_decoding_at

    def hidden_at(self, lsn: int) -> frozenset[int]:
        """What the server's snapshot for a change at this position lacks."""
        if not self.strict or not self.hidden:
            return frozenset()
        at = bisect_right(self.hidden, lsn, key=lambda entry: entry[0]) - 1
        return self.hidden[at][1] if at >= 0 else frozenset()

    def _find_snapshot(self, lsn: int, running: RunningXacts) -> bool:
        """Make a transition; whether it was that of a server on which nothing runs."""
        if running.oldest_running_xid == running.next_xid:
            self.start_decoding_at = max(self.start_decoding_at, lsn + 1)
            self.xmin = running.next_xid
            self._become(BuilderState.CONSISTENT, lsn, 0)
            return True
        if self.state == BuilderState.START:
            self.xmin = running.next_xid
            self._become(BuilderState.BUILDING_SNAPSHOT, lsn, running.next_xid)
        elif not precedes(running.oldest_running_xid, self.next_phase_at):
            if self.state == BuilderState.BUILDING_SNAPSHOT:
                self._become(BuilderState.FULL_SNAPSHOT, lsn, running.next_xid)
            else:
                self._become(BuilderState.CONSISTENT, lsn, 0)
        return False

    def _become(self, state: BuilderState, lsn: int, next_phase_at: int) -> None:
        self.state, self.next_phase_at = state, next_phase_at
        if state == BuilderState.CONSISTENT:
            self.consistent_lsn = lsn
        log.info("snapshot builder is %s at %s", state.name, render_lsn(lsn))
        if state >= BuilderState.FULL_SNAPSHOT and not self.hidden and self.missed:
            log.warning(
                "transactions %s changed catalogs and committed before the snapshot was full; "
                "the server's own decoding does not see them%s",
                sorted(self.missed),
                "" if self.strict else ", this one does",
            )
            self._remember_hidden(lsn)

    def _remember_hidden(self, lsn: int) -> None:
        missing = frozenset(x for x in self.missed if not precedes(x, self.xmin))
        if missing or self.hidden:
            self.hidden.append((lsn + 1, missing))
