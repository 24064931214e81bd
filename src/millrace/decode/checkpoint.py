"""The state of a decoding in a file: where it stopped, it can continue; older WAL may go.

Invariant: a checkpoint is whole or refused: it has a checksum, and it replaces the one before only
when it is on disk. Decoding that continues from one emits exactly what it would have emitted
without the interruption.

A checkpoint holds the catalogs with all versions that open transactions may ask for, the state of
the snapshot builder, and the open transactions: where their changes are, not the changes. So WAL
is needed from the first record of the oldest of them on (`needed_lsn`), and it may serve as a base.

    magic:8 version:4 sha256:32 pickled state
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from millrace.errors import FormatError, UnknownVersion
from millrace.wal.catalog.base_image import BaseLabel, Database
from millrace.wal.catalog.historic_catalog import HistoricCatalog
from millrace.wal.reorder_buffer import ReorderBuffer
from millrace.wal.snapshot_builder import SnapshotBuilder
from millrace.wal.types.settings import OutputSettings

MAGIC: Final = b"MRDECODE"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sI32s")
# What a pickled state may be made of.
_MODULES: Final = ("millrace.wal.", "numpy.", "numpy")
_BUILTINS: Final = frozenset({"set", "frozenset", "dict", "list", "tuple", "deque", "bytearray"})


@dataclass
class Checkpoint:
    """Everything that decoding needs to continue."""

    label: BaseLabel
    database: Database
    settings: OutputSettings
    # Where reading continues.
    next_lsn: int
    catalog: HistoricCatalog
    builder: SnapshotBuilder
    buffer: ReorderBuffer
    prepared: set[int]
    # The pieces that open transactions refer to.
    bounds: dict[int, int]
    mapped_files: set[int]
    multixacts: dict[int, int]
    backup_start: int | None
    catalog_exact_at: int
    commits_before_exact: int
    # How long the output was, if it is a file.
    output_bytes: int = 0

    @property
    def needed_lsn(self) -> int:
        """WAL before this position is not needed any more."""
        oldest = self.buffer.oldest_lsn()
        return min([self.next_lsn, *self.bounds] if oldest is not None else [self.next_lsn])


def is_checkpoint(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the file by a new one, at once."""
    checkpoint.catalog.settle()
    state = pickle.dumps(vars(checkpoint), protocol=5)
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as opened:
        opened.write(_HEADER.pack(MAGIC, VERSION, hashlib.sha256(state).digest()))
        opened.write(state)
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_checkpoint(path: Path) -> Checkpoint:
    data = path.read_bytes()
    if len(data) < _HEADER.size:
        raise FormatError(f"{path} is cut off", hint="use an older checkpoint or the base")
    magic, version, digest = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FormatError(f"{path} is no checkpoint of a decoding")
    if version != VERSION:
        raise UnknownVersion(
            f"{path} is a checkpoint of version {version}, expected {VERSION}",
            hint="continue it with the version of millrace that wrote it",
        )
    state = data[_HEADER.size :]
    if hashlib.sha256(state).digest() != digest:
        raise FormatError(f"{path} is damaged", hint="use an older checkpoint or the base")
    return Checkpoint(**_Unpickler(io.BytesIO(state)).load())


class _Unpickler(pickle.Unpickler):
    """Makes objects of the state, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_state = module.startswith(_MODULES) or module == "numpy"
        is_plain = module in ("builtins", "collections") and name in _BUILTINS
        if not is_state and not is_plain:
            raise FormatError(f"a checkpoint does not contain {module}.{name}")
        return super().find_class(module, name)
