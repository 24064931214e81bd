"""Where received transactions wait until they are applied: what the two kinds have in common.

Invariant: a reader sees whole transactions that are durable, in commit order, each once.

One kind is files in the work directory (`spool_writer`, `spool_reader`), the other a table of the
target (`table_spool`); `spool_place` opens the one that a stream has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from millrace.postgres.pgoutput.messages import Bytes, Messages, RelationVersion

# Of a spool in files, in the work directory.
FOLDER: Final = "spool"


@dataclass(frozen=True)
class Range:
    """Consecutive whole transactions of a spool: those that end after one position and up to
    another. It means the same in every process, until it is pruned."""

    after_lsn: int
    # Of its last transaction: the end, the commit record, the time in microseconds since 2000.
    end_lsn: int
    commit_lsn: int
    committed_at: int
    transactions: int
    changes: int
    bytes: int
    # Where it is in the files: the block of the first Begin, that Begin, the end.
    begin_block: int = 0
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class SpoolExtent:
    """What a spool holds now."""

    # Changes after this position are there.
    oldest_lsn: int
    # The end of its last transaction.
    last_end_lsn: int
    # Nothing is missing up to here.
    complete_lsn: int


class Writer(Protocol):
    """What a receiver needs of a spool."""

    @property
    def last_end_lsn(self) -> int:
        """The end of the last transaction taken, synced or not."""

    @property
    def complete_lsn(self) -> int:
        """Nothing is missing up to here: last_end_lsn, or how far the source is known to be
        idle."""

    @property
    def durable_lsn(self) -> int:
        """The same, on disk: what may be confirmed to the source."""

    @property
    def is_in_transaction(self) -> bool: ...

    @property
    def is_syncing(self) -> bool:
        """Whether `sync_soon` has not ended yet."""

    @property
    def bytes(self) -> int: ...

    @property
    def unsynced_bytes(self) -> int: ...

    def append(self, frames: memoryview, messages: Messages) -> None: ...

    def mark_idle(self, lsn: int) -> None: ...

    def sync(self) -> int: ...

    def sync_soon(self) -> None: ...

    def cut_unfinished(self) -> None: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """What an applier needs of a spool."""

    def last_end_lsn(self) -> int: ...

    def extent(self) -> SpoolExtent: ...

    def plan(self, after_lsn: int, max_bytes: int, until_lsn: int | None) -> Range | None: ...

    def chunks(self, range_: Range, max_chunk_bytes: int) -> Iterator[Bytes]: ...

    def relations(self, range_: Range) -> dict[int, RelationVersion]: ...

    def bytes_after(self, lsn: int) -> int: ...

    def close(self) -> None: ...
