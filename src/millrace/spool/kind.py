"""The kinds of spool, by the names that options give them.

Invariant: nothing is imported here that takes long to load; every command reads its options.
"""

from __future__ import annotations

from enum import StrEnum


class SpoolKind(StrEnum):
    """Where received changes wait until they are applied."""

    FILES = "files"
    TABLE = "table"
