"""Frames of the spool into rows by table.

Invariant: within a section the order of changes of each table is the source's, and all rows of a
table have one version; a changed version, a TRUNCATE, and a logical message or a row that somebody
waits for end a section. Sections in their order mean what the frames mean. The partitions of a root
are one table, so that a row that moves from one to another is one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from millrace.apply.layout import Layout, plan_layouts
from millrace.apply.structure import TableName, WatchedRow, decode_row
from millrace.errors import FormatError
from millrace.postgres.pgoutput.messages import (
    Bytes,
    LogicalMessage,
    Messages,
    RelationVersion,
    Truncate,
    decode_message,
    decode_relation,
    decode_truncate,
    scan,
)
from millrace.postgres.pgoutput.tuples import BINARY, TEXT, Rows, locate

_ROWS = np.array([ord("I"), ord("U"), ord("D")], np.uint8)
_RELATION, _TRUNCATE, _MESSAGE, _INSERT = b"RTMI"


@dataclass(frozen=True)
class TableRows:
    """Changes of one version of a table, all text or all binary."""

    relation: RelationVersion
    rows: Rows
    is_binary: bool

    @property
    def label(self) -> str:
        return _label(self.relation)


@dataclass(frozen=True)
class TruncatedTables:
    """One TRUNCATE."""

    relations: tuple[RelationVersion, ...]
    restart_identity: bool
    lsn: int

    @property
    def label(self) -> str:
        return ", ".join(map(_label, self.relations))


def _label(relation: RelationVersion) -> str:
    return f"{relation.schema}.{relation.name}"


Section = TableRows | TruncatedTables | LogicalMessage | WatchedRow


def iter_sections(
    buffer: Bytes,
    relations: dict[int, RelationVersion],
    encoding: str,
    prefixes: Collection[str] = (),
    watched: Collection[TableName] = (),
) -> Iterator[Section]:
    """The changes of a buffer of whole frames, and the logical messages with one of the prefixes;
    `relations` is kept up to date on the way. Rows of `watched` tables come one by one."""
    messages = scan(buffer, len(buffer))
    begin = 0
    kinds = [_RELATION, _TRUNCATE]
    kinds += [_MESSAGE] if prefixes else []
    kinds += [_INSERT] if watched else []
    for at in np.flatnonzero(np.isin(messages.kind, kinds)):
        if messages.kind[at] == _INSERT:
            found = relations.get(int(messages.relation[at]))
            if found is None or (found.schema, found.name) not in watched:
                continue
            yield from _rows(buffer, messages, begin, int(at), relations)
            yield decode_row(_message(buffer, messages, int(at)), found, int(messages.lsn[at]))
            begin = int(at) + 1
            continue
        message = _message(buffer, messages, int(at))
        if messages.kind[at] == _MESSAGE:
            emitted = decode_message(message, encoding)
            if emitted.prefix not in prefixes:
                continue
            yield from _rows(buffer, messages, begin, int(at), relations)
            yield emitted
        elif messages.kind[at] == _RELATION:
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
    for oid in truncate.relations:
        if oid not in relations:
            raise _not_described(oid, lsn)
    return TruncatedTables(
        tuple(relations[oid] for oid in truncate.relations), truncate.restart_identity, lsn
    )


def _not_described(oid: int, lsn: int) -> FormatError:
    return FormatError(f"a change of relation {oid} came before its description", lsn=lsn)


def _rows(
    buffer: Bytes,
    messages: Messages,
    begin: int,
    end: int,
    relations: dict[int, RelationVersion],
) -> Iterator[TableRows]:
    numbers = begin + np.flatnonzero(np.isin(messages.kind[begin:end], _ROWS))
    owners = messages.relation[numbers]
    oids: list[int] = np.unique(owners).tolist()
    for oid in oids:
        if oid not in relations:
            raise _not_described(oid, int(messages.lsn[numbers[owners == oid][0]]))
    for together in _by_name([relations[oid] for oid in oids]):
        ours = [relation.oid for relation in together]
        if len(ours) == 1:
            chosen = numbers[owners == ours[0]]
            yield from _located(buffer, messages, chosen, Layout.of(together))
            continue
        chosen = numbers[np.isin(owners, ours)]
        for layout, part in _by_layout(messages, chosen, together):
            yield from _located(buffer, messages, part, layout)


def _by_name(relations: list[RelationVersion]) -> list[list[RelationVersion]]:
    """The partitions of each root together."""
    groups: dict[tuple[str, str], list[RelationVersion]] = {}
    for relation in relations:
        groups.setdefault((relation.schema, relation.name), []).append(relation)
    return list(groups.values())


def _by_layout(
    messages: Messages, chosen: NDArray[np.int64], relations: list[RelationVersion]
) -> Iterator[tuple[Layout, NDArray[np.int64]]]:
    """The rows of one name, cut where they can't be handled together; often nowhere."""
    layouts = plan_layouts(relations)
    if len(layouts) == 1:
        yield layouts[0], chosen
        return
    owners = messages.relation[chosen]
    number = np.empty(len(chosen), np.int64)
    for at, layout in enumerate(layouts):
        number[np.isin(owners, list(layout.places))] = at
    cuts = [0, *(1 + np.flatnonzero(np.diff(number))).tolist(), len(chosen)]
    for first, end in pairwise(cuts):
        yield layouts[number[first]], chosen[first:end]


def _located(
    buffer: Bytes, messages: Messages, chosen: NDArray[np.int64], layout: Layout
) -> Iterator[TableRows]:
    rows = locate(
        buffer,
        messages.kind[chosen],
        messages.offset[chosen],
        messages.length[chosen],
        messages.lsn[chosen],
        len(layout.relation.columns),
    )
    for oid, places in layout.places.items():
        if places is not None:
            rows.reorder(messages.relation[chosen] == oid, places)
    yield from _by_format(layout.relation, rows)


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
