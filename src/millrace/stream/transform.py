"""Frames of the spool into rows by table.

Invariant: within a section the order of changes of each table is the source's, and all rows of a
table have one version; a changed version and a TRUNCATE end a section. Sections in their order
mean what the frames mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.postgres.pgoutput import (
    Bytes,
    Messages,
    RelationVersion,
    Truncate,
    decode_relation,
    decode_truncate,
    scan,
)
from millrace.postgres.pgoutput_tuple import BINARY, TEXT, Rows, locate

_ROWS = np.array([ord("I"), ord("U"), ord("D")], np.uint8)
_BOUNDARIES = np.array([ord("R"), ord("T")], np.uint8)


@dataclass(frozen=True)
class TableRows:
    """Changes of one version of a table, all text or all binary."""

    relation: RelationVersion
    rows: Rows
    is_binary: bool


@dataclass(frozen=True)
class TruncatedTables:
    """One TRUNCATE."""

    relations: tuple[RelationVersion, ...]
    restart_identity: bool
    lsn: int


Section = TableRows | TruncatedTables


def iter_sections(
    buffer: Bytes, relations: dict[int, RelationVersion], encoding: str
) -> Iterator[Section]:
    """The changes of a buffer of whole frames; `relations` is kept up to date on the way."""
    messages = scan(buffer, len(buffer))
    begin = 0
    for at in np.flatnonzero(np.isin(messages.kind, _BOUNDARIES)):
        message = _message(buffer, messages, int(at))
        if messages.kind[at] == ord("R"):
            relation = decode_relation(message, encoding)
            if relations.get(relation.oid) == relation:
                continue  # said again on a new connection
            yield from _rows(buffer, messages, begin, int(at), relations)
            relations[relation.oid] = relation
        else:
            yield from _rows(buffer, messages, begin, int(at), relations)
            yield _truncated(decode_truncate(message), relations, int(messages.lsn[at]))
        begin = int(at) + 1
    yield from _rows(buffer, messages, begin, len(messages), relations)


def _message(buffer: Bytes, messages: Messages, at: int) -> bytes:
    offset = int(messages.offset[at])
    return buffer[offset : offset + int(messages.length[at])].tobytes()


def _truncated(
    truncate: Truncate, relations: dict[int, RelationVersion], lsn: int
) -> TruncatedTables:
    return TruncatedTables(
        tuple(_relation(relations, oid, lsn) for oid in truncate.relations),
        truncate.restart_identity,
        lsn,
    )


def _relation(relations: dict[int, RelationVersion], oid: int, lsn: int) -> RelationVersion:
    try:
        return relations[oid]
    except KeyError:
        raise FormatError(
            f"a change of relation {oid} came before its description", lsn=lsn
        ) from None


def _rows(
    buffer: Bytes,
    messages: Messages,
    begin: int,
    end: int,
    relations: dict[int, RelationVersion],
) -> Iterator[TableRows]:
    numbers = begin + np.flatnonzero(np.isin(messages.kind[begin:end], _ROWS))
    owners = messages.relation[numbers]
    for oid in np.unique(owners):
        chosen = numbers[owners == oid]
        relation = _relation(relations, int(oid), int(messages.lsn[chosen[0]]))
        rows = locate(
            buffer,
            messages.kind[chosen],
            messages.offset[chosen],
            messages.length[chosen],
            messages.lsn[chosen],
            len(relation.columns),
        )
        yield from _by_format(relation, rows)


def _by_format(relation: RelationVersion, rows: Rows) -> Iterator[TableRows]:
    """Cut where text turns into binary: at a new connection of the receiver, which is rare."""
    formats = rows.formats
    mixed = np.flatnonzero(formats == (TEXT | BINARY))
    if len(mixed):
        raise FormatError(
            f"{relation.schema}.{relation.name}: a row is half text, half binary",
            lsn=int(rows.lsn[mixed[0]]),
        )
    for first, end, form in _runs(formats):
        yield TableRows(relation, rows.between(first, end), form == BINARY)


def _runs(formats: NDArray[np.uint8]) -> Iterator[tuple[int, int, int]]:
    """(first, end, format) of stretches of one format; rows without values belong to any."""
    said = np.flatnonzero(formats)
    if not len(said):
        yield 0, len(formats), TEXT
        return
    changes = said[1:][formats[said[1:]] != formats[said[:-1]]]
    begin = 0
    for end in [*changes.tolist(), len(formats)]:
        form = formats[begin:end].max()
        yield begin, end, int(form)
        begin = end
