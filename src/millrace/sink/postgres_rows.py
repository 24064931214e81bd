"""What a table of documents holds, and how that differs from what it should hold.

Invariant: rows are read in the order of their key, page by page, each page by a statement of its
own. A document is equal if writing it would leave its row as it is: its values are compared after
they got the types of the table, by the text that PostgreSQL prints.
"""

from __future__ import annotations

from collections.abc import Iterator

from psycopg.pq.abc import PGconn

from millrace.postgres.quote import ident, literal
from millrace.postgres.wire.libpq import execute
from millrace.sink.document import id_of
from millrace.sink.protocol import Difference


def iter_ids(session: PGconn, table: str, key: tuple[str, ...], limit: int) -> Iterator[list[str]]:
    """The ids of all rows; those without a key are nobody's documents."""
    # With the table's name: ORDER BY would take a bare one for the text that is selected.
    names = ", ".join(f"t.{ident(one)}" for one in key)
    texts = ", ".join(f"t.{ident(one)}::text" for one in key)
    known = " AND ".join(f"t.{ident(one)} IS NOT NULL" for one in key)
    after = ""
    while True:
        found = execute(
            session,
            f"SELECT {texts} FROM {table} t WHERE {known}{after} ORDER BY {names} LIMIT {limit}",
            "listing documents",
        )[-1]
        rows = [
            tuple((found.get_value(row, at) or b"").decode() for at in range(len(key)))
            for row in range(found.ntuples)
        ]
        if not rows:
            return
        yield [id_of(values) for values in rows]
        # Literals without a type get that of the column.
        after = f" AND ({names}) > ({', '.join(literal(value) for value in rows[-1])})"


def read_unequal(
    session: PGconn, table: str, names: tuple[str, ...], key: tuple[str, ...]
) -> dict[str, Difference]:
    """The documents of the table `stage` that are not rows of the other one; in a transaction."""
    same = " AND ".join(f"t.{ident(one)} = s.{ident(one)}" for one in key)
    present = f"t.{ident(key[0])} IS NOT NULL"
    differs = " OR ".join(
        f"t.{ident(one)}::text IS DISTINCT FROM s.{ident(one)}::text"
        for one in names
        if one not in key
    )
    found = execute(
        session,
        # By the unique index: a page is small, and nothing is known of the stage's size.
        "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off;"
        " SET LOCAL enable_seqscan = off;"
        f" SELECT s._id, CASE WHEN s._deleted THEN 'surplus' WHEN {present} THEN 'different'"
        f" ELSE 'missing' END FROM stage s LEFT JOIN {table} t ON {same}"
        f" WHERE CASE WHEN s._deleted THEN {present} WHEN {present} THEN {differs or 'false'}"
        " ELSE true END",
        "comparing documents",
    )[-1]
    return {
        (found.get_value(row, 0) or b"").decode(): Difference(
            (found.get_value(row, 1) or b"").decode()
        )
        for row in range(found.ntuples)
    }
