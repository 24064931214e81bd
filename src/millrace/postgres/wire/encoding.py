"""PostgreSQL's names of encodings, and Python's.

Facts: the table is psycopg's.
"""

from __future__ import annotations

from psycopg._encodings import pg2pyenc

# SQL_ASCII means bytes that nobody has looked at: names and statements are ours.
_OURS = {"SQL_ASCII": "utf-8", "LATIN1": "latin-1", "UTF8": "utf-8"}


def python_encoding(name: str) -> str:
    """Python's name for an encoding of a server; Python's own names of the common ones pass."""
    return _OURS.get(name.upper().replace("-", "")) or pg2pyenc(name.encode())
