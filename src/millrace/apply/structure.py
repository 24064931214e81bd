"""Changes of structure in the stream: rows of a table that somebody waits for, in transactions of
their own.

Invariant: a batch holds either no such row, or exactly the one source transaction that has it; so
everything before that transaction is committed on the target, and what it does to the structure
commits with its rows and its position.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from psycopg.pq.abc import PGconn

from millrace.errors import FormatError, MillraceError
from millrace.postgres.pgoutput.messages import (
    Bytes,
    LogicalMessage,
    Messages,
    RelationVersion,
    decode_commit,
    decode_message,
    decode_relation,
    scan,
)
from millrace.spool.interface import Range, Reader

_INSERT, _RELATION, _COMMIT, _MESSAGE = b"IRCM"
# Bytes looked at in one piece.
_CHUNK_BYTES = 16 << 20
# As many as there are.
_ANY_BYTES = 1 << 62

# Schema and name.
TableName = tuple[str, str]


@dataclass(frozen=True)
class WatchedRow:
    """A row that was inserted into a watched table, at its place among the changes."""

    relation: RelationVersion
    # By column, as they were sent: text, or the binary form of text, which is the same.
    values: dict[str, bytes | None]
    lsn: int

    @property
    def label(self) -> str:
        return f"{self.relation.schema}.{self.relation.name}"

    @classmethod
    def lost(cls, table: TableName, message: LogicalMessage) -> WatchedRow:
        """The row that a message stands for."""
        relation = RelationVersion(0, *table, "d", ())
        values: dict[str, bytes | None] = {"event": b"lost", "command_tag": b"DDL"}
        return cls(relation, values | {"error": message.content}, message.lsn)

    def text(self, column: str, encoding: str) -> str | None:
        value = self.values.get(column)
        return None if value is None else value.decode(encoding)


@dataclass(frozen=True)
class Place:
    """Where in the stream a change of structure is."""

    # Of its own row, and of the end of its transaction.
    lsn: int
    end_lsn: int
    # When it was committed, as a timestamptz reads it.
    committed_at: str
    encoding: str


class Structure(Protocol):
    """Who changes the target's structure. It survives pickle."""

    @property
    def tables(self) -> Collection[TableName]:
        """The tables whose rows are meant for it."""

    @property
    def prefix(self) -> str:
        """Of the logical messages that stand for a row which could not be written."""

    def open(self, session: PGconn) -> StructureChanges:
        """For one source transaction, within the session's transaction."""

    def leaves_out(self, schema: str, name: str) -> bool:
        """Whether a table, by its name on the source, is none of the target's."""

    def note_failure(self, session: PGconn, error: MillraceError) -> None:
        """What stopped a change, now that all of its transaction is rolled back."""


class StructureChanges(Protocol):
    """The changes of structure of one source transaction, in their order."""

    def apply(self, row: WatchedRow, place: Place) -> None:
        """Do it, in the session's transaction, which it does not end. Raises what stops it."""

    def end(self) -> None:
        """Before the transaction commits."""


def decode_row(message: bytes, relation: RelationVersion, lsn: int) -> WatchedRow:
    """An Insert message of a watched table."""
    try:
        return WatchedRow(relation, dict(_iter_values(message, relation)), lsn)
    except (struct.error, IndexError):
        raise FormatError(
            f"{relation.schema}.{relation.name}: expected a whole row", lsn=lsn
        ) from None


def _iter_values(message: bytes, relation: RelationVersion) -> list[tuple[str, bytes | None]]:
    at = struct.calcsize(">cIcH")
    found: list[tuple[str, bytes | None]] = []
    for column in relation.columns:
        kind = message[at : at + 1]
        at += 1
        if kind in (b"t", b"b"):
            (size,) = struct.unpack_from(">I", message, at)
            at += 4
            found.append((column.name, message[at : at + size]))
            at += size
        else:
            found.append((column.name, None))
    return found


class StructureScan:
    """Finds the transactions of a spool that change the structure."""

    def __init__(self, spool: Reader, structure: Structure, encoding: str) -> None:
        self._spool = spool
        self._tables = frozenset(structure.tables)
        self._prefix = structure.prefix
        self._encoding = encoding
        # Up to here, these are they: where each ends, and where the one before it ends.
        self._known_to = 0
        self._ends: list[int] = []
        self._befores: list[int] = []

    def cut(self, after_lsn: int, found: Range) -> Range:
        """As much of a range as may be one batch."""
        self._look(after_lsn, found)
        at = bisect_right(self._ends, after_lsn)
        if at == len(self._ends) or self._ends[at] > found.end_lsn:
            return found
        if self._befores[at] > after_lsn:
            return self._spool.plan(after_lsn, _ANY_BYTES, self._befores[at]) or found
        return self._spool.plan(after_lsn, 1, self._ends[at]) or found

    def is_alone(self, cut: Range) -> bool:
        """Whether that is a transaction that changes the structure."""
        at = bisect_right(self._ends, cut.after_lsn)
        return at < len(self._ends) and self._ends[at] == cut.end_lsn

    def _look(self, after_lsn: int, found: Range) -> None:
        if found.end_lsn <= self._known_to:
            return
        part: Range | None = found
        if after_lsn < self._known_to:
            part = self._spool.plan(self._known_to, _ANY_BYTES, found.end_lsn)
        if part is not None:
            self._scan(part)
        self._known_to = found.end_lsn

    def _scan(self, part: Range) -> None:
        relations = self._spool.relations(part)
        oids = {oid for oid, one in relations.items() if self._is_watched(one)}
        before, has_row = part.after_lsn, False
        for chunk in self._spool.chunks(part, _CHUNK_BYTES):
            messages = scan(chunk, len(chunk))
            for at in np.flatnonzero(messages.kind == _RELATION):
                relation = decode_relation(_message(chunk, messages, at), self._encoding)
                if self._is_watched(relation):
                    oids.add(relation.oid)
            is_row = (messages.kind == _INSERT) & np.isin(messages.relation, list(oids))
            for at in np.flatnonzero(messages.kind == _MESSAGE):
                emitted = decode_message(_message(chunk, messages, at), self._encoding)
                is_row[at] = emitted.prefix == self._prefix
            for at in np.flatnonzero(is_row | (messages.kind == _COMMIT)):
                if is_row[at]:
                    has_row = True
                    continue
                end = decode_commit(_message(chunk, messages, at)).end_lsn
                if has_row:
                    self._ends.append(end)
                    self._befores.append(before)
                before, has_row = end, False

    def _is_watched(self, relation: RelationVersion) -> bool:
        return (relation.schema, relation.name) in self._tables


def _message(chunk: Bytes, messages: Messages, at: np.int64) -> bytes:
    offset = int(messages.offset[at])
    return chunk[offset : offset + int(messages.length[at])].tobytes()
