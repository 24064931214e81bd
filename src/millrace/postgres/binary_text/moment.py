"""Dates, times and intervals as PostgreSQL prints them: ISO, in UTC, intervals in its own style.

Invariant: every value a server can hold is printed, years before Christ and after 9999 included.

Days and microseconds count from 2000-01-01. An interval that is the largest of all in every field
is infinite since version 17, and was a very long one before.

Facts: datetime.c, EncodeDateTime(), EncodeTimezone(), EncodeInterval(); timestamp.h.
"""

from __future__ import annotations

import struct
from typing import Final

DAY_MICROSECONDS: Final = 86_400_000_000
# From 0000-03-01 of the proleptic Gregorian calendar to 2000-01-01.
DAYS_BEFORE_2000: Final = 730_425
# Every 400 years the calendar repeats.
ERA_DAYS: Final = 146_097

_MAX_DATE, _MIN_DATE = 2**31 - 1, -(2**31)
_MAX_TIME, _MIN_TIME = 2**63 - 1, -(2**63)


def render_date(data: bytes, encoding: str) -> str:
    (days,) = struct.unpack(">i", data)
    if days in (_MAX_DATE, _MIN_DATE):
        return "infinity" if days > 0 else "-infinity"
    date, era = _date(days)
    return date + era


def render_time(data: bytes, encoding: str) -> str:
    return render_clock(struct.unpack(">q", data)[0])


def render_timetz(data: bytes, encoding: str) -> str:
    microseconds, west = struct.unpack(">qi", data)
    return render_clock(microseconds) + render_offset(west)


def render_timestamp(data: bytes, encoding: str) -> str:
    return _timestamp(data, "")


def render_timestamptz(data: bytes, encoding: str) -> str:
    return _timestamp(data, "+00")


def render_interval(data: bytes, encoding: str) -> str:
    microseconds, days, months = struct.unpack(">qii", data)
    if (microseconds, days, months) == (_MAX_TIME, _MAX_DATE, _MAX_DATE):
        return "infinity"
    if (microseconds, days, months) == (_MIN_TIME, _MIN_DATE, _MIN_DATE):
        return "-infinity"
    parts: list[str] = []
    is_before = False
    years, rest = divmod(abs(months), 12)
    direction = -1 if months < 0 else 1
    for value, unit in ((direction * years, "year"), (direction * rest, "mon"), (days, "day")):
        if value:
            sign = "+" if is_before and value > 0 else ""
            parts.append(f"{sign}{value} {unit}{'' if value == 1 else 's'}")
            is_before = value < 0
    if microseconds or not parts:
        sign = "-" if microseconds < 0 else "+" if is_before else ""
        parts.append(sign + render_clock(abs(microseconds)))
    return " ".join(parts)


def _timestamp(data: bytes, zone: str) -> str:
    (microseconds,) = struct.unpack(">q", data)
    if microseconds in (_MAX_TIME, _MIN_TIME):
        return "infinity" if microseconds > 0 else "-infinity"
    days, rest = divmod(microseconds, DAY_MICROSECONDS)
    date, era = _date(days)
    return f"{date} {render_clock(rest)}{zone}{era}"


def _date(days: int) -> tuple[str, str]:
    """(date, " BC" or "")."""
    year, month, day = civil_date(days)
    if year <= 0:
        return f"{1 - year:04}-{month:02}-{day:02}", " BC"
    return f"{year:04}-{month:02}-{day:02}", ""


def civil_date(days: int) -> tuple[int, int, int]:
    """(year, month, day) of a number of days since 2000-01-01; before the year 1 is the year 0."""
    # A year that begins in March ends with the day that is not always there.
    era, day = divmod(days + DAYS_BEFORE_2000, ERA_DAYS)
    year = (day - day // 1460 + day // 36524 - day // (ERA_DAYS - 1)) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    year += 400 * era + (month >= 10)
    return year, month + 3 if month < 10 else month - 9, day


def render_clock(microseconds: int) -> str:
    """A time of the day, or of any number of hours."""
    seconds, fraction = divmod(microseconds, 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours:02}:{minutes:02}:{seconds:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def render_offset(west: int) -> str:
    """A time zone by its seconds west of Greenwich."""
    minutes, seconds = divmod(abs(west), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{'-' if west > 0 else '+'}{hours:02}"
    if minutes or seconds:
        text += f":{minutes:02}"
    return f"{text}:{seconds:02}" if seconds else text
