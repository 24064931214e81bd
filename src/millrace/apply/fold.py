"""The net effect of many changes of one table.

Invariant: applying the result to the table, first what is deleted, then what is updated, then what
is inserted, leaves the rows that the changes one after another would leave.

A *line* follows one row through the changes: from the key it had on the target when they began, or
from its insert, to its last values. An update finds its row's line by the key the row has now, so
a row whose key changed, even several times, stays one line. A deleted row ends its line; the same
key inserted again begins another. Keys are compared as bytes: all of them come from the source, as
the source holds them.

Where changes bring the whole row as it was, a row is known by all its values. Equal rows may then
be there several times, and it does not matter which one of them a change means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.postgres.kernel import kernel
from millrace.postgres.pgoutput.messages import Bytes
from millrace.postgres.pgoutput.tuples import INSERT, Rows, Values

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Lines:
    """Rows with the same fate."""

    # The key, or whole row, on the target before; no columns for inserted rows.
    before: Values
    # The last values of all columns; those of deleted rows mean nothing.
    after: Values
    # The first change of each.
    lsn: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.lsn)

    def take(self, rows: Numbers) -> Lines:
        return Lines(self.before.take(rows), self.after.take(rows), self.lsn[rows])


@dataclass(frozen=True)
class NetChanges:
    """What to do to a table, in this order."""

    buffer: Bytes
    deleted: Lines
    updated: Lines
    # Of `updated`, those whose key is another one afterwards.
    is_key_changed: NDArray[np.bool_]
    inserted: Lines

    def __len__(self) -> int:
        return len(self.deleted) + len(self.updated) + len(self.inserted)

    def known_by(self, key: Numbers, columns: Numbers) -> NetChanges:
        """For rows that were followed by all of `columns`, which rise: known by the key alone."""
        if len(self) == len(self.inserted):
            return self
        within = np.searchsorted(columns, key)
        before, after = self.updated.before.columns(within), self.updated.after.columns(key)
        is_same = np.empty(len(before), np.bool_)
        at, size = np.ascontiguousarray(before.at), np.ascontiguousarray(before.size)
        to, to_size = np.ascontiguousarray(after.at), np.ascontiguousarray(after.size)
        _are_same(self.buffer, at, size, to, to_size, is_same)
        return NetChanges(
            self.buffer,
            _with_before(self.deleted, self.deleted.before.columns(within)),
            _with_before(self.updated, before),
            ~is_same,
            self.inserted,
        )

    def without_updates(self) -> NetChanges:
        """Each update as a delete and an insert, for lines that are known whole."""
        return NetChanges(
            self.buffer,
            _joined(self.deleted, self.updated),
            self.updated.take(np.zeros(0, np.int64)),
            self.is_key_changed[:0],
            _joined(self.inserted, _without_before(self.updated)),
        )


def fold(rows: Rows, key: Numbers, *, is_multiset: bool) -> NetChanges:
    """Fold changes; `key` are the numbers of the columns that identify rows.

    With `is_multiset` these are all columns, and rows may be equal.
    """
    if np.all(rows.kind == INSERT):
        return _only_inserts(rows)
    count, columns = rows.new.at.shape
    first = np.empty(count, np.int64)
    begins = np.zeros(count, np.bool_)
    alive = np.zeros(count, np.bool_)
    moved = np.zeros(count, np.bool_)
    before, current = _values(count, len(key)), _values(count, len(key))
    after = _values(count, columns)
    lines, bad = _fold(
        rows.buffer,
        rows.kind,
        rows.new.at,
        rows.new.size,
        rows.old.at,
        rows.old.size,
        rows.old_kind,
        key,
        is_multiset,
        first,
        begins,
        alive,
        moved,
        before.at,
        before.size,
        current.at,
        current.size,
        after.at,
        after.size,
    )
    if bad >= 0:
        raise FormatError(
            "an update or delete without a key or old row",
            lsn=int(rows.lsn[bad]),
        )
    begins, alive = begins[:lines], alive[:lines]
    whole = Lines(before, after, rows.lsn[first[:lines]])
    updated = np.flatnonzero(alive & ~begins)
    return NetChanges(
        rows.buffer,
        whole.take(np.flatnonzero(~alive & ~begins)),
        whole.take(updated),
        moved[updated],
        _without_before(whole.take(np.flatnonzero(alive & begins))),
    )


def _joined(first: Lines, second: Lines) -> Lines:
    return Lines(
        _below(first.before, second.before),
        _below(first.after, second.after),
        np.concatenate((first.lsn, second.lsn)),
    )


def _below(upper: Values, lower: Values) -> Values:
    if not len(upper):
        return lower
    return Values(np.vstack((upper.at, lower.at)), np.vstack((upper.size, lower.size)))


def _values(rows: int, columns: int) -> Values:
    return Values(np.zeros((rows, columns), np.int32), np.full((rows, columns), -2, np.int32))


def _with_before(lines: Lines, before: Values) -> Lines:
    return Lines(before, lines.after, lines.lsn)


def _without_before(lines: Lines) -> Lines:
    return _with_before(lines, _values(len(lines), 0))


def _only_inserts(rows: Rows) -> NetChanges:
    columns = rows.new.at.shape[1]
    none = Lines(_values(0, 0), _values(0, columns), rows.lsn[:0])
    inserted = Lines(_values(len(rows), 0), rows.new, rows.lsn)
    return NetChanges(rows.buffer, none, none, np.zeros(0, np.bool_), inserted)


@kernel
def _hash(buffer: Any, at: Any, size: Any, row: Any) -> Any:
    """Of one line of positions; NULL counts as well."""
    value = np.uint64(0x9E3779B97F4A7C15)
    for column in range(at.shape[1]):
        start = np.int64(at[row, column])
        length = np.int64(size[row, column])
        value = (value ^ np.uint64(length + 3)) * np.uint64(0xFF51AFD7ED558CCD)
        for i in range(start, start + length):  # no turn for NULL
            value = (value ^ np.uint64(buffer[i])) * np.uint64(0x100000001B3)
        value ^= value >> np.uint64(29)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return np.int64((value ^ (value >> np.uint64(32))) & np.uint64(0x7FFFFFFFFFFFFFFF))


@kernel
def _is_same(
    buffer: Any, at_a: Any, size_a: Any, row_a: int, at_b: Any, size_b: Any, row_b: int
) -> bool:
    for column in range(at_a.shape[1]):
        length = size_a[row_a, column]
        if length != size_b[row_b, column]:
            return False
        a = np.int64(at_a[row_a, column])
        b = np.int64(at_b[row_b, column])
        if a != b:
            for i in range(length):
                if buffer[a + i] != buffer[b + i]:
                    return False
    return True


@kernel
def _are_same(buffer: Any, at_a: Any, size_a: Any, at_b: Any, size_b: Any, is_same: Any) -> None:
    for row in range(len(is_same)):
        is_same[row] = _is_same(buffer, at_a, size_a, row, at_b, size_b, row)


@kernel
def _find(
    buffer: Any, slots: Any, probe_at: Any, probe_size: Any, alive: Any, at: Any, size: Any
) -> Any:
    """The living line whose current key is the probe, or -1."""
    mask = len(slots) - 1
    slot = _hash(buffer, probe_at, probe_size, 0) & mask
    while slots[slot] >= 0:
        line = slots[slot]
        if alive[line] and _is_same(buffer, at, size, line, probe_at, probe_size, 0):
            return np.int64(line)
        slot = (slot + 1) & mask
    return np.int64(-1)


@kernel
def _enter(buffer: Any, slots: Any, line: int, at: Any, size: Any) -> None:
    mask = len(slots) - 1
    slot = _hash(buffer, at, size, line) & mask
    while slots[slot] >= 0:
        slot = (slot + 1) & mask
    slots[slot] = line


@kernel
def _fold(
    buffer: Any,
    kind: Any,
    new_at: Any,
    new_size: Any,
    old_at: Any,
    old_size: Any,
    old_kind: Any,
    key: Any,
    is_multiset: bool,
    first: Any,
    begins: Any,
    alive: Any,
    moved: Any,
    before_at: Any,
    before_size: Any,
    current_at: Any,
    current_size: Any,
    after_at: Any,
    after_size: Any,
) -> tuple[int, int]:
    """(lines, the first bad change or -1)."""
    count = len(kind)
    columns = new_at.shape[1]
    width = len(key)
    capacity = 16
    # Each change enters at most one key; half the slots stay free.
    while capacity < 2 * count:
        capacity *= 2
    slots = np.full(capacity, -1, np.int32)
    probe_at = np.zeros((1, width), np.int32)
    probe_size = np.zeros((1, width), np.int32)
    lines = 0
    for change in range(count):
        if kind[change] == 73:
            line = lines
            lines += 1
            first[line] = change
            begins[line] = True
            alive[line] = True
            for column in range(columns):
                after_at[line, column] = new_at[change, column]
                after_size[line, column] = new_size[change, column]
            for k in range(width):
                current_at[line, k] = new_at[change, key[k]]
                current_size[line, k] = new_size[change, key[k]]
            _enter(buffer, slots, line, current_at, current_size)
            continue
        has_old = old_kind[change] != 0
        if width == 0 or (not has_old and (is_multiset or kind[change] == 68)):
            return lines, change
        for k in range(width):
            if has_old:
                probe_at[0, k] = old_at[change, key[k]]
                probe_size[0, k] = old_size[change, key[k]]
            else:
                probe_at[0, k] = new_at[change, key[k]]
                probe_size[0, k] = new_size[change, key[k]]
            if probe_size[0, k] == -2:
                return lines, change
        line = _find(buffer, slots, probe_at, probe_size, alive, current_at, current_size)
        is_new = line < 0
        if is_new:
            line = lines
            lines += 1
            first[line] = change
            alive[line] = True
            for k in range(width):
                before_at[line, k] = current_at[line, k] = probe_at[0, k]
                before_size[line, k] = current_size[line, k] = probe_size[0, k]
            if old_kind[change] == 79:
                # The whole old row is known, so nothing of it stays unknown.
                for column in range(columns):
                    after_at[line, column] = old_at[change, column]
                    after_size[line, column] = old_size[change, column]
        if kind[change] == 68:
            alive[line] = False
            continue
        for column in range(columns):
            if new_size[change, column] != -2:
                after_at[line, column] = new_at[change, column]
                after_size[line, column] = new_size[change, column]
        is_moved = False
        for k in range(width):
            if new_size[change, key[k]] != -2:
                probe_at[0, k] = new_at[change, key[k]]
                probe_size[0, k] = new_size[change, key[k]]
        if not _is_same(buffer, current_at, current_size, line, probe_at, probe_size, 0):
            is_moved = True
        for k in range(width):
            current_at[line, k] = probe_at[0, k]
            current_size[line, k] = probe_size[0, k]
            # A key is never left unknown: where it was not sent again it is the old one.
            after_at[line, key[k]] = probe_at[0, k]
            after_size[line, key[k]] = probe_size[0, k]
        if is_new or is_moved:
            _enter(buffer, slots, line, current_at, current_size)
        if is_moved and not begins[line]:
            moved[line] = True
    return lines, -1
