"""Changes into a sink, piece by piece.

Invariant: a piece is committed once all its changes are written; a delivery that begins anew begins
at the sink's own position, if it keeps one, so there is no gap.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from millrace.errors import ConfigError
from millrace.lsn import render_lsn
from millrace.sink.protocol import ChangeSink

# The end of the last transaction in it, and its change batches.
Piece = tuple[int, Iterable[pa.RecordBatch]]


def choose_start(sink: ChangeSink, asked_lsn: int | None, oldest_lsn: int) -> int:
    """After which position to deliver: the sink's, or the one asked for, or all there is."""
    if not sink.position:
        return oldest_lsn if asked_lsn is None else asked_lsn
    if asked_lsn is not None and asked_lsn > sink.position:
        raise ConfigError(
            f"the sink has changes up to {render_lsn(sink.position)}, so beginning after "
            f"{render_lsn(asked_lsn)} would leave a gap",
            hint="leave --after out, or write to a new place",
        )
    return sink.position


def deliver(sink: ChangeSink, pieces: Iterable[Piece]) -> None:
    """Write and commit each piece."""
    for end_lsn, batches in pieces:
        for batch in batches:
            sink.write_changes(batch)
        sink.commit(end_lsn)
