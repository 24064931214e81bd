"""How `stream transform` prints changes."""

from __future__ import annotations

from enum import StrEnum


class OutputFormat(StrEnum):
    """What a change is printed as."""

    SQL = "sql"
    JSON = "json"
