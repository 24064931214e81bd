"""Columns that are not what they were when the stream began, under the same names.

Invariant: a table is passed over only if each name that it had then, and has now, is that of the
same column, and the rows were not written anew with another type of it.

ALTER TABLE changes rows, and nothing of that is sent; and changes go by the names of columns. With
another type the rows are written anew, by an expression that may give any value (USING); a type
that takes the old values as they are, such as a longer varchar, leaves them alone. A column that
was dropped and added again is empty on the source, and as before on the target.

Facts: PostgreSQL documentation, "ALTER TABLE", Notes, and "pg_attribute" (attnum).
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.follow.audit.source_state import SourceTable


def iter_changed_columns(before: SourceTable, now: SourceTable) -> Iterator[str]:
    """Why the rows of a table may differ for what was done to its columns."""
    then = {name: (number, kind) for number, name, kind in before.columns if name}
    for number, name, kind in now.columns:
        if name not in then:
            continue
        old_number, old_kind = then[name]
        if number != old_number:
            yield f"column {name} is another one than the one that was copied under this name"
        elif kind != old_kind and now.filenode != before.filenode:
            yield f"column {name} was {old_kind} and is {kind}, and the rows were written anew"
