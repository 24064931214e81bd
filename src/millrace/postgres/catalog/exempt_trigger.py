"""Triggers that are meant to see what Millrace itself writes: tubes, and whatever a user marks.

Invariant: such a trigger is known by the comment of its function, and is neither silenced nor
refused anywhere.
"""

from __future__ import annotations

from typing import Final

from millrace.postgres.quote import literal

# What the comment of a trigger's function begins with if it must fire for applied changes.
FIRES_COMMENT: Final = "millrace: fires for applied changes"


def is_exempt_sql(function: str) -> str:
    """Whether the function with this OID, an SQL expression, is marked."""
    return (
        "EXISTS (SELECT FROM pg_description d WHERE d.classoid = 'pg_proc'::regclass"
        f" AND d.objoid = {function} AND starts_with(d.description, {literal(FIRES_COMMENT)}))"
    )
