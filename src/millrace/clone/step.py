"""The steps of a clone, by name.

Invariant: every step can be run again: what is done of it is found on the target and left
alone.
"""

from __future__ import annotations

from enum import StrEnum


class Step(StrEnum):
    """One kind of work; the value is how people name it."""

    ROLES = "roles"
    EXTENSIONS = "extensions"
    DUMP = "dump"
    # Everything of the schema that rows need: tables, types, functions.
    PRE_DATA = "pre-data"
    TABLE_DATA = "table-data"
    LARGE_OBJECTS = "large-objects"
    SEQUENCES = "sequences"
    INDEXES = "indexes"
    # Constraints on built indexes, indexes of partitioned tables, foreign keys.
    CONSTRAINTS = "constraints"
    VACUUM = "vacuum"
    # Triggers, rules, policies: what is left of the schema. Materialized views are refreshed with
    # it, or with the rows, whichever comes last.
    POST_DATA = "post-data"
    PROPERTIES = "database-properties"


ALL = frozenset(Step) - {Step.EXTENSIONS}

# What single commands do.
SCHEMA = frozenset({Step.DUMP, Step.PRE_DATA, Step.INDEXES, Step.CONSTRAINTS, Step.POST_DATA})
DATA = frozenset(
    {
        Step.TABLE_DATA,
        Step.LARGE_OBJECTS,
        Step.SEQUENCES,
        Step.INDEXES,
        Step.CONSTRAINTS,
        Step.VACUUM,
    }
)
