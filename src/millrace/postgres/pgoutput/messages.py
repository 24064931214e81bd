"""The messages of logical replication, out of bytes and into bytes.

Invariant: nothing here waits or opens anything; whatever the bytes, the answer is a value or a
FormatError that says what was expected and where.

A frame is what the server sends for each message while it replicates, a CopyData message:

    'd'  length:4  'w'  start_lsn:8  end_lsn:8  time:8  message      XLogData
    'd'  length:4  'k'  wal_end:8  time:8  reply_requested:1         keepalive

All numbers are big-endian; times are microseconds since 2000. `scan` finds the boundaries for a
whole buffer at once; the decoders below are for the few messages that are not rows.

The Relation message of a partition gets the name of its root before it is spooled, and behind its
columns what it is itself; all texts end with a zero byte:

    root:4  keys:2  is_condition_known:1  is_rehashed:1  schema  name  condition  key*
    key = columns:2  name*

One whose columns have types of the users' own gets their names, before that. No root has the OID 0:

    0:4  types:2  type*
    type = oid:4  schema  name

Facts: PostgreSQL documentation, "Streaming Replication Protocol" and "Logical Replication Message
Formats"; src/backend/replication/logical/proto.c.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.postgres.kernel import be32, kernel

Bytes = NDArray[np.uint8]

# 'd', length, 'w' and three positions: what is before the message in its frame.
FRAME_HEADER_BYTES: Final = 30
# The server refuses to build anything larger than 1 GB; a length beyond that is damage.
MAX_FRAME_BYTES: Final = 0x40000000
# Neither streaming of transactions in progress nor two-phase commit is asked for. Version 18 sends
# a Stream Abort all the same, for a large transaction that is rolled back after a part of it was.
KINDS: Final = b"BCORYIUDTMA"
_IS_KIND = np.isin(np.arange(256), list(KINDS))

_KEEPALIVE_BYTES = 4 + 1 + 8 + 8 + 1
# A microsecond count since 2000 plus this is one since 1970.
MICROSECONDS_1970_TO_2000: Final = 946_684_800_000_000

_EXPECTED = {
    1: "expected a CopyData message",
    2: "expected the length of a CopyData message",
    3: "expected XLogData or a keepalive",
    4: "expected an XLogData message with contents",
    5: "expected a keepalive of 18 bytes",
    6: "expected a message of pgoutput",
    7: "expected the OID of a relation",
}


@dataclass(frozen=True)
class Messages:
    """Where the messages of a buffer are: parallel arrays over its whole XLogData frames."""

    # The first byte of the message.
    kind: NDArray[np.uint8]
    # Where the message starts in the buffer, FRAME_HEADER_BYTES after its frame, and its size.
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    # start_lsn of the frame: of a row its own, of a commit the end of the transaction.
    lsn: NDArray[np.uint64]
    # The OID of the relation for R, I, U and D, otherwise 0.
    relation: NDArray[np.uint32]
    # Bytes up to the end of the last whole frame, keepalives included.
    consumed: int
    # The last keepalive, if there was one.
    wal_end: int | None = None
    reply_requested: bool = False
    # What is at `consumed` is another kind of message: the stream is over.
    is_over: bool = False

    def __len__(self) -> int:
        return len(self.kind)

    def slice(self, first: int, end: int, consumed: int) -> Messages:
        """Some of the messages of the same buffer."""
        part = slice(first, end)
        return Messages(
            self.kind[part],
            self.offset[part],
            self.length[part],
            self.lsn[part],
            self.relation[part],
            consumed,
        )


def scan(
    buffer: Bytes, size: int, *, stop_at_other: bool = False, any_kind: bool = False
) -> Messages:
    """Find every message in the first `size` bytes; a frame cut off at the end is left alone.

    With `stop_at_other` a message that is not CopyData ends the scan, as it does the stream.
    With `any_kind` the messages are another plugin's, and only the frames are looked at.
    """
    count, consumed, error, at = _count(buffer, size, stop_at_other, any_kind)
    if error > 0:
        raise _bad(error, int(at), bytes(buffer[at : min(size, at + 8)]))
    arrays = (
        np.empty(count, np.uint8),
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.uint64),
        np.empty(count, np.uint32),
    )
    keepalive_at = _fill(buffer, consumed, any_kind, *arrays)
    wal_end, reply_requested = None, False
    if keepalive_at >= 0:
        body = buffer[keepalive_at + 6 : keepalive_at + 23].tobytes()
        wal_end, _, reply_requested = struct.unpack(">Qq?", body)
    return Messages(*arrays, int(consumed), wal_end, reply_requested, error < 0)


def whole_frames(buffer: Bytes, limit: int) -> int:
    """The end of the last frame that ends at or before `limit`, or of the first frame if that is
    larger; `buffer` holds whole frames, scanned before."""
    return int(_whole_frames(buffer, limit))


def _bad(error: int, at: int, found: bytes) -> FormatError:
    return FormatError(
        f"replication stream: {_EXPECTED[error]} at offset {at}, found {found.hex(' ')}",
        offset=at,
    )


@kernel
def _is_kind(value: Any) -> Any:
    return _IS_KIND[value]


@kernel
def _has_relation(value: Any) -> Any:
    # I U D R
    return value == 73 or value == 85 or value == 68 or value == 82


@kernel
def _count(
    buffer: Bytes, size: int, stop_at_other: bool, any_kind: bool
) -> tuple[int, int, int, int]:
    """(messages, bytes consumed, error or 0 or -1 for another kind of message, where)."""
    at = 0
    count = 0
    while at < size:
        if buffer[at] != 100:
            if stop_at_other:
                return count, at, -1, at
            return count, at, 1, at
        if at + 5 > size:
            break
        length = be32(buffer, at + 1)
        if length < 5 or length > 0x40000000:
            return count, at, 2, at + 1
        if at + 6 > size:
            break
        kind = buffer[at + 5]
        if kind == 119:
            if length < 29 or (length == 29 and not any_kind):
                return count, at, 4, at + 1
            if at + 30 < size and not any_kind:
                message = buffer[at + 30]
                if not _is_kind(message):
                    return count, at, 6, at + 30
                if _has_relation(message) and length < 34:
                    return count, at, 7, at + 30
            if at + 1 + length > size:
                break
            count += 1
        elif kind == 107:
            if length != 22:
                return count, at, 5, at + 1
            if at + 1 + length > size:
                break
        else:
            return count, at, 3, at + 5
        at += 1 + length
    return count, at, 0, at


@kernel
def _fill(
    buffer: Bytes,
    size: int,
    any_kind: bool,
    kinds: Any,
    offsets: Any,
    lengths: Any,
    lsns: Any,
    relations: Any,
) -> int:
    """Fill the arrays from checked frames; where the last keepalive is, or -1."""
    at = 0
    index = 0
    keepalive = -1
    while at < size:
        length = be32(buffer, at + 1)
        if buffer[at + 5] == 119:
            kind = buffer[at + 30] if length > 29 else np.uint8(0)
            kinds[index] = kind
            offsets[index] = at + 30
            lengths[index] = length - 29
            high = np.uint64(be32(buffer, at + 6))
            low = np.uint64(be32(buffer, at + 10))
            lsns[index] = (high << np.uint64(32)) | low
            relations[index] = 0
            if not any_kind and _has_relation(kind):
                relations[index] = be32(buffer, at + 31)
            index += 1
        else:
            keepalive = at
        at += 1 + length
    return keepalive


@kernel
def _whole_frames(buffer: Bytes, limit: int) -> int:
    at = 0
    while at < len(buffer):
        end = at + 1 + be32(buffer, at + 1)
        if end > limit and at > 0:
            break
        at = end
    return at


@dataclass(frozen=True)
class RelationColumn:
    """A published column."""

    name: str
    # 0 when the plugin does not send it.
    type_oid: int
    type_modifier: int
    is_key: bool
    # Schema and name of a type of the users' own, of a domain those of what it is based on; None
    # for the server's types, and where nobody said.
    type_name: tuple[str, str] | None = None


@dataclass(frozen=True)
class Partition:
    """What a relation is itself that goes by the name of the root it is a partition of."""

    schema: str
    name: str
    root_oid: int
    # Columns that identify a row of the root, whichever partitions they are in.
    keys: tuple[frozenset[str], ...] = ()
    # Which rows of the root it holds, as SQL; empty for all, None where nobody asked.
    condition: str | None = None
    # It may hold others on the target with the same bounds: hashes can differ between servers.
    is_rehashed: bool = False


@dataclass(frozen=True)
class RelationVersion:
    """A table as it was from some position on."""

    oid: int
    # Of the table, or of the root of its partitions.
    schema: str
    name: str
    # As in pg_class.relreplident: d, n, f or i.
    replica_identity: str
    columns: tuple[RelationColumn, ...]
    partition: Partition | None = None


# Of a transaction that no server has numbered.
NO_XID = 0


@dataclass(frozen=True)
class Begin:
    """The start of a transaction: it is sent when its end is known."""

    commit_lsn: int
    committed_at_microseconds: int
    xid: int


@dataclass(frozen=True)
class Commit:
    """The end of a transaction."""

    commit_lsn: int
    end_lsn: int
    committed_at_microseconds: int


@dataclass(frozen=True)
class Truncate:
    """One TRUNCATE of one or more tables."""

    relations: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True)
class LogicalMessage:
    """What `pg_logical_emit_message` was called with."""

    prefix: str
    content: bytes
    # Where its record begins in the WAL.
    lsn: int
    # Part of its transaction; otherwise it was sent at once, and stays if that is rolled back.
    is_transactional: bool

    @property
    def label(self) -> str:
        return f"message with prefix {self.prefix!r}"


class _Reader:
    """Takes fields off the front of a message."""

    def __init__(self, message: bytes, kind: bytes, what: str) -> None:
        self._message = message
        self._what = what
        self._at = 1
        if message[:1] != kind:
            raise self._bad(f"expected {kind!r}", 0)

    def take(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        if self._at + size > len(self._message):
            raise self._bad(f"expected {size} more bytes", self._at)
        values = struct.unpack_from(layout, self._message, self._at)
        self._at += size
        return values

    def take_name(self, encoding: str) -> str:
        end = self._message.find(b"\0", self._at)
        if end < 0:
            raise self._bad("expected the zero byte that ends a name", self._at)
        raw = self._message[self._at : end]
        self._at = end + 1
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            raise self._bad(f"expected a name in {encoding}", end - len(raw)) from None

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._message)

    def end(self) -> None:
        if not self.is_at_end:
            raise self._bad("expected the end of the message", self._at)

    def _bad(self, expected: str, at: int) -> FormatError:
        return FormatError(f"{self._what} message of pgoutput: {expected} at offset {at}")


def decode_begin(message: bytes) -> Begin:
    reader = _Reader(message, b"B", "Begin")
    commit_lsn, at, xid = reader.take(">QqI")
    reader.end()
    return Begin(commit_lsn, at, xid)


def decode_commit(message: bytes) -> Commit:
    reader = _Reader(message, b"C", "Commit")
    _, commit_lsn, end_lsn, at = reader.take(">BQQq")
    reader.end()
    return Commit(commit_lsn, end_lsn, at)


def decode_relation(message: bytes, encoding: str = "utf-8") -> RelationVersion:
    """Names are in the client encoding of the connection; `encoding` is Python's name for it."""
    reader = _Reader(message, b"R", "Relation")
    (oid,) = reader.take(">I")
    # The empty name means pg_catalog.
    schema = reader.take_name(encoding) or "pg_catalog"
    name = reader.take_name(encoding)
    identity, count = reader.take(">cH")
    columns = []
    for _ in range(count):
        (flags,) = reader.take(">B")
        column = reader.take_name(encoding)
        type_oid, modifier = reader.take(">Ii")
        columns.append(RelationColumn(column, type_oid, modifier, bool(flags & 1)))
    (root_oid,) = (0,) if reader.is_at_end else reader.take(">I")
    if not root_oid and not reader.is_at_end:
        columns = _with_types(columns, _decode_types(reader, encoding))
        (root_oid,) = (0,) if reader.is_at_end else reader.take(">I")
    partition = _decode_partition(reader, root_oid, encoding) if root_oid else None
    reader.end()
    return RelationVersion(oid, schema, name, identity.decode("latin-1"), tuple(columns), partition)


def decode_type(message: bytes, encoding: str = "utf-8") -> tuple[int, tuple[str, str]]:
    """The OID of a type, and its schema and name; of a domain those of what it is based on."""
    reader = _Reader(message, b"Y", "Type")
    (oid,) = reader.take(">I")
    name = reader.take_name(encoding) or "pg_catalog", reader.take_name(encoding)
    reader.end()
    return oid, name


def with_type_names(
    relation: RelationVersion, names: Mapping[int, tuple[str, str]]
) -> RelationVersion:
    """The relation, with what is known of its types."""
    return replace(relation, columns=tuple(_with_types(relation.columns, names)))


def _with_types(
    columns: Iterable[RelationColumn], names: Mapping[int, tuple[str, str]]
) -> list[RelationColumn]:
    return [replace(column, type_name=names.get(column.type_oid)) for column in columns]


def _decode_types(reader: _Reader, encoding: str) -> dict[int, tuple[str, str]]:
    (count,) = reader.take(">H")
    names = {}
    for _ in range(count):
        (oid,) = reader.take(">I")
        names[oid] = reader.take_name(encoding), reader.take_name(encoding)
    return names


def _decode_partition(reader: _Reader, root_oid: int, encoding: str) -> Partition:
    key_count, is_condition_known, is_rehashed = reader.take(">H??")
    schema, name = reader.take_name(encoding), reader.take_name(encoding)
    condition = reader.take_name(encoding)
    keys = []
    for _ in range(key_count):
        (columns,) = reader.take(">H")
        keys.append(frozenset(reader.take_name(encoding) for _ in range(columns)))
    known = condition if is_condition_known else None
    return Partition(schema, name, root_oid, tuple(keys), known, is_rehashed)


def decode_truncate(message: bytes) -> Truncate:
    reader = _Reader(message, b"T", "Truncate")
    count, flags = reader.take(">IB")
    if count > len(message) // 4:
        raise FormatError(f"Truncate message of pgoutput: expected fewer than {count} relations")
    relations = reader.take(f">{count}I")
    reader.end()
    return Truncate(tuple(relations), bool(flags & 1), bool(flags & 2))


def decode_message(message: bytes, encoding: str = "utf-8") -> LogicalMessage:
    """The prefix is in the client encoding of the connection, the content as it was given."""
    reader = _Reader(message, b"M", "Message")
    flags, lsn = reader.take(">BQ")
    prefix = reader.take_name(encoding)
    (size,) = reader.take(">I")
    (content,) = reader.take(f"{size}s")
    reader.end()
    return LogicalMessage(prefix, content, lsn, bool(flags & 1))


class Unchanged:
    """In place of a value: an out-of-line value that the update left alone, so it was not sent."""


UNCHANGED = Unchanged()
# Text in the client encoding, NULL, or not sent.
Value = bytes | None | Unchanged


def encode_begin(begin: Begin) -> bytes:
    return struct.pack(">cQqI", b"B", begin.commit_lsn, begin.committed_at_microseconds, begin.xid)


def encode_commit(commit: Commit) -> bytes:
    return struct.pack(
        ">cBQQq", b"C", 0, commit.commit_lsn, commit.end_lsn, commit.committed_at_microseconds
    )


def encode_relation(relation: RelationVersion, encoding: str = "utf-8") -> bytes:
    parts = [
        struct.pack(">cI", b"R", relation.oid),
        relation.schema.encode(encoding) + b"\0",
        relation.name.encode(encoding) + b"\0",
        relation.replica_identity.encode("latin-1"),
        struct.pack(">H", len(relation.columns)),
    ]
    for column in relation.columns:
        parts.append(bytes([column.is_key]) + column.name.encode(encoding) + b"\0")
        parts.append(struct.pack(">Ii", column.type_oid, column.type_modifier))
    parts.append(_encode_types(relation.columns, encoding))
    if relation.partition is not None:
        parts.append(_encode_partition(relation.partition, encoding))
    return b"".join(parts)


def _encode_types(columns: Iterable[RelationColumn], encoding: str) -> bytes:
    names = {column.type_oid: column.type_name for column in columns if column.type_name}
    if not names:
        return b""
    parts = [struct.pack(">IH", 0, len(names))]
    for oid, both in names.items():
        parts.append(struct.pack(">I", oid))
        parts += [name.encode(encoding) + b"\0" for name in both]
    return b"".join(parts)


def _encode_partition(partition: Partition, encoding: str) -> bytes:
    condition = partition.condition
    facts = (partition.root_oid, len(partition.keys), condition is not None, partition.is_rehashed)
    names = [partition.schema, partition.name, condition or ""]
    parts = [struct.pack(">IH??", *facts), *(name.encode(encoding) + b"\0" for name in names)]
    for key in partition.keys:
        parts.append(struct.pack(">H", len(key)))
        parts += [name.encode(encoding) + b"\0" for name in sorted(key)]
    return b"".join(parts)


def encode_insert(relation_oid: int, row: Sequence[Value]) -> bytes:
    return struct.pack(">cIc", b"I", relation_oid, b"N") + _encode_tuple(row)


def encode_update(
    relation_oid: int,
    row: Sequence[Value],
    old: Sequence[Value] | None = None,
    *,
    old_is_key: bool = True,
) -> bytes:
    """`old` is the old key (other columns NULL), or the whole old row."""
    head = struct.pack(">cI", b"U", relation_oid)
    before = b"" if old is None else (b"K" if old_is_key else b"O") + _encode_tuple(old)
    return head + before + b"N" + _encode_tuple(row)


def encode_delete(relation_oid: int, old: Sequence[Value], *, old_is_key: bool = True) -> bytes:
    kind = b"K" if old_is_key else b"O"
    return struct.pack(">cIc", b"D", relation_oid, kind) + _encode_tuple(old)


def encode_truncate(truncate: Truncate) -> bytes:
    flags = truncate.cascade | truncate.restart_identity << 1
    count = len(truncate.relations)
    return struct.pack(f">cIB{count}I", b"T", count, flags, *truncate.relations)


def encode_message(message: LogicalMessage, encoding: str = "utf-8") -> bytes:
    head = struct.pack(">cBQ", b"M", message.is_transactional, message.lsn)
    size = struct.pack(">I", len(message.content))
    return head + message.prefix.encode(encoding) + b"\0" + size + message.content


def encode_frame(message: bytes, lsn: int, sent_at_microseconds: int = 0) -> bytes:
    """The message in a frame, as the server would send it."""
    head = struct.pack(">cIcQQq", b"d", len(message) + 29, b"w", lsn, lsn, sent_at_microseconds)
    return head + message


def encode_keepalive(
    wal_end: int, *, reply_requested: bool, sent_at_microseconds: int = 0
) -> bytes:
    return struct.pack(
        ">cIcQqB", b"d", _KEEPALIVE_BYTES, b"k", wal_end, sent_at_microseconds, reply_requested
    )


def _encode_tuple(row: Sequence[Value]) -> bytes:
    parts = [struct.pack(">H", len(row))]
    for value in row:
        if value is None:
            parts.append(b"n")
        elif isinstance(value, Unchanged):
            parts.append(b"u")
        else:
            parts.append(struct.pack(">cI", b"t", len(value)) + value)
    return b"".join(parts)
