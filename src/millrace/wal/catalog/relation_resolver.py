"""Which relation each change of a batch belongs to.

Invariant: a change's relation is the one its transaction saw when it made the change. A transaction
with a change that belongs to nothing known, although it carries a row, is withheld whole.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal import classify as kind
from millrace.wal.catalog.historic_catalog import Snapshot
from millrace.wal.catalog.table_lookup import Relation, Role, TableLookup
from millrace.wal.read.pieces import Pieces
from millrace.wal.read.record import Records
from millrace.wal.reorder_buffer import WholeTransaction
from millrace.wal.snapshot_builder import SnapshotBuilder
from millrace.wal.transaction import (
    MESSAGE,
    TRUNCATION,
    Batch,
    References,
    Transaction,
    Withheld,
)

Ended = tuple[Transaction, WholeTransaction]
_UPDATE_CONTAINS = 0x1C  # old tuple, old key, new tuple
_DELETE_CONTAINS = 0x06  # old tuple, old key
_TRUNCATE_HEADER = struct.Struct("<IIB")
_TRUNCATE_RELIDS_AT = 12


class RelationResolver:
    """Numbers relations, and finds those of changes."""

    def __init__(self, tables: TableLookup, pieces: Pieces, builder: SnapshotBuilder) -> None:
        self.tables = tables
        self._pieces = pieces
        self._builder = builder
        # By the numbers that references have.
        self.relations: list[Relation] = [Relation(Role.SKIPPED), Relation(Role.SKIPPED)]
        self._numbers: dict[int, int] = {}
        self._by_oid: dict[int, list[int]] = {}

    def resolve(self, ended: Sequence[Ended], batch: Batch) -> None:
        """The transactions of a batch, but for those that cannot be decoded."""
        plain = [e for e in ended if not e[1].has_catalog_changes]
        self._resolve_plain(plain, batch)
        for transaction, whole in ended:
            try:
                if whole.has_catalog_changes:
                    self._resolve_own(transaction, whole, batch)
                self._check(transaction)
                batch.transactions.append(transaction)
            except FormatError as error:
                batch.withheld.append(
                    Withheld(
                        transaction.xid, transaction.commit_lsn, transaction.end_lsn, str(error)
                    )
                )

    def add_message(self, alone: Transaction, piece: int, i: int) -> None:
        """The one reference of a message outside of transactions."""
        alone.references.append(
            References(piece, np.array([i], np.int64), np.array([MESSAGE], np.int32))
        )

    def forget(self, horizon: int) -> None:
        self.tables.forget(horizon)
        self._pieces.forget(horizon)

    def _resolve_plain(self, ended: Sequence[Ended], batch: Batch) -> None:
        """All at once, piece by piece."""
        wanted: dict[int, list[References]] = {}
        for transaction, whole in ended:
            for piece, indices in whole.references:
                found = References(piece, indices, np.empty(0, np.int32))
                transaction.references.append(found)
                wanted.setdefault(piece, []).append(found)
        for piece, references in wanted.items():
            indices = np.concatenate([r.indices for r in references])
            numbers = self._number_all(piece, indices, batch)
            at = 0
            for found in references:
                found.relations = numbers[at : at + len(found.indices)]
                at += len(found.indices)

    def _number_all(
        self, piece: int, indices: NDArray[np.int64], batch: Batch
    ) -> NDArray[np.int32]:
        records = self._pieces.get(piece)
        numbers = np.zeros(len(indices), np.int32)
        special = self._number_special(piece, records, indices, numbers, Snapshot(0), batch)
        rows = np.flatnonzero(~special)
        block = records.first_block[indices[rows]]
        spc, db = records.spc[block].astype(np.uint64), records.db[block]
        key = spc << np.uint64(32) | records.rel[block]
        lsn = records.lsn[indices[rows]]
        for each in np.unique(key).tolist():
            mine = np.flatnonzero(key == each)
            locator = (each >> 32, int(db[mine[0]]), each & 0xFFFFFFFF)
            while len(mine):
                first = int(lsn[mine].min())
                snapshot = Snapshot(first, hidden=self._builder.hidden_at(first))
                relation = self.tables.by_file(locator, snapshot)
                _, end = self.tables.stretch(locator, first)
                covered = lsn[mine] < np.uint64(min(end, (1 << 64) - 1))
                numbers[rows[mine[covered]]] = self._number(relation)
                mine = mine[~covered]
        return numbers

    def _number_special(
        self,
        piece: int,
        records: Records,
        indices: NDArray[np.int64],
        numbers: NDArray[np.int32],
        snapshot: Snapshot,
        batch: Batch,
    ) -> NDArray[np.bool_]:
        """Messages and truncations, which name no file; whether each is one."""
        is_message = records.rmid[indices] == kind.MESSAGE
        is_truncate = (records.rmid[indices] == kind.HEAP) & (
            records.info[indices] & 0x70 == kind.TRUNCATE
        )
        numbers[is_message] = MESSAGE
        numbers[is_truncate] = TRUNCATION
        for i in indices[is_truncate].tolist():
            lsn = int(records.lsn[i])
            seen = Snapshot(lsn, snapshot.own, snapshot.command_id, self._builder.hidden_at(lsn))
            batch.truncated[piece, i] = self._truncated(records, i, seen)
        special: NDArray[np.bool_] = is_message | is_truncate
        return special

    def _truncated(self, records: Records, i: int, snapshot: Snapshot) -> tuple[Relation, ...]:
        main = records.main_data(i)
        _, count, _ = _TRUNCATE_HEADER.unpack_from(main)
        oids = struct.unpack_from(f"<{count}I", main, _TRUNCATE_RELIDS_AT)
        found = (self.tables.by_oid(oid, snapshot) for oid in oids)
        return tuple(relation for relation in found if relation.role == Role.TABLE)

    def _resolve_own(self, transaction: Transaction, whole: WholeTransaction, batch: Batch) -> None:
        """A transaction that changed catalogs: each change as of its own command."""
        positions = [lsn for lsn, _ in whole.commands]
        commands: list[int] = []
        for _, command in whole.commands:
            commands.append(max(command, commands[-1] if commands else 0))
        for piece, indices in whole.references:
            records = self._pieces.get(piece)
            numbers = np.zeros(len(indices), np.int32)
            known: dict[tuple[int, int, int, int, int], int] = {}
            for at, i in enumerate(indices.tolist()):
                lsn = int(records.lsn[i])
                passed = bisect_right(positions, lsn)
                command = commands[passed - 1] if passed else 0
                own = whole.members if command else frozenset()
                snapshot = Snapshot(lsn, own, command, self._builder.hidden_at(lsn))
                one = indices[at : at + 1]
                if self._number_special(piece, records, one, numbers[at : at + 1], snapshot, batch)[
                    0
                ]:
                    continue
                block = int(records.first_block[i])
                locator = (int(records.spc[block]), int(records.db[block]), int(records.rel[block]))
                question = (*locator, command, self.tables.epoch(lsn))
                if question not in known:
                    known[question] = self._number(self.tables.by_file(locator, snapshot))
                numbers[at] = known[question]
            transaction.references.append(References(piece, indices, numbers))

    def _number(self, relation: Relation) -> int:
        """Its number; the same for equal relations, so that batches have few."""
        number = self._numbers.get(id(relation))
        if number is not None and self.relations[number] is relation:
            return number
        for candidate in self._by_oid.get(relation.oid, ()):
            if self.relations[candidate] == relation:
                return candidate
        number = len(self.relations)
        self.relations.append(relation)
        self._numbers[id(relation)] = number
        self._by_oid.setdefault(relation.oid, []).append(number)
        return number

    def _check(self, transaction: Transaction) -> None:
        unknown = [n for n, r in enumerate(self.relations) if r.role == Role.UNKNOWN]
        for found in transaction.references if unknown else ():
            for i in found.indices[np.isin(found.relations, unknown)].tolist():
                records = self._pieces.get(found.piece)
                if _carries_row(records, i):
                    block = int(records.first_block[i])
                    raise FormatError(
                        f"the change at {render_lsn(int(records.lsn[i]))} is of file "
                        f"{records.rel[block]}, which no table had"
                    )


def _carries_row(records: Records, i: int) -> bool:
    op = int(records.info[i]) & 0x70
    if records.rmid[i] == kind.HEAP2 or op in (kind.INSERT, kind.CONFIRM):
        return op != kind.CONFIRM
    main = records.main_data(i)
    if len(main) < 8:
        return False
    return bool(main[7] & (_DELETE_CONTAINS if op == kind.DELETE else _UPDATE_CONTAINS))
