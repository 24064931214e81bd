"""The server's settings that decide how values are printed.

Invariant: a setting that we don't understand is refused before anything is printed by it.

Facts: PostgreSQL documentation, "Client Connection Defaults", "Locale and Formatting"; variable.c,
check_datestyle(), check_timezone().
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millrace.errors import ConfigError
from millrace.wal.types.zone import TimeZone, find_zone

_DATE_STYLES: Final = {"iso": "ISO", "sql": "SQL", "postgres": "Postgres", "german": "German"}
_ORDERS: Final = {
    "dmy": "DMY", "euro": "DMY", "european": "DMY", "mdy": "MDY", "us": "MDY", "noneuro": "MDY",
    "noneuropean": "MDY", "ymd": "YMD",
}  # fmt: skip
INTERVAL_STYLES: Final = ("postgres", "postgres_verbose", "sql_standard", "iso_8601")
# Money in these locales looks alike: $1,234.56.
_MONEY_LOCALES: Final = ("c", "posix", "en_us", "")


@dataclass(frozen=True)
class OutputSettings:
    """As SHOW says them, of the session whose output is wanted."""

    date_style: str = "ISO, MDY"
    interval_style: str = "postgres"
    time_zone: str = "UTC"
    bytea_output: str = "hex"
    extra_float_digits: int = 1
    lc_monetary: str = "C"
    # The major version of the server that wrote the values.
    server_version: int = 18
    # Python's name of the encoding of the database, which is that of the output.
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        _ = self.date_format, self.date_order, self.zone
        if self.interval_style not in INTERVAL_STYLES:
            raise _bad("IntervalStyle", self.interval_style, ", ".join(INTERVAL_STYLES))
        if self.bytea_output not in ("hex", "escape"):
            raise _bad("bytea_output", self.bytea_output, "hex or escape")
        if not -15 <= self.extra_float_digits <= 3:
            raise _bad("extra_float_digits", str(self.extra_float_digits), "a number from -15 to 3")

    @property
    def date_format(self) -> str:
        """ISO, SQL, Postgres or German."""
        words = [_DATE_STYLES[word] for word in self._date_words() if word in _DATE_STYLES]
        return words[0] if words else "ISO"

    @property
    def date_order(self) -> str:
        """DMY, MDY or YMD."""
        words = [_ORDERS[word] for word in self._date_words() if word in _ORDERS]
        if words:
            return words[0]
        return "DMY" if self.date_format == "German" else "MDY"

    @property
    def zone(self) -> TimeZone:
        return find_zone(self.time_zone)

    @property
    def has_dollars(self) -> bool:
        """Whether we know how lc_monetary prints money."""
        return self.lc_monetary.partition(".")[0].partition("@")[0].lower() in _MONEY_LOCALES

    def _date_words(self) -> list[str]:
        words = [word.strip().lower() for word in self.date_style.split(",")]
        for word in words:
            if word not in _DATE_STYLES and word not in _ORDERS:
                raise _bad("DateStyle", self.date_style, "a style and an order, such as ISO, MDY")
        return words


def _bad(name: str, value: str, expected: str) -> ConfigError:
    return ConfigError(f"expected {expected} as {name}, found {value!r}")
