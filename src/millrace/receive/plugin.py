"""Output plugins: the options they get, and their messages as pgoutput's.

Invariant: what leaves `translate` are frames of pgoutput, whole transactions in order, whichever
plugin made them; so the spool has one format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import psycopg
from numpy.typing import NDArray

from millrace.errors import PreflightError
from millrace.postgres.catalog.relations import read_text_reasons
from millrace.postgres.catalog.schemas import USER_SCHEMA, USER_TABLE, publication_names
from millrace.postgres.pgoutput import wal2json
from millrace.postgres.pgoutput.messages import (
    FRAME_HEADER_BYTES,
    Messages,
    RelationVersion,
    Truncate,
    decode_relation,
    decode_truncate,
    decode_type,
    encode_frame,
    encode_relation,
    encode_truncate,
    with_type_names,
)
from millrace.postgres.quote import ident
from millrace.postgres.wire.encoding import python_encoding
from millrace.receive.logical_message import Edit, OwnTransactions, edited, enclose_messages
from millrace.receive.partitions import Partitions, as_partition
from millrace.receive.text_plugin import TextPlugin
from millrace.workdir.followed_table import FollowedTables

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

_RELATION, _TYPE, _TRUNCATE, _STREAM_ABORT = b"RYTA"
_LOOKED_AT = np.array([_RELATION, _TYPE, _TRUNCATE, _STREAM_ABORT], np.uint8)
_ROWS = np.array([ord("I"), ord("U"), ord("D")], np.uint8)


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
    followed: FollowedTables | None = None,
    left_out: Collection[tuple[str, str]] = (),
) -> Plugin:
    """The plugin, with what it must know of the source; `partitions` are those that plugins on
    earlier connections knew, `followed` the tables whose changes are wanted, None for all. Tables
    that are `left_out` need not be sent; of a publication, they are no part."""
    tables = followed or FollowedTables()
    known = Partitions(encoding, tables) if partitions is None else partitions
    if name != "pgoutput":
        plugin = TextPlugin(name, catalog, encoding, reconnect, known, tables)
        if left_out and name == "wal2json":
            plugin.options[wal2json.LEFT_OUT] = wal2json.render_tables(left_out)
        return plugin
    return Pgoutput(
        catalog,
        slot,
        encoding,
        binary=binary,
        reconnect=reconnect,
        partitions=known,
        followed=tables,
    )


class Pgoutput:
    """The server's own plugin: partitions go by their root, changes of tables that are not followed
    are left out, and in binary mode types are watched.

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
        followed: FollowedTables,
    ) -> None:
        self._publications = publication_names(slot)
        self._is_for_all = _check_publications(catalog, self._publications)
        self._followed = followed
        self._encoding = python_encoding(encoding)
        self._reconnect = reconnect
        self._reasons = read_text_reasons(catalog)
        self._text_reason = self._why_text(catalog, self._publications, asked=binary)
        self._partitions = partitions
        self._partitions.read(catalog, self._publications)
        # Partitions as they were sent last on this connection.
        self._sent: dict[int, RelationVersion] = {}
        # Names of types, as they were sent on this connection: before the tables that have them.
        self._types: dict[int, tuple[str, str]] = {}
        self._own = OwnTransactions()
        # Descriptions of tables whose changes are left out for now, as they came.
        self._withheld: dict[int, bytes] = {}
        self.options = {
            "proto_version": "1",
            "publication_names": ",".join(map(ident, self._publications)),
        }
        if not self._text_reason:
            self.options["binary"] = "true"
        if catalog.info.server_version >= 140000:
            self.options["messages"] = "true"

    def translate(self, frames: memoryview, messages: Messages) -> tuple[memoryview, Messages]:
        frames, messages = self._own.leave_out(frames, messages)
        places = np.flatnonzero(np.isin(messages.kind, _LOOKED_AT))
        edits = enclose_messages(frames, messages)
        if not len(places) and not self._withheld:
            return edited(frames, edits) if edits else (frames, messages)
        is_changed = self._followed.look_again()
        self._look_up(messages, places, self._withheld if is_changed else ())
        edits += self._reveal(frames, messages)
        for at in places:
            edits += self._edit(frames, messages, int(at))
        edits += dropped_rows(messages, list(self._withheld))
        return edited(frames, sorted(edits)) if edits else (frames, messages)

    def _edit(self, frames: memoryview, messages: Messages, at: int) -> list[Edit]:
        """What becomes of a message that is not a row."""
        begin = int(messages.offset[at])
        start, end = begin - FRAME_HEADER_BYTES, begin + int(messages.length[at])
        lsn, message = int(messages.lsn[at]), bytes(frames[begin:end])
        if messages.kind[at] == _STREAM_ABORT:
            return [(start, end, b"")]  # nothing of that transaction was sent
        if messages.kind[at] == _TYPE:
            self._types.update((decode_type(message, self._encoding),))
            return []
        if messages.kind[at] == _TRUNCATE:
            return self._edit_truncate(decode_truncate(message), lsn, start, end)
        oid = int(messages.relation[at])
        if not self._is_followed(oid):
            self._withhold(oid, message)
            return [(start, end, b"")]
        self._withheld.pop(oid, None)
        frame = self._encode_description(message, lsn)
        return [] if frame is None else [(start, end, frame)]

    def _is_followed(self, oid: int) -> bool:
        if self._partitions.is_foreign(oid):
            return False
        known = self._partitions.find(oid)
        if known is None:
            return self._followed.has(oid)
        return self._followed.has(oid, known.partition.root_oid, known.attached)

    def _withhold(self, oid: int, message: bytes) -> None:
        if oid not in self._withheld and not self._partitions.is_foreign(oid):
            relation = decode_relation(message, self._encoding)
            log.warning(
                "%s.%s is new to this stream: its changes are left out until it is copied",
                relation.schema,
                relation.name,
            )
        self._withheld[oid] = message

    def _reveal(self, frames: memoryview, messages: Messages) -> list[Edit]:
        """Descriptions of tables that are followed by now, before their first change."""
        edits: list[Edit] = []
        for oid, at in self._first_changes(frames, messages).items():
            if not self._is_followed(oid):
                continue
            message, lsn = self._withheld.pop(oid), int(messages.lsn[at])
            start = int(messages.offset[at]) - FRAME_HEADER_BYTES
            frame = self._encode_description(message, lsn) or encode_frame(message, lsn)
            edits.append((start, start, frame))
        return edits

    def _first_changes(self, frames: memoryview, messages: Messages) -> dict[int, int]:
        """Where the first row or TRUNCATE is of each relation that is left out."""
        if not self._withheld:
            return {}
        places = {oid: np.flatnonzero(messages.relation == oid) for oid in self._withheld}
        first = {oid: int(rows[0]) for oid, rows in places.items() if len(rows)}
        for at in np.flatnonzero(messages.kind == _TRUNCATE).tolist():
            begin = int(messages.offset[at])
            message = bytes(frames[begin : begin + int(messages.length[at])])
            for oid in decode_truncate(message).relations:
                if oid in self._withheld:
                    first[oid] = min(at, first.get(oid, at))
        return first

    def _edit_truncate(self, truncate: Truncate, lsn: int, start: int, end: int) -> list[Edit]:
        kept = tuple(oid for oid in truncate.relations if oid not in self._withheld)
        if not kept:
            return [(start, end, b"")]
        wanted = replace(truncate, relations=kept)
        before = self._before_truncate(wanted, lsn)
        edits = [(start, start, before)] if before else []
        if kept != truncate.relations:
            edits.append((start, end, encode_frame(encode_truncate(wanted), lsn)))
        return edits

    def describe(self) -> str:
        return f"in text: {self._text_reason}" if self._text_reason else "in binary"

    def _look_up(
        self, messages: Messages, places: NDArray[np.int64], others: Collection[int]
    ) -> None:
        """Ask the source about relations that are described: they may be partitions by now, or
        another table's; and about others."""
        described = {int(oid) for oid in messages.relation[places] if oid}
        oids = {oid for oid in described if not self._partitions.is_own(oid)} | set(others)
        if oids:
            with self._reconnect() as catalog:
                self._partitions.read(catalog, self._publications, oids)

    def _encode_description(self, message: bytes, lsn: int) -> bytes | None:
        """The frame of a Relation message as it is spooled; None if that is as it came."""
        relation = self._describe_relation(message)
        if relation is None:
            return None
        return encode_frame(encode_relation(relation, self._encoding), lsn)

    def _describe_relation(self, message: bytes) -> RelationVersion | None:
        """The relation as it is spooled; None if that is as it came."""
        relation = decode_relation(message, self._encoding)
        if not self._text_reason:
            self._check(relation)
        named = with_type_names(relation, self._types)
        known = self._partitions.find(relation.oid)
        if known is None:
            if not self._is_for_all and not self._partitions.is_listed(relation.oid):
                log.warning(
                    "%s.%s is not published on its own, and is no longer a partition: its changes"
                    " are applied under its own name",
                    relation.schema,
                    relation.name,
                )
            self._sent.pop(relation.oid, None)
            return None if named == relation else named
        self._sent[relation.oid] = as_partition(named, known)
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
            return "it was requested, or a type needs it"
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


def dropped_rows(messages: Messages, oids: Sequence[int]) -> list[Edit]:
    """Edits that leave out the rows of these relations."""
    if not oids:
        return []
    rows = np.flatnonzero(np.isin(messages.relation, oids) & np.isin(messages.kind, _ROWS))
    if not len(rows):
        return []
    starts = messages.offset[rows] - FRAME_HEADER_BYTES
    ends = messages.offset[rows] + messages.length[rows]
    cuts = 1 + np.flatnonzero(starts[1:] != ends[:-1])
    firsts, lasts = np.append(0, cuts), np.append(cuts - 1, len(rows) - 1)
    return [
        (int(starts[first]), int(ends[last]), b"")
        for first, last in zip(firsts, lasts, strict=True)
    ]


def _check_publications(catalog: Connection, names: tuple[str, str]) -> bool:
    """Whether one of them has all tables."""
    found: dict[str, tuple[bool, bool]] = {
        name: (via_root, is_for_all)
        for name, via_root, is_for_all in catalog.execute(
            "SELECT pubname, pubviaroot, puballtables FROM pg_publication WHERE pubname = ANY(%s)",
            (list(names),),
        )
    }
    for name in names:
        if name not in found:
            raise PreflightError(
                f"the source has no publication {name}",
                hint="it is made before the slot, by `millrace stream setup` or "
                "`millrace snapshot --follow`",
            )
        if found[name][0]:
            raise PreflightError(
                f"publication {name} of the source publishes partitions by way of their root: a "
                "TRUNCATE of one of them would not be sent",
                hint=f"ALTER PUBLICATION {ident(name)} SET (publish_via_partition_root = false)",
            )
    return any(is_for_all for _, is_for_all in found.values())


def _read_published_types(catalog: Connection, names: tuple[str, str]) -> list[tuple[str, int]]:
    """(column, type) of everything published that may be followed. Not by pg_publication_tables,
    which locks each of them, and so waits for whoever has locked one."""
    sent = "'', 's'" if catalog.info.server_version >= 180000 else "''"
    return catalog.execute(
        "SELECT format('%%s.%%s.%%s', n.nspname, c.relname, a.attname), a.atttypid::int8"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
        " WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND EXISTS ("
        "SELECT FROM pg_publication p WHERE p.pubname = ANY(%s) AND (p.puballtables OR EXISTS ("
        "SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND (r.prrelid = c.oid"
        " OR r.prrelid IN (SELECT relid FROM pg_partition_ancestors(c.oid))))))"
        f" AND a.attgenerated IN ({sent}) AND {USER_SCHEMA} AND {USER_TABLE} ORDER BY 1",
        (list(names),),
    ).fetchall()
