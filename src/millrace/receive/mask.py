"""Values that nobody is to see: left out, or replaced by their digests, before they are spooled.

Invariant: no value of a masked column is in the frames that leave `Masker.translate`; of a column
that is left out the relation does not speak either. Everything else passes as it came.

A publication could leave columns out at the source, by a list of those that it has. But such a list
keeps the source from dropping any of them, and hides every column that is added later.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from millrace.errors import FormatError
from millrace.postgres.digest import BYTEA_OID, Digester
from millrace.postgres.pgoutput.messages import (
    FRAME_HEADER_BYTES,
    Messages,
    RelationVersion,
    decode_relation,
    encode_frame,
    encode_relation,
)
from millrace.postgres.wire.encoding import python_encoding
from millrace.receive.logical_message import Edit, edited

Name = tuple[str, str]

_RELATION: Final = ord("R")
_ROWS = np.array([ord("I"), ord("U"), ord("D")], np.uint8)
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"


@dataclass(frozen=True)
class Mask:
    """Columns by table, as the source calls it; of partitions, as it calls their root."""

    left_out: Mapping[Name, frozenset[str]] = field(default_factory=dict)
    hashed: Mapping[Name, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Shape:
    """Where a relation has masked columns."""

    columns: int
    left_out: frozenset[int]
    # And whether they are bytea.
    hashed: Mapping[int, bool]


class Masker:
    """Masks the frames of one stream, in their order."""

    def __init__(self, mask: Mask, encoding: str, settings: Mapping[str, str]) -> None:
        """`settings` are those of the source's sessions: the key is among them."""
        self._mask = mask
        self._encoding = python_encoding(encoding)
        self._is_utf8 = codecs.lookup(self._encoding).name == "utf-8"
        self._digester = Digester(settings) if mask.hashed else None
        self._shapes: dict[int, _Shape] = {}

    def translate(self, frames: memoryview, messages: Messages) -> tuple[memoryview, Messages]:
        if not self._mask.left_out and not self._mask.hashed:
            return frames, messages
        is_relation = messages.kind == _RELATION
        if is_relation.any():
            # What is described here has rows from here on.
            rows = np.isin(messages.kind, _ROWS)
        else:
            rows = np.isin(messages.relation, list(self._shapes)) & np.isin(messages.kind, _ROWS)
        edits: list[Edit] = []
        for at in np.flatnonzero(is_relation | rows).tolist():
            begin = int(messages.offset[at])
            end = begin + int(messages.length[at])
            message = bytes(frames[begin:end])
            if is_relation[at]:
                masked = self._describe(message)
            else:
                shape = self._shapes.get(int(messages.relation[at]))
                masked = None if shape is None else self._mask_row(message, shape)
            if masked is not None:
                frame = encode_frame(masked, int(messages.lsn[at]))
                edits.append((begin - FRAME_HEADER_BYTES, end, frame))
        return edited(frames, edits) if edits else (frames, messages)

    def _describe(self, message: bytes) -> bytes | None:
        """The Relation message without what is left out; None if that is as it came."""
        relation = decode_relation(message, self._encoding)
        name = relation.schema, relation.name
        out = self._mask.left_out.get(name, frozenset())
        hashed = self._mask.hashed.get(name, frozenset())
        columns = list(enumerate(relation.columns))
        shape = _Shape(
            len(columns),
            frozenset(at for at, column in columns if column.name in out),
            {at: one.type_oid == BYTEA_OID for at, one in columns if one.name in hashed},
        )
        self._shapes.pop(relation.oid, None)
        if not shape.left_out and not shape.hashed:
            return None
        self._shapes[relation.oid] = shape
        return encode_relation(_without(relation, shape.left_out), self._encoding)

    def _mask_row(self, message: bytes, shape: _Shape) -> bytes:
        parts, at = [message[:5]], 5
        try:
            while at < len(message):
                # K, O or N before a tuple.
                parts.append(message[at : at + 1])
                at = self._mask_tuple(message, at + 1, shape, parts)
        except (struct.error, IndexError) as error:
            raise FormatError("row message of pgoutput: it ends too early") from error
        if at > len(message):
            raise FormatError("row message of pgoutput: it ends too early")
        return b"".join(parts)

    def _mask_tuple(self, message: bytes, at: int, shape: _Shape, parts: list[bytes]) -> int:
        """Where the tuple ends."""
        (count,) = struct.unpack_from(">H", message, at)
        if count != shape.columns:
            raise FormatError(f"row message of pgoutput: expected {shape.columns} columns")
        parts.append(struct.pack(">H", count - len(shape.left_out)))
        at += 2
        for place in range(count):
            begin, mark = at, message[at]
            at += 1
            if mark in (_TEXT, _BINARY):
                (size,) = struct.unpack_from(">I", message, at)
                at += 4 + size
            elif mark not in (_NULL, _UNCHANGED):
                raise FormatError("row message of pgoutput: expected a value")
            if place in shape.left_out:
                continue
            if place in shape.hashed and mark in (_TEXT, _BINARY):
                is_bytea = shape.hashed[place]
                parts.append(self._hashed(message[begin + 5 : at], mark, is_bytea=is_bytea))
            else:
                parts.append(message[begin:at])
        return at

    def _hashed(self, value: bytes, mark: int, *, is_bytea: bool) -> bytes:
        assert self._digester is not None
        if is_bytea:
            is_text = mark == _TEXT
            raw = bytes.fromhex(value.removeprefix(b"\\x").decode()) if is_text else value
            digest = self._digester.digest(raw)
            new = b"\\x" + digest.hex().encode() if is_text else digest
        else:
            text = value if self._is_utf8 else value.decode(self._encoding).encode()
            new = self._digester.digest(text).hex().encode()
        return struct.pack(">BI", mark, len(new)) + new


def _without(relation: RelationVersion, places: frozenset[int]) -> RelationVersion:
    kept = (column for at, column in enumerate(relation.columns) if at not in places)
    return replace(relation, columns=tuple(kept))
