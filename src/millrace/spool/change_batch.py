"""Frames of a range of the spool into change batches.

Invariant: the batches hold every change of the range once, in commit order, and nothing else; a
change's position in its transaction depends neither on where batches are cut nor on which tables
are asked for.

All rows of a chunk are taken apart together: kernels find the values, Arrow columns are made of
their positions. Memory is that of a chunk, or of one row if it is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.change import CASCADE, OPERATIONS, REPLICA_IDENTITIES, RESTART_IDENTITY, SCHEMA
from millrace.errors import FormatError
from millrace.postgres.pgoutput.entries import Entries, RowEntries, RowMessages, find_entries
from millrace.postgres.pgoutput.messages import (
    MICROSECONDS_1970_TO_2000,
    Bytes,
    Commit,
    Messages,
    RelationVersion,
    Truncate,
    decode_begin,
    decode_commit,
    decode_message,
    decode_relation,
    decode_truncate,
    scan,
)
from millrace.spool.change_text import ColumnOrigin, build_texts
from millrace.spool.interface import Range, Reader

# A batch is made of this number of bytes of frames, and takes a few times as much.
CHUNK_BYTES: Final = 4 << 20

_BEGIN, _COMMIT, _RELATION, _TRUNCATE, _MESSAGE = b"BCRTM"
_CODES = np.full(256, -1, np.int8)
_CODES[list(b"IUDTM")] = range(5)
_TRUNCATE_CODE, _MESSAGE_CODE = 3, 4
# Stands for the table of a message, which has none.
_NO_RELATION = RelationVersion(0, "", "", "", ())

Numbers = NDArray[np.int64]
# (schema, name)
TableName = tuple[str, str]


def iter_changes(
    reader: Reader,
    range_: Range,
    encoding: str,
    *,
    tables: frozenset[TableName] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[pa.RecordBatch]:
    """The changes of a range, of all tables or of some; `encoding` is Python's name of the
    spool's."""

    def find_commit(after_lsn: int) -> Commit | None:
        following = reader.plan(after_lsn, 1, range_.end_lsn)
        if following is None:
            return None
        return Commit(following.commit_lsn, following.end_lsn, following.committed_at)

    converter = FrameConverter(encoding, find_commit, range_.after_lsn, tables=tables)
    converter.describe(reader.relations(range_))
    for chunk in reader.chunks(range_, chunk_bytes):
        batch = converter.convert(chunk)
        if batch.num_rows:
            yield batch


@dataclass(frozen=True)
class _Transaction:
    commit_lsn: int
    end_lsn: int
    xid: int
    committed_at: int


@dataclass
class _Versions:
    """Versions of relations by number, and the columns of all of them by number."""

    relations: list[RelationVersion] = field(default_factory=list)
    first_column: list[int] = field(default_factory=list)
    columns: list[ColumnOrigin] = field(default_factory=list)
    # By which names each is asked for.
    names: list[tuple[TableName, ...]] = field(default_factory=list)
    _numbers: dict[RelationVersion, int] = field(default_factory=dict)

    def number(self, relation: RelationVersion, *root: TableName) -> int:
        if relation not in self._numbers:
            self._numbers[relation] = len(self.relations)
            self.relations.append(relation)
            self.names.append(((relation.schema, relation.name), *root))
            self.first_column.append(len(self.columns))
            label = f"{relation.schema}.{relation.name}"
            self.columns += [ColumnOrigin(column, label) for column in relation.columns]
        return self._numbers[relation]


@dataclass(frozen=True)
class _Rows:
    """The rows of a chunk: which message each is of, which version of a table, and its place in
    which transaction."""

    message: Numbers
    version: Numbers
    transaction: Numbers
    position: Numbers

    def take(self, chosen: NDArray[np.bool_]) -> _Rows:
        return _Rows(
            self.message[chosen],
            self.version[chosen],
            self.transaction[chosen],
            self.position[chosen],
        )


class FrameConverter:
    """Frames in consecutive chunks; what is known from one chunk to the next."""

    def __init__(
        self,
        encoding: str,
        find_commit: Callable[[int], Commit | None],
        after_lsn: int,
        *,
        tables: frozenset[TableName] | None = None,
    ) -> None:
        """`find_commit` says how the first transaction that ends after a position was committed:
        the Commit of a transaction may be in a later chunk."""
        self._find = find_commit
        self._encoding = encoding
        self._tables = tables
        self._versions = _Versions()
        # `scan` says so of what is no table's.
        self._current = {0: self._versions.number(_NO_RELATION)}
        self._end_lsn = after_lsn
        # The transaction that continues in the next chunk, and how many changes it had so far.
        self._open: _Transaction | None = None
        self._open_changes = 0

    def describe(self, relations: Mapping[int, RelationVersion]) -> None:
        """Tables whose Relation messages came before the first chunk."""
        for oid, relation in relations.items():
            self._current[oid] = self._versions.number(relation)

    def convert(self, buffer: Bytes) -> pa.RecordBatch:
        """The changes of a chunk of whole frames."""
        messages = scan(buffer, len(buffer))
        is_continued = self._open is not None
        open_changes = self._open_changes
        transactions = self._take_transactions(buffer, messages)
        truncates = {
            int(at): decode_truncate(_message(buffer, messages, int(at)))
            for at in np.flatnonzero(messages.kind == _TRUNCATE)
        }
        message, version = self._take_versions(buffer, messages, truncates)
        begun = np.cumsum(messages.kind == _BEGIN) - (not is_continued)
        transaction = begun[message]
        if len(transaction) and transaction[0] < 0:
            raise FormatError("replication stream: a change before the first Begin")
        rows = _Rows(message, version, transaction, _positions(transaction, open_changes))
        last = len(transactions) - 1
        if self._open is not None:
            self._open_changes = int((transaction == last).sum())
            self._open_changes += open_changes if last == 0 else 0
        else:
            self._open_changes = 0
        rows = self._wanted(rows)
        return self._batch(buffer, messages, rows, transactions, truncates)

    def _take_transactions(self, buffer: Bytes, messages: Messages) -> list[_Transaction]:
        """All that have a part in the chunk, the open one first."""
        found = [self._open] if self._open is not None else []
        marks = np.flatnonzero((messages.kind == _BEGIN) | (messages.kind == _COMMIT))
        ends = iter(np.flatnonzero(messages.kind == _COMMIT).tolist()[len(found) :])
        for at in marks.tolist():
            if messages.kind[at] == _COMMIT:
                self._end_lsn = decode_commit(_message(buffer, messages, at)).end_lsn
                self._open = None
                continue
            begin = decode_begin(_message(buffer, messages, at))
            end = next(ends, None)
            # Where and when it was committed not every plugin knows at its begin.
            commit = (
                self._find_commit()
                if end is None
                else decode_commit(_message(buffer, messages, end))
            )
            self._open = _Transaction(
                commit.commit_lsn, commit.end_lsn, begin.xid, commit.committed_at_microseconds
            )
            found.append(self._open)
        return found

    def _find_commit(self) -> Commit:
        """Of a transaction whose Commit is in a later chunk: the next one there is."""
        found = self._find(self._end_lsn)
        if found is None:
            raise FormatError("replication stream: a Begin without a Commit", lsn=self._end_lsn)
        return found

    def _take_versions(
        self, buffer: Bytes, messages: Messages, truncates: dict[int, Truncate]
    ) -> tuple[Numbers, Numbers]:
        """(message, version of its table) for each row: of a TRUNCATE, one for each table."""
        changes = np.flatnonzero(_CODES[messages.kind] >= 0)
        version = np.empty(len(changes), np.int64)
        counts = np.ones(len(changes), np.int64)
        first = 0
        truncated: dict[int, list[int]] = {}
        boundaries = np.flatnonzero((messages.kind == _RELATION) | (messages.kind == _TRUNCATE))
        for at in [*boundaries.tolist(), len(messages)]:
            end = int(np.searchsorted(changes, at))
            version[first:end] = self._current_versions(messages, changes[first:end])
            first = end
            if at in truncates:
                truncated[end] = [
                    self._truncated_version(oid, int(messages.lsn[at]))
                    for oid in truncates[at].relations
                ]
                counts[end] = len(truncated[end])
                first += 1
            elif at < len(messages):
                relation = decode_relation(_message(buffer, messages, at), self._encoding)
                self._current[relation.oid] = self._versions.number(relation)
        message, spread = np.repeat(changes, counts), np.repeat(version, counts)
        offsets = np.cumsum(counts) - counts
        for at, versions in truncated.items():
            spread[offsets[at] : offsets[at] + len(versions)] = versions
        return message, spread

    def _current_versions(self, messages: Messages, changes: Numbers) -> Numbers:
        if not len(changes):
            return np.empty(0, np.int64)
        oids, first, which = np.unique(
            messages.relation[changes], return_index=True, return_inverse=True
        )
        versions = [
            self._current_version(int(oid), int(messages.lsn[changes[at]]))
            for oid, at in zip(oids, first, strict=True)
        ]
        return np.array(versions, np.int64)[which.ravel()]

    def _truncated_version(self, oid: int, lsn: int) -> int:
        """Of a partition under its own name: the root may keep other rows."""
        version = self._current_version(oid, lsn)
        relation = self._versions.relations[version]
        if relation.partition is None:
            return version
        own = relation.partition
        itself = replace(relation, schema=own.schema, name=own.name, partition=None)
        return self._versions.number(itself, (relation.schema, relation.name))

    def _current_version(self, oid: int, lsn: int) -> int:
        try:
            return self._current[oid]
        except KeyError:
            raise FormatError(
                f"a change of relation {oid} came before its description", lsn=lsn
            ) from None

    def _wanted(self, rows: _Rows) -> _Rows:
        if self._tables is None:
            return rows
        wanted = [not self._tables.isdisjoint(names) for names in self._versions.names]
        return rows.take(np.array(wanted, np.bool_)[rows.version])

    def _batch(
        self,
        buffer: Bytes,
        messages: Messages,
        rows: _Rows,
        transactions: list[_Transaction],
        truncates: dict[int, Truncate],
    ) -> pa.RecordBatch:
        entries = self._entries(buffer, messages, rows)
        codes = _CODES[messages.kind[rows.message]]
        of = _TransactionColumns(transactions, rows.transaction)
        relations = self._versions.relations
        version = pa.array(rows.version)
        names = pa.array([origin.column.name for origin in self._versions.columns], pa.string())
        identities = [REPLICA_IDENTITIES.get(r.replica_identity) for r in relations]
        keys = [
            [column.name for column in relation.columns if column.is_key] if relation.oid else None
            for relation in relations
        ]

        def build_map(values: Entries, is_missing: NDArray[np.bool_]) -> pa.Array:
            texts = build_texts(buffer, values, self._versions.columns, self._encoding)
            return pa.MapArray.from_arrays(
                pa.array(values.offset), names.take(pa.array(values.column)), texts,
                mask=pa.array(is_missing),
            )  # fmt: skip

        columns = [
            of.take("commit_lsn"),
            of.take("end_lsn"),
            pa.array(messages.lsn[rows.message].astype(np.int64)),
            pa.array(rows.position),
            of.take("xid"),
            of.take("committed_at", MICROSECONDS_1970_TO_2000).cast(
                SCHEMA.field("committed_at").type
            ),
            pa.array([r.schema or None for r in relations], pa.string()).take(version),
            pa.array([r.name or None for r in relations], pa.string()).take(version),
            pa.array([r.oid or None for r in relations], pa.int64()).take(version),
            pa.array(OPERATIONS).take(pa.array(codes)),
            pa.array(identities, pa.string()).take(version),
            pa.array(keys, SCHEMA.field("key").type).take(version),
            build_map(entries.old, ~entries.has_old),
            build_map(entries.new, (codes != 0) & (codes != 1)),
            pa.ListArray.from_arrays(
                pa.array(entries.unchanged_offset),
                names.take(pa.array(entries.unchanged_column)),
                type=SCHEMA.field("unchanged").type,
            ),
            _options(codes, rows, truncates),
        ]
        columns += self._message_columns(buffer, messages, rows, codes)
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _message_columns(
        self, buffer: Bytes, messages: Messages, rows: _Rows, codes: NDArray[np.int8]
    ) -> list[pa.Array]:
        prefixes: list[str | None] = [None] * len(codes)
        contents: list[bytes | None] = [None] * len(codes)
        for at in np.flatnonzero(codes == _MESSAGE_CODE).tolist():
            message = _message(buffer, messages, int(rows.message[at]))
            found = decode_message(message, self._encoding)
            prefixes[at], contents[at] = found.prefix, found.content
        return [pa.array(prefixes, pa.string()), pa.array(contents, pa.binary())]

    def _entries(self, buffer: Bytes, messages: Messages, rows: _Rows) -> RowEntries:
        """Of all rows; a TRUNCATE and a message have none."""
        relations = self._versions.relations
        kind = messages.kind[rows.message]
        counts = np.array([len(r.columns) for r in relations], np.int64)
        first = np.array(self._versions.first_column, np.int64)
        is_key = np.array([o.column.is_key for o in self._versions.columns], np.bool_)
        is_row = (kind != _TRUNCATE) & (kind != _MESSAGE)
        at, version = rows.message[is_row], rows.version[is_row]
        found = find_entries(
            buffer,
            RowMessages(
                kind[is_row],
                messages.offset[at],
                messages.length[at],
                first[version],
                counts[version],
                is_key,
            ),
        )
        if isinstance(found, int):
            relation = relations[int(version[found])]
            raise FormatError(
                f"{relation.schema}.{relation.name}: expected a row of {len(relation.columns)} "
                f"columns in {messages.length[at[found]]} bytes",
                lsn=int(messages.lsn[at[found]]),
            )
        return found if is_row.all() else _spread(found, is_row)


class _TransactionColumns:
    """Values of the transactions, for each row."""

    def __init__(self, transactions: list[_Transaction], of_row: Numbers) -> None:
        self._transactions = transactions
        self._of_row = of_row

    def take(self, name: str, shift: int = 0) -> pa.Array:
        values = [getattr(one, name) + shift for one in self._transactions]
        return pa.array(np.array(values, np.int64)[self._of_row])


def _message(buffer: Bytes, messages: Messages, at: int) -> bytes:
    offset = int(messages.offset[at])
    return buffer[offset : offset + int(messages.length[at])].tobytes()


def _positions(transaction: Numbers, open_changes: int) -> Numbers:
    """Numbers from 0 in each transaction; the first one continues where it was."""
    count = np.arange(len(transaction))
    first = np.searchsorted(transaction, transaction)
    return count - first + np.where(transaction == 0, open_changes, 0)


def _spread(entries: RowEntries, is_row: NDArray[np.bool_]) -> RowEntries:
    """With empty rows where there is none."""
    before = np.concatenate(([0], np.cumsum(is_row)))

    def wider(values: Entries) -> Entries:
        return Entries(
            values.offset[before], values.column, values.at, values.size, values.is_binary
        )

    has_old = np.zeros(len(is_row), np.bool_)
    has_old[is_row] = entries.has_old
    return RowEntries(
        wider(entries.new),
        wider(entries.old),
        has_old,
        entries.unchanged_offset[before],
        entries.unchanged_column,
    )


def _options(codes: NDArray[np.int8], rows: _Rows, truncates: dict[int, Truncate]) -> pa.Array:
    type_ = SCHEMA.field("options").type
    if not truncates:
        return pa.nulls(len(codes), type_)
    values: list[Any] = [None] * len(codes)
    for at in np.flatnonzero(codes == _TRUNCATE_CODE).tolist():
        truncate = truncates[int(rows.message[at])]
        flags = ((truncate.cascade, CASCADE), (truncate.restart_identity, RESTART_IDENTITY))
        values[at] = [name for is_set, name in flags if is_set]
    return pa.array(values, type_)
