"""Transactions as change batches.

Invariant: the batches are those that a spool with the same frames gives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import pyarrow as pa

from millrace.postgres.pgoutput.messages import Commit
from millrace.spool.change_batch import FrameConverter, TableName
from millrace.wal.output.columnar import ChangeSource, ColumnarWriter, EndedTransaction
from millrace.wal.output.frames import FrameFormat
from millrace.wal.types.registry import Renderers


class ChangeBatchWriter:
    """Writes frames and reads them at once. Whatever `source` renders must be frames, too."""

    def __init__(
        self,
        renderers: Renderers,
        source: ChangeSource,
        after_lsn: int,
        *,
        tables: frozenset[TableName] | None = None,
    ) -> None:
        self._frames = ColumnarWriter(FrameFormat(renderers), source)
        self._commits: list[Commit] = []
        encoding = renderers.settings.encoding
        self._converter = FrameConverter(encoding, self._find_commit, after_lsn, tables=tables)

    def write(self, transactions: Sequence[EndedTransaction]) -> Iterator[pa.RecordBatch]:
        """The changes of transactions in commit order."""
        self._commits = [Commit(t.commit_lsn, t.end_lsn, t.committed_at) for t in transactions]
        for frames in self._frames.write(transactions):
            batch = self._converter.convert(frames)
            if batch.num_rows:
                yield batch

    def _find_commit(self, after_lsn: int) -> Commit | None:
        at = bisect_right(self._commits, after_lsn, key=lambda commit: commit.end_lsn)
        return self._commits[at] if at < len(self._commits) else None
