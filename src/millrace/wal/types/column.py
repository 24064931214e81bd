"""Whole columns of stored values into text.

Invariant: says what `Renderers.render` says of each value, only faster: the common types go through
kernels, the others value by value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.postgres.binary_text.column_kernel import render_hexadecimal
from millrace.wal.row.descriptor import DOMAIN, ENUM, TypeDescriptor
from millrace.wal.types import column_kernel
from millrace.wal.types.column_kernel import Bytes, Numbers, Texts
from millrace.wal.types.registry import Renderers
from millrace.wal.types.settings import OutputSettings

# In place of a size.
NULL: Final = -1
UNCHANGED: Final = -2

# From here on a shortest number can be a halfway point between two, which the server never prints.
_HALFWAY_FROM: Final = {"<f8": 2.0**52, "<f4": 2.0**22}
_EXPONENT_FROM: Final = {"<f8": 15, "<f4": 6}
_MINUTE: Final = 60_000_000


@dataclass(frozen=True)
class TextColumn:
    """Where the texts are: in `data`; a size can be NULL or UNCHANGED."""

    data: Bytes
    at: Numbers
    size: Numbers


_Fast = Callable[[Bytes, Numbers, Numbers, OutputSettings], Texts | None]


def render_column(
    renderers: Renderers, type_: TypeDescriptor, buffer: Bytes, at: Numbers, size: Numbers
) -> TextColumn:
    """The texts of the values at these places; a size may be NULL or UNCHANGED."""
    while type_.kind == DOMAIN and type_.base is not None:
        type_ = type_.base
    if _is_in_place(type_):
        return TextColumn(buffer, at, size)
    there = size >= 0
    if there.all():
        return TextColumn(*_render(renderers, type_, buffer, at, size))
    data, places, sizes = _render(renderers, type_, buffer, at[there], size[there])
    all_at, all_size = np.zeros(len(at), np.int64), size.copy()
    all_at[there], all_size[there] = places, sizes
    return TextColumn(data, all_at, all_size)


def _is_in_place(type_: TypeDescriptor) -> bool:
    names = _IN_PLACE if type_.namespace == "pg_catalog" else ("citext",)
    return type_.name in names


def _render(
    renderers: Renderers, type_: TypeDescriptor, buffer: Bytes, at: Numbers, size: Numbers
) -> Texts:
    if type_.kind == ENUM:
        return _by_value(renderers, type_, buffer, at)
    fast = _FAST.get(type_.name) if type_.namespace == "pg_catalog" else None
    found = fast(buffer, at, size, renderers.settings) if fast is not None else None
    return found or _one_by_one(renderers, type_, buffer, at, size)


def _one_by_one(
    renderers: Renderers, type_: TypeDescriptor, buffer: Bytes, at: Numbers, size: Numbers
) -> Texts:
    view = np.ascontiguousarray(buffer).data
    places = zip(at.tolist(), (at + size).tolist(), strict=True)
    return _joined([renderers.render(type_, bytes(view[first:end])) for first, end in places])


def _by_value(renderers: Renderers, type_: TypeDescriptor, buffer: Bytes, at: Numbers) -> Texts:
    """Few different values: each is printed once."""
    different, which = np.unique(_numbers(buffer, at, "<u4"), return_inverse=True)
    texts = [renderers.render(type_, int(one).to_bytes(4, "little")) for one in different]
    data, places, sizes = _joined(texts)
    return data, places[which], sizes[which]


def _joined(texts: list[bytes]) -> Texts:
    size = np.fromiter(map(len, texts), np.int64, len(texts))
    return np.frombuffer(bytearray().join(texts), np.uint8), np.cumsum(size) - size, size


def _numbers(buffer: Bytes, at: Numbers, kind: str) -> NDArray[Any]:
    width = np.dtype(kind).itemsize
    numbers: NDArray[Any] = buffer[at[:, None] + np.arange(width)].reshape(-1).view(kind)
    return numbers


def _integers(width: int, *, is_signed: bool) -> _Fast:
    def render(buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings) -> Texts:
        return column_kernel.render_integers(buffer, at, width, is_signed=is_signed)

    return render


def _bool(buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings) -> Texts:
    return np.frombuffer(bytearray(b"ft"), np.uint8), (buffer[at] != 0).astype(np.int64), size


def _numerics(buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings) -> Texts | None:
    return column_kernel.render_numerics(buffer, at, size)


def _names(buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings) -> Texts:
    zeros = buffer[at[:, None] + np.arange(64)] == 0
    return buffer, at, np.where(zeros.any(axis=1), zeros.argmax(axis=1), size)


def _dates(buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings) -> Texts | None:
    if settings.date_format != "ISO":
        return None
    return column_kernel.render_dates(_numbers(buffer, at, "<i4").astype(np.int64))


def _timestamps(
    buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings
) -> Texts | None:
    if settings.date_format != "ISO":
        return None
    moments = _numbers(buffer, at, "<i8")
    return column_kernel.render_timestamps(moments, np.zeros_like(moments), with_zone=False)


def _timestamps_with_zone(
    buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings
) -> Texts | None:
    if settings.date_format != "ISO":
        return None
    moments = _numbers(buffer, at, "<i8")
    east = _offsets(moments, settings)
    return None if east is None else column_kernel.render_timestamps(moments, east, with_zone=True)


def _offsets(moments: Numbers, settings: OutputSettings) -> Numbers | None:
    """Of each moment from Greenwich; None if a clock was changed in the middle of a minute."""
    zone = settings.zone
    if zone.fixed is not None:
        return np.full(len(moments), zone.fixed[0], np.int64)
    minutes, which = np.unique(moments // _MINUTE, return_inverse=True)
    first = [zone.at(minute * _MINUTE)[0] for minute in minutes.tolist()]
    last = [zone.at(minute * _MINUTE + _MINUTE - 1)[0] for minute in minutes.tolist()]
    return np.array(first, np.int64)[which] if first == last else None


def _floats(kind: str) -> _Fast:
    def render(buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings) -> Texts | None:
        numbers = _numbers(buffer, at, kind)
        if settings.extra_float_digits <= 0 or not np.all(np.abs(numbers) < _HALFWAY_FROM[kind]):
            return None
        texts = pa.array(numbers).cast(pa.string())
        offsets = np.frombuffer(texts.buffers()[1], np.int32, len(texts) + 1).astype(np.int64)
        data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
        return column_kernel.render_floats(
            data, offsets[:-1], np.diff(offsets), _EXPONENT_FROM[kind]
        )

    return render


def _bytea(buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings) -> Texts | None:
    if settings.bytea_output != "hex":
        return None
    return _hexadecimal(buffer, at, size, b"\\x", ())


def _uuid(buffer: Bytes, at: Numbers, size: Numbers, settings: OutputSettings) -> Texts:
    return _hexadecimal(buffer, at, size, b"", (4, 6, 8, 10))


def _hexadecimal(
    buffer: Bytes, at: Numbers, size: Numbers, prefix: bytes, dashes: tuple[int, ...]
) -> Texts:
    data, sizes = render_hexadecimal(
        buffer, at, size, np.frombuffer(prefix, np.uint8), np.array(dashes, np.int64)
    )
    return data, np.cumsum(sizes) - sizes, sizes


# Stored as they are printed.
_IN_PLACE: Final = frozenset(("text", "varchar", "bpchar", "json", "refcursor", "pg_node_tree"))
_FAST: Final[dict[str, _Fast]] = {
    "bool": _bool,
    "name": _names,
    "int2": _integers(2, is_signed=True),
    "int4": _integers(4, is_signed=True),
    "int8": _integers(8, is_signed=True),
    **dict.fromkeys(("oid", "xid", "cid"), _integers(4, is_signed=False)),
    "xid8": _integers(8, is_signed=False),
    "numeric": _numerics,
    "float4": _floats("<f4"),
    "float8": _floats("<f8"),
    "date": _dates,
    "timestamp": _timestamps,
    "timestamptz": _timestamps_with_zone,
    "bytea": _bytea,
    "uuid": _uuid,
}
