"""Output plugins: what is asked of them, and their messages as pgoutput's.

Invariant: what leaves `translate` are frames of pgoutput, whole transactions in order, whichever
plugin made them; so the spool has one format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import psycopg

from millrace.errors import PreflightError
from millrace.postgres.catalog import read_text_reasons
from millrace.postgres.encoding import python_encoding
from millrace.postgres.pgoutput import Messages, RelationVersion, decode_relation
from millrace.postgres.quote import ident
from millrace.stream.publication import publication_names
from millrace.stream.translate import TextPlugin

Connection = psycopg.Connection[tuple[Any, ...]]

_RELATION = ord("R")


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
) -> Plugin:
    """The plugin, with what it must know of the source."""
    if name != "pgoutput":
        return TextPlugin(name, catalog, encoding, reconnect)
    return Pgoutput(catalog, slot, encoding, binary=binary, reconnect=reconnect)


class Pgoutput:
    """The server's own plugin: nothing to translate, types to watch in binary mode."""

    is_text = False

    def __init__(
        self,
        catalog: Connection,
        slot: str,
        encoding: str,
        *,
        binary: bool,
        reconnect: Callable[[], Connection],
    ) -> None:
        names = publication_names(slot)
        _check_publications(catalog, names)
        self._encoding = python_encoding(encoding)
        self._reconnect = reconnect
        self._reasons = read_text_reasons(catalog)
        self._text_reason = self._why_text(catalog, names, asked=binary)
        self.options = {
            "proto_version": "1",
            "publication_names": ",".join(map(ident, names)),
        }
        if not self._text_reason:
            self.options["binary"] = "true"

    def translate(self, frames: memoryview, messages: Messages) -> tuple[memoryview, Messages]:
        if not self._text_reason:
            for at in np.flatnonzero(messages.kind == _RELATION):
                offset = int(messages.offset[at])
                message = frames[offset : offset + int(messages.length[at])]
                self._check(decode_relation(bytes(message), self._encoding))
        return frames, messages

    def describe(self) -> str:
        return f"in text: {self._text_reason}" if self._text_reason else "in binary"

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


def _check_publications(catalog: Connection, names: tuple[str, str]) -> None:
    found = {
        row[0]
        for row in catalog.execute(
            "SELECT pubname FROM pg_publication WHERE pubname = ANY(%s)", (list(names),)
        )
    }
    for name in names:
        if name not in found:
            raise PreflightError(
                f"the source has no publication {name}",
                hint="it is made before the slot, by `millrace stream setup` or "
                "`millrace snapshot --follow`",
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
