"""Stored dates, times and intervals in every style the server has.

Invariant: every value a server can hold is printed, years before Christ and after 9999 included.

Days and microseconds count from 2000-01-01; a time with time zone has its seconds west of
Greenwich. An interval is microseconds:8 days:4 months:4; since version 17 the largest and the
smallest of all are infinite.

Facts: datetime.c, EncodeDateOnly(), EncodeDateTime(), EncodeInterval(); timestamp.c,
timestamp2tm(), interval2itm().
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from millrace.postgres.binary_text.moment import (
    DAY_MICROSECONDS,
    civil_date,
    render_clock,
    render_offset,
)
from millrace.wal.types.settings import OutputSettings

Render = Callable[[bytes], str]

_MAX_DATE, _MIN_DATE = 2**31 - 1, -(2**31)
_MAX_TIME, _MIN_TIME = 2**63 - 1, -(2**63)
_INFINITE_INTERVALS_FROM: Final = 17
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# 2000-01-01 was a Saturday.
_DAYS = ("Sat", "Sun", "Mon", "Tue", "Wed", "Thu", "Fri")


def render_time(data: bytes) -> str:
    return render_clock(struct.unpack("<q", data)[0])


def render_timetz(data: bytes) -> str:
    microseconds, west = struct.unpack("<qi", data)
    return render_clock(microseconds) + render_offset(west)


def date_renderer(settings: OutputSettings) -> Render:
    style, order = settings.date_format, settings.date_order

    def render(data: bytes) -> str:
        (days,) = struct.unpack("<i", data)
        if days in (_MAX_DATE, _MIN_DATE):
            return "infinity" if days > 0 else "-infinity"
        year, month, day = civil_date(days)
        era = " BC" if year <= 0 else ""
        return _date(year, month, day, style, order) + era

    return render


def timestamp_renderer(settings: OutputSettings, *, with_zone: bool) -> Render:
    style, order = settings.date_format, settings.date_order
    zone = settings.zone

    def render(data: bytes) -> str:
        (microseconds,) = struct.unpack("<q", data)
        if microseconds in (_MAX_TIME, _MIN_TIME):
            return "infinity" if microseconds > 0 else "-infinity"
        if not with_zone:
            return _timestamp(microseconds, "", style, order)
        east, abbreviation = zone.at(microseconds)
        suffix = render_offset(-east) if style == "ISO" else " " + abbreviation
        return _timestamp(microseconds + east * 1_000_000, suffix, style, order)

    return render


def interval_renderer(settings: OutputSettings) -> Render:
    style = _INTERVAL_STYLES[settings.interval_style]
    can_be_infinite = settings.server_version >= _INFINITE_INTERVALS_FROM

    def render(data: bytes) -> str:
        microseconds, days, months = struct.unpack("<qii", data)
        if can_be_infinite:
            if (microseconds, days, months) == (_MAX_TIME, _MAX_DATE, _MAX_DATE):
                return "infinity"
            if (microseconds, days, months) == (_MIN_TIME, _MIN_DATE, _MIN_DATE):
                return "-infinity"
        return style(_Interval.of(microseconds, days, months))

    return render


def _date(year: int, month: int, day: int, style: str, order: str) -> str:
    shown = year if year > 0 else 1 - year
    if style == "ISO":
        return f"{shown:04}-{month:02}-{day:02}"
    if style == "German":
        return f"{day:02}.{month:02}.{shown:04}"
    sign = "/" if style == "SQL" else "-"
    first, second = (day, month) if order == "DMY" else (month, day)
    return f"{first:02}{sign}{second:02}{sign}{shown:04}"


def _timestamp(microseconds: int, zone: str, style: str, order: str) -> str:
    days, rest = divmod(microseconds, DAY_MICROSECONDS)
    year, month, day = civil_date(days)
    era = " BC" if year <= 0 else ""
    clock = render_clock(rest)
    if style != "Postgres":
        return f"{_date(year, month, day, style, order)} {clock}{zone}{era}"
    name = _MONTHS[month - 1]
    date = f"{day:02} {name}" if order == "DMY" else f"{name} {day:02}"
    shown = year if year > 0 else 1 - year
    return f"{_DAYS[days % 7]} {date} {clock} {shown:04}{zone}{era}"


@dataclass(frozen=True)
class _Interval:
    """Each part has the sign of the number it was taken from."""

    years: int
    months: int
    days: int
    hours: int
    minutes: int
    # With their fraction.
    microseconds: int

    @classmethod
    def of(cls, microseconds: int, days: int, months: int) -> _Interval:
        sign = -1 if months < 0 else 1
        years, rest = divmod(abs(months), 12)
        minutes, seconds = divmod(abs(microseconds), 60_000_000)
        hours, minutes = divmod(minutes, 60)
        to = -1 if microseconds < 0 else 1
        return cls(sign * years, sign * rest, days, to * hours, to * minutes, to * seconds)

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.years, self.months, self.days, self.hours, self.minutes, self.microseconds)

    @property
    def clock(self) -> tuple[int, ...]:
        return self.parts[3:]

    @property
    def clock_microseconds(self) -> int:
        """Of the hours, minutes and seconds, without their sign."""
        hours, minutes, microseconds = map(abs, self.clock)
        return hours * 3_600_000_000 + minutes * 60_000_000 + microseconds


def _seconds(microseconds: int, width: int) -> str:
    """Without sign; the whole seconds with so many digits at least."""
    seconds, fraction = divmod(abs(microseconds), 1_000_000)
    text = f"{seconds:0{width}}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def _postgres(interval: _Interval) -> str:
    parts: list[str] = []
    is_before = False
    for value, unit in zip(interval.parts[:3], ("year", "mon", "day"), strict=True):
        if value:
            sign = "+" if is_before and value > 0 else ""
            parts.append(f"{sign}{value} {unit}{'' if value == 1 else 's'}")
            is_before = value < 0
    if any(interval.clock) or not parts:
        sign = "-" if min(interval.clock) < 0 else "+" if is_before else ""
        parts.append(sign + render_clock(interval.clock_microseconds))
    return " ".join(parts)


def _verbose(interval: _Interval) -> str:
    """The first part decides whether it is "ago", and the signs of the others count from there."""
    parts: list[str] = []
    is_before = False
    units = ("year", "mon", "day", "hour", "min")
    for value, unit in zip(interval.parts[:5], units, strict=True):
        if value:
            is_before = value < 0 if not parts else is_before
            shown = -value if is_before else value
            parts.append(f"{shown} {unit}{'' if shown == 1 else 's'}")
    if interval.microseconds:
        is_negative = interval.microseconds < 0
        is_before = is_negative if not parts else is_before
        sign = "-" if is_negative != is_before else ""
        is_one = abs(interval.microseconds) == 1_000_000
        parts.append(f"{sign}{_seconds(interval.microseconds, 1)} sec{'' if is_one else 's'}")
    return " ".join(["@", *(parts or ["0"]), *(["ago"] if is_before else [])])


def _iso_8601(interval: _Interval) -> str:
    if not any(interval.parts):
        return "PT0S"
    date = "".join(
        f"{value}{letter}" for value, letter in zip(interval.parts[:3], "YMD", strict=True) if value
    )
    clock = "".join(
        f"{value}{letter}" for value, letter in zip(interval.parts[3:5], "HM", strict=True) if value
    )
    if interval.microseconds:
        sign = "-" if interval.microseconds < 0 else ""
        clock += f"{sign}{_seconds(interval.microseconds, 1)}S"
    return f"P{date}T{clock}" if clock else f"P{date}"


def _sql_standard(interval: _Interval) -> str:
    parts = interval.parts
    if not any(parts):
        return "0"
    has_negative, has_positive = min(parts) < 0, max(parts) > 0
    has_months, has_time = any(parts[:2]), any(parts[2:])
    years, months, days, hours, minutes, microseconds = map(abs, parts)
    clock = f"{hours}:{minutes:02}:{_seconds(microseconds, 2)}"
    if (has_negative and has_positive) or (has_months and has_time):
        signs = ["-" if min(part) < 0 else "+" for part in (parts[:2], parts[2:3], parts[3:])]
        return f"{signs[0]}{years}-{months} {signs[1]}{days} {signs[2]}{clock}"
    sign = "-" if has_negative else ""
    if has_months:
        return f"{sign}{years}-{months}"
    return f"{sign}{days} {clock}" if days else f"{sign}{clock}"


_INTERVAL_STYLES: Final[dict[str, Callable[[_Interval], str]]] = {
    "postgres": _postgres,
    "postgres_verbose": _verbose,
    "iso_8601": _iso_8601,
    "sql_standard": _sql_standard,
}
