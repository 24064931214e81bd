"""Positions in the source's WAL: a number inside, `16/B374D848` for people.

Invariant: `parse_lsn(render_lsn(n)) == n` for every 64-bit n.
"""

from __future__ import annotations

import re

from millrace.errors import ConfigError

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def parse_lsn(text: str) -> int:
    """From PostgreSQL's two hexadecimal halves."""
    match = _LSN.fullmatch(text.strip())
    if not match:
        raise ConfigError(
            f"invalid WAL position: {text!r}",
            hint="write it as PostgreSQL does, such as 16/B374D848",
        )
    return int(match[1], 16) << 32 | int(match[2], 16)


def render_lsn(lsn: int) -> str:
    """As PostgreSQL prints it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
