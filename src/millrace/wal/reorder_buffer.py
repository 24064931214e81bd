"""Open transactions, and what is known of each: where its changes are, its commands, its children.

Invariant: whole transactions leave in commit order, aborted ones never. No change is held here,
only where it stands in the WAL, so memory grows with the number of open transactions and with a few
bytes for each of their changes.

A change is a record's number within a piece of WAL that can be read again (`Piece`).
Subtransactions are transactions of their own until the commit of their parent names them.

Facts: reorderbuffer.c; wal.md of the design pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millrace.wal.snapshot_builder import precedes
from millrace.wal.transaction import Transaction

# The number of a piece of WAL, in their order.
Piece = int
Indices = NDArray[np.int64]


@dataclass(slots=True)
class OpenTransaction:
    """A transaction id that has written something and has not ended."""

    xid: int
    # Its first record of any kind: what the server prints with BEGIN.
    first_lsn: int
    top_xid: int = 0
    # Whether a change gave it a snapshot; without one it leaves no trace.
    has_snapshot: bool = False
    has_catalog_changes: bool = False
    references: list[tuple[Piece, Indices]] = field(default_factory=list)
    # (lsn, command id): from there on the catalog is seen as of that command.
    commands: list[tuple[int, int]] = field(default_factory=list)
    # What is emitted for PREPARE TRANSACTION, and whether it was.
    prepared: Transaction | None = None
    was_emitted: bool = False

    @property
    def change_count(self) -> int:
        return sum(len(indices) for _, indices in self.references)


@dataclass(frozen=True, slots=True)
class WholeTransaction:
    """A transaction with its committed subtransactions."""

    xid: int
    first_lsn: int
    members: frozenset[int]
    has_snapshot: bool
    has_catalog_changes: bool
    references: tuple[tuple[Piece, Indices], ...]
    commands: tuple[tuple[int, int], ...]


class ReorderBuffer:
    """All open transactions by their id."""

    def __init__(self) -> None:
        self.open: dict[int, OpenTransaction] = {}

    def register(self, xid: int, lsn: int) -> OpenTransaction:
        """A record of the transaction."""
        found = self.open.get(xid)
        if found is None:
            found = self.open[xid] = OpenTransaction(xid, lsn)
        elif lsn < found.first_lsn:
            found.first_lsn = lsn
        return found

    def assign(self, top_xid: int, xid: int, lsn: int) -> None:
        """A record that names the top-level transaction of a subtransaction."""
        self.register(top_xid, lsn)
        self.register(xid, lsn).top_xid = top_xid

    def add_changes(self, xid: int, piece: Piece, indices: Indices) -> None:
        """Changes of the transaction in a piece, and those of them that are kept: maybe none."""
        found = self.open[xid]
        found.has_snapshot = True
        if found.top_xid in self.open:
            # Also if the subtransaction is rolled back: an empty transaction is left.
            self.open[found.top_xid].has_snapshot = True
        if len(indices):
            found.references.append((piece, indices))

    def add_command(self, xid: int, top_xid: int, lsn: int, command_id: int) -> None:
        """NEW_CID: the transaction changes the catalog."""
        self.register(xid, lsn).commands.append((lsn, command_id))
        self.mark_catalog_change(xid, lsn)
        if top_xid:
            self.register(top_xid, lsn).has_catalog_changes = True

    def mark_catalog_change(self, xid: int, lsn: int) -> None:
        found = self.register(xid, lsn)
        found.has_catalog_changes = True
        if found.top_xid:
            self.register(found.top_xid, lsn).has_catalog_changes = True

    def changed_catalog(self, xid: int) -> bool:
        found = self.open.get(xid)
        return found is not None and found.has_catalog_changes

    def gather(self, xid: int, subxids: Iterable[int]) -> WholeTransaction | None:
        """The transaction and those of its children that committed; None if it wrote nothing."""
        parts = [self.open[x] for x in (xid, *subxids) if x in self.open]
        if not parts:
            return None
        own = self.open.get(xid)
        commands = sorted(command for part in parts for command in part.commands)
        return WholeTransaction(
            xid,
            own.first_lsn if own else min(p.first_lsn for p in parts),
            frozenset((xid, *subxids)),
            any(part.has_snapshot for part in parts),
            any(part.has_catalog_changes for part in parts),
            tuple(_merge(parts)),
            tuple(commands),
        )

    def drop(self, xids: Iterable[int]) -> None:
        for xid in xids:
            self.open.pop(xid, None)

    def drop_before(self, oldest_running: int) -> list[int]:
        """Those that a crash has ended without a record."""
        gone = [xid for xid in self.open if precedes(xid, oldest_running)]
        self.drop(gone)
        return gone

    def oldest_lsn(self) -> int | None:
        """Where the first record of any open transaction is."""
        return min((found.first_lsn for found in self.open.values()), default=None)


def _merge(parts: list[OpenTransaction]) -> Iterator[tuple[Piece, Indices]]:
    """The references of all parts, in the order of the WAL."""
    if len(parts) == 1:
        yield from parts[0].references
        return
    pieces: dict[Piece, list[Indices]] = {}
    for part in parts:
        for piece, indices in part.references:
            pieces.setdefault(piece, []).append(indices)
    for piece in sorted(pieces):
        found = pieces[piece]
        yield piece, found[0] if len(found) == 1 else np.sort(np.concatenate(found))
