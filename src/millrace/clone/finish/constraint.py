"""Foreign keys, added at the end, in parallel where they lock different tables.

Invariant: two foreign keys that share a table are never added at the same time.
ADD FOREIGN KEY takes SHARE ROW EXCLUSIVE on both of its tables, which excludes
itself: such a pair would only wait for each other, and could do so in a circle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from millrace.postgres.quote import ident, qualified
from millrace.postgres.wire.connect import translated
from millrace.relation import ForeignKey

Connection = psycopg.Connection[tuple[Any, ...]]


def foreign_key_statement(key: ForeignKey) -> str:
    """The constraint as the source has it; NOT VALID stays NOT VALID."""
    only = "" if key.is_partitioned else "ONLY "
    name = qualified(key.schema, key.table)
    return f"ALTER TABLE {only}{name} ADD CONSTRAINT {ident(key.name)} {key.definition}"


def add_foreign_key(connection: Connection, key: ForeignKey) -> None:
    """Add one foreign key, unless it is there."""
    with translated(f"adding foreign key {key.name} to {key.schema}.{key.table}"):
        row = connection.execute(
            "SELECT FROM pg_constraint WHERE conname = %s AND conrelid = to_regclass(%s)",
            (key.name, qualified(key.schema, key.table)),
        ).fetchone()
        if row is not None:
            return
        with connection.transaction():
            if key.search_path is not None:
                path = f"{ident(key.search_path)}, pg_catalog"
                connection.execute("SELECT set_config('search_path', %s, true)", (path,))
            connection.execute(foreign_key_statement(key))


def run_disjoint(
    keys: Sequence[ForeignKey],
    add: Callable[[ForeignKey], None],
    *,
    jobs: int,
    families: dict[int, int],
) -> None:
    """Call `add` for each key, up to `jobs` at once, no two of which share a table.

    `families` maps a partition to the root of its tree: locking one locks the others.
    """
    waiting = list(keys)
    busy: set[int] = set()
    changed = threading.Condition()
    errors: list[BaseException] = []

    def tables_of(key: ForeignKey) -> set[int]:
        pair = (key.table_oid, key.referenced_oid)
        return {families.get(oid, oid) for oid in pair}

    def take() -> ForeignKey | None:
        with changed:
            while waiting and not errors:
                for key in waiting:
                    if not tables_of(key) & busy:
                        waiting.remove(key)
                        busy.update(tables_of(key))
                        return key
                changed.wait()
        return None

    def work() -> None:
        while (key := take()) is not None:
            try:
                add(key)
            except BaseException as error:
                errors.append(error)
            finally:
                with changed:
                    busy.difference_update(tables_of(key))
                    changed.notify_all()

    threads = [threading.Thread(target=work, name=f"foreign-key-{n}") for n in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
