"""Which tables of the source a stream follows, by OID: a record in the work directory.

Invariant: changes of a table get into the spool only if it is written down here. That is done when
the stream begins, if the slot's snapshot has the table, and later by `stream.take_up`, before the
position is taken at which it is copied. So of whatever the spool has, the target has what came
before. A stream that is older than this record follows what its publications list.

A table that is dropped and created again has another OID, and is another table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from millrace.workdir.sentinel import Sentinel

_WRITE = (
    "INSERT OR REPLACE INTO followed_table (oid, schema, name, is_whole, root_oid, link)"
    " VALUES (?, ?, ?, ?, ?, ?)"
)


@dataclass(frozen=True)
class FollowedTable:
    """A table, or a partition, whose changes are spooled."""

    oid: int
    schema: str
    name: str
    # False: inserts and TRUNCATE only.
    is_whole: bool
    # Of a partition, as long as anybody knew.
    root_oid: int | None = None
    # What distinguishes its attachment to the root from a later one; None if nobody knows, empty if
    # it is still to be decided what must be copied because of it.
    link: str | None = None


def read_followed(sentinel: Sentinel) -> dict[int, FollowedTable]:
    """All by OID; nothing for a stream that began without such a record."""
    return {
        row["oid"]: FollowedTable(
            row["oid"],
            row["schema"],
            row["name"],
            bool(row["is_whole"]),
            row["root_oid"],
            row["link"],
        )
        for row in sentinel.rows("SELECT * FROM followed_table")
    }


def write_followed(sentinel: Sentinel, tables: Iterable[FollowedTable]) -> None:
    """Write them down, or what has become of them: all at once, since a receiver that finds some
    tables leaves out the others."""
    sentinel.write_many(_WRITE, [_values(table) for table in tables])


def replace_followed(sentinel: Sentinel, tables: Iterable[FollowedTable]) -> None:
    """These, and no others."""
    rows = [_values(table) for table in tables]
    sentinel.write_many(_WRITE, rows, after="DELETE FROM followed_table")


def lose_wholeness(sentinel: Sentinel, known: Mapping[int, FollowedTable], oid: int) -> None:
    """Write down that updates and deletes of a table are not followed any more, nor those of its
    partitions. What is not written down yet is left to those who decide about it."""
    rows = [one for one in known.values() if oid in (one.oid, one.root_oid)]
    write_followed(sentinel, [replace(one, is_whole=False) for one in rows])


class FollowedTables:
    """The record as a receiver asks for it; without one, everything is followed.

    `has_all`: so it is whatever the record has, because DDL comes with the changes: of a table that
    is new, the target has what came before.
    """

    def __init__(self, sentinel: Sentinel | None = None, *, has_all: bool = False) -> None:
        self._sentinel = sentinel
        self._has_all = has_all
        self._known: dict[int, FollowedTable] = {}
        # The record's when it was read; None before that.
        self._version: int | None = None

    def look_again(self) -> bool:
        """Read the record if it has changed; whether it had, since it was read before.

        Once for each piece of the stream is enough: a table is written down before the position
        from which on its changes count, so before they come."""
        if self._sentinel is None:
            return False
        # The number first: what is written in between is read again the next time.
        number = self._sentinel.rows("SELECT number FROM followed_version")[0]["number"]
        before, self._version = self._version, number
        if before == number:
            return False
        self._known = read_followed(self._sentinel)
        return before is not None

    def find(self, oid: int, root_oid: int | None = None) -> FollowedTable | None:
        """The table, or its root."""
        if self._version is None:
            self.look_again()
        for wanted in (root_oid, oid):
            if wanted is not None and wanted in self._known:
                return self._known[wanted]
        return None

    def has(self, oid: int, root_oid: int | None = None, attached: Collection[int] = ()) -> bool:
        """`attached`: tables of its path to the root that were tables of their own before, so that
        the root does not speak for them."""
        if self._has_all:
            return True
        found = self.find(oid, root_oid)
        if found is None or oid in self._known:
            return found is not None or not self._known
        return self._known.keys() >= set(attached)

    def is_own(self, oid: int) -> bool | None:
        """Whether it is written down as a table of its own; None if nothing is written down."""
        if self._version is None:
            self.look_again()
        if not self._known:
            return None
        return oid in self._known and self._known[oid].root_oid is None

    def lose_identity(self, table: FollowedTable) -> None:
        """Write down that updates and deletes of a table are left out from now on: of a table that
        is written down as whole, none may be."""
        assert self._sentinel is not None
        lose_wholeness(self._sentinel, self._known, table.root_oid or table.oid)
        self.look_again()


def _values(table: FollowedTable) -> tuple[object, ...]:
    return (
        table.oid,
        table.schema,
        table.name,
        int(table.is_whole),
        table.root_oid,
        table.link,
    )
