"""Whole columns of binary values into text.

Invariant: says what `BinaryType.render` says of each value, only faster: the common types go
through kernels, the others value by value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.postgres.binary_text import column_kernel
from millrace.postgres.binary_text.types import BinaryType
from millrace.postgres.pgoutput.messages import Bytes

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class RenderedColumn:
    """Where the texts are: in `data`, or, if that is None, still in the buffer."""

    data: Bytes | None
    at: Positions
    size: Positions


def render_column(
    type_: BinaryType, buffer: Bytes, at: Positions, size: Positions, encoding: str
) -> RenderedColumn:
    """The texts, in the client encoding, of the values at these places of the buffer."""
    fast = _FAST.get(type_.name)
    if fast is not None:
        found = fast(buffer, at, size)
        if found is not None:
            return found
        # Some value is not what it should be: say which, or find that it is fine after all.
    return _one_by_one(type_, buffer, at, size, encoding)


def _one_by_one(
    type_: BinaryType, buffer: Bytes, at: Positions, size: Positions, encoding: str
) -> RenderedColumn:
    view = np.ascontiguousarray(buffer).data
    render = type_.renderer
    places = list(zip(at.tolist(), (at + size).tolist(), strict=True))
    try:
        texts = [render(bytes(view[first:end]), encoding).encode(encoding) for first, end in places]
    except Exception:
        for first, end in places:
            type_.render(bytes(view[first:end]), encoding)  # the error of the first bad value
        raise FormatError(f"a value of type {type_.name} can't be printed") from None
    return _joined(np.frombuffer(b"".join(texts), np.uint8), np.fromiter(map(len, texts), np.int64))


def _joined(data: Bytes, size: Positions) -> RenderedColumn:
    """Texts that lie one after the other."""
    return RenderedColumn(data, np.cumsum(size) - size, size)


_Fast = Callable[[Bytes, Positions, Positions], RenderedColumn | None]


def _text(buffer: Bytes, at: Positions, size: Positions) -> RenderedColumn:
    return RenderedColumn(None, at, size)


def _versioned(buffer: Bytes, at: Positions, size: Positions) -> RenderedColumn | None:
    if np.any(size < 1) or np.any(buffer[at] != 1):
        return None
    return RenderedColumn(None, at + 1, size - 1)


def _bool(buffer: Bytes, at: Positions, size: Positions) -> RenderedColumn | None:
    if np.any(size != 1):
        return None
    letters = np.frombuffer(b"ft", np.uint8)
    return RenderedColumn(letters, (buffer[at] != 0).astype(np.int64), size)


def _integers(kind: str) -> _Fast:
    def render(buffer: Bytes, at: Positions, size: Positions) -> RenderedColumn | None:
        numbers = _numbers(buffer, at, size, kind)
        if numbers is None:
            return None
        # Arrow prints integers, without a Python object for each.
        texts = pa.array(numbers).cast(pa.string())
        offsets = np.frombuffer(texts.buffers()[1], np.int32, len(texts) + 1).astype(np.int64)
        data: Bytes = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
        return RenderedColumn(data, offsets[:-1], np.diff(offsets))

    return render


def _numbers(buffer: Bytes, at: Positions, size: Positions, kind: str) -> NDArray[Any] | None:
    """Numbers of one width in this machine's byte order; None if a size is another."""
    width = np.dtype(kind).itemsize
    if np.any(size != width):
        return None
    places = at[:, None] + np.arange(width)
    numbers = buffer[places].reshape(-1).view(kind)
    native: NDArray[Any] = numbers.astype(np.dtype(kind).newbyteorder("="))
    return native


def _dates(buffer: Bytes, at: Positions, size: Positions) -> RenderedColumn | None:
    days = _numbers(buffer, at, size, ">i4")
    if days is None:
        return None
    return _joined(*column_kernel.render_dates(days.astype(np.int64)))


def _timestamps(zone: bytes) -> _Fast:
    def render(buffer: Bytes, at: Positions, size: Positions) -> RenderedColumn | None:
        microseconds = _numbers(buffer, at, size, ">i8")
        if microseconds is None:
            return None
        suffix = np.frombuffer(zone, np.uint8)
        return _joined(*column_kernel.render_timestamps(microseconds, suffix))

    return render


def _numerics(buffer: Bytes, at: Positions, size: Positions) -> RenderedColumn | None:
    rendered = column_kernel.render_numerics(buffer, at, size)
    return None if rendered is None else _joined(*rendered)


def _hexadecimal(prefix: bytes, dashes: tuple[int, ...], width: int | None) -> _Fast:
    def render(buffer: Bytes, at: Positions, size: Positions) -> RenderedColumn | None:
        if width is not None and np.any(size != width):
            return None
        rendered = column_kernel.render_hexadecimal(
            buffer, at, size, np.frombuffer(prefix, np.uint8), np.array(dashes, np.int64)
        )
        return _joined(*rendered)

    return render


_FAST: dict[str, _Fast] = {
    **dict.fromkeys(("text", "varchar", "bpchar", "name", "json", "refcursor"), _text),
    **dict.fromkeys(("jsonb", "jsonpath"), _versioned),
    "bool": _bool,
    "int2": _integers(">i2"),
    "int4": _integers(">i4"),
    "int8": _integers(">i8"),
    **dict.fromkeys(("oid", "xid", "cid"), _integers(">u4")),
    "xid8": _integers(">u8"),
    "date": _dates,
    "timestamp": _timestamps(b""),
    "timestamptz": _timestamps(b"+00"),
    "numeric": _numerics,
    "bytea": _hexadecimal(b"\\x", (), None),
    "uuid": _hexadecimal(b"", (4, 6, 8, 10), 16),
}
