"""Output plugins: what is asked of them, and their messages as pgoutput's.

Invariant: what leaves `translate` are frames of pgoutput, whole transactions in order, whichever
plugin made them; so the spool has one format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import psycopg
from numpy.typing import NDArray

from millrace.errors import PreflightError
from millrace.postgres.catalog import read_text_reasons
from millrace.postgres.encoding import python_encoding
from millrace.postgres.pgoutput import (
    FRAME_HEADER_BYTES,
    Messages,
    RelationVersion,
    Truncate,
    decode_relation,
    decode_truncate,
    encode_frame,
    encode_relation,
    scan,
)
from millrace.postgres.quote import ident
from millrace.stream.partition import Partitions, as_partition
from millrace.stream.publication import publication_names
from millrace.stream.translate import TextPlugin

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

_RELATION, _TRUNCATE, _STREAM_ABORT = ord("R"), ord("T"), ord("A")
_LOOKED_AT = np.array([_RELATION, _TRUNCATE, _STREAM_ABORT], np.uint8)


class UnsafeBinary(Exception):
    """A column has a type whose binary form means something else on another server."""


class Plugin(Protocol):
    """One output plugin on one connection."""

    # For START_REPLICATION.
    options: dict[str, str]
    # Its messages are not pgoutput's and must be translated.
    is_text: bool

    def translate(self, frames: memoryview, messages: Messages) -> tuple[memoryview, Messages]:
        """Frames of pgoutput for whole frames of this plugin."""

    def describe(self) -> str:
        """For the log."""


def open_plugin(
    name: str,
    catalog: Connection,
    slot: str,
    encoding: str,
    *,
    binary: bool,
    reconnect: Callable[[], Connection],
    partitions: Partitions | None = None,
) -> Plugin:
    """The plugin, with what it must know of the source; `partitions` are those that plugins on
    earlier connections knew."""
    known = Partitions(encoding) if partitions is None else partitions
    if name != "pgoutput":
        return TextPlugin(name, catalog, encoding, reconnect, known)
    return Pgoutput(catalog, slot, encoding, binary=binary, reconnect=reconnect, partitions=known)


class Pgoutput:
    """The server's own plugin: partitions go by their root, and in binary mode types are watched.

    Everything else passes as it came.
    """

    is_text = False

    def __init__(
        self,
        catalog: Connection,
        slot: str,
        encoding: str,
        *,
        binary: bool,
        reconnect: Callable[[], Connection],
        partitions: Partitions,
    ) -> None:
        self._publications = publication_names(slot)
        _check_publications(catalog, self._publications)
        self._encoding = python_encoding(encoding)
        self._reconnect = reconnect
        self._reasons = read_text_reasons(catalog)
        self._text_reason = self._why_text(catalog, self._publications, asked=binary)
        self._partitions = partitions
        self._partitions.read(catalog, self._publications)
        # Partitions as they were sent last on this connection.
        self._sent: dict[int, RelationVersion] = {}
        self.options = {
            "proto_version": "1",
            "publication_names": ",".join(map(ident, self._publications)),
        }
        if not self._text_reason:
            self.options["binary"] = "true"

    def translate(self, frames: memoryview, messages: Messages) -> tuple[memoryview, Messages]:
        places = np.flatnonzero(np.isin(messages.kind, _LOOKED_AT))
        if not len(places):
            return frames, messages
        self._look_up(messages, places)
        edits: list[tuple[int, int, bytes]] = []
        for at in places:
            begin = int(messages.offset[at])
            end = begin + int(messages.length[at])
            lsn, message = int(messages.lsn[at]), bytes(frames[begin:end])
            start = begin - FRAME_HEADER_BYTES
            if messages.kind[at] == _STREAM_ABORT:
                edits.append((start, end, b""))  # nothing of that transaction was sent
                continue
            if messages.kind[at] == _TRUNCATE:
                before = self._before_truncate(decode_truncate(message), lsn)
                edits += [(start, start, before)] if before else []
                continue
            relation = self._describe_relation(message)
            if relation is not None:
                frame = encode_frame(encode_relation(relation, self._encoding), lsn)
                edits.append((start, end, frame))
        return _edited(frames, edits) if edits else (frames, messages)

    def describe(self) -> str:
        return f"in text: {self._text_reason}" if self._text_reason else "in binary"

    def _look_up(self, messages: Messages, places: NDArray[np.int64]) -> None:
        """Ask the source about relations that are new, and partitions that are described anew:
        they may be another table's now."""
        oids = {
            int(oid)
            for oid in messages.relation[places]
            if oid and (int(oid) in self._sent or not self._partitions.knows(int(oid)))
        }
        if oids:
            with self._reconnect() as catalog:
                self._partitions.read(catalog, self._publications, oids)

    def _describe_relation(self, message: bytes) -> RelationVersion | None:
        """The relation as it is spooled; None if that is as it came."""
        relation = decode_relation(message, self._encoding)
        if not self._text_reason:
            self._check(relation)
        known = self._partitions.find(relation.oid)
        if known is None:
            if not self._partitions.knows(relation.oid):
                log.warning(
                    "%s.%s is not published by itself, and no partition any more: its changes go"
                    " by its own name",
                    relation.schema,
                    relation.name,
                )
            self._sent.pop(relation.oid, None)
            return None
        self._sent[relation.oid] = as_partition(relation, known)
        return self._sent[relation.oid]

    def _before_truncate(self, truncate: Truncate, lsn: int) -> bytes:
        """The partitions among its relations once more: with the rows that each one holds."""
        partitions = [oid for oid in truncate.relations if oid in self._sent]
        if not partitions:
            return b""
        with self._reconnect() as catalog:
            self._partitions.read_conditions(catalog, partitions)
        relations = [self._partitions.with_condition(self._sent[oid]) for oid in partitions]
        return b"".join(
            encode_frame(encode_relation(relation, self._encoding), lsn) for relation in relations
        )

    def _why_text(self, catalog: Connection, names: tuple[str, str], *, asked: bool) -> str:
        if not asked:
            return "it was asked for, or a type needs it"
        if catalog.info.server_version < 140000:
            return "the source is older than PostgreSQL 14"
        for label, type_oid in _read_published_types(catalog, names):
            if reason := self._reasons.get(type_oid, "its type is unknown"):
                return f"{label}: {reason}"
        return ""

    def _check(self, relation: RelationVersion) -> None:
        """Raise UnsafeBinary if the relation got a type that must travel as text."""
        for column in relation.columns:
            if column.type_oid not in self._reasons:
                with self._reconnect() as catalog:
                    self._reasons = read_text_reasons(catalog)
            if reason := self._reasons.get(column.type_oid, "its type is gone"):
                label = f"{relation.schema}.{relation.name}.{column.name}"
                raise UnsafeBinary(f"{label}: {reason}")


def _edited(frames: memoryview, edits: list[tuple[int, int, bytes]]) -> tuple[memoryview, Messages]:
    """The frames with something else in some places, given as (begin, end, what)."""
    parts: list[bytes | memoryview] = []
    done = 0
    for begin, end, frame in edits:
        parts += [frames[done:begin], frame]
        done = end
    parts.append(frames[done:])
    data = b"".join(parts)
    return memoryview(data), scan(np.frombuffer(data, np.uint8), len(data))


def _check_publications(catalog: Connection, names: tuple[str, str]) -> None:
    found: dict[str, bool] = dict(
        catalog.execute(
            "SELECT pubname, pubviaroot FROM pg_publication WHERE pubname = ANY(%s)", (list(names),)
        ).fetchall()
    )
    for name in names:
        if name not in found:
            raise PreflightError(
                f"the source has no publication {name}",
                hint="it is made before the slot, by `millrace stream setup` or "
                "`millrace snapshot --follow`",
            )
        if found[name]:
            raise PreflightError(
                f"publication {name} of the source publishes partitions by way of their root: a "
                "TRUNCATE of one of them would not be sent",
                hint=f"ALTER PUBLICATION {ident(name)} SET (publish_via_partition_root = false)",
            )


def _read_published_types(catalog: Connection, names: tuple[str, str]) -> list[tuple[str, int]]:
    """(column, type) of everything published."""
    return catalog.execute(
        "SELECT DISTINCT format('%%s.%%s.%%s', t.schemaname, t.tablename, a.attname),"
        " a.atttypid::int8 FROM pg_publication_tables t"
        " JOIN pg_namespace n ON n.nspname = t.schemaname"
        " JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename"
        " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
        " WHERE t.pubname = ANY(%s) AND a.attgenerated = '' ORDER BY 1",
        (list(names),),
    ).fetchall()
