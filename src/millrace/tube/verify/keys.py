"""The keys that a tube should have delivered, from the table itself.

Invariant: every row that matches the predicates, with a key, is in one page; pages come in the
order of the key, each by a statement of its own, so that no snapshot is held.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.postgres.quote import ident, literal, qualified
from millrace.postgres.wire.connect import translated
from millrace.sink.document import id_of
from millrace.tube.delivery.tube import Connection, Tube, TubeTable


def iter_keys(
    connection: Connection, tube: Tube, table: TubeTable, limit: int
) -> Iterator[list[str]]:
    """Pages of ids; a page may be short, where rows do not match."""
    names = ", ".join(f"rows.{ident(one)}" for one in table.key)
    texts = ", ".join(f"rows.{ident(one)}::text" for one in table.key)
    known = " AND ".join(f"rows.{ident(one)} IS NOT NULL" for one in table.key)
    matches = _predicate(connection, tube, table) or "true"
    after = ""
    while True:
        # The predicate comes behind the limit: a page reads no more rows than that.
        query = (
            f"SELECT {texts}, ({matches}) IS TRUE FROM (SELECT * FROM"
            f" {qualified(table.schema, table.name)} AS rows WHERE {known}{after}"
            f" ORDER BY {names} LIMIT {limit}) AS rows ORDER BY {names}"
        )
        with translated(f"reading the keys of {table.label}"), connection.transaction():
            # Predicates are resolved by the search path of the installation.
            connection.execute(
                f"SELECT set_config('search_path', {ident(tube.schema)}._tube_path(),"
                " true)".encode()
            )
            rows = connection.execute(query.encode()).fetchall()
        if not rows:
            return
        yield list(dict.fromkeys(id_of(tuple(row[:-1])) for row in rows if row[-1]))
        last = ", ".join(literal(value) for value in rows[-1][:-1])
        after = f" AND ({names}) > ({last})"


def _predicate(connection: Connection, tube: Tube, table: TubeTable) -> str:
    with translated("reading predicates"):
        row = connection.execute(
            f"SELECT predicate FROM {ident(tube.schema)}.tube_tables(%s)"
            " WHERE table_id = %s".encode(),
            (tube.name, table.id),
        ).fetchone()
    return "" if row is None else str(row[0])
