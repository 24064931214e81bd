"""Numbers as PostgreSQL prints them.

Invariant: a floating-point number has the fewest digits that lie strictly between the halfway
points to its neighbours; a numeric keeps its scale.

    numeric = digits:2 weight:2 sign:2 scale:2 (digit in base 10000):2 *

Facts: src/common/d2s.c, f2s.c (a halfway point itself is never printed, and the exponent form
begins at 1e15, for float4 at 1e6); numeric.c, numeric_send(), get_str_from_var().
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Final

import numpy as np

# Below this, halfway points have more than 17 digits, so that no shortest form is one.
_HALFWAY_FROM: Final = 2.0**52
_HALFWAY_FROM_SINGLE: Final = 2.0**22

NUMERIC_NAMES = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_NEGATIVE = 0x4000
_MAX_DIGITS = 17
_MAX_DIGITS_SINGLE = 9


def render_int2(data: bytes, encoding: str) -> str:
    return str(struct.unpack(">h", data)[0])


def render_int4(data: bytes, encoding: str) -> str:
    return str(struct.unpack(">i", data)[0])


def render_int8(data: bytes, encoding: str) -> str:
    return str(struct.unpack(">q", data)[0])


def render_uint4(data: bytes, encoding: str) -> str:
    return str(struct.unpack(">I", data)[0])


def render_uint8(data: bytes, encoding: str) -> str:
    return str(struct.unpack(">Q", data)[0])


def render_float4(data: bytes, encoding: str) -> str:
    return render_single(struct.unpack(">f", data)[0])


def render_float8(data: bytes, encoding: str) -> str:
    return render_double(struct.unpack(">d", data)[0])


def render_double(value: float) -> str:
    """A float8."""
    if value != value or math.isinf(value):
        return render_special(value)
    shortest = repr(value)
    if abs(value) >= _HALFWAY_FROM:
        following = math.nextafter(abs(value), math.inf)
        previous = math.nextafter(abs(value), 0.0)
        shortest = _between(shortest, abs(value), previous, following, _MAX_DIGITS)
    return _in_notation(shortest, value < 0 or shortest.startswith("-"), 15)


def render_single(value: float) -> str:
    """A float4, given as the double that equals it."""
    if value != value or math.isinf(value):
        return render_special(value)
    single = np.float32(value)
    shortest = np.format_float_scientific(single, unique=True, trim="-")
    if abs(value) >= _HALFWAY_FROM_SINGLE:
        (bits,) = struct.unpack(">I", struct.pack(">f", abs(value)))
        previous, following = struct.unpack(">2f", struct.pack(">2I", bits - 1, bits + 1))
        shortest = _between(shortest, abs(value), previous, following, _MAX_DIGITS_SINGLE)
    return _in_notation(shortest, value < 0 or shortest.startswith("-"), 6)


def render_special(value: float) -> str:
    if value != value:
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _between(shortest: str, value: float, previous: float, following: float, digits: int) -> str:
    """The shortest form, unless it is a halfway point: then one with more digits."""
    low = (Fraction(previous) + Fraction(value)) / 2
    # The largest number has no finite neighbour; as far away as the one below is right for it.
    is_last = following == math.inf
    above = 2 * Fraction(value) - Fraction(previous) if is_last else Fraction(following)
    high = (above + Fraction(value)) / 2
    found = shortest.lstrip("-")
    count = len(found.partition("e")[0].replace(".", "").strip("0"))
    while not low < Fraction(found) < high and count < digits:
        count += 1
        found = f"{value:.{count - 1}e}"
    return found


def _in_notation(text: str, is_negative: bool, exponent_from: int) -> str:
    """Digits and exponent of a number in PostgreSQL's notation."""
    mantissa, _, exponent = text.lstrip("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    # The power of ten of the first digit.
    power = int(exponent or 0) + len(whole) - 1 - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    sign = "-" if is_negative else ""
    if not digits:
        return sign + "0"
    if power < -4 or power >= exponent_from:
        point = "." if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{point}{digits[1:]}e{'-' if power < 0 else '+'}{abs(power):02}"
    if power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    if len(digits) <= power + 1:
        return sign + digits + "0" * (power + 1 - len(digits))
    return f"{sign}{digits[: power + 1]}.{digits[power + 1 :]}"


def render_numeric(data: bytes, encoding: str) -> str:
    count, weight, sign, scale = struct.unpack_from(">HhHH", data)
    if sign in NUMERIC_NAMES:
        return NUMERIC_NAMES[sign]
    digits = struct.unpack(f">{count}H", data[8:])
    text = render_groups(digits, weight, scale)
    return "-" + text if sign == _NEGATIVE else text


def render_groups(digits: tuple[int, ...], weight: int, scale: int) -> str:
    """The absolute value of a numeric: digits in base 10000, the first of which counts so many
    times the power `weight` of it, with `scale` decimal digits after the point."""
    groups = "".join([f"{digit:04}" for digit in digits])
    # The number of decimal digits before the point.
    before = 4 * (weight + 1)
    if before <= 0:
        whole, fraction = "0", "0" * -before + groups
    else:
        whole, fraction = groups[:before].ljust(before, "0").lstrip("0") or "0", groups[before:]
    return f"{whole}.{fraction[:scale].ljust(scale, '0')}" if scale else whole
