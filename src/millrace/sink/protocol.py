"""What a sink promises to whoever delivers to it.

Invariant: what was written before a successful `commit` stays, whatever happens afterwards. What
was written and not committed may stay or may be gone, so it is delivered again. A sink that commits
with a position loses what was not committed and drops what it has already, so it holds every change
exactly once; any other sink may hold some twice. After an error a sink accepts nothing more: it is
closed, and opened anew. An error is raised by the call that met it, `commit` and `close` included.

A sink takes change batches (`millrace.change`), documents, or both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import pyarrow as pa

from millrace.sink.document import DocumentBatch, DocumentOrigin, Version


@dataclass(frozen=True)
class Capabilities:
    """What a sink can do besides taking what it is given."""

    # A document that is older than the one it holds is dropped.
    compares_versions: bool = False
    # It is a `ListingSink`.
    lists_ids_by_shard: bool = False
    # `position` survives the process, and moves with the changes that it stands for.
    commits_with_position: bool = False


@runtime_checkable
class Sink(Protocol):
    """What all kinds have in common."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def position(self) -> int:
        """The last committed position; 0 if there is none, or if it keeps none."""

    def commit(self, position: int) -> None:
        """Make durable what was written. Changes up to `position`, the end of a transaction, were
        all written, and none after it."""

    def close(self) -> None:
        """Release what it holds, in any state; what is not committed is given up."""


@runtime_checkable
class ChangeSink(Sink, Protocol):
    """Takes change batches."""

    def begin(self, origin: str) -> None:
        """Which changes will come. A sink that commits with a position raises if it holds those of
        another origin: its position would say nothing about these."""

    def write_changes(self, batch: pa.RecordBatch) -> None:
        """In commit order; a transaction may span several batches."""


@runtime_checkable
class DocumentSink(Sink, Protocol):
    """Takes documents."""

    def begin_documents(self, origin: DocumentOrigin, body: pa.Schema) -> None:
        """Whose documents will come, and their columns."""

    def write_documents(self, batch: DocumentBatch) -> None:
        """A sink that compares versions drops those that are older than what it holds; a deleted
        document leaves its version behind."""


@dataclass(frozen=True)
class ShardChoice:
    """One shard, or all those of a partition."""

    shard: int | None
    partitions: int = 1
    partition: int = 0

    def has(self, shard: int) -> bool:
        return (
            shard == self.shard
            if self.shard is not None
            else (shard % self.partitions == self.partition)
        )


@runtime_checkable
class ListingSink(DocumentSink, Protocol):
    """Knows which documents it holds."""

    def list_ids(self, choice: ShardChoice, older_than: Version, limit: int) -> dict[str, int]:
        """At most `limit` documents of this origin that garbage collection has to look at, with
        their shards."""

    def forget_deleted(self, choice: ShardChoice, older_than: Version) -> None:
        """Drop what deleted documents left behind. A frozen worker may still come with something
        older than this: from now on that is refused."""


class Difference(StrEnum):
    """How what a sink holds differs from a document that it should hold."""

    MISSING = "missing"
    # It holds a document that should be gone.
    SURPLUS = "surplus"
    DIFFERENT = "different"


@runtime_checkable
class ComparableSink(ListingSink, Protocol):
    """Can be held against the source."""

    def iter_held(self, limit: int) -> Iterator[list[str]]:
        """The ids of all documents, in pages of at most `limit`."""

    def find_unequal(self, batch: DocumentBatch) -> dict[str, Difference]:
        """Which of these documents it does not hold as they are, whatever their version."""

    def newest_version(self) -> Version | None:
        """The largest that it was given; None if it holds nothing."""
