"""How the server of a base image was set to print values.

Invariant: a setting given by the user wins; else the base's configuration files decide, read in
the order in which the server reads them; else the server's own default holds.

Facts: guc-file.l: later lines win, names are case-insensitive, `include` reads another file;
postgresql.auto.conf comes last. DateStyle and the like of a role or a database are not in files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from millrace.errors import ConfigError
from millrace.wal.catalog.base_image import BaseFiles, Database
from millrace.wal.types.settings import OutputSettings

_LINE = re.compile(r"^\s*([A-Za-z_][\w.]*)\s*(?:=|\s)\s*('(?:[^']|'')*'|[^#\s]+)")
_DEPTH = 10  # CONF_FILE_MAX_DEPTH
# By the number in pg_database.encoding.
_ENCODINGS = {
    0: "latin-1",  # SQL_ASCII: bytes of no known encoding
    1: "euc_jp",
    2: "gb2312",
    3: "euc_kr",
    5: "euc_jis_2004",
    6: "utf-8",
    8: "latin-1",
    9: "iso8859-2",
    10: "iso8859-3",
    11: "iso8859-4",
    12: "iso8859-9",
    13: "iso8859-10",
    14: "iso8859-13",
    15: "iso8859-14",
    16: "iso8859-15",
    17: "iso8859-16",
    18: "cp1256",
    19: "cp1258",
    20: "cp866",
    21: "cp874",
    22: "koi8-r",
    23: "cp1251",
    24: "cp1252",
    25: "iso8859-5",
    26: "iso8859-6",
    27: "iso8859-7",
    28: "iso8859-8",
    29: "cp1250",
    30: "cp1253",
    31: "cp1254",
    32: "cp1255",
    33: "cp1257",
    34: "koi8-u",
}
_NAMES = {
    "datestyle": "date_style",
    "intervalstyle": "interval_style",
    "timezone": "time_zone",
    "bytea_output": "bytea_output",
    "extra_float_digits": "extra_float_digits",
    "lc_monetary": "lc_monetary",
}


def output_settings(files: BaseFiles, version: int, database: Database) -> OutputSettings:
    """The settings of the base, which values are printed under."""
    found = {name: value for name, value in read_configuration(files) if name in _NAMES}
    known = OutputSettings(server_version=version, encoding=encoding_of(database))
    return change_settings(known, found)


def change_settings(settings: OutputSettings, given: Mapping[str, str]) -> OutputSettings:
    """With some of them set to other values."""
    values: dict[str, str | int] = {}
    for name, value in given.items():
        if name.lower() not in _NAMES:
            raise ConfigError(
                f"{name} does not change how values are printed",
                hint=f"these do: {', '.join(_NAMES)}",
            )
        values[_NAMES[name.lower()]] = value
    if "extra_float_digits" in values:
        values["extra_float_digits"] = int(values["extra_float_digits"])
    return replace(settings, **values)  # type: ignore[arg-type]


def encoding_of(database: Database) -> str:
    """Python's name for the encoding of a database."""
    if database.encoding not in _ENCODINGS:
        raise ConfigError(f"the encoding {database.encoding} of {database.name} is not supported")
    return _ENCODINGS[database.encoding]


def read_configuration(files: BaseFiles) -> Iterator[tuple[str, str]]:
    """(name in lower case, value) of every line of the configuration files, in order."""
    yield from _read_file(files, "postgresql.conf", 0)
    yield from _read_file(files, "postgresql.auto.conf", 0)


def _read_file(files: BaseFiles, name: str, depth: int) -> Iterator[tuple[str, str]]:
    text = (files.read(name) or b"").decode("utf-8", "replace")
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        key, value = match[1].lower(), match[2]
        if value.startswith("'"):
            value = value[1:-1].replace("''", "'")
        if key in ("include", "include_if_exists") and depth < _DEPTH:
            yield from _read_file(files, value, depth + 1)
        else:
            yield key, value
