"""Which records of a piece the decoder has to look at, and in which role.

Invariant: every record that logical decoding acts on is in exactly one of the roles below, or in
none because its transaction id is all that counts.

    events    looked at one by one, in order: ends of transactions, running-xacts, commands,
              messages, relation maps, changes of catalogs
    changes   rows and truncations of user tables, kept as references until their commit

Facts: decode.c; heapam_xlog.h; rmgrlist.h.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.wal.catalog.catalog_file import Locator
from millrace.wal.read.record import Records

# Resource managers.
XLOG, XACT, STORAGE, DATABASE, MULTIXACT, RELMAP = 0, 1, 2, 4, 6, 7
STANDBY, HEAP2, HEAP, MESSAGE = 8, 9, 10, 21

# Operations: xl_info & 0xF0, of XACT, HEAP and HEAP2 & 0x70.
CHECKPOINT_SHUTDOWN, CHECKPOINT_ONLINE, BACKUP_END = 0x00, 0x10, 0x50
PARAMETER_CHANGE, END_OF_RECOVERY, FPI = 0x60, 0x90, 0xB0
COMMIT, PREPARE, ABORT, COMMIT_PREPARED, ABORT_PREPARED = 0x00, 0x10, 0x20, 0x30, 0x40
INVALIDATIONS = 0x60
RUNNING_XACTS = 0x10
INSERT, DELETE, UPDATE, TRUNCATE, HOT_UPDATE, CONFIRM = 0x00, 0x10, 0x20, 0x30, 0x40, 0x50
INPLACE = 0x70
MULTI_INSERT, NEW_CID = 0x50, 0x70
CREATE_MULTIXACT = 0x20

INSERT_CONTAINS_NEW_TUPLE = 0x08
# Where its flags are in the main data of an INSERT, of a MULTI_INSERT.
_INSERT_FLAGS_AT, _MULTI_INSERT_FLAGS_AT = 2, 0

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Roles:
    """Masks over the records of a piece."""

    # With a transaction id that counts as seen here.
    registers: Mask
    # Gives its transaction a snapshot.
    is_change: Mask
    # Is kept as a reference: a change in our database, with a tuple if it must have one.
    is_referenced: Mask
    # To be looked at, whatever the catalog's files are.
    is_event: Mask
    # Heap changes and page images, which count as events if they are those of a catalog.
    may_be_catalog: Mask
    # The file of its first block; -1 where there is none.
    spc: NDArray[np.int64]
    db: NDArray[np.int64]
    rel: NDArray[np.int64]


def classify(records: Records, database: int) -> Roles:
    """The roles of all records."""
    rmid = records.rmid
    op = records.info & 0xF0
    heap_op = records.info & 0x70
    spc, db, rel = _first_block(records)
    row = (rmid == HEAP) & np.isin(heap_op, (INSERT, DELETE, UPDATE, HOT_UPDATE))
    row |= (rmid == HEAP2) & (heap_op == MULTI_INSERT)
    other = (rmid == HEAP) & np.isin(heap_op, (TRUNCATE, CONFIRM))
    message = rmid == MESSAGE
    named = _named_database(records, message, (rmid == HEAP) & (heap_op == TRUNCATE))
    db = np.where(named >= 0, named, db)
    transactional = _transactional(records, message)
    is_change = (row | other | transactional) & (records.xid != 0)
    image = (rmid == XLOG) & (op == FPI)
    event = (rmid == XACT) | ((rmid == STANDBY) & (op == RUNNING_XACTS)) | (rmid == RELMAP)
    event |= ((rmid == HEAP2) & (heap_op == NEW_CID)) | (message & ~transactional)
    event |= (rmid == XLOG) & np.isin(
        op, (CHECKPOINT_SHUTDOWN, CHECKPOINT_ONLINE, BACKUP_END, PARAMETER_CHANGE, END_OF_RECOVERY)
    )
    event |= (rmid == MULTIXACT) & (op == CREATE_MULTIXACT)
    inplace = (rmid == HEAP) & (heap_op == INPLACE)
    referenced = is_change & (db == database)
    referenced &= ~_lacks_tuple(records, heap_op)
    registers = (records.xid != 0) & ((rmid != XACT) | (heap_op == INVALIDATIONS))
    return Roles(registers, is_change, referenced, event, row | image | inplace, spc, db, rel)


def in_files(roles: Roles, files: Collection[Locator]) -> Mask:
    """Records whose first block is in one of the files."""
    numbers = np.array(sorted({locator[2] for locator in files}), np.int64)
    mask: Mask = roles.may_be_catalog & np.isin(roles.rel, numbers)
    if mask.any():
        for i in np.flatnonzero(mask):
            mask[i] = (int(roles.spc[i]), int(roles.db[i]), int(roles.rel[i])) in files
    return mask


def _first_block(
    records: Records,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of block 0: tablespace, database, file number."""
    count = len(records)
    at = records.first_block[:-1]
    has = records.first_block[1:] > at
    has[has] &= records.block_id[at[has]] == 0
    columns = []
    for column in (records.spc, records.db, records.rel):
        values = np.full(count, -1, np.int64)
        values[has] = column[at[has]]
        columns.append(values)
    return columns[0], columns[1], columns[2]


def _named_database(records: Records, *masks: Mask) -> NDArray[np.int64]:
    """The database at the head of the main data; -1 for other records."""
    named = np.full(len(records), -1, np.int64)
    for mask in masks:
        for i in np.flatnonzero(mask & (records.main_length >= 4)).tolist():
            named[i] = int.from_bytes(records.main_data(i)[:4], "little")
    return named


def _transactional(records: Records, message: Mask) -> Mask:
    """Messages that belong to their transaction: the flag is behind the database."""
    mask: Mask = np.zeros(len(records), np.bool_)
    rows = np.flatnonzero(message & (records.main_length > 4))
    mask[rows] = records.data[records.main_start[rows] + 4] != 0
    return mask


def _lacks_tuple(records: Records, heap_op: NDArray[Any]) -> Mask:
    """Inserts that do not carry what they inserted: into catalogs, or while a heap is rewritten."""
    lacks: Mask = np.zeros(len(records), np.bool_)
    for rmid, op, at in (
        (HEAP, INSERT, _INSERT_FLAGS_AT),
        (HEAP2, MULTI_INSERT, _MULTI_INSERT_FLAGS_AT),
    ):
        rows = np.flatnonzero((records.rmid == rmid) & (heap_op == op))
        rows = rows[records.main_length[rows] > at]
        flags = records.data[records.main_start[rows] + at]
        lacks[rows] = flags & INSERT_CONTAINS_NEW_TUPLE == 0
    return lacks
