"""The loops that print common types for a whole column of stored values.

Invariant: texts are where `at` and `size` say; what a loop can't print it reports, and prints
nothing instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.postgres.binary_text.date_kernel import (
    put_before_christ,
    put_date,
    put_infinity,
    put_two,
)
from millrace.postgres.kernel import kernel

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
# Where texts are: in the bytes, at these places, with these sizes.
Texts = tuple[Bytes, Numbers, Numbers]

# A sign and 19 digits, or 20 digits.
_INTEGER_BYTES = 20
# `294277-01-09 04:00:54.775807+15:59:59 BC` is the longest.
_TIMESTAMP_BYTES = 48
_TIME_BYTES = 16


def render_integers(buffer: Bytes, at: Numbers, width: int, *, is_signed: bool) -> Texts:
    out = np.empty(len(at) * _INTEGER_BYTES, np.uint8)
    begin, size = np.empty(len(at), np.int64), np.empty(len(at), np.int64)
    _integers(buffer, at, width, is_signed, out, begin, size)
    return out, begin, size


def render_numerics(buffer: Bytes, at: Numbers, sizes: Numbers) -> Texts | None:
    """None if a value is not finite, or not a numeric at all."""
    room = np.empty(len(at), np.int64)
    if not _numeric_room(buffer, at, sizes, room):
        return None
    begin = np.cumsum(room) - room
    out = np.empty(int(room.sum()), np.uint8)
    size = np.empty(len(at), np.int64)
    _numerics(buffer, at, sizes, out, begin, size)
    return out, begin, size


def render_timestamps(microseconds: Numbers, east: Numbers, *, with_zone: bool) -> Texts:
    """In ISO style, `east` seconds of Greenwich."""
    out = np.empty(len(microseconds) * _TIMESTAMP_BYTES, np.uint8)
    size = np.empty(len(microseconds), np.int64)
    _timestamps(microseconds, east, with_zone, out, size)
    return out, np.arange(len(size)) * _TIMESTAMP_BYTES, size


def render_dates(days: Numbers) -> Texts:
    """In ISO style."""
    out = np.empty(len(days) * _TIME_BYTES, np.uint8)
    size = np.empty(len(days), np.int64)
    _dates(days, out, size)
    return out, np.arange(len(size)) * _TIME_BYTES, size


def render_floats(digits: Bytes, at: Numbers, sizes: Numbers, exponent_from: int) -> Texts:
    """Numbers that are printed with the right digits, in PostgreSQL's notation."""
    out = np.empty(len(at) * 32, np.uint8)
    size = np.empty(len(at), np.int64)
    _floats(digits, at, sizes, exponent_from, out, size)
    return out, np.arange(len(size)) * 32, size


@kernel
def load(buffer: Any, at: Any, width: Any) -> Any:
    """The unsigned number of that many bytes, the low one first."""
    value = np.uint64(0)
    for i in range(width):
        value |= np.uint64(buffer[at + i]) << np.uint64(8 * i)
    return value


@kernel
def _integers(
    buffer: Any, at: Any, width: Any, is_signed: Any, out: Any, begins: Any, sizes: Any
) -> None:
    ten = np.uint64(10)
    top = np.uint64(1) << np.uint64(8 * width - 1)
    for row in range(len(at)):
        value = load(buffer, at[row], width)
        is_negative = is_signed and value & top != 0
        if is_negative:
            # What is missing to the power of two above; for 8 bytes that overflows as it should.
            value = (top << np.uint64(1)) - value if width < 8 else ~value + np.uint64(1)
        end = (row + 1) * 20
        first = end
        while True:
            rest = value // ten
            first -= 1
            out[first] = 48 + np.uint8(value - rest * ten)
            value = rest
            if value == 0:
                break
        if is_negative:
            first -= 1
            out[first] = 45
        begins[row] = first
        sizes[row] = end - first


@kernel
def _numeric_head(buffer: Any, at: Any, size: Any) -> Any:
    """(is_negative, scale, weight, where the digits begin, how many); digits -1 if it is none."""
    if size < 2:
        return False, 0, 0, 0, -1
    header = np.int64(load(buffer, at, 2))
    if header & 0xC000 == 0xC000:
        return False, 0, 0, 0, -1
    if header & 0x8000:
        weight = header & 0x3F
        if header & 0x40:
            weight -= 64
        return header & 0x2000 != 0, header >> 7 & 0x3F, weight, at + 2, (size - 2) // 2
    if size < 4:
        return False, 0, 0, 0, -1
    weight = np.int64(load(buffer, at + 2, 2))
    if weight >= 0x8000:
        weight -= 0x10000
    return header & 0x4000 != 0, header & 0x3FFF, weight, at + 4, (size - 4) // 2


@kernel
def _numeric_room(buffer: Any, positions: Any, sizes: Any, room: Any) -> Any:
    for row in range(len(positions)):
        _, scale, weight, digits, count = _numeric_head(buffer, positions[row], sizes[row])
        if count < 0:
            return False
        for i in range(count):
            if load(buffer, digits + 2 * i, 2) > 9999:
                return False
        before = weight + 1 if weight >= 0 else 0
        # A sign, the point, a zero before it, and the rest of the last group.
        room[row] = 4 * before + scale + 10
    return True


@kernel
def _put_group(out: Any, at: Any, group: Any) -> None:
    out[at] = 48 + group // 1000
    out[at + 1] = 48 + group // 100 % 10
    out[at + 2] = 48 + group // 10 % 10
    out[at + 3] = 48 + group % 10


@kernel
def _numerics(
    buffer: Any, positions: Any, value_sizes: Any, out: Any, begins: Any, sizes: Any
) -> None:
    for row in range(len(positions)):
        is_negative, scale, weight, digits, count = _numeric_head(
            buffer, positions[row], value_sizes[row]
        )
        begin = begins[row]
        end = begin
        if is_negative:
            out[end] = 45
            end += 1
        whole = end
        for i in range(weight + 1):
            _put_group(out, end, np.int64(load(buffer, digits + 2 * i, 2)) if i < count else 0)
            end += 4
        # Zeros at the front go, but for the last.
        skipped = 0
        while whole + skipped < end - 1 and out[whole + skipped] == 48:
            skipped += 1
        if skipped:
            for i in range(whole, end - skipped):
                out[i] = out[i + skipped]
            end -= skipped
        if end == whole:
            out[end] = 48
            end += 1
        if scale:
            out[end] = 46
            end += 1
            last = end + scale
            i = weight + 1
            while end < last:
                group = np.int64(load(buffer, digits + 2 * i, 2)) if 0 <= i < count else 0
                _put_group(out, end, group)
                end += 4
                i += 1
            end = last
        sizes[row] = end - begin


@kernel
def _dates(days: Any, out: Any, sizes: Any) -> None:
    for row in range(len(days)):
        begin = row * 16
        at = begin
        value = days[row]
        if value == 2147483647 or value == -2147483648:
            at = put_infinity(out, at, value < 0)
        else:
            at, is_before = put_date(out, at, value)
            if is_before:
                at = put_before_christ(out, at)
        sizes[row] = at - begin


@kernel
def _put_zone(out: Any, at: Any, east: Any) -> Any:
    out[at] = 45 if east < 0 else 43
    seconds = -east if east < 0 else east
    at = put_two(out, at + 1, seconds // 3600)
    if seconds % 3600:
        out[at] = 58
        at = put_two(out, at + 1, seconds // 60 % 60)
        if seconds % 60:
            out[at] = 58
            at = put_two(out, at + 1, seconds % 60)
    return at


@kernel
def _timestamps(microseconds: Any, east: Any, with_zone: Any, out: Any, sizes: Any) -> None:
    for row in range(len(microseconds)):
        begin = row * 48
        at = begin
        value = microseconds[row]
        if value == 9223372036854775807 or value == -9223372036854775808:
            sizes[row] = put_infinity(out, at, value < 0) - begin
            continue
        # Days first: the sum with the offset may be out of range.
        days = value // 86400000000
        rest = value - days * 86400000000 + east[row] * 1000000
        if rest < 0 or rest >= 86400000000:
            more = rest // 86400000000
            days += more
            rest -= more * 86400000000
        at, is_before = put_date(out, at, days)
        out[at] = 32
        seconds = rest // 1000000
        fraction = rest - seconds * 1000000
        at = put_two(out, at + 1, seconds // 3600)
        out[at] = 58
        at = put_two(out, at + 1, seconds // 60 % 60)
        out[at] = 58
        at = put_two(out, at + 1, seconds % 60)
        if fraction:
            out[at] = 46
            for i in range(at + 6, at, -1):
                out[i] = 48 + fraction % 10
                fraction //= 10
            at += 7
            while out[at - 1] == 48:
                at -= 1
        if with_zone:
            at = _put_zone(out, at, east[row])
        if is_before:
            at = put_before_christ(out, at)
        sizes[row] = at - begin


@kernel
def _floats(
    source: Any, positions: Any, source_sizes: Any, exponent_from: Any, out: Any, sizes: Any
) -> None:
    digits = np.empty(32, np.uint8)
    for row in range(len(positions)):
        begin = row * 32
        at = begin
        read = positions[row]
        end = read + source_sizes[row]
        if source[read] == 45:
            out[at] = 45
            at += 1
            read += 1
        count = 0
        # The power of ten of the first digit.
        power = -1
        is_behind_point = False
        while read < end and source[read] != 101 and source[read] != 69:
            if source[read] == 46:
                is_behind_point = True
            elif count > 0 or source[read] != 48:
                digits[count] = source[read]
                count += 1
                if not is_behind_point:
                    power += 1
            elif is_behind_point:
                power -= 1
            read += 1
        exponent = 0
        if read < end:
            read += 1
            is_small = source[read] == 45
            if source[read] == 45 or source[read] == 43:
                read += 1
            while read < end:
                exponent = 10 * exponent + source[read] - 48
                read += 1
            if is_small:
                exponent = -exponent
        power += exponent
        while count > 1 and digits[count - 1] == 48:
            count -= 1
        sizes[row] = _put_float(out, at, digits, count, power, exponent_from) - begin


@kernel
def _put_float(out: Any, at: Any, digits: Any, count: Any, power: Any, exponent_from: Any) -> Any:
    if count == 0:
        out[at] = 48
        return at + 1
    if power < -4 or power >= exponent_from:
        for i in range(count):
            out[at] = digits[i]
            at += 1
            if i == 0 and count > 1:
                out[at] = 46
                at += 1
        out[at] = 101
        out[at + 1] = 45 if power < 0 else 43
        at += 2
        size = -power if power < 0 else power
        if size >= 100:
            out[at] = 48 + size // 100
            at += 1
            size %= 100
        return put_two(out, at, size)
    if power < 0:
        out[at] = 48
        out[at + 1] = 46
        at += 2
        for _ in range(-power - 1):
            out[at] = 48
            at += 1
        for i in range(count):
            out[at] = digits[i]
            at += 1
        return at
    for i in range(max(count, power + 1)):
        if i == power + 1:
            out[at] = 46
            at += 1
        out[at] = digits[i] if i < count else 48
        at += 1
    return at
