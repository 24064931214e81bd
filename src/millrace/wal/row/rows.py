"""Changes of a transaction as rows: the plain way, one by one.

Invariant: what comes out is in the order of the WAL, complete with values that were stored out of
line, and exactly what the server's decoding would hand to a plug-in.

Speculative insertions come out where they are confirmed, with the position of the insertion.

Facts: decode.c, DecodeInsert() and others; reorderbuffer.c, ReorderBufferProcessTXN().
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal import classify as kind
from millrace.wal.catalog.catalog_records import next_tuple
from millrace.wal.catalog.table_lookup import Relation, Role
from millrace.wal.output.row_change import DELETE, INSERT, UPDATE, RowChange
from millrace.wal.read.pieces import Pieces
from millrace.wal.read.record import Records
from millrace.wal.row.descriptor import RowDescriptor
from millrace.wal.row.heap_tuple import HeapTuple, deform
from millrace.wal.row.toast import RowValue, SpeculativeInsert, ToastValues
from millrace.wal.small_records import LogicalMessage, decode_message
from millrace.wal.transaction import MESSAGE, TRUNCATION, Batch, Transaction

_INSERT_IS_SPECULATIVE, _INSERT_LAST_IN_MULTI = 0x04, 0x02
_UPDATE_CONTAINS_OLD, _UPDATE_CONTAINS_NEW = 0x0C, 0x10
_DELETE_CONTAINS_OLD, _DELETE_IS_SUPER = 0x06, 0x08
_UPDATE_BYTES, _DELETE_BYTES = 14, 8
_CASCADE, _RESTART_IDENTITY = 1, 2


@dataclass(frozen=True, slots=True)
class Truncation:
    """TRUNCATE of one or more tables."""

    relations: tuple[RowDescriptor, ...]
    cascade: bool
    restart_identity: bool


Event = RowChange | Truncation | LogicalMessage


class RowReader:
    """Reads the changes that references point to."""

    def __init__(self, pieces: Pieces, relations: Sequence[Relation]) -> None:
        self._pieces = pieces
        self._relations = relations

    def read(self, transaction: Transaction, batch: Batch) -> Iterator[tuple[int, Event]]:
        """(position, change) of all changes of a transaction that are emitted."""
        run = _Run()
        for found in transaction.references:
            records = self._pieces.get(found.piece)
            for i, number in zip(found.indices.tolist(), found.relations.tolist(), strict=True):
                lsn = int(records.lsn[i])
                try:
                    if number == MESSAGE:
                        yield int(records.end_lsn[i]), decode_message(records, i)
                    elif number == TRUNCATION:
                        yield lsn, _truncation(records, i, batch.truncated[found.piece, i])
                    else:
                        yield from run.take(records, i, lsn, self._relations[number])
                except (FormatError, struct.error, IndexError) as error:
                    raise FormatError(f"the change at {render_lsn(lsn)}: {error}") from error


class _Run:
    """What one transaction keeps from change to change."""

    def __init__(self) -> None:
        self._toast = ToastValues()
        self._held: SpeculativeInsert[tuple[int, RowDescriptor, HeapTuple]] = SpeculativeInsert(
            self._toast
        )

    def take(
        self, records: Records, i: int, lsn: int, relation: Relation
    ) -> Iterator[tuple[int, Event]]:
        op = int(records.info[i]) & 0x70
        if records.rmid[i] == kind.HEAP2:
            yield from self._multi_insert(records, i, lsn, relation)
        elif op == kind.INSERT:
            yield from self._insert(records, i, lsn, relation)
        elif op == kind.CONFIRM:
            yield from self._confirm(relation)
        elif op == kind.DELETE:
            yield from self._delete(records, i, lsn, relation)
        else:
            yield from self._update(records, i, lsn, relation)

    def _insert(
        self, records: Records, i: int, lsn: int, relation: Relation
    ) -> Iterator[tuple[int, Event]]:
        stored = HeapTuple.from_record(records.block_data(records.find_block(i, 0)))
        if relation.role == Role.TOAST:
            self._toast.add(stored)
        elif relation.row is not None:
            if records.main_data(i)[2] & _INSERT_IS_SPECULATIVE:
                self._held.hold((lsn, relation.row, stored))
            else:
                yield lsn, self._row(relation.row, INSERT, stored, None)
                self._toast.forget()

    def _confirm(self, relation: Relation) -> Iterator[tuple[int, Event]]:
        if relation.row is None:
            return
        lsn, row, stored = self._held.confirm()
        yield lsn, self._row(row, INSERT, stored, None)
        self._toast.forget()

    def _multi_insert(
        self, records: Records, i: int, lsn: int, relation: Relation
    ) -> Iterator[tuple[int, Event]]:
        main = records.main_data(i)
        (count,) = struct.unpack_from("<H", main, 2)
        data = records.block_data(records.find_block(i, 0))
        at = 0
        for _ in range(count):
            at, stored = next_tuple(data, at)
            if relation.role == Role.TOAST:
                self._toast.add(stored)
            elif relation.row is not None:
                yield lsn, self._row(relation.row, INSERT, stored, None)
        if relation.row is not None and main[0] & _INSERT_LAST_IN_MULTI:
            self._toast.forget()

    def _update(
        self, records: Records, i: int, lsn: int, relation: Relation
    ) -> Iterator[tuple[int, Event]]:
        if relation.row is None:
            return
        main = records.main_data(i)
        flags = main[7]
        new = old = None
        if flags & _UPDATE_CONTAINS_NEW:
            new = HeapTuple.from_record(records.block_data(records.find_block(i, 0)))
        if flags & _UPDATE_CONTAINS_OLD:
            old = HeapTuple.from_record(main[_UPDATE_BYTES:])
        yield lsn, self._row(relation.row, UPDATE, new, old)
        self._toast.forget()

    def _delete(
        self, records: Records, i: int, lsn: int, relation: Relation
    ) -> Iterator[tuple[int, Event]]:
        main = records.main_data(i)
        if main[7] & _DELETE_IS_SUPER:
            self._held.cancel()
        elif relation.row is not None:
            old = None
            if main[7] & _DELETE_CONTAINS_OLD:
                old = HeapTuple.from_record(main[_DELETE_BYTES:])
            yield lsn, self._row(relation.row, DELETE, None, old)
            self._toast.forget()

    def _row(
        self, row: RowDescriptor, change: str, new: HeapTuple | None, old: HeapTuple | None
    ) -> RowChange:
        return RowChange(change, row, self._values(row, new), self._values(row, old))

    def _values(self, row: RowDescriptor, stored: HeapTuple | None) -> list[RowValue] | None:
        return None if stored is None else self._toast.complete(deform(stored, row.columns))


def _truncation(records: Records, i: int, relations: tuple[Relation, ...]) -> Truncation:
    flags = records.main_data(i)[8]
    rows = tuple(r.row for r in relations if r.row is not None)
    return Truncation(rows, bool(flags & _CASCADE), bool(flags & _RESTART_IDENTITY))
