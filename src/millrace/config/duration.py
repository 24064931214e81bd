"""Times as people write them: `90s`, `30min`, `12h`, `3600`.

Facts: units are those of PostgreSQL's settings, from a second up.
"""

from __future__ import annotations

import re

from millrace.errors import ConfigError

_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")


def parse_duration(text: str) -> float:
    """Seconds."""
    match = _DURATION.fullmatch(text)
    if not match or match[2] not in _SECONDS:
        raise ConfigError(
            f"invalid time: {text!r}",
            hint="write a number of seconds, or a number with s, min, h or d, such as '12h'",
        )
    return float(match[1]) * _SECONDS[match[2]]


def render_duration(seconds: float) -> str:
    """In the largest unit that it is one of: `12 h`, `1.5 min`."""
    unit = max((u for u in _SECONDS if u and _SECONDS[u] <= max(seconds, 1.0)), key=_SECONDS.get)  # type: ignore[arg-type]
    return f"{seconds / _SECONDS[unit]:.3g} {unit}"
