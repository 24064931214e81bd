"""The values of many rows of one table as text, column by column.

Invariant: says what `heap_tuple.deform`, `ToastValues.complete` and `Renderers.render` say of each
row, or raises what they raise, with the name of the column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import FormatError
from millrace.postgres.kernel import kernel
from millrace.wal.row import varlena
from millrace.wal.row.descriptor import ColumnDescriptor, RowDescriptor
from millrace.wal.row.heap_columns import (
    COMPRESSED,
    EXTERNAL,
    MISSING,
    NULL,
    Bytes,
    Numbers,
    deform_columns,
)
from millrace.wal.row.toast import CHUNK_COLUMNS, ToastValues
from millrace.wal.row.varlena import ToastPointer
from millrace.wal.types.column import UNCHANGED, TextColumn, render_column
from millrace.wal.types.registry import Renderers


@dataclass(frozen=True)
class StoredRows:
    """Rows of one table: where their headers are, the size of their bodies, and the epochs whose
    chunks are theirs."""

    buffer: Bytes
    at: Numbers
    size: Numbers
    epoch: Numbers


# By epoch.
Chunks = Mapping[int, ToastValues]
_NO_VALUES = ToastValues()


def render_rows(
    renderers: Renderers, relation: RowDescriptor, rows: StoredRows, chunks: Chunks
) -> list[TextColumn | None]:
    """The texts of each column; None for one that is dropped."""
    stored = deform_columns(rows.buffer, rows.at, rows.size, relation.columns)
    texts: list[TextColumn | None] = []
    for column, at, size in zip(relation.columns, stored.at, stored.size, strict=True):
        if column.type is None:
            texts.append(None)
            continue
        try:
            buffer, places, sizes = _complete(rows, column, at, size, chunks)
            texts.append(render_column(renderers, column.type, buffer, places, sizes))
        except FormatError as error:
            raise column_error(relation, column, error) from None
    return texts


def column_error(
    relation: RowDescriptor, column: ColumnDescriptor, error: FormatError
) -> FormatError:
    """The same, with the column's name."""
    return FormatError(
        f"column {column.name} of {relation.namespace}.{relation.name}: {error.message}",
        hint=error.hint,
        **error.facts,
    )


def add_chunks(rows: StoredRows, chunks: dict[int, ToastValues]) -> None:
    """Rows that were inserted into TOAST tables."""
    stored = deform_columns(rows.buffer, rows.at, rows.size, CHUNK_COLUMNS)
    if np.any(stored.size < 0):
        raise FormatError("expected chunk_id, chunk_seq and chunk_data in rows of TOAST tables")
    value, number = (_load_u4(rows.buffer, stored.at[column]) for column in (0, 1))
    view = rows.buffer.data
    ends = stored.at[2] + stored.size[2]
    for epoch, oid, n, begin, end in zip(
        rows.epoch.tolist(),
        value.tolist(),
        number.tolist(),
        stored.at[2].tolist(),
        ends.tolist(),
        strict=True,
    ):
        chunks.setdefault(epoch, ToastValues()).add_chunk(oid, n, bytes(view[begin:end]))


def _load_u4(buffer: Bytes, at: Numbers) -> Any:
    return buffer[at[:, None] + np.arange(4)].reshape(-1).view("<u4")


def _complete(
    rows: StoredRows, column: ColumnDescriptor, at: Numbers, size: Numbers, chunks: Chunks
) -> tuple[Bytes, Numbers, Numbers]:
    """Where the values are, now that none is missing, compressed or elsewhere."""
    special = np.flatnonzero(size < NULL)
    if not len(special):
        return rows.buffer, at, size
    sizes = size.copy()
    found: list[bytes] = []
    for row in special.tolist():
        value = _special_value(rows, column, row, int(at[row]), int(size[row]), chunks)
        sizes[row] = value if isinstance(value, int) else len(value)
        found.append(b"" if isinstance(value, int) else value)
    # What is in the buffer is copied behind what was found.
    extra = np.frombuffer(b"".join(found), np.uint8)
    places = np.zeros(len(at), np.int64)
    places[special] = np.cumsum([0, *map(len, found)])[:-1]
    plain = np.flatnonzero(size >= 0)
    pool = np.empty(len(extra) + int(size[plain].sum()), np.uint8)
    pool[: len(extra)] = extra
    places[plain] = len(extra) + np.cumsum(size[plain]) - size[plain]
    _copy(rows.buffer, at[plain], size[plain], pool, places[plain])
    return pool, places, sizes


def _special_value(
    rows: StoredRows, column: ColumnDescriptor, row: int, at: int, code: int, chunks: Chunks
) -> bytes | int:
    if code == MISSING:
        return NULL if column.missing is None else column.missing
    if code not in (EXTERNAL, COMPRESSED):
        raise FormatError(f"expected a value, found {code} in place of its size")
    data = rows.buffer[at : at + varlena.POINTER_BYTES].tobytes()
    if code == COMPRESSED:
        size = varlena.measure(data, 0)
        data = rows.buffer[at : at + size].tobytes()
    value = varlena.decode(data, 0, len(data))
    if not isinstance(value, ToastPointer):
        return value
    complete = chunks.get(int(rows.epoch[row]), _NO_VALUES).find(value)
    return UNCHANGED if complete is None else complete


@kernel
def _copy(source: Any, at: Any, size: Any, out: Any, to: Any) -> None:
    for row in range(len(at)):
        for i in range(size[row]):
            out[to[row] + i] = source[at[row] + i]
