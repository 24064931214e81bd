"""Messages of test_decoding and wal2json as pgoutput's.

Invariant: a row that leaves here says no more and no less than the plugin did: a column that was
not sent is NULL in an old key, unchanged in an update, and never made up.

These plugins name tables and columns, but neither keys nor OIDs; those come from the catalog as it
is now, read again when a name is new. As with our publications, partitions go by the name of their
root, and of a table without replica identity only inserts and TRUNCATE are followed. Generated
columns are left out, unless they are part of the key. A TRUNCATE is one of the partitions alone, as
the server tells it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import psycopg

from millrace.errors import FormatError, PreflightError
from millrace.lsn import render_lsn
from millrace.postgres.catalog.schemas import USER_SCHEMA, USER_TABLE
from millrace.postgres.pgoutput import test_decoding, wal2json
from millrace.postgres.pgoutput.messages import (
    UNCHANGED,
    Begin,
    Commit,
    Messages,
    RelationColumn,
    RelationVersion,
    Truncate,
    Unchanged,
    Value,
    encode_begin,
    encode_commit,
    encode_delete,
    encode_frame,
    encode_insert,
    encode_relation,
    encode_truncate,
    encode_update,
    scan,
)
from millrace.postgres.pgoutput.plugin_change import (
    BeginText,
    CommitText,
    Row,
    RowText,
    TruncateText,
)
from millrace.postgres.wire.connect import server_encoding, translated
from millrace.postgres.wire.encoding import python_encoding
from millrace.receive.partitions import Partitions, as_partition
from millrace.receive.plugin_check import require_numbers
from millrace.workdir.followed_table import FollowedTables

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

# What a name in a message can be: a table, a partition or partitioned table, or something that is
# not followed, such as a materialized view that is refreshed concurrently.
_TABLES = f"""
SELECT n.nspname, c.relname, c.relkind IN ('r', 'p') AND {USER_SCHEMA} AND {USER_TABLE},
       c.oid::int8, c.relkind = 'p', c.relispartition, c.relreplident::text,
       sent.names, sent.types, sent.modifiers,
       array(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid
              AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> ''
              AND NOT a.attnum = ANY(key.numbers)),
       array(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid
              AND a.attnum = ANY(key.numbers))
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (
       SELECT array(SELECT k.number FROM pg_index i,
                           unnest(i.indkey[0:i.indnkeyatts - 1]) AS k (number)
                     WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate AND
                           CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                               WHEN 'i' THEN i.indisreplident END)) AS key (numbers)
 CROSS JOIN LATERAL (
       SELECT coalesce(array_agg(a.attname::text ORDER BY a.attnum), '{{}}'),
              coalesce(array_agg(a.atttypid::int8 ORDER BY a.attnum), '{{}}'),
              coalesce(array_agg(a.atttypmod ORDER BY a.attnum), '{{}}')
         FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
          AND (a.attgenerated = '' OR a.attnum = ANY(key.numbers))
       ) AS sent (names, types, modifiers)
 WHERE c.relkind IN ('r', 'p', 'm')
"""


@dataclass(frozen=True)
class KnownTable:
    """A table by the name that a plugin calls it."""

    schema: str
    name: str
    is_followed: bool
    oid: int
    is_partitioned: bool
    is_partition: bool
    # As in pg_class.relreplident.
    replica_identity: str
    types: dict[str, tuple[int, int]]
    generated: frozenset[str]
    key: frozenset[str]

    @property
    def label(self) -> tuple[str, str]:
        return self.schema, self.name

    @property
    def has_identity(self) -> bool:
        return self.replica_identity == "f" or bool(self.key)


class TextPlugin:
    """A plugin whose messages are text, on one connection."""

    is_text = True

    def __init__(
        self,
        name: str,
        catalog: Connection,
        encoding: str,
        reconnect: Callable[[], Connection],
        partitions: Partitions,
        followed: FollowedTables,
    ) -> None:
        self._name = name
        self._followed = followed
        self._module: ModuleType = {"test_decoding": test_decoding, "wal2json": wal2json}[name]
        self.options: dict[str, str] = dict(self._module.OPTIONS)
        # The walsender converts nothing for these plugins.
        self._from = python_encoding(server_encoding(catalog))
        self._to = python_encoding(encoding)
        self._reconnect = reconnect
        self._tables = _read_tables(catalog)
        self._partitions = partitions
        self._partitions.read(catalog)
        self._check_numbers(catalog)
        # The version of each relation that was sent last on this connection.
        self._sent: dict[int, RelationVersion] = {}
        self._end_lsn = 0
        self._last_lsn = 0
        self._truncate: tuple[int, TruncateText] | None = None
        self._warned: set[tuple[str, str]] = set()

    def describe(self) -> str:
        return f"by {self._name}"

    def translate(self, frames: memoryview, messages: Messages) -> tuple[memoryview, Messages]:
        out: list[bytes] = []
        if self._followed.look_again():
            self._read_again()  # a table was taken up: it may have a key by now, or a root
        for offset, length, lsn in zip(
            messages.offset.tolist(), messages.length.tolist(), messages.lsn.tolist(), strict=True
        ):
            text = str(frames[offset : offset + length], self._from, "surrogateescape")
            self._translate(text, lsn, out)
        data = b"".join(out)
        return memoryview(data), scan(np.frombuffer(data, np.uint8), len(data))

    def _translate(self, text: str, lsn: int, out: list[bytes]) -> None:
        change = self._module.parse_message(text)
        if self._truncate is not None:
            # wal2json sends one TRUNCATE table by table, at one position.
            at, truncate = self._truncate
            if isinstance(change, TruncateText) and at == lsn:
                self._truncate = (lsn, _joined(truncate, change))
                return
            self._flush_truncate(out)
        if isinstance(change, TruncateText):
            self._truncate = (lsn, change)
        elif isinstance(change, RowText):
            self._put_row(change, lsn, out)
        elif isinstance(change, BeginText):
            begin = Begin(change.commit_lsn, change.committed_at_microseconds, change.xid)
            out.append(encode_frame(encode_begin(begin), lsn))
        elif isinstance(change, CommitText):
            # The frame of a commit has the transaction's end. Where its commit record begins
            # test_decoding does not say: after its last change and the commit before it.
            end_lsn = change.end_lsn or lsn
            commit_lsn = change.commit_lsn or max(self._end_lsn, self._last_lsn)
            commit = Commit(min(commit_lsn, end_lsn), end_lsn, change.committed_at_microseconds)
            out.append(encode_frame(encode_commit(commit), end_lsn))
            self._end_lsn = end_lsn
        self._last_lsn = lsn

    def _put_row(self, change: RowText, lsn: int, out: list[bytes]) -> None:
        table = self._table(change.schema, change.table, lsn)
        if not self._is_followed(table):
            return
        if change.kind != "I" and not table.has_identity and self._is_noted_whole(table):
            self._read_again()
            table = self._table(change.schema, change.table, lsn)
        if change.kind != "I" and not self._is_whole(table):
            self._warn(table)
            return
        new = _without(change.new, table.generated)
        old = _without(change.old, table.generated)
        relation = self._relation(table, new, old, lsn, may_omit=change.may_omit)
        self._put_relation(relation, lsn, out)
        is_key = table.replica_identity != "f"
        if change.kind == "I":
            message = encode_insert(relation.oid, self._values(relation, new, None))
        elif change.kind == "D":
            if old is None:
                raise FormatError(
                    f"{self._name}: a delete in {table.schema}.{table.name} at {render_lsn(lsn)} "
                    "has no old row"
                )
            values = self._values(relation, old, None)
            message = encode_delete(relation.oid, values, old_is_key=is_key)
        else:
            if is_key and old is not None and new is not None and _same_key(old, new):
                old = None
            before = None if old is None else self._values(relation, old, None)
            after = self._values(relation, new, UNCHANGED)
            message = encode_update(relation.oid, after, before, old_is_key=is_key)
        out.append(encode_frame(message, lsn))

    def _flush_truncate(self, out: list[bytes]) -> None:
        if self._truncate is None:
            return
        lsn, change = self._truncate
        self._truncate = None
        tables = [self._table(*label, lsn) for label in dict.fromkeys(change.tables)]
        tables = [t for t in tables if self._is_followed(t) and not t.is_partitioned]
        if not tables:
            return
        relations = [self._relation(table, None, None, lsn, may_omit=True) for table in tables]
        if partitions := [one.oid for one in relations if one.partition is not None]:
            with self._reconnect() as catalog:
                self._partitions.read_conditions(catalog, partitions)
        for relation in relations:
            self._put_relation(self._partitions.with_condition(relation), lsn, out)
        oids = tuple(relation.oid for relation in relations)
        truncate = Truncate(oids, change.cascade, change.restart_identity)
        out.append(encode_frame(encode_truncate(truncate), lsn))

    def _root_oid(self, table: KnownTable) -> int | None:
        partition = self._partitions.find(table.oid) if table.is_partition else None
        return partition.partition.root_oid if partition else None

    def _is_followed(self, table: KnownTable) -> bool:
        if not table.is_followed:
            return False
        partition = self._partitions.find(table.oid) if table.is_partition else None
        attached = partition.attached if partition else ()
        return self._followed.has(table.oid, self._root_oid(table), attached)

    def _is_noted_whole(self, table: KnownTable) -> bool:
        known = self._followed.find(table.oid, self._root_oid(table))
        return known is not None and known.is_whole

    def _is_whole(self, table: KnownTable) -> bool:
        """An identity that a table got later counts when it is copied again; one that is lost is
        written down before anything is left out."""
        known = self._followed.find(table.oid, self._root_oid(table))
        if known is None:
            return table.has_identity
        if known.is_whole and not table.has_identity:
            self._followed.lose_identity(known)
            return False
        return known.is_whole

    def _table(self, schema: str, name: str, lsn: int) -> KnownTable:
        found = self._tables.get((schema, name))
        if found is None:
            self._read_again()
            found = self._tables.get((schema, name))
        if found is None:
            raise PreflightError(
                f"{self._name} sent a change of {schema}.{name} at {render_lsn(lsn)}, which the "
                "source does not have now: it was renamed or dropped",
                hint="plugin pgoutput can follow that: begin again with --plugin pgoutput",
            )
        return found

    def _relation(
        self, table: KnownTable, new: Row | None, old: Row | None, lsn: int, *, may_omit: bool
    ) -> RelationVersion:
        """The version of the relation that this row has."""
        known = self._sent.get(table.oid)
        names: list[str]
        if known is not None:
            names = [column.name for column in known.columns]
        else:
            names = list(table.types)
        seen = new if new is not None else old or {}
        if new is not None and not may_omit:
            if set(names) != set(new):
                names = list(new)
        elif not set(seen) <= set(names):
            names = [*names, *(name for name in seen if name not in names)]
        if not set(names) <= set(table.types):
            self._read_again()
            table = self._table(*table.label, lsn)
        columns = tuple(
            RelationColumn(
                name,
                *table.types.get(name, (0, -1)),
                table.replica_identity == "f" or name in table.key,
            )
            for name in names
        )
        relation = RelationVersion(
            table.oid, table.schema, table.name, table.replica_identity, columns
        )
        partition = self._partitions.find(table.oid) if table.is_partition else None
        return relation if partition is None else as_partition(relation, partition)

    def _put_relation(self, relation: RelationVersion, lsn: int, out: list[bytes]) -> None:
        if self._sent.get(relation.oid) != relation:
            self._sent[relation.oid] = relation
            out.append(encode_frame(encode_relation(relation, self._to), lsn))

    def _values(
        self, relation: RelationVersion, row: Row | None, missing: Unchanged | None
    ) -> list[Value]:
        found = row or {}
        values: list[Value] = []
        for column in relation.columns:
            value = found.get(column.name, missing)
            values.append(
                value.encode(self._to, "surrogateescape") if isinstance(value, str) else value
            )
        return values

    def _warn(self, table: KnownTable) -> None:
        if table.label not in self._warned:
            self._warned.add(table.label)
            log.warning(
                "%s.%s has no replica identity: its updates and deletes are not followed",
                *table.label,
            )

    def _read_again(self) -> None:
        with self._reconnect() as catalog:
            self._tables |= _read_tables(catalog)
            self._partitions.read(catalog)
            self._check_numbers(catalog)

    def _check_numbers(self, catalog: Connection) -> None:
        """Ask for numbers as strings; where wal2json can't, there may be none, nor may one come
        later."""
        if self._name == wal2json.PLUGIN and require_numbers(catalog):
            self.options[wal2json.NUMBERS_AS_STRINGS] = "1"


def _read_tables(catalog: Connection) -> dict[tuple[str, str], KnownTable]:
    with translated("reading the source's tables"):
        rows = catalog.execute(_TABLES).fetchall()
    return {table.label: table for table in map(_known_table, rows)}


def _known_table(row: tuple[Any, ...]) -> KnownTable:
    schema, name, is_followed, oid, is_partitioned, is_partition, identity, *lists = row
    columns, types, modifiers, generated, key = lists
    return KnownTable(
        schema,
        name,
        is_followed,
        oid,
        is_partitioned,
        is_partition,
        identity,
        dict(zip(columns, zip(types, modifiers, strict=True), strict=True)),
        frozenset(generated),
        frozenset(key),
    )


def _without(row: Row | None, names: frozenset[str]) -> Row | None:
    if row is None or not names:
        return row
    return {name: value for name, value in row.items() if name not in names}


def _same_key(old: Row, new: Row) -> bool:
    return all(new.get(name) == value for name, value in old.items())


def _joined(first: TruncateText, second: TruncateText) -> TruncateText:
    return TruncateText(
        first.tables + second.tables,
        first.cascade or second.cascade,
        first.restart_identity or second.restart_identity,
    )
