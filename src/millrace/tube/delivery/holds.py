"""What a worker locks besides its partitions, where those of another could have the same document.

Invariant: a document is in flight in one session at most. A table with a shard of its own is
delivered by one session, also while it gets another shard or routing: that one holds it alone.
Those that deliver a routed table hold it together, and lock each key. A sink whose documents are
fanned out to is held for each batch.

Facts: PostgreSQL documentation, Advisory Locks; a session may have a lock several times, and then
has to let go of it as often.
"""

from __future__ import annotations

import zlib

from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.tube import Connection, Tube, TubeTable


class Holds:
    """Those of one session."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # By name; whether others may have it, too.
        self._held: dict[str, bool] = {}

    def take(self, tube: Tube, name: str, *, is_shared: bool = False) -> bool:
        """Whether this session has it now, until it lets go."""
        if name in self._held:
            return True
        with translated("locking"):
            row = self._connection.execute(
                f"SELECT pg_try_advisory_lock{_mode(is_shared)}(%s, %s)".encode(), _lock(tube, name)
            ).fetchone()
        if row == (True,):
            self._held[name] = is_shared
        return row == (True,)

    def take_table(self, tube: Tube, table: TubeTable) -> bool:
        return self.take(tube, _name(table), is_shared=table.is_routed)

    def let_go(self, tube: Tube, name: str) -> None:
        if name not in self._held or self._connection.closed:
            return
        with translated("unlocking"):
            self._connection.execute(
                f"SELECT pg_advisory_unlock{_mode(self._held.pop(name))}(%s, %s)".encode(),
                _lock(tube, name),
            )

    def let_go_table(self, tube: Tube, table: TubeTable) -> None:
        self.let_go(tube, _name(table))

    def forget(self) -> None:
        """The session has given up all its locks."""
        self._held.clear()

    def lock_keys(self, table: TubeTable, keys: list[str]) -> dict[str, int]:
        """Those that no other session has, with the numbers of their locks."""
        numbers = {key: _number(key) for key in keys}
        with translated("locking keys"):
            rows = self._connection.execute(
                "SELECT n FROM unnest(%s::int[]) n WHERE pg_try_advisory_lock(%s, n)",
                (sorted(set(numbers.values())), -table.id),
            ).fetchall()
        got = {row[0] for row in rows}
        return {key: number for key, number in numbers.items() if number in got}

    def unlock_keys(self, table: TubeTable, locked: dict[str, int]) -> None:
        if not locked or self._connection.closed:
            return
        with translated("unlocking keys"):
            self._connection.execute(
                "SELECT count(pg_advisory_unlock(%s, n)) FROM unnest(%s::int[]) n",
                (-table.id, sorted(set(locked.values()))),
            )


def _mode(is_shared: bool) -> str:
    return "_shared" if is_shared else ""


def _name(table: TubeTable) -> str:
    return f"table {table.id}"


def _lock(tube: Tube, name: str) -> tuple[int, int]:
    return _number(f"millrace tube {tube.schema}.{tube.name} holds"), _number(name)


def _number(text: str) -> int:
    return zlib.crc32(text.encode()) - (1 << 31)
