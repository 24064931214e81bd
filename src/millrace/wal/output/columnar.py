"""Transactions into bytes, all rows of a piece of WAL at a time.

Invariant: the bytes are those that the plain way gives, change by change, in the same order. What
comes out depends on the transactions alone, not on how the WAL was cut into pieces.

Items lie one after the other in the output: what begins a transaction, its rows, what ends it, and
where the format wants it a table's description before rows. First the size of each item is
counted, rows by groups of one table and one kind of change; that gives their places. Then each
group writes its rows, column by column, to where they belong.

A table with a column that prints names of objects is not for this way (`is_fit`): the names are
those of each change's own position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal.output.rows import RowFormat, RowGroup, Stamps
from millrace.wal.read.record import Records
from millrace.wal.row import row_kernel
from millrace.wal.row.descriptor import RowDescriptor
from millrace.wal.row.heap_columns import Bytes, Numbers
from millrace.wal.row.row_columns import StoredRows, add_chunks, render_rows
from millrace.wal.row.toast import ToastValues
from millrace.wal.types.registry import needs_names

# Rows that are written before the next ones: what they take should fit into a cache.
_STEP: Final = 8192
# The number that find_rows gets for an insertion of earlier records.
_CARRIED: Final = -2
COMMIT: Final = "commit"
PREPARE: Final = "prepare"


class ChangeReferences(Protocol):
    """Changes of a transaction in one piece: record numbers, and for each its relation."""

    @property
    def piece(self) -> int: ...

    @property
    def indices(self) -> NDArray[np.int64]: ...

    @property
    def relations(self) -> NDArray[np.int32]: ...


class EndedTransaction(Protocol):
    """A transaction that is emitted; one that is neither committed nor prepared has no rows."""

    @property
    def ending(self) -> Enum: ...

    @property
    def xid(self) -> int: ...

    @property
    def first_lsn(self) -> int: ...

    @property
    def commit_lsn(self) -> int: ...

    @property
    def end_lsn(self) -> int: ...

    @property
    def committed_at(self) -> int: ...

    @property
    def references(self) -> Sequence[ChangeReferences]: ...


class ChangeSource(Protocol):
    """Where changes are looked up, and what writes those that are no rows."""

    def records(self, piece: int) -> Records: ...

    def relation(self, number: int) -> tuple[int, RowDescriptor | None]:
        """(SKIP, TABLE, TOAST or SPECIAL of row_kernel, what a table's rows are made of)."""

    def render_other(
        self, transaction: EndedTransaction, piece: int, record: int, number: int
    ) -> bytes:
        """A change that is SPECIAL: a TRUNCATE or a message."""

    def render_ending(self, transaction: EndedTransaction) -> bytes:
        """The end of a transaction that was not committed in one step."""


def is_fit(relation: RowDescriptor) -> bool:
    """Whether the table's rows can be written together."""
    return not any(column.type and needs_names(column.type) for column in relation.columns)


@dataclass(frozen=True)
class _Part:
    """What a transaction has in one piece."""

    transaction: EndedTransaction
    references: ChangeReferences | None
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class _Held:
    """A speculative insertion that waits for a later piece."""

    row: bytes
    number: int
    lsn: int


@dataclass
class _Rows:
    """What the records of a run hold, in order."""

    data: Bytes
    part: Numbers
    kind: NDArray[np.uint8]
    number: Numbers
    lsn: NDArray[np.uint64]
    record: Numbers
    new_at: Numbers
    new_size: Numbers
    old_at: Numbers
    old_size: Numbers
    epoch: Numbers

    def take(self, chosen: Any) -> _Rows:
        return _Rows(self.data, *(getattr(self, name)[chosen] for name in _COLUMNS))

    def __len__(self) -> int:
        return len(self.part)


_COLUMNS = (
    "part", "kind", "number", "lsn", "record", "new_at", "new_size", "old_at", "old_size", "epoch",
)  # fmt: skip


@dataclass
class _Items:
    """The pieces of output of one run: sizes by place in the order, and who writes them."""

    size: Numbers
    texts: list[tuple[int, bytes]] = field(default_factory=list)
    groups: list[tuple[RowGroup, Numbers]] = field(default_factory=list)


class ColumnarWriter:
    """Writes transactions in one format; what is known from one piece to the next is kept."""

    def __init__(
        self,
        format_: RowFormat,
        source: ChangeSource,
        *,
        described: dict[int, RowDescriptor] | None = None,
        drops_empty: bool = False,
    ) -> None:
        """`described` has the tables that were described before, by OID, and gets those that
        are. With `drops_empty` a transaction without changes in one piece is left out."""
        self._format = format_
        self._drops_empty = drops_empty
        # Changes of the last call of `write`.
        self.row_count = 0
        self._source = source
        self._roles = np.empty(0, np.uint8)
        self._tables: list[RowDescriptor | None] = []
        self._oids = np.empty(0, np.int64)
        # The table that was described last, by OID, and what it was before this call.
        self._described = {} if described is None else described
        self._described_before: dict[int, RowDescriptor | None] = {}
        self._epoch = 0
        self._chunks: dict[int, ToastValues] = {}
        self._held: _Held | None = None

    def write(self, transactions: Sequence[EndedTransaction]) -> Iterator[Bytes]:
        """The bytes of all of them, piece by piece."""
        self.row_count = 0
        self._described_before = {}
        for run in _runs(transactions):
            out = self._write_run(run)
            if len(out):
                yield out

    def reset(self) -> None:
        """What was written by the last call was thrown away."""
        for oid, table in self._described_before.items():
            if table is None:
                self._described.pop(oid, None)
            else:
                self._described[oid] = table
        self._chunks.clear()
        self._held = None

    def _write_run(self, run: list[_Part]) -> Bytes:
        rows = self._find_rows(run)
        chunks = rows.kind == row_kernel.CHUNK
        if chunks.any():
            mine = rows.take(chunks)
            add_chunks(StoredRows(rows.data, mine.new_at, mine.new_size, mine.epoch), self._chunks)
            rows = rows.take(~chunks)
        self.row_count += len(rows)
        begins = np.array([p.is_first and _has_begin(p.transaction) for p in run], np.bool_)
        ends = np.array([p.is_last for p in run], np.bool_)
        described = self._descriptions(rows)
        # Where each item is in the order.
        counts = np.bincount(rows.part, minlength=len(run)) + begins + ends
        counts += np.bincount(rows.part[list(described)], minlength=len(run)).astype(np.int64)
        first = np.cumsum(counts) - counts
        items = _Items(np.zeros(int(counts.sum()), np.int64))
        place = _row_places(rows, first, begins, described)
        for row, text in described.items():
            items.texts.append((int(place[row]) - 1, text))
        self._group(run, rows, place, items)
        out = self._put(run, items, first, first + counts - 1, begins, ends)
        self._forget(run)
        return out

    def _put(
        self,
        run: list[_Part],
        items: _Items,
        begin_place: Numbers,
        end_place: Numbers,
        begins: NDArray[np.bool_],
        ends: NDArray[np.bool_],
    ) -> Bytes:
        """Count everything, then write it."""
        plain = ends & np.array([p.transaction.ending.value == COMMIT for p in run], np.bool_)
        for at in np.flatnonzero(ends & ~plain).tolist():
            text = self._source.render_ending(run[at].transaction)
            items.texts.append((int(end_place[at]), text))
        size = items.size
        for at, text in items.texts:
            size[at] = len(text)
        for group, places in items.groups:
            size[places] = self._format.count_rows(group)
        if self._drops_empty:
            passed = np.append(0, np.cumsum(size))
            is_empty = begins & plain & (passed[end_place] == passed[begin_place])
            begins, plain = begins & ~is_empty, plain & ~is_empty
        begin_stamps = _stamps([run[n].transaction for n in np.flatnonzero(begins)], is_end=False)
        end_stamps = _stamps([run[n].transaction for n in np.flatnonzero(plain)], is_end=True)
        size[begin_place[begins]] = self._format.count_begins(begin_stamps)
        size[end_place[plain]] = self._format.count_commits(end_stamps)
        offset = np.cumsum(size) - size
        out = np.empty(int(size.sum()), np.uint8)
        self._format.put_begins(begin_stamps, out, offset[begin_place[begins]])
        self._format.put_commits(end_stamps, out, offset[end_place[plain]])
        for at, text in items.texts:
            out[offset[at] : offset[at] + len(text)] = np.frombuffer(text, np.uint8)
        for group, places in items.groups:
            for begin in range(0, len(group), _STEP):
                cursor = offset[places[begin : begin + _STEP]]
                self._format.put_rows(group.slice(begin, begin + _STEP), out, cursor)
        return out

    def _find_rows(self, run: list[_Part]) -> _Rows:
        """The rows of all records of a run."""
        with_changes = [p for p in run if p.references is not None]
        if not with_changes or with_changes[0].references is None:
            return _no_rows()
        records = self._source.records(with_changes[0].references.piece)
        references = [p.references for p in with_changes if p.references is not None]
        indices = np.concatenate([r.indices for r in references])
        numbers = np.concatenate([r.relations for r in references]).astype(np.int64)
        self._know(int(numbers.max(initial=-1)) + 1)
        lengths = np.array([len(r.indices) for r in references], np.int64)
        parts = np.flatnonzero([p.references is not None for p in run])
        is_first = np.zeros(len(indices), np.bool_)
        starts = np.cumsum(lengths) - lengths
        is_first[starts[[p.is_first for p in with_changes]]] = True
        return self._expand(records, indices, numbers, is_first, np.repeat(parts, lengths))

    def _expand(
        self,
        records: Records,
        indices: Numbers,
        numbers: Numbers,
        is_first: NDArray[np.bool_],
        part: Numbers,
    ) -> _Rows:
        roles = self._roles[numbers]
        data, held = records.data, self._held
        held_at = len(data)
        if held is not None:
            data = np.concatenate([data, np.frombuffer(held.row, np.uint8)])
        columns = (records.rmid, records.info, records.main_start, records.main_length)
        room = row_kernel.count_rows(*columns, data, indices, roles)
        source, kind = np.empty(room, np.int64), np.empty(room, np.uint8)
        new_at, new_size, old_at, old_size, epoch = (np.zeros(room, np.int64) for _ in range(5))
        count, self._epoch, waits, wait_at, wait_size, bad = row_kernel.find_rows(
            *columns, records.first_block, records.block_id, records.data_start,
            records.data_length, data, indices, roles, is_first, self._epoch,
            _CARRIED if held else -1, held_at, len(held.row) - 5 if held else 0,
            source, kind, new_at, new_size, old_at, old_size, epoch,
        )  # fmt: skip
        if bad >= 0:
            lsn = render_lsn(int(records.lsn[indices[bad]]))
            raise FormatError(f"expected a change of a row in the record at {lsn}", lsn=lsn)
        source, kind = source[:count], kind[:count]
        carried = np.flatnonzero(source == _CARRIED)
        source = np.maximum(source, 0)
        number, lsn_ = numbers[source], records.lsn[indices[source]]
        part_of = part[source]
        if held is not None and len(carried):
            # It comes out where it is confirmed, so with the rows after it.
            number[carried], lsn_[carried] = held.number, held.lsn
            part_of[carried] = part[0]
        rows = _Rows(
            data, part_of, kind, number, lsn_, indices[source],
            new_at[:count], new_size[:count], old_at[:count], old_size[:count], epoch[:count],
        )  # fmt: skip
        if waits != _CARRIED:
            self._held = None
        if waits >= 0:
            row = data[wait_at : wait_at + 5 + wait_size].tobytes()
            held_lsn = int(records.lsn[indices[waits]])
            self._held = _Held(row, int(numbers[waits]), held_lsn)
        return rows

    def _know(self, count: int) -> None:
        """Look up relations with new numbers."""
        if count <= len(self._tables):
            return
        found = [self._source.relation(n) for n in range(len(self._tables), count)]
        self._roles = np.append(self._roles, np.array([role for role, _ in found], np.uint8))
        self._tables += [table for _, table in found]
        oids = [table.oid if table else 0 for _, table in found]
        self._oids = np.append(self._oids, np.array(oids, np.int64))

    def _descriptions(self, rows: _Rows) -> dict[int, bytes]:
        """What stands before some rows, by row, in order."""
        tables = np.flatnonzero(rows.kind != row_kernel.OTHER)
        oids = self._oids[rows.number[tables]]
        order = np.argsort(oids, kind="stable")
        number = rows.number[tables][order]
        is_new = np.ones(len(order), np.bool_)
        is_new[1:] = (number[1:] != number[:-1]) | (oids[order][1:] != oids[order][:-1])
        found: dict[int, bytes] = {}
        for row in np.sort(tables[order[is_new]]).tolist():
            table = self._tables[int(rows.number[row])]
            if table is None or self._described.get(table.oid) == table:
                continue
            self._described_before.setdefault(table.oid, self._described.get(table.oid))
            self._described[table.oid] = table
            text = self._format.relation(table, int(rows.lsn[row]))
            if text:
                found[row] = text
        return found

    def _group(self, run: list[_Part], rows: _Rows, place: Numbers, items: _Items) -> None:
        """Rows by table and kind of change; what is no row is written at once."""
        for row in np.flatnonzero(rows.kind == row_kernel.OTHER).tolist():
            part = run[int(rows.part[row])]
            if part.references is not None:
                text = self._source.render_other(
                    part.transaction,
                    part.references.piece,
                    int(rows.record[row]),
                    int(rows.number[row]),
                )
                items.texts.append((int(place[row]), text))
        xids = np.array([p.transaction.xid for p in run], np.int64)
        shape = (rows.new_at >= 0).astype(np.int64) | (rows.old_at >= 0).astype(np.int64) << 1
        key = (rows.number << 10) | rows.kind.astype(np.int64) << 2 | shape
        order = np.argsort(key, kind="stable")
        cuts = np.flatnonzero(np.diff(key[order])) + 1
        for chosen in np.split(order, cuts):
            if len(chosen) and rows.kind[chosen[0]] != row_kernel.OTHER:
                group = self._render(rows.take(chosen), xids[rows.part[chosen]])
                items.groups.append((group, place[chosen]))

    def _render(self, rows: _Rows, xid: Numbers) -> RowGroup:
        table = self._tables[int(rows.number[0])]
        if table is None:
            raise FormatError("expected a change of a table")
        new = StoredRows(rows.data, rows.new_at, rows.new_size, rows.epoch)
        old = StoredRows(rows.data, rows.old_at, rows.old_size, rows.epoch)
        renderers = self._format.renderers
        none = np.empty(0, np.uint64)
        return RowGroup(
            table,
            chr(rows.kind[0]),
            Stamps(rows.lsn, xid, none, none.astype(np.int64)),
            render_rows(renderers, table, new, self._chunks) if rows.new_at[0] >= 0 else None,
            render_rows(renderers, table, old, self._chunks) if rows.old_at[0] >= 0 else None,
        )

    def _forget(self, run: list[_Part]) -> None:
        """Of chunks and held rows only those of a transaction that continues are needed."""
        if run[-1].is_last:
            self._chunks.clear()
            self._held = None
        else:
            self._chunks = {e: v for e, v in self._chunks.items() if e == self._epoch}


def _runs(transactions: Sequence[EndedTransaction]) -> Iterator[list[_Part]]:
    """Consecutive parts in the same piece."""
    run: list[_Part] = []
    piece: int | None = None
    for transaction in transactions:
        references = [one for one in transaction.references if len(one.indices)]
        if not references:
            run.append(_Part(transaction, None, is_first=True, is_last=True))
        for n, one in enumerate(references):
            if piece not in (None, one.piece):
                yield run
                run = []
            piece = one.piece
            is_last = n == len(references) - 1
            run.append(_Part(transaction, one, is_first=n == 0, is_last=is_last))
    if run:
        yield run


def _has_begin(transaction: EndedTransaction) -> bool:
    return transaction.ending.value in (COMMIT, PREPARE)


def _row_places(
    rows: _Rows, first: Numbers, begins: NDArray[np.bool_], described: dict[int, bytes]
) -> Numbers:
    """Where each row is in the order of all items: behind what begins its transaction, the rows of
    the same part before it, and what stands before them."""
    extra = np.zeros(len(rows), np.int64)
    extra[list(described)] = 1
    position = np.arange(len(rows)) + np.cumsum(extra)
    parts, starts = np.unique(rows.part, return_index=True)
    base = np.zeros(len(first), np.int64)
    base[parts] = position[starts] - extra[starts]
    place: Numbers = first[rows.part] + begins[rows.part] + position - base[rows.part]
    return place


def _stamps(transactions: list[EndedTransaction], *, is_end: bool) -> Stamps:
    lsn = [t.end_lsn if is_end else t.first_lsn for t in transactions]
    return Stamps(
        np.array(lsn, np.uint64),
        np.array([t.xid for t in transactions], np.int64),
        np.array([t.commit_lsn for t in transactions], np.uint64),
        np.array([t.committed_at for t in transactions], np.int64),
    )


def _no_rows() -> _Rows:
    numbers = np.empty(0, np.int64)
    data = np.empty(0, np.uint8)
    columns: dict[str, Any] = dict.fromkeys(_COLUMNS, numbers)
    return _Rows(data, **columns | {"kind": data, "lsn": np.empty(0, np.uint64)})
