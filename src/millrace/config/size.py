"""Sizes as people write them: `250 MB`, `2GB`, `1048576`.

Facts: units are powers of 1024, as in PostgreSQL's settings and pg_size_pretty().
"""

from __future__ import annotations

import re

from millrace.errors import ConfigError

UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_FACTOR = {unit.lower(): 1024**power for power, unit in enumerate(UNITS)} | {"": 1}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes; units are powers of 1024, as in PostgreSQL."""
    match = _SIZE.fullmatch(text)
    if not match or match[2].lower() not in _FACTOR:
        raise ConfigError(
            f"invalid size: {text!r}",
            hint=f"write a number of bytes, or a number with one of {', '.join(UNITS)}, "
            "such as '250 MB'",
        )
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * _FACTOR[match[2].lower()])


def render_size(size: float) -> str:
    """`1.5 GB`, with three significant digits at most."""
    for unit in UNITS:
        if abs(size) < 1000 or unit == UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
