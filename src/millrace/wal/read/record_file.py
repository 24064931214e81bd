"""Records in a file, to be read by another process.

Invariant: what is read is what was written, byte for byte; a file that was not written to its end
is never found under its name. Columns are mapped into memory, not read.

    magic:8 version:4 columns:4, next_lsn:8, then for each column its items:8; then the columns in
    the order of `Records`, each from a multiple of 64 bytes on
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np

from millrace.errors import FormatError
from millrace.wal.read.record import BLOCK_COLUMNS, RECORD_COLUMNS, Records
from millrace.wal.read.version import VERSIONS

_MAGIC: Final = b"MRWALR01"
_HEAD: Final = struct.Struct("<8sIIQ")
_ALIGNMENT: Final = 64
_COLUMNS: Final[dict[str, Any]] = {
    **RECORD_COLUMNS,
    "first_block": np.int64,
    **BLOCK_COLUMNS,
    "data": np.uint8,
}


def write_record_file(path: Path, records: Records, attempt: int = 0) -> None:
    """Under its name when it is complete; another attempt may have been faster."""
    columns = [getattr(records, name) for name in _COLUMNS]
    head = _HEAD.pack(_MAGIC, records.version.major, len(columns), records.next_lsn)
    head += struct.pack(f"<{len(columns)}Q", *(len(column) for column in columns))
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{attempt}.tmp")
    with unfinished.open("wb") as file:
        file.write(head)
        for column in columns:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(np.ascontiguousarray(column).data)
    unfinished.replace(path)


def read_record_file(path: Path) -> Records:
    mapped = np.memmap(path, np.uint8, mode="r")
    if mapped.size < _HEAD.size:
        raise _bad_file(path)
    magic, major, count, next_lsn = _HEAD.unpack(mapped[: _HEAD.size].tobytes())
    version = next((v for v in VERSIONS if v.major == major), None)
    if magic != _MAGIC or count != len(_COLUMNS) or version is None:
        raise _bad_file(path)
    at = _HEAD.size + 8 * count
    lengths = struct.unpack(f"<{count}Q", mapped[_HEAD.size : at].tobytes())
    columns: dict[str, Any] = {}
    for (name, kind), length in zip(_COLUMNS.items(), lengths, strict=True):
        at += -at % _ALIGNMENT
        end = at + length * np.dtype(kind).itemsize
        if end > mapped.size:
            raise _bad_file(path)
        columns[name] = np.asarray(mapped[at:end]).view(kind)
        at = end
    return Records(version=version, next_lsn=next_lsn, **columns)


def _bad_file(path: Path) -> FormatError:
    return FormatError(
        f"{path} is no file of parsed records",
        hint="remove the folder of the run and decode again",
        file=str(path),
    )
