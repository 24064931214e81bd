"""The loop that finds the stored rows in records of changes.

Invariant: rows come out in the order in which the server's decoding emits them, with the position
of the record that stored them. No place lies outside of its record.

An *epoch* is a stretch of a transaction's changes that ends with a row after which chunks of values
out of line are forgotten: a row's chunks are those of its own epoch (see toast). A speculative
insertion comes out where it is confirmed.

Facts: decode.c, DecodeInsert(), DecodeUpdate(), DecodeDelete(), DecodeMultiInsert();
heapam_xlog.h.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millrace.postgres.kernel import kernel

# What becomes of a change, by its relation.
SKIP, TABLE, TOAST, SPECIAL = range(4)

# Kinds of what comes out: I, U, D, a chunk of a value, or a record that is no row.
INSERT, UPDATE, DELETE, CHUNK, OTHER = 73, 85, 68, 67, 79

HEAP2: Final = 9


@kernel
def _u16(data: Any, at: Any) -> Any:
    return np.int64(data[at]) | np.int64(data[at + 1]) << 8


@kernel
def count_rows(
    rmid: Any, info: Any, main_start: Any, main_length: Any, data: Any, indices: Any, roles: Any
) -> Any:
    """No less than the rows that come out."""
    count = 0
    for n in range(len(indices)):
        i = indices[n]
        if rmid[i] == 9 and roles[n] != 3 and main_length[i] >= 4:
            count += _u16(data, main_start[i] + 2)
        else:
            count += 1
    return count


@kernel
def find_rows(
    rmid: Any,
    info: Any,
    main_start: Any,
    main_length: Any,
    first_block: Any,
    block_id: Any,
    data_start: Any,
    data_length: Any,
    data: Any,
    indices: Any,
    roles: Any,
    is_first: Any,
    epoch: Any,
    held: Any,
    held_at: Any,
    held_size: Any,
    source: Any,
    kinds: Any,
    new_at: Any,
    new_size: Any,
    old_at: Any,
    old_size: Any,
    epochs: Any,
) -> Any:
    """(rows, next epoch, the insertion that still waits: its record or -1, place and size, bad
    record or -1).

    `roles` is for each of the records, `is_first` whether it is the first of its transaction;
    `source` becomes the number of a row's record among them. An insertion that waits since earlier
    records is given as `held`, with a number of the caller's choice below -1.
    """
    count = 0
    for n in range(len(indices)):
        i = indices[n]
        if is_first[n]:
            epoch += 1
            held = -1
        role = roles[n]
        if role == 3:
            source[count] = n
            kinds[count] = 79
            new_at[count] = -1
            old_at[count] = -1
            epochs[count] = epoch
            count += 1
            continue
        op = info[i] & 0x70
        main = main_start[i]
        main_end = main + main_length[i]
        # A DELETE of a speculative insertion counts in whatever relation.
        if rmid[i] == 10 and op == 0x10:
            if main + 8 > main_end:
                return count, epoch, held, held_at, held_size, n
            if data[main + 7] & 8:
                if held != -1:
                    held = -1
                    epoch += 1
                continue
        if role == 0:
            continue
        begin = np.int64(-1)
        size = np.int64(0)
        for block in range(first_block[i], first_block[i + 1]):
            if block_id[block] == 0:
                begin = data_start[block]
                size = np.int64(data_length[block])
                break
        if rmid[i] == 9:
            # MULTI_INSERT
            if main + 4 > main_end or begin < 0:
                return count, epoch, held, held_at, held_size, n
            flags = data[main]
            if not flags & 8:
                continue
            at = begin
            end = begin + size
            for _ in range(_u16(data, main + 2)):
                at = begin + ((at - begin + 1) & -2)
                if at + 7 > end or at + 7 + _u16(data, at) > end:
                    return count, epoch, held, held_at, held_size, n
                source[count] = n
                kinds[count] = 73 if role == 1 else 67
                new_at[count] = at + 2
                new_size[count] = _u16(data, at)
                old_at[count] = -1
                epochs[count] = epoch
                count += 1
                at += 7 + _u16(data, at)
            if role == 1 and flags & 2:
                epoch += 1
            continue
        if op == 0x00:
            # INSERT
            if main + 3 > main_end:
                return count, epoch, held, held_at, held_size, n
            flags = data[main + 2]
            if not flags & 8:
                continue
            if begin < 0 or size < 5:
                return count, epoch, held, held_at, held_size, n
            if role == 1 and flags & 4:
                held = n
                held_at = begin
                held_size = size - 5
                continue
            source[count] = n
            kinds[count] = 73 if role == 1 else 67
            new_at[count] = begin
            new_size[count] = size - 5
            old_at[count] = -1
            epochs[count] = epoch
            count += 1
            if role == 1:
                epoch += 1
            continue
        if role != 1:
            continue
        if op == 0x50:
            # CONFIRM
            if held == -1:
                return count, epoch, held, held_at, held_size, n
            source[count] = held
            kinds[count] = 73
            new_at[count] = held_at
            new_size[count] = held_size
            old_at[count] = -1
            held = -1
        elif op == 0x10:
            # DELETE
            source[count] = n
            kinds[count] = 68
            new_at[count] = -1
            old_at[count] = -1
            if data[main + 7] & 6:
                if main + 13 > main_end:
                    return count, epoch, held, held_at, held_size, n
                old_at[count] = main + 8
                old_size[count] = main_end - main - 13
        else:
            # UPDATE and HOT_UPDATE
            if main + 14 > main_end:
                return count, epoch, held, held_at, held_size, n
            flags = data[main + 7]
            source[count] = n
            kinds[count] = 85
            new_at[count] = -1
            old_at[count] = -1
            if flags & 0x10:
                if begin < 0 or size < 5:
                    return count, epoch, held, held_at, held_size, n
                new_at[count] = begin
                new_size[count] = size - 5
            if flags & 0x0C:
                if main + 19 > main_end:
                    return count, epoch, held, held_at, held_size, n
                old_at[count] = main + 14
                old_size[count] = main_end - main - 19
        epochs[count] = epoch
        count += 1
        epoch += 1
    return count, epoch, held, held_at, held_size, -1
