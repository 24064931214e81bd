"""The values of a chunk as one Arrow array of text.

Invariant: the text of a value is what the server prints, in UTF-8; NULL is null. Bytes that are no
text, and binary values of a type that can't be printed, are an error that names the column.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.postgres.binary_text import find_type, render_column
from millrace.postgres.kernel import kernel
from millrace.postgres.pgoutput.entries import Entries
from millrace.postgres.pgoutput.messages import Bytes, RelationColumn

# What an Arrow array of strings, and a value in Spark, can hold.
_MAX_BYTES: Final = 2**31 - 1
_UTF8: Final = "utf-8"


@dataclass(frozen=True)
class ColumnOrigin:
    """A column, and which table it is of."""

    column: RelationColumn
    table: str

    @property
    def label(self) -> str:
        return f"{self.table}.{self.column.name}"


def build_texts(
    buffer: Bytes, entries: Entries, columns: list[ColumnOrigin], encoding: str
) -> pa.Array:
    """The text of each entry."""
    at, size = entries.at.astype(np.int64), entries.size.astype(np.int64)
    pool = _render_binary(buffer, entries, at, size, columns, encoding)
    total = int(np.maximum(size, 0).sum())
    if total > _MAX_BYTES:
        raise FormatError(f"a value takes more than the {_MAX_BYTES} bytes that a text can have")
    data = np.empty(total, np.uint8)
    offsets = np.empty(len(size) + 1, np.int32)
    _gather(pool, at, size, data, offsets)
    if encoding != _UTF8 and data.size and data.max() >= 128:
        return _decoded(data, offsets, entries, columns, encoding)
    texts = pa.StringArray.from_buffers(
        len(size), pa.py_buffer(offsets), pa.py_buffer(data), *_nulls(size)
    )
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        _decoded(data, offsets, entries, columns, encoding)  # says which
        raise FormatError("values that are not UTF-8") from None
    return texts


def _render_binary(
    buffer: Bytes,
    entries: Entries,
    at: NDArray[np.int64],
    size: NDArray[np.int64],
    columns: list[ColumnOrigin],
    encoding: str,
) -> Bytes:
    """Change `at` and `size` of binary values to those of their texts; where all texts are."""
    binary = np.flatnonzero(entries.is_binary)
    if not len(binary):
        return buffer
    parts = [buffer]
    end = len(buffer)
    owner = entries.column[binary]
    binary = binary[np.argsort(owner, kind="stable")]
    for chosen in np.split(binary, np.flatnonzero(np.diff(np.sort(owner))) + 1):
        origin = columns[int(entries.column[chosen[0]])]
        type_ = find_type(origin.column.type_oid)
        if type_ is None:
            raise _unknown_type(origin)
        try:
            rendered = render_column(type_, buffer, at[chosen], size[chosen], encoding)
        except FormatError as error:
            raise FormatError(f"{origin.label}: {error.message}") from None
        at[chosen], size[chosen] = rendered.at, rendered.size
        if rendered.data is not None:
            at[chosen] += end
            parts.append(rendered.data)
            end += len(rendered.data)
    return np.concatenate(parts) if len(parts) > 1 else buffer


def _unknown_type(origin: ColumnOrigin) -> FormatError:
    return FormatError(
        f"{origin.label}: values of the type with OID {origin.column.type_oid} came in binary, and "
        "only the server can print them",
        hint="receive these changes as text: `millrace stream receive --no-binary`",
        column=origin.label,
        type_oid=origin.column.type_oid,
    )


def _nulls(size: NDArray[np.int64]) -> tuple[pa.Buffer | None, int]:
    is_valid = size >= 0
    count = int(len(size) - is_valid.sum())
    if not count:
        return None, 0
    return pa.py_buffer(np.packbits(is_valid, bitorder="little")), count


def _decoded(
    data: Bytes,
    offsets: NDArray[np.int32],
    entries: Entries,
    columns: list[ColumnOrigin],
    encoding: str,
) -> pa.Array:
    """One by one, from another encoding."""
    values: list[str | None] = []
    raw = data.tobytes()
    for number, (first, end) in enumerate(pairwise(offsets.tolist())):
        if entries.size[number] < 0:
            values.append(None)
            continue
        try:
            values.append(raw[first:end].decode(encoding))
        except UnicodeDecodeError:
            label = columns[int(entries.column[number])].label
            raise FormatError(
                f"{label}: expected text in {encoding}",
                hint="a database in SQL_ASCII may hold any bytes; its changes can be applied, but "
                "not read as text",
                column=label,
            ) from None
    return pa.array(values, pa.string())


@kernel
def _gather(pool: Any, positions: Any, sizes: Any, data: Any, offsets: Any) -> None:
    end = 0
    offsets[0] = 0
    for i in range(len(sizes)):
        at, size = positions[i], sizes[i]
        if size > 32:
            data[end : end + size] = pool[at : at + size]
            end += size
        else:
            for byte in range(size):
                data[end + byte] = pool[at + byte]
            if size > 0:
                end += size
        offsets[i + 1] = end
