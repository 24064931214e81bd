"""Values that a transaction stored out of line, put together again.

Invariant: a value is given only if all of its chunks are here and have the announced size; an
update's value whose chunks are not here was left alone by it, and is UNCHANGED.

In one top-level transaction, in the order of its changes, the chunks of a row come before the row,
with no other row in between but further rows of the same multi-insert. So what was collected is
forgotten after each row that ends such a sequence (`forget`): every INSERT, UPDATE and DELETE, and
of a multi-insert the last row of the record that has the flag LAST_IN_MULTI. Value OIDs come back
after a table was rewritten, so to keep chunks longer would be wrong.

An INSERT ... ON CONFLICT stores its row before it knows whether it may stay. That row is held back
(`hold`) until the record that confirms it, and is dropped with its chunks by one that cancels it.

Facts: reorderbuffer.c, ReorderBufferToastAppendChunk(), ReorderBufferToastReplace(), and what
ReorderBufferProcessTXN() does with speculative insertions; wal.md of the design pages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from millrace.errors import FormatError
from millrace.postgres.pgoutput.messages import UNCHANGED, Unchanged
from millrace.wal.row import varlena
from millrace.wal.row.descriptor import VARLENA, ColumnDescriptor
from millrace.wal.row.heap_tuple import HeapTuple, StoredValue, deform
from millrace.wal.row.varlena import ToastPointer

# A value of a row that can be printed.
RowValue = bytes | Unchanged | None

# chunk_id oid, chunk_seq integer, chunk_data bytea
CHUNK_COLUMNS: Final = (
    ColumnDescriptor(1, "chunk_id", None, 4, True, "i"),
    ColumnDescriptor(2, "chunk_seq", None, 4, True, "i"),
    ColumnDescriptor(3, "chunk_data", None, VARLENA, False, "i"),
)

Change = TypeVar("Change")


class ToastValues:
    """The chunks a transaction has written since its last row."""

    def __init__(self) -> None:
        self._chunks: dict[int, list[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add(self, row: HeapTuple) -> None:
        """A row that was inserted into a TOAST table."""
        value_oid, number, data = deform(row, CHUNK_COLUMNS)
        if not isinstance(value_oid, bytes) or not isinstance(number, bytes):
            raise FormatError("expected chunk_id and chunk_seq in a row of a TOAST table")
        if not isinstance(data, bytes):
            raise FormatError("expected chunk_data in a row of a TOAST table")
        self.add_chunk(struct.unpack("<I", value_oid)[0], struct.unpack("<i", number)[0], data)

    def add_chunk(self, value_oid: int, number: int, data: bytes) -> None:
        chunks = self._chunks.setdefault(value_oid, [])
        if number != len(chunks):
            raise FormatError(
                f"expected chunk {len(chunks)} of value {value_oid} stored out of line, "
                f"found {number}"
            )
        chunks.append(data)

    def find(self, pointer: ToastPointer) -> bytes | None:
        """The value, or None if this transaction did not store it since its last row."""
        chunks = self._chunks.get(pointer.value_oid)
        if chunks is None:
            return None
        data = b"".join(chunks)
        if len(data) != pointer.stored_bytes:
            raise FormatError(
                f"expected {pointer.stored_bytes} bytes of value {pointer.value_oid} stored out of "
                f"line, found {len(data)}"
            )
        return varlena.inflate(data) if pointer.is_compressed else data

    def complete(self, values: Iterable[StoredValue]) -> list[RowValue]:
        """A row's values with what its pointers point to."""
        return [self._complete(v) if isinstance(v, ToastPointer) else v for v in values]

    def _complete(self, pointer: ToastPointer) -> RowValue:
        found = self.find(pointer)
        return UNCHANGED if found is None else found

    def forget(self) -> None:
        """A row is done, and its chunks with it."""
        self._chunks.clear()


class SpeculativeInsert(Generic[Change]):
    """At most one inserted row that waits for its confirmation."""

    def __init__(self, toast: ToastValues) -> None:
        self._toast = toast
        self._held: Change | None = None

    def hold(self, change: Change) -> None:
        """A later one takes the place of one that was never confirmed."""
        self._held = change

    def confirm(self) -> Change:
        """The row, which now counts as inserted."""
        if self._held is None:
            raise FormatError("expected a speculative insertion before its confirmation")
        held, self._held = self._held, None
        return held

    def cancel(self) -> None:
        """The row was taken back. Its chunks are, too, one by one: only the first call counts."""
        if self._held is not None:
            self._held = None
            self._toast.forget()
