"""Rows as pgoutput's messages in frames, many at a time: what a spool holds.

Invariant: the same bytes as `PgOutput` and `encode_frame` make of each.

Facts: as pgoutput.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from millrace.postgres.pgoutput.messages import FRAME_HEADER_BYTES, encode_frame
from millrace.wal.output import value_kernel
from millrace.wal.output.pgoutput import PgOutput, is_sent
from millrace.wal.output.rows import RowGroup, Stamps
from millrace.wal.output.value_kernel import Bytes
from millrace.wal.row.descriptor import RowDescriptor
from millrace.wal.row.heap_columns import Numbers
from millrace.wal.types.column import TextColumn
from millrace.wal.types.registry import Renderers

_HEADER: Final = [
    ("d", "u1"), ("length", ">u4"), ("w", "u1"), ("start", ">u8"), ("end", ">u8"), ("time", ">i8"),
]  # fmt: skip
_BEGIN: Final = np.dtype(
    [*_HEADER, ("kind", "u1"), ("commit_lsn", ">u8"), ("at", ">i8"), ("xid", ">u4")]
)
_COMMIT: Final = np.dtype(
    [*_HEADER, ("kind", "u1"), ("flags", "u1"), ("commit_lsn", ">u8"), ("end_lsn", ">u8"),
     ("at", ">i8")]
)  # fmt: skip
_ROW: Final = np.dtype([*_HEADER, ("kind", "u1"), ("relation", ">u4")])


class FrameFormat:
    """Frames of rows, and of the begins and ends of transactions."""

    def __init__(self, renderers: Renderers) -> None:
        self.renderers = renderers
        self._messages = PgOutput(renderers)

    def relation(self, relation: RowDescriptor, lsn: int) -> bytes:
        return encode_frame(self._messages.relation(relation), lsn)

    def count_begins(self, stamps: Stamps) -> Numbers:
        return np.full(len(stamps.lsn), _BEGIN.itemsize, np.int64)

    def put_begins(self, stamps: Stamps, out: Bytes, cursor: Numbers) -> None:
        table = _frames(_BEGIN, stamps, "B")
        table["commit_lsn"], table["at"] = stamps.commit_lsn, stamps.committed_at
        table["xid"] = stamps.xid
        value_kernel.put_bytes(_bytes(table), out, cursor)

    def count_commits(self, stamps: Stamps) -> Numbers:
        return np.full(len(stamps.lsn), _COMMIT.itemsize, np.int64)

    def put_commits(self, stamps: Stamps, out: Bytes, cursor: Numbers) -> None:
        table = _frames(_COMMIT, stamps, "C")
        table["flags"] = 0
        table["commit_lsn"], table["at"] = stamps.commit_lsn, stamps.committed_at
        table["end_lsn"] = stamps.lsn
        value_kernel.put_bytes(_bytes(table), out, cursor)

    def count_rows(self, group: RowGroup) -> Numbers:
        if group.kind == "D" and group.old is None:
            return np.zeros(len(group), np.int64)
        totals = np.full(len(group), _ROW.itemsize, np.int64)
        for text, columns in _parts(group):
            totals += len(text)
            for column in columns:
                value_kernel.count_fields(column.size, totals)
        return totals

    def put_rows(self, group: RowGroup, out: Bytes, cursor: Numbers) -> None:
        if group.kind == "D" and group.old is None:
            return
        sizes = self.count_rows(group)
        table = _frames(_ROW, group.stamps, group.kind)
        table["length"] = sizes - 1
        table["relation"] = group.relation.oid
        value_kernel.put_bytes(_bytes(table), out, cursor)
        for text, columns in _parts(group):
            value_kernel.put_constant(np.frombuffer(bytearray(text), np.uint8), out, cursor)
            for column in columns:
                value_kernel.put_fields(column.data, column.at, column.size, out, cursor)


def _parts(group: RowGroup) -> list[tuple[bytes, list[TextColumn]]]:
    """(what stands before a row's columns, the columns)."""
    parts = []
    if group.old is not None:
        letter = b"O" if group.relation.replica_identity == "f" else b"K"
        parts.append(_part(letter, group.relation, group.old))
    if group.kind != "D":
        parts.append(_part(b"N", group.relation, group.new or ()))
    return parts


def _part(
    letter: bytes, relation: RowDescriptor, columns: Sequence[TextColumn | None]
) -> tuple[bytes, list[TextColumn]]:
    sent = [
        column
        for descriptor, column in zip(relation.columns, columns, strict=False)
        if column is not None and is_sent(descriptor)
    ]
    return letter + len(sent).to_bytes(2, "big"), sent


def _frames(layout: Any, stamps: Stamps, kind: str) -> Any:
    table = np.zeros(len(stamps.lsn), layout)
    table["d"], table["w"], table["kind"] = ord("d"), ord("w"), ord(kind)
    table["length"] = layout.itemsize - 1
    table["start"] = table["end"] = stamps.lsn
    return table


def _bytes(table: Any) -> Bytes:
    rows: Bytes = np.ascontiguousarray(table).view(np.uint8).reshape(len(table), -1)
    return rows


assert _ROW.itemsize == FRAME_HEADER_BYTES + 5
