"""Transactions of a batch into outputs: together where that is possible, else one by one.

Invariant: outputs get the same bytes either way. What is written together is whole: it fits into
one piece of WAL, or it is one transaction. If a change in it can't be printed, nothing of it is
written, and its transactions are emitted one by one, which finds the one to be withheld.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from millrace.decode.outputs import Output, SpoolOutput, TextOutput
from millrace.decode.selection import Selection
from millrace.errors import FormatError
from millrace.wal.catalog.table_lookup import Relation, Role
from millrace.wal.output.columnar import ColumnarWriter, EndedTransaction, is_fit
from millrace.wal.read.pieces import Pieces
from millrace.wal.read.record import Records
from millrace.wal.row import row_kernel
from millrace.wal.row.descriptor import RowDescriptor
from millrace.wal.transaction import MESSAGE, Batch, Ending, Transaction

_ROLES = {Role.TABLE: row_kernel.TABLE, Role.TOAST: row_kernel.TOAST}

EmitOne = Callable[[Transaction, Batch], None]


class Counters(Protocol):
    """What is counted of what was emitted."""

    transactions: int
    changes: int


class BatchSource:
    """Changes by reference, as the decoder gives them."""

    def __init__(self, pieces: Pieces, relations: Sequence[Relation]) -> None:
        self._pieces = pieces
        self._relations = relations

    def records(self, piece: int) -> Records:
        return self._pieces.get(piece)

    def relation(self, number: int) -> tuple[int, RowDescriptor | None]:
        relation = self._relations[number]
        return _ROLES.get(relation.role, row_kernel.SKIP), relation.row

    def render_other(
        self, transaction: EndedTransaction, piece: int, record: int, number: int
    ) -> bytes:
        raise AssertionError("such transactions are emitted one by one")

    def render_ending(self, transaction: EndedTransaction) -> bytes:
        raise AssertionError("such transactions are emitted one by one")


class ByColumn:
    """Emits batches."""

    def __init__(
        self,
        source: BatchSource,
        relations: Sequence[Relation],
        outputs: Sequence[Output],
        selection: Selection,
    ) -> None:
        self._relations = relations
        self._selection = selection
        self._outputs = [one for one in outputs if isinstance(one, TextOutput | SpoolOutput)]
        self._writers = [
            ColumnarWriter(
                one.row_format,
                source,
                described=one.described if isinstance(one, SpoolOutput) else None,
                drops_empty=isinstance(one, SpoolOutput),
            )
            for one in self._outputs
        ]
        self._is_possible = len(self._outputs) == len(outputs) and not selection.tables
        self._fit = np.zeros(0, np.bool_)

    def emit(self, batch: Batch, emit_one: EmitOne, counters: Counters) -> None:
        """All transactions of the batch, in order."""
        for unit in self._units(batch.transactions):
            if unit.is_fit and self._emit_unit(unit.transactions):
                counters.transactions += len(unit.transactions)
                counters.changes += self._writers[0].row_count
                continue
            for transaction in unit.transactions:
                emit_one(transaction, batch)

    def _emit_unit(self, transactions: list[Transaction]) -> bool:
        """Whether it was possible."""
        try:
            # The first may be wrong about nothing that another is not: they print alike.
            for output, writer in zip(self._outputs, self._writers, strict=True):
                output.write_whole(writer.write(transactions))
        except FormatError:
            for writer in self._writers:
                writer.reset()
            return False
        return True

    def _units(self, transactions: Sequence[Transaction]) -> Iterator[_Unit]:
        unit = _Unit()
        for transaction in transactions:
            if not unit.takes(transaction, is_fit=self._takes(transaction)):
                yield unit
                unit = _Unit()
                unit.takes(transaction, is_fit=self._takes(transaction))
        if unit.transactions:
            yield unit

    def _takes(self, transaction: Transaction) -> bool:
        if not self._is_possible or transaction.ending != Ending.COMMIT:
            return False
        self._know()
        return self._selection.takes(transaction) and all(
            self._fit[found.relations].all() for found in transaction.references
        )

    def _know(self) -> None:
        """Look at relations with new numbers."""
        known = len(self._fit)
        if known < len(self._relations):
            found = [
                n > MESSAGE and (one.row is None or is_fit(one.row))
                for n, one in enumerate(self._relations[known:], known)
            ]
            self._fit = np.append(self._fit, np.array(found, np.bool_))


class _Unit:
    """Transactions that are emitted together, or one that is not."""

    def __init__(self) -> None:
        self.transactions: list[Transaction] = []
        self.is_fit = False
        self._is_wide = False
        self._piece: int | None = None

    def takes(self, transaction: Transaction, *, is_fit: bool) -> bool:
        """Add it if it goes with those that are here."""
        pieces = {found.piece for found in transaction.references}
        if self.transactions:
            others = pieces - {self._piece} if self._piece is not None else pieces
            is_together = self.is_fit and is_fit and len(pieces) <= 1 and not self._is_wide
            if not is_together or (others and self._piece is not None):
                return False
        self.is_fit = is_fit
        self.transactions.append(transaction)
        self._is_wide = len(pieces) > 1
        self._piece = next(iter(pieces), self._piece)
        return True
