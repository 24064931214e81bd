"""Where decoded transactions go.

Invariant: an output shows whole transactions only. What was added since `begin` appears with
`commit` and is gone with `discard`; a large transaction waits in a temporary file.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.postgres.pgoutput.messages import (
    NO_XID,
    Begin,
    Commit,
    Truncate,
    encode_begin,
    encode_commit,
    encode_frame,
    encode_message,
    encode_truncate,
    scan,
)
from millrace.postgres.pgoutput.messages import LogicalMessage as FrameMessage
from millrace.spool.writer import SpoolWriter
from millrace.wal.output.frames import FrameFormat
from millrace.wal.output.lines import LineFormat
from millrace.wal.output.pgoutput import PgOutput
from millrace.wal.output.row_change import RowChange
from millrace.wal.output.test_decoding import TestDecoding
from millrace.wal.row.descriptor import RowDescriptor
from millrace.wal.row.rows import Event, Truncation
from millrace.wal.transaction import Ending, Transaction
from millrace.wal.types.registry import Renderers

# Of a transaction that waits in memory; a larger one waits on disk.
_MEMORY_BYTES = 32 << 20
# Of frames that are handed to the spool at once.
_CHUNK_BYTES = 8 << 20
_ESCAPES = [
    (b"\\", b"\\\\"), (b"\n", b"\\n"), (b"\t", b"\\t"), (b"\r", b"\\r"),
    (b"\b", b"\\b"), (b"\f", b"\\f"), (b"\v", b"\\v"),
]  # fmt: skip


class Output(Protocol):
    """What takes transactions."""

    @property
    def position(self) -> int:
        """How many bytes were written to a file; 0 if it is none."""

    def begin(self, transaction: Transaction) -> None: ...

    def add(self, lsn: int, event: Event) -> None: ...

    def commit(self) -> None: ...

    def discard(self) -> None: ...

    def flush(self) -> None:
        """Make visible what was committed."""

    def finish(self, end_lsn: int) -> None:
        """There is nothing more up to this position."""


class TextOutput:
    """Lines as COPY writes (lsn, xid, data) of pg_logical_slot_peek_changes."""

    def __init__(self, stream: IO[bytes], renderers: Renderers, *, drops_empty: bool) -> None:
        self._stream = stream
        self._plugin = TestDecoding(renderers)
        self.row_format = LineFormat(renderers)
        self._drops_empty = drops_empty
        self._waiting: IO[bytes] = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115
        self._transaction: Transaction | None = None
        self._count = 0

    @property
    def position(self) -> int:
        return self._stream.tell() if self._stream.seekable() else 0

    def begin(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._count = 0
        if transaction.ending in (Ending.COMMIT, Ending.PREPARE):
            self._line(transaction.first_lsn, self._plugin.begin(transaction.xid))

    def add(self, lsn: int, event: Event) -> None:
        self._count += 1
        self._line(lsn, self._text(event))

    def commit(self) -> None:
        transaction = self._transaction
        if transaction is None or (self._drops_empty and not self._count):
            self.discard()
            return
        text = self._ending(transaction)
        if text:
            self._line(transaction.end_lsn, text)
        self._waiting.seek(0)
        shutil.copyfileobj(self._waiting, self._stream, 1 << 20)
        self.discard()

    def write_whole(self, chunks: Iterable[NDArray[np.uint8]]) -> None:
        """Lines of whole transactions; all of them or, if the chunks end with an error, none."""
        self.discard()
        for chunk in chunks:
            self._waiting.write(chunk.data)
        self._waiting.seek(0)
        shutil.copyfileobj(self._waiting, self._stream, 1 << 20)
        self.discard()

    def discard(self) -> None:
        self._waiting.seek(0)
        self._waiting.truncate()

    def flush(self) -> None:
        """A file is on disk then: a checkpoint that is written next counts on it."""
        self._stream.flush()
        with suppress(io.UnsupportedOperation):  # memory
            descriptor = self._stream.fileno()
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.fsync(descriptor)

    def finish(self, end_lsn: int) -> None:
        self._stream.flush()
        self.close()

    def close(self) -> None:
        self._waiting.close()

    def _text(self, event: Event) -> bytes:
        if isinstance(event, RowChange):
            return self._plugin.change(event)
        if isinstance(event, Truncation):
            return self._plugin.truncate(
                event.relations, cascade=event.cascade, restart_identity=event.restart_identity
            )
        return self._plugin.message(
            event.prefix, event.content, is_transactional=event.is_transactional
        )

    def _ending(self, transaction: Transaction) -> bytes:
        xid, gid = transaction.xid, transaction.gid
        if transaction.ending == Ending.COMMIT:
            return self._plugin.commit(xid)
        if transaction.ending == Ending.PREPARE:
            return self._plugin.prepare(gid, xid)
        if transaction.ending == Ending.COMMIT_PREPARED:
            return self._plugin.commit_prepared(gid, xid)
        if transaction.ending == Ending.ROLLBACK_PREPARED:
            return self._plugin.rollback_prepared(gid, xid)
        return b""

    def _line(self, lsn: int, data: bytes) -> None:
        xid = self._transaction.xid if self._transaction else 0
        head = f"{render_lsn(lsn)}\t{xid}\t".encode()
        self._waiting.write(head + _escape(data) + b"\n")


def _escape(data: bytes) -> bytes:
    """As COPY's text format does."""
    for plain, escaped in _ESCAPES:
        if plain in data:
            data = data.replace(plain, escaped)
    return data


class SpoolOutput:
    """pgoutput's messages as frames of a spool, so that all behind a spool works."""

    def __init__(self, spool: SpoolWriter, renderers: Renderers) -> None:
        self._spool = spool
        self._plugin = PgOutput(renderers)
        self.row_format = FrameFormat(renderers)
        self._encoding = renderers.settings.encoding
        self._frames = bytearray()
        self._sent: dict[int, RowDescriptor] = {}
        self._new: dict[int, RowDescriptor] = {}
        self._transaction: Transaction | None = None
        self._is_open = False
        self._is_known = False

    @property
    def position(self) -> int:
        return 0

    def begin(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._is_open = False
        # A decoding that was interrupted may have written more than its checkpoint says.
        self._is_known = transaction.end_lsn <= self._spool.last_end_lsn
        self._new = {}

    def add(self, lsn: int, event: Event) -> None:
        message = None if self._is_known else self._message(lsn, event)
        if message is None:
            return
        self._open()
        if isinstance(event, RowChange):
            self._describe(lsn, event.relation)
        elif isinstance(event, Truncation):
            for relation in event.relations:
                self._describe(lsn, relation)
        self._frames += encode_frame(message, lsn)

    def commit(self) -> None:
        transaction = self._transaction
        if transaction is None or not self._is_open:
            return
        end = Commit(transaction.commit_lsn, transaction.end_lsn, transaction.committed_at)
        self._frames += encode_frame(encode_commit(end), transaction.end_lsn)
        self._sent |= self._new
        frames = bytes(self._frames)
        self._spool.append(memoryview(frames), scan(np.frombuffer(frames, np.uint8), len(frames)))
        self._frames.clear()

    @property
    def described(self) -> dict[int, RowDescriptor]:
        """The tables whose Relation messages were written last, by OID."""
        return self._sent

    def write_whole(self, chunks: Iterable[NDArray[np.uint8]]) -> None:
        """Frames of transactions that end in one chunk, or of one transaction; none of them if the
        chunks end with an error."""
        try:
            for chunk in chunks:
                self._spool.append(chunk.data, scan(chunk, len(chunk)))
        except FormatError:
            self._spool.cut_unfinished()
            raise

    def discard(self) -> None:
        self._frames.clear()
        self._is_open = False

    def flush(self) -> None:
        self._spool.sync()

    def finish(self, end_lsn: int) -> None:
        self._spool.mark_idle(end_lsn)
        self._spool.sync()

    def _open(self) -> None:
        transaction = self._transaction
        if self._is_open or transaction is None:
            return
        self._is_open = True
        # A message outside of transactions is one of its own, as it is when it is received.
        xid = NO_XID if transaction.ending == Ending.MESSAGE else transaction.xid
        begin = Begin(transaction.commit_lsn, transaction.committed_at, xid)
        self._frames += encode_frame(encode_begin(begin), transaction.first_lsn)

    def _describe(self, lsn: int, relation: RowDescriptor) -> None:
        last = self._new.get(relation.oid) or self._sent.get(relation.oid)
        if last is not relation and last != relation:
            self._frames += encode_frame(self._plugin.relation(relation), lsn)
        self._new[relation.oid] = relation

    def _message(self, lsn: int, event: Event) -> bytes | None:
        if isinstance(event, RowChange):
            return self._plugin.change(event)
        if isinstance(event, Truncation):
            oids = tuple(relation.oid for relation in event.relations)
            return encode_truncate(Truncate(oids, event.cascade, event.restart_identity))
        prefix = event.prefix.decode(self._encoding)
        return encode_message(
            FrameMessage(prefix, event.content, lsn, event.is_transactional), self._encoding
        )
