"""A spool of decoded changes as JSON lines or as Parquet: change batches, written out.

Invariant: the rows are those of the change batch (`millrace.change`), in its order. They come from
the spool alone, so a second format of a range that was decoded reads no WAL again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.change import SCHEMA
from millrace.lsn import render_lsn
from millrace.spool.change_batch import iter_changes
from millrace.spool.reader import SpoolReader

# Of frames that are taken at once.
_RANGE_BYTES = 64 << 20
_LSN_COLUMNS = ("commit_lsn", "end_lsn", "lsn")


def iter_spooled(directory: Path, encoding: str) -> Iterator[pa.RecordBatch]:
    """All changes of a spool."""
    reader = SpoolReader(directory, encoding)
    after = reader.extent().oldest_lsn
    while (range_ := reader.plan(after, _RANGE_BYTES)) is not None:
        yield from iter_changes(reader, range_, encoding)
        after = range_.end_lsn


def write_parquet(directory: Path, encoding: str, path: Path) -> None:
    """One file, which appears when it is whole."""
    draft = path.with_name(path.name + ".draft")
    with pq.ParquetWriter(draft, SCHEMA) as writer:
        for batch in iter_spooled(directory, encoding):
            writer.write_batch(batch)
    draft.replace(path)


def write_json(directory: Path, encoding: str, stream: IO[bytes]) -> None:
    """One line for each change."""
    for batch in iter_spooled(directory, encoding):
        for row in batch.to_pylist():
            line = json.dumps(_printable(row), ensure_ascii=False, separators=(",", ":"))
            stream.write(line.encode() + b"\n")
    stream.flush()


def _printable(row: dict[str, Any]) -> dict[str, Any]:
    """Without what the operation does not have; positions as the server prints them."""
    shown: dict[str, Any] = {}
    for name, value in row.items():
        if value is None:
            continue
        if name in _LSN_COLUMNS:
            shown[name] = render_lsn(value)
        elif isinstance(value, datetime):
            shown[name] = value.isoformat()
        elif isinstance(value, bytes):
            shown[name] = value.hex()
        elif name in ("old", "new"):
            shown[name] = dict(value)
        else:
            shown[name] = value
    return shown
