"""What leaves the decoder: transactions in commit order, their changes as references.

Invariant: a batch is complete in itself. Its references can be read from the pieces they name, its
relations are described as they were when the change was made, and nothing else is needed to turn
it into rows, in this process or in another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from millrace.wal.catalog.table_lookup import Relation


class Ending(Enum):
    """How a transaction came to its end, or what else is emitted in its place."""

    COMMIT = "commit"
    PREPARE = "prepare"
    COMMIT_PREPARED = "commit prepared"
    ROLLBACK_PREPARED = "rollback prepared"
    MESSAGE = "message"  # one that belongs to no transaction


@dataclass(slots=True)
class References:
    """Changes in one piece of WAL, in order: record numbers, and for each its relation."""

    piece: int
    indices: NDArray[np.int64]
    # Positions in the decoder's list of relations; see `Decoder.relations`.
    relations: NDArray[np.int32]


@dataclass(slots=True)
class Transaction:
    """One transaction, or a message outside of any."""

    ending: Ending
    xid: int
    # Its first record, the record that ends it, and the end of that.
    first_lsn: int
    commit_lsn: int
    end_lsn: int
    # Microseconds since 2000-01-01, as in the WAL.
    committed_at: int = 0
    origin: int = 0
    origin_lsn: int = 0
    gid: str = ""
    references: list[References] = field(default_factory=list)

    @property
    def change_count(self) -> int:
        return sum(len(r.indices) for r in self.references)


@dataclass(frozen=True, slots=True)
class Withheld:
    """A transaction that could not be decoded, and why."""

    xid: int
    commit_lsn: int
    end_lsn: int
    reason: str


# Relations with a meaning of their own, at the head of the list.
TRUNCATION = 0
MESSAGE = 1


@dataclass(slots=True)
class Batch:
    """What one piece of WAL has completed."""

    # WAL up to here has been seen.
    end_lsn: int
    transactions: list[Transaction] = field(default_factory=list)
    withheld: list[Withheld] = field(default_factory=list)
    # The tables of each TRUNCATE, by (piece, record number).
    truncated: dict[tuple[int, int], tuple[Relation, ...]] = field(default_factory=dict)
