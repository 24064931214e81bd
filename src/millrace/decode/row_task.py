"""Transactions into lines of test_decoding: what a task does.

Invariant: the file holds what decoding in one process would have written for these transactions, in
their order. A transaction that cannot be rendered is left out whole, and named.

All that a task needs comes with it: references to records in files, relations as they were. Types
whose values are names of catalog objects need the catalog, so their transactions are no matter for
a task (`needs_catalog`).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from millrace.decode.outputs import TextOutput
from millrace.decode.selection import Selection
from millrace.errors import FormatError
from millrace.wal.catalog.table_lookup import Relation, Role
from millrace.wal.output.columnar import ColumnarWriter
from millrace.wal.output.lines import LineFormat
from millrace.wal.read.record import Records
from millrace.wal.read.record_file import read_record_file
from millrace.wal.row import row_kernel
from millrace.wal.row.descriptor import RowDescriptor, TypeDescriptor
from millrace.wal.row.rows import RowReader
from millrace.wal.transaction import (
    MESSAGE,
    TRUNCATION,
    Batch,
    Ending,
    References,
    Transaction,
    Withheld,
)
from millrace.wal.types.registry import REGISTERED, Renderers
from millrace.wal.types.settings import OutputSettings

_LINE_END = 10
_ROLES = {Role.TABLE: row_kernel.TABLE, Role.TOAST: row_kernel.TOAST}


@dataclass(frozen=True, slots=True)
class RowTask:
    """Transactions, and what their changes refer to."""

    batch: Batch
    relations: Mapping[int, Relation]
    pieces: Mapping[int, Path]
    settings: OutputSettings
    unknown_as_raw: bool
    selection: Selection
    path: Path  # to write


@dataclass(slots=True)
class Rendered:
    """What has become of a task's transactions."""

    path: Path
    transactions: int = 0
    changes: int = 0
    withheld: list[Withheld] = field(default_factory=list)


class FilePieces:
    """Pieces of WAL in files of records."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self._paths = paths
        self.get = lru_cache(maxsize=8)(self._read)

    def _read(self, piece: int) -> Records:
        return read_record_file(self._paths[piece])


def render_transactions(task: RowTask, attempt: int = 0) -> Rendered:
    """The body of a task."""
    renderers = Renderers(task.settings, unknown_as_raw=task.unknown_as_raw)
    pieces = FilePieces(task.pieces)
    draft = task.path.with_name(f"{task.path.name}.{attempt}.draft")
    with draft.open("wb") as stream:
        done = None if task.selection.drops_empty else _by_column(task, renderers, pieces, stream)
        if done is None:
            stream.seek(0)
            stream.truncate()
            done = _one_by_one(task, renderers, pieces, stream)
    draft.replace(task.path)
    return done


def needs_catalog(relations: Iterable[Relation]) -> bool:
    """Whether a column can hold the name of an object, which only the catalog tells."""
    rows = [relation.row for relation in relations if relation.row is not None]
    return any(_names_objects(c.type) for row in rows for c in row.columns)


def _names_objects(type_: TypeDescriptor | None) -> bool:
    if type_ is None:
        return False
    inner = [type_.element, type_.base, type_.subtype, type_.range]
    inner += [column.type for column in type_.columns]
    is_one = type_.namespace == "pg_catalog" and type_.name in (*REGISTERED, "aclitem")
    return is_one or any(_names_objects(one) for one in inner)


def _by_column(
    task: RowTask, renderers: Renderers, pieces: FilePieces, stream: Any
) -> Rendered | None:
    """All at once; None if one of them cannot be rendered."""
    writer = ColumnarWriter(LineFormat(renderers), _Source(task, renderers, pieces))
    lines = 0
    try:
        for part in writer.write(task.batch.transactions):
            stream.write(part.data)
            lines += int(np.count_nonzero(part == _LINE_END))
    except FormatError:
        return None
    marks = sum(_count_marks(transaction) for transaction in task.batch.transactions)
    return Rendered(task.path, len(task.batch.transactions), lines - marks)


def _count_marks(transaction: Transaction) -> int:
    """Lines that are no changes: the beginning and the end."""
    has_begin = transaction.ending in (Ending.COMMIT, Ending.PREPARE)
    return has_begin + (transaction.ending != Ending.MESSAGE)


def _one_by_one(task: RowTask, renderers: Renderers, pieces: FilePieces, stream: Any) -> Rendered:
    """The plain way, which knows who is to blame."""
    done = Rendered(task.path)
    reader = RowReader(pieces, task.relations)  # type: ignore[arg-type]
    with closing(TextOutput(stream, renderers, drops_empty=task.selection.drops_empty)) as output:
        for transaction in task.batch.transactions:
            _emit(task, transaction, reader, output, done)
    return done


def _emit(
    task: RowTask, transaction: Transaction, reader: RowReader, output: TextOutput, done: Rendered
) -> None:
    count = 0
    try:
        output.begin(transaction)
        for lsn, event in task.selection.filter(reader.read(transaction, task.batch)):
            output.add(lsn, event)
            count += 1
    except FormatError as error:
        output.discard()
        done.withheld.append(
            Withheld(transaction.xid, transaction.commit_lsn, transaction.end_lsn, str(error))
        )
        return
    output.commit()
    done.transactions += 1
    done.changes += count


class _Source:
    """Where the columnar writer looks changes up."""

    def __init__(self, task: RowTask, renderers: Renderers, pieces: FilePieces) -> None:
        self._task = task
        self._renderers = renderers
        self._pieces = pieces
        self._reader = RowReader(pieces, task.relations)  # type: ignore[arg-type]

    def records(self, piece: int) -> Records:
        return self._pieces.get(piece)

    def relation(self, number: int) -> tuple[int, RowDescriptor | None]:
        if number in (TRUNCATION, MESSAGE):
            return row_kernel.SPECIAL, None
        found = self._task.relations.get(number)
        if found is None:
            return row_kernel.SKIP, None
        return _ROLES.get(found.role, row_kernel.SKIP), found.row

    def render_other(self, transaction: Any, piece: int, record: int, number: int) -> bytes:
        """A TRUNCATE or a message, by the plain way."""
        one = References(piece, np.array([record], np.int64), np.array([number], np.int32))
        return self._lines(replace(transaction, references=[one]), without_ends=True)

    def render_ending(self, transaction: Any) -> bytes:
        return self._lines(replace(transaction, references=[]), without_ends=False)

    def _lines(self, transaction: Transaction, *, without_ends: bool) -> bytes:
        """Of a transaction with one change only the change; of one with none only its end."""
        stream = io.BytesIO()
        if without_ends:
            # What stands alone has neither a beginning nor an end.
            transaction = replace(transaction, ending=Ending.MESSAGE)
        with closing(TextOutput(stream, self._renderers, drops_empty=False)) as output:
            output.begin(transaction)
            for lsn, event in self._reader.read(transaction, self._task.batch):
                output.add(lsn, event)
            output.commit()
        lines = stream.getvalue().splitlines(keepends=True)
        return b"".join(lines if without_ends else lines[-1:])


def used_relations(
    transactions: Sequence[Transaction], relations: Sequence[Relation]
) -> dict[int, Relation]:
    """By number, those that the transactions refer to."""
    numbers = {
        int(number)
        for transaction in transactions
        for reference in transaction.references
        for number in set(reference.relations.tolist())
    }
    return {n: relations[n] for n in sorted(numbers) if n not in (TRUNCATION, MESSAGE)}
