"""Rows of test_decoding as lines of COPY, many at a time.

    lsn TAB xid TAB data

Invariant: the same bytes as COPY (SELECT lsn, xid, data FROM pg_logical_slot_peek_changes(...)) TO
STDOUT writes of what `TestDecoding` prints.

Facts: copyto.c, CopyAttributeOutText().
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from millrace.lsn import render_lsn
from millrace.wal.output import value_kernel
from millrace.wal.output.rows import RowGroup, Stamps
from millrace.wal.output.test_decoding import QUOTED, TestDecoding, literal_mode
from millrace.wal.output.value_kernel import Bytes
from millrace.wal.row.descriptor import RowDescriptor
from millrace.wal.row.heap_columns import Numbers
from millrace.wal.types.column import TextColumn
from millrace.wal.types.registry import Renderers

_ESCAPES: Final = {8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 92: "\\"}
_TABLE: Final = {byte: "\\" + letter for byte, letter in _ESCAPES.items()}
_OLD: Final = b" old-key:"
_NEW: Final = b" new-tuple:"
_NO_ROW: Final = b" (no-tuple-data)"


def _pairs(is_quoted: bool) -> tuple[Bytes, Bytes]:
    """What is written in place of a byte, if it is two."""
    first, second = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    for byte, letter in _ESCAPES.items():
        first[byte], second[byte] = 92, ord(letter)
    if is_quoted:
        first[39] = second[39] = 39
    return first, second


_FIRST, _SECOND = _pairs(is_quoted=True)


def escape(data: bytes) -> bytes:
    """As COPY writes it."""
    if not any(byte in data for byte in _ESCAPES):
        return data
    return data.decode("latin-1").translate(_TABLE).encode("latin-1")


def render_line(lsn: int, xid: int, data: bytes) -> bytes:
    return f"{render_lsn(lsn)}\t{xid}\t".encode() + escape(data) + b"\n"


class LineFormat:
    """Lines of rows, and of the begins and ends of transactions."""

    def __init__(self, renderers: Renderers) -> None:
        self.renderers = renderers
        self._text = TestDecoding(renderers)

    def relation(self, relation: RowDescriptor, lsn: int) -> bytes:
        """Nothing stands before a table's rows."""
        return b""

    def count_begins(self, stamps: Stamps) -> Numbers:
        return _count_marks(stamps, b"BEGIN ")

    def put_begins(self, stamps: Stamps, out: Bytes, cursor: Numbers) -> None:
        _put_marks(stamps, b"BEGIN ", out, cursor)

    def count_commits(self, stamps: Stamps) -> Numbers:
        return _count_marks(stamps, b"COMMIT ")

    def put_commits(self, stamps: Stamps, out: Bytes, cursor: Numbers) -> None:
        _put_marks(stamps, b"COMMIT ", out, cursor)

    def count_rows(self, group: RowGroup) -> Numbers:
        totals = np.zeros(len(group), np.int64)
        value_kernel.count_positions(group.stamps.lsn, group.stamps.xid, totals)
        for text, columns, is_old in self._parts(group):
            totals += len(text)
            for label, mode, column in self._columns(group.relation, columns):
                value_kernel.count_literals(
                    label, mode, is_old, _FIRST, column.data, column.at, column.size, totals
                )
        return totals + 1

    def put_rows(self, group: RowGroup, out: Bytes, cursor: Numbers) -> None:
        value_kernel.put_positions(group.stamps.lsn, group.stamps.xid, out, cursor)
        for text, columns, is_old in self._parts(group):
            value_kernel.put_constant(_array(text), out, cursor)
            for label, mode, column in self._columns(group.relation, columns):
                value_kernel.put_literals(
                    label, mode, is_old, _FIRST, _SECOND,
                    column.data, column.at, column.size, out, cursor,
                )  # fmt: skip
        value_kernel.put_constant(_array(b"\n"), out, cursor)

    def _parts(self, group: RowGroup) -> list[tuple[bytes, Sequence[TextColumn | None], bool]]:
        """(what stands before columns, the columns, whether those of an old row)."""
        head = escape(self._text.head(group.relation, group.kind))
        if group.kind == "D":
            return [(head + _NO_ROW, (), True) if group.old is None else (head, group.old, True)]
        parts: list[tuple[bytes, Sequence[TextColumn | None], bool]] = []
        if group.old is not None:
            parts.append((head + _OLD, group.old, True))
            head = _NEW
        parts.append((head + _NO_ROW, (), False) if group.new is None else (head, group.new, False))
        return parts

    def _columns(
        self, relation: RowDescriptor, columns: Sequence[TextColumn | None]
    ) -> list[tuple[Bytes, int, TextColumn]]:
        labels = self._text.labels(relation)
        return [
            (_array(escape(label)), QUOTED if c.type is None else literal_mode(c.type), column)
            for c, label, column in zip(relation.columns, labels, columns, strict=False)
            if column is not None
        ]


def _count_marks(stamps: Stamps, word: bytes) -> Numbers:
    totals = np.full(len(stamps.lsn), len(word) + 1, np.int64)
    value_kernel.count_positions(stamps.lsn, stamps.xid, totals)
    value_kernel.count_decimals(stamps.xid, totals)
    return totals


def _put_marks(stamps: Stamps, word: bytes, out: Bytes, cursor: Numbers) -> None:
    value_kernel.put_positions(stamps.lsn, stamps.xid, out, cursor)
    value_kernel.put_constant(_array(word), out, cursor)
    value_kernel.put_decimals(stamps.xid, out, cursor)
    value_kernel.put_constant(_array(b"\n"), out, cursor)


def _array(text: bytes) -> Bytes:
    # Like all other arrays one that can be written to: kernels are compiled for each kind.
    return np.frombuffer(bytearray(text), np.uint8)
