"""Sequence positions, set on the target to the source's values.

Invariant: the target's sequence gives the value the source's would give next.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from typing import Any

import psycopg

from millrace.postgres.quote import literal, qualified
from millrace.postgres.wire.connect import translated
from millrace.relation import Sequence

Connection = psycopg.Connection[tuple[Any, ...]]

# So many calls in one statement: few round trips, statements of moderate size.
BATCH = 200


def set_sequences(connection: Connection, sequences: Sequenced[Sequence]) -> None:
    """setval for each, with is_called."""
    for at in range(0, len(sequences), BATCH):
        calls = ", ".join(
            f"setval({literal(qualified(s.schema, s.name))}::regclass,"
            f" {literal(str(s.last_value))}::int8, {'true' if s.is_called else 'false'})"
            for s in sequences[at : at + BATCH]
        )
        with translated("setting sequences on the target"):
            connection.execute(f"SELECT {calls}")
