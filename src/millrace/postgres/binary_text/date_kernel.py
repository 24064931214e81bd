"""The loops that print dates, for every column kernel.

Invariant: each writes one text at a place that has room for it, and returns where it ends.
"""

from __future__ import annotations

from typing import Any

from millrace.postgres.kernel import kernel


@kernel
def put_two(out: Any, at: Any, number: Any) -> Any:
    out[at] = 48 + number // 10
    out[at + 1] = 48 + number % 10
    return at + 2


@kernel
def put_infinity(out: Any, at: Any, is_negative: Any) -> Any:
    if is_negative:
        out[at] = 45
        at += 1
    # i n f i n i t y
    for letter in (105, 110, 102, 105, 110, 105, 116, 121):
        out[at] = letter
        at += 1
    return at


@kernel
def put_date(out: Any, at: Any, days: Any) -> Any:
    """(where it ends, whether it is before Christ); see moment.civil_date()."""
    shifted = days + 730425
    era = shifted // 146097
    day = shifted - era * 146097
    year = (day - day // 1460 + day // 36524 - day // 146096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    year += 400 * era
    if month >= 10:
        year += 1
        month -= 9
    else:
        month += 3
    is_before = year <= 0
    if is_before:
        year = 1 - year
    digits = 4
    power = 10000
    while year >= power:
        digits += 1
        power *= 10
    for i in range(at + digits - 1, at - 1, -1):
        out[i] = 48 + year % 10
        year //= 10
    at += digits
    out[at] = 45
    at = put_two(out, at + 1, month)
    out[at] = 45
    return put_two(out, at + 1, day), is_before


@kernel
def put_before_christ(out: Any, at: Any) -> Any:
    out[at] = 32
    out[at + 1] = 66
    out[at + 2] = 67
    return at + 3
