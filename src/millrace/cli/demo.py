"""`millrace demo`: the main job, end to end, on throw-away servers."""

from __future__ import annotations


def demo() -> None:
    """Clone a busy shop database from PostgreSQL 16 to 18 and compare both."""
