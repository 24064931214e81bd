"""Time zones: what the clock shows at a moment.

Invariant: every moment a timestamp can hold has an offset, also those that Python's calendar does
not reach. The rules repeat with the calendar, every 400 years; before the year 1 there was only
local mean time.

A zone has a name of the time zone database, or it is in POSIX form with one fixed offset
(`<+05>-05`, which is what SET TIME ZONE 5 makes of it, or `XYZ-5:30`).

Facts: pgtz.c, pg_tzset(); localtime.c, localsub(), tzparse().
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from millrace.errors import ConfigError

_SECOND: Final = 1_000_000
_CYCLE_SECONDS: Final = 146_097 * 86_400
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
# Of Python's calendar, a few days inside of it; in seconds since 2000.
_FIRST: Final = int((datetime(1, 1, 3, tzinfo=UTC) - _EPOCH).total_seconds())
_LAST: Final = int((datetime(9999, 12, 29, tzinfo=UTC) - _EPOCH).total_seconds())
_POSIX: Final = re.compile(
    r"(?:<([A-Za-z0-9+-]{3,})>|([A-Za-z]{3,}))([+-]?)(\d{1,3})(?::(\d\d))?(?::(\d\d))?"
)
# The server prints no more of an abbreviation.
_MAX_ABBREVIATION: Final = 10


@dataclass(frozen=True)
class TimeZone:
    """A zone of the database, or one fixed offset."""

    name: str
    # Seconds east and the abbreviation, if they never change.
    fixed: tuple[int, str] | None = None

    def at(self, microseconds: int) -> tuple[int, str]:
        """(seconds east of Greenwich, abbreviation) at a moment since 2000 in UTC."""
        if self.fixed is not None:
            return self.fixed
        seconds = microseconds // _SECOND
        if seconds > _LAST:
            seconds -= -(-(seconds - _LAST) // _CYCLE_SECONDS) * _CYCLE_SECONDS
        return _offset(self.name, max(seconds, _FIRST))


@lru_cache(100)
def find_zone(name: str) -> TimeZone:
    """The zone that a server with this setting uses."""
    if name.upper() in ("UTC", "GMT", "Z", "ETC/UTC"):
        return TimeZone(name, (0, "GMT" if name.upper() == "GMT" else "UTC"))
    if _load(name) is not None:
        return TimeZone(name)
    match = _POSIX.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"unknown time zone {name!r}",
            hint="give one of the time zone database, such as Europe/Berlin or UTC",
        )
    seconds = int(match[4]) * 3600 + int(match[5] or 0) * 60 + int(match[6] or 0)
    # POSIX counts west.
    east = seconds if match[3] == "-" else -seconds
    return TimeZone(name, (east, (match[1] or match[2])[:_MAX_ABBREVIATION]))


@lru_cache(100)
def _load(name: str) -> tzinfo | None:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None


@lru_cache(1 << 16)
def _offset(name: str, seconds: int) -> tuple[int, str]:
    local = (_EPOCH + timedelta(seconds=seconds)).astimezone(_load(name))
    east = local.utcoffset() or timedelta()
    return int(east.total_seconds()), (local.tzname() or "")[:_MAX_ABBREVIATION]
