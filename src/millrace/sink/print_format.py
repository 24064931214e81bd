"""How the sink `print` prints changes. Apart from it, so that the command line loads no Arrow."""

from __future__ import annotations

from enum import StrEnum


class OutputFormat(StrEnum):
    """What a change is printed as."""

    SQL = "sql"
    JSON = "json"
