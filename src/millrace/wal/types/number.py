"""Stored numbers as the server prints them.

Invariant: a floating-point number has the fewest digits that tell it from its neighbours, or the
number of digits extra_float_digits asks for; a numeric keeps its scale.

    numeric, short   = header:2 digits: header is 1 0 sign:1 scale:6 weight's sign:1 weight:6
    numeric, long    = header:2 weight:2 digits: header is 0 sign:1 scale:14
    numeric, special = header:2: 1 1 and a name

Facts: numeric.c, "numeric short" and after; float.c, float8out_internal(); cash.c, cash_out().
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from millrace.errors import ConfigError
from millrace.postgres.binary_text.number import (
    NUMERIC_NAMES,
    render_double,
    render_groups,
    render_single,
    render_special,
)
from millrace.wal.types.settings import OutputSettings

Render = Callable[[bytes], str]

_FLOAT4_DIGITS: Final = 6
_FLOAT8_DIGITS: Final = 15


def integer_renderer(layout: str) -> Render:
    unpack = struct.Struct(layout).unpack

    def render(data: bytes) -> str:
        return str(unpack(data)[0])

    return render


def float_renderer(settings: OutputSettings) -> Callable[[float], str]:
    """Of a float8, given as a number."""
    extra = settings.extra_float_digits
    return render_double if extra > 0 else _digits_renderer(_FLOAT8_DIGITS + extra)


def float4_renderer(settings: OutputSettings) -> Render:
    extra = settings.extra_float_digits
    render_value = render_single if extra > 0 else _digits_renderer(_FLOAT4_DIGITS + extra)
    return lambda data: render_value(struct.unpack("<f", data)[0])


def float8_renderer(settings: OutputSettings) -> Render:
    render_value = float_renderer(settings)
    return lambda data: render_value(struct.unpack("<d", data)[0])


def _digits_renderer(digits: int) -> Callable[[float], str]:
    count = max(digits, 1)

    def render(value: float) -> str:
        if value != value or value in (float("inf"), float("-inf")):
            return render_special(value)
        return f"{value:.{count}g}"

    return render


def render_numeric(data: bytes) -> str:
    (header,) = struct.unpack_from("<H", data)
    if header & 0xC000 == 0xC000:
        return NUMERIC_NAMES[header & 0xF000]
    if header & 0x8000:
        is_negative, scale = bool(header & 0x2000), header >> 7 & 0x3F
        weight = (header & 0x3F) - (64 if header & 0x40 else 0)
        digits = data[2:]
    else:
        is_negative, scale = bool(header & 0x4000), header & 0x3FFF
        (weight,) = struct.unpack_from("<h", data, 2)
        digits = data[4:]
    groups = struct.unpack(f"<{len(digits) // 2}H", digits)
    text = render_groups(groups, weight, scale)
    return "-" + text if is_negative else text


def money_renderer(settings: OutputSettings) -> Render:
    def render(data: bytes) -> str:
        if not settings.has_dollars:
            raise ConfigError(
                f"money can't be printed with lc_monetary {settings.lc_monetary!r}",
                hint="only the locales C, POSIX and en_US are known",
            )
        (cents,) = struct.unpack("<q", data)
        units, rest = divmod(abs(cents), 100)
        return f"{'-' if cents < 0 else ''}${units:,}.{rest:02}"

    return render
