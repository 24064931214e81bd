"""The loops that print common types for a whole column.

Invariant: the texts lie one after the other in the result, with their sizes beside them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.postgres.binary_text.date_kernel import (
    put_before_christ,
    put_date,
    put_infinity,
)
from millrace.postgres.kernel import be16, kernel
from millrace.postgres.pgoutput.messages import Bytes

Texts = tuple[Bytes, NDArray[np.int64]]

# `294277-01-09 04:00:54.775807+00 BC` and `5874898-01-01` are the longest.
_TIMESTAMP_BYTES = 36
_DATE_BYTES = 16
_HEXADECIMAL = np.frombuffer(b"0123456789abcdef", np.uint8)


def render_dates(days: NDArray[np.int64]) -> Texts:
    out = np.empty(len(days) * _DATE_BYTES, np.uint8)
    sizes = np.empty(len(days), np.int64)
    end = _dates(days, out, sizes)
    return out[:end], sizes


def render_timestamps(microseconds: NDArray[np.int64], zone: Bytes) -> Texts:
    out = np.empty(len(microseconds) * _TIMESTAMP_BYTES, np.uint8)
    sizes = np.empty(len(microseconds), np.int64)
    end = _timestamps(microseconds, zone, out, sizes)
    return out[:end], sizes


def render_numerics(buffer: Bytes, at: NDArray[np.int64], size: NDArray[np.int64]) -> Texts | None:
    """None if a value is not finite, or not a numeric at all."""
    room = _numerics_room(buffer, at, size)
    if room < 0:
        return None
    out = np.empty(room, np.uint8)
    sizes = np.empty(len(at), np.int64)
    end = _numerics(buffer, at, out, sizes)
    return out[:end], sizes


def render_hexadecimal(
    buffer: Bytes,
    at: NDArray[np.int64],
    size: NDArray[np.int64],
    prefix: Bytes,
    dashes: NDArray[np.int64],
) -> Texts:
    """`dashes` says before which bytes a dash is written."""
    sizes = 2 * size + len(prefix) + len(dashes)
    out = np.empty(int(sizes.sum()), np.uint8)
    _hexadecimal(buffer, at, size, prefix, dashes, out)
    return out, sizes


@kernel
def _put_number(out: Any, at: Any, number: Any, width: Any) -> Any:
    """The number with at least that number of digits; where it ends."""
    digits = 1
    rest = number // 10
    while rest:
        digits += 1
        rest //= 10
    if digits < width:
        digits = width
    for i in range(at + digits - 1, at - 1, -1):
        out[i] = 48 + number % 10
        number //= 10
    return at + digits


@kernel
def _dates(days: Any, out: Any, sizes: Any) -> Any:
    at = 0
    for row in range(len(days)):
        begin = at
        value = days[row]
        if value == 2147483647 or value == -2147483648:
            at = put_infinity(out, at, value < 0)
        else:
            at, is_before = put_date(out, at, value)
            if is_before:
                at = put_before_christ(out, at)
        sizes[row] = at - begin
    return at


@kernel
def _timestamps(microseconds: Any, zone: Any, out: Any, sizes: Any) -> Any:
    at = 0
    for row in range(len(microseconds)):
        begin = at
        value = microseconds[row]
        if value == 9223372036854775807 or value == -9223372036854775808:
            at = put_infinity(out, at, value < 0)
            sizes[row] = at - begin
            continue
        days = value // 86400000000
        rest = value - days * 86400000000
        at, is_before = put_date(out, at, days)
        out[at] = 32
        at = _put_number(out, at + 1, rest // 3600000000, 2)
        out[at] = 58
        at = _put_number(out, at + 1, rest // 60000000 % 60, 2)
        out[at] = 58
        at = _put_number(out, at + 1, rest // 1000000 % 60, 2)
        fraction = rest % 1000000
        if fraction:
            out[at] = 46
            at = _put_number(out, at + 1, fraction, 6)
            while out[at - 1] == 48:
                at -= 1
        for i in range(len(zone)):
            out[at] = zone[i]
            at += 1
        if is_before:
            at = put_before_christ(out, at)
        sizes[row] = at - begin
    return at


@kernel
def _numerics_room(buffer: Any, positions: Any, sizes: Any) -> Any:
    """Bytes that are enough for all, or -1."""
    room = 0
    for row in range(len(positions)):
        at = positions[row]
        if sizes[row] < 8:
            return -1
        count = be16(buffer, at)
        sign = be16(buffer, at + 4)
        if sizes[row] != 8 + 2 * count or (sign != 0 and sign != 0x4000):
            return -1
        for i in range(count):
            if be16(buffer, at + 8 + 2 * i) > 9999:
                return -1
        weight = be16(buffer, at + 2)
        before = weight + 1 if weight < 0x8000 else 0
        # A sign, the point, a zero before it.
        room += 4 * before + be16(buffer, at + 6) + 7
    return room


@kernel
def _digit(buffer: Any, at: Any, count: Any, number: Any) -> Any:
    """A decimal digit, counted from the first one stored."""
    if number < 0 or number >= 4 * count:
        return 0
    group = be16(buffer, at + 8 + 2 * (number // 4))
    place = number % 4
    if place == 0:
        return group // 1000
    if place == 1:
        return group // 100 % 10
    if place == 2:
        return group // 10 % 10
    return group % 10


@kernel
def _numerics(buffer: Any, positions: Any, out: Any, sizes: Any) -> Any:
    end = 0
    for row in range(len(positions)):
        begin = end
        at = positions[row]
        count = be16(buffer, at)
        weight = be16(buffer, at + 2)
        if weight >= 0x8000:
            weight -= 0x10000
        scale = be16(buffer, at + 6)
        if be16(buffer, at + 4):
            out[end] = 45
            end += 1
        # The number of the first decimal digit after the point.
        point = 4 * (weight + 1)
        first = 0
        while first < point - 1 and _digit(buffer, at, count, first) == 0:
            first += 1
        if point <= 0:
            out[end] = 48
            end += 1
        for number in range(first, point):
            out[end] = 48 + _digit(buffer, at, count, number)
            end += 1
        if scale:
            out[end] = 46
            end += 1
            for number in range(point, point + scale):
                out[end] = 48 + _digit(buffer, at, count, number)
                end += 1
        sizes[row] = end - begin
    return end


@kernel
def _hexadecimal(
    buffer: Any, positions: Any, sizes: Any, prefix: Any, dashes: Any, out: Any
) -> None:
    end = 0
    for row in range(len(positions)):
        for i in range(len(prefix)):
            out[end] = prefix[i]
            end += 1
        dash = 0
        for i in range(sizes[row]):
            if dash < len(dashes) and dashes[dash] == i:
                out[end] = 45
                end += 1
                dash += 1
            byte = buffer[positions[row] + i]
            out[end] = _HEXADECIMAL[byte >> 4]
            out[end + 1] = _HEXADECIMAL[byte & 15]
            end += 2
