"""The sink `postgresql`: documents as rows of a table, with the enrichment's columns.

Invariant: the table holds the newest version of each document that it was given. A row and its
version commit together; the versions, those of deleted documents too, are in a table of ours beside
it, and a delivery that is older than what is there changes nothing. What is older than a finished
collection of garbage is refused: the versions of deleted documents that would reject it are gone.

Facts: PostgreSQL documentation, INSERT, ON CONFLICT: a row that the WHERE condition leaves alone is
locked and not returned; so of two writers of one id the second sees the version of the first. It
sees its row only in the next statement: one that waited for a lock has an older snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

import pyarrow as pa
from psycopg.pq.abc import PGconn
from pyarrow import csv

from millrace import failpoint
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, SinkError
from millrace.postgres.quote import columns as column_list
from millrace.postgres.quote import ident, literal
from millrace.postgres.wire.libpq import command_rows, copy_in, execute, open_session
from millrace.sink.document import DocumentBatch, DocumentOrigin, Version
from millrace.sink.postgres_rows import iter_ids, read_unequal
from millrace.sink.protocol import Capabilities, Difference, ShardChoice

SCHEMA: Final = "millrace_tube"
_SETUP: Final = f"""
SELECT pg_advisory_xact_lock(hashtextextended('{SCHEMA}', 0));
CREATE SCHEMA IF NOT EXISTS {SCHEMA};
CREATE TABLE IF NOT EXISTS {SCHEMA}.sink (
    id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE
);
CREATE TABLE IF NOT EXISTS {SCHEMA}.version (
    sink int NOT NULL,
    id text COLLATE "C" NOT NULL,
    shard int NOT NULL,
    epoch bigint NOT NULL,
    number bigint NOT NULL,
    deleted boolean NOT NULL,
    origin int NOT NULL,
    PRIMARY KEY (sink, id)
) WITH (fillfactor = 80);
CREATE TABLE IF NOT EXISTS {SCHEMA}.origin (
    id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE
);
CREATE TABLE IF NOT EXISTS {SCHEMA}.collected (
    sink int NOT NULL,
    origin int NOT NULL,
    partitions int NOT NULL,
    partition int NOT NULL,
    epoch bigint NOT NULL,
    number bigint NOT NULL,
    PRIMARY KEY (sink, origin, partitions, partition)
);
"""
# A writer that froze in mid-transaction would keep the others from its documents.
_IDLE_SECONDS: Final = 60
# Columns of a stage table besides the document's.
_OWN: Final = ("_id", "_shard", "_deleted")
_FORMAT: Final = "FORMAT csv, NULL ''"
# Documents that are looked at to tell whether a batch is of known ones.
_FEW: Final = 64
# The planner knows nothing about the stage, and might read a large table to find a few rows of it.
_NESTED: Final = "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; "


def open_sink(address: str) -> PostgresTableSink:
    """`postgresql://.../database?table=NAME`; the name as in SQL, with or without a schema."""
    place, _, query = address.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    table = options.pop("table", "")
    if not table:
        raise ConfigError(
            "the sink postgresql needs a table",
            hint="write postgresql://user@host:5432/database?table=NAME",
        )
    uri = f"postgresql:{place}?{urlencode(options, quote_via=quote)}"
    return PostgresTableSink(Dsn.parse(uri, what="sink"), table)


class PostgresTableSink:
    """Writes to one table."""

    capabilities = Capabilities(compares_versions=True, lists_ids_by_shard=True)
    position = 0

    def __init__(self, dsn: Dsn, table: str) -> None:
        self._table = table
        self._session: PGconn = open_session(dsn, "sink", "UTF8")
        timeout = f"SET idle_in_transaction_session_timeout = '{_IDLE_SECONDS}s'"
        execute(self._session, timeout)
        self._is_open = False
        self._name = ""
        self._names: tuple[str, ...] = ()
        self._key: tuple[str, ...] = ()
        self._sink = 0
        self._origin = 0

    def begin_documents(self, origin: DocumentOrigin, body: pa.Schema) -> None:
        self._names, self._key = tuple(body.names), origin.key
        self._name = name = self._find_table()
        self._require_columns(name)
        self._require_key(name, origin.key)
        execute(self._session, f"BEGIN; {_SETUP}")
        self._sink = self._number("sink", name)
        self._origin = self._number("origin", f"{origin.tube} {origin.table}")
        execute(self._session, "COMMIT")
        selected = ", ".join(f"t.{ident(one)}" for one in self._names)
        execute(
            self._session,
            "CREATE TEMP TABLE stage ON COMMIT DELETE ROWS AS"
            f" SELECT ''::text COLLATE \"C\" AS _id, 0 AS _shard, false AS _deleted, {selected}"
            f" FROM {name} t LIMIT 0",
        )

    def write_documents(self, batch: DocumentBatch) -> None:
        first = "TRUNCATE stage" if self._is_open else "BEGIN"
        self._is_open = True
        self._fill_stage(batch, first)
        if len(batch) <= _FEW:
            self._take_few(batch.version)
            return
        is_known = self._take_versions(batch.version, len(batch))
        self._refuse_collected(batch.version)
        deleted = batch.is_deleted.true_count
        self._take_documents(len(batch) - deleted, deleted, is_known=is_known)

    def commit(self, position: int) -> None:
        if self._is_open:
            failpoint.hit("sink.before_commit")
            execute(self._session, "COMMIT")
            self._is_open = False

    def close(self) -> None:
        self._session.finish()

    def list_ids(self, choice: ShardChoice, older_than: Version, limit: int) -> dict[str, int]:
        found = execute(
            self._session,
            f"SELECT id, shard FROM {SCHEMA}.version WHERE {self._older(choice, older_than)}"
            f" AND NOT deleted LIMIT {limit}",
        )[-1]
        return {
            (found.get_value(row, 0) or b"").decode(): int(found.get_value(row, 1) or 0)
            for row in range(found.ntuples)
        }

    def forget_deleted(self, choice: ShardChoice, older_than: Version) -> None:
        epoch, number = older_than
        # A single shard is noted as a partition of none.
        place = (choice.partitions, choice.partition)
        parts, part = place if choice.shard is None else (0, choice.shard)
        execute(
            self._session,
            f"INSERT INTO {SCHEMA}.collected AS c VALUES ({self._sink}, {self._origin}, {parts},"
            f" {part}, {epoch}, {number}) ON CONFLICT (sink, origin, partitions, partition)"
            " DO UPDATE SET epoch = excluded.epoch, number = excluded.number"
            " WHERE (c.epoch, c.number) < (excluded.epoch, excluded.number);"
            f"DELETE FROM {SCHEMA}.version WHERE {self._older(choice, older_than)} AND deleted",
        )

    def iter_held(self, limit: int) -> Iterator[list[str]]:
        return iter_ids(self._session, self._name, self._key, limit)

    def find_unequal(self, batch: DocumentBatch) -> dict[str, Difference]:
        self._fill_stage(batch, "BEGIN")
        found = read_unequal(self._session, self._name, self._names, self._key)
        execute(self._session, "ROLLBACK")
        return found

    def newest_version(self) -> Version | None:
        found = execute(
            self._session,
            f"SELECT epoch, number FROM {SCHEMA}.version WHERE sink = {self._sink}"
            " ORDER BY epoch DESC, number DESC LIMIT 1",
        )[-1]
        if not found.ntuples:
            return None
        return int(found.get_value(0, 0) or 0), int(found.get_value(0, 1) or 0)

    def _fill_stage(self, batch: DocumentBatch, first: str) -> None:
        """After another statement, in the same message."""
        arrays = [batch.ids, batch.shards, batch.is_deleted, *batch.body.columns]
        rows = pa.RecordBatch.from_arrays(arrays, names=[*_OWN, *self._names])
        copy_in(self._session, f"{first}; COPY stage FROM STDIN ({_FORMAT})", _csv(rows))

    def _older(self, choice: ShardChoice, version: Version) -> str:
        epoch, number = version
        n, p = choice.partitions, choice.partition
        # The remainder of a negative number is negative in SQL.
        shards = f"(shard % {n} + {n}) % {n} = {p}"
        if choice.shard is not None:
            shards = f"shard = {choice.shard}"
        return (
            f"sink = {self._sink} AND origin = {self._origin} AND {shards}"
            f" AND (epoch, number) < ({epoch}, {number})"
        )

    def _number(self, table: str, name: str) -> int:
        """The number of a name in one of our tables."""
        execute(
            self._session,
            f"INSERT INTO {SCHEMA}.{table} (name) VALUES ({literal(name)}) ON CONFLICT DO NOTHING",
        )
        return int(self._scalar(f"SELECT id FROM {SCHEMA}.{table} WHERE name = {literal(name)}"))

    def _find_table(self) -> str:
        """The table with its schema, which may come from the user's search path."""
        found = self._scalar(
            "BEGIN; SET LOCAL search_path TO DEFAULT;"
            " SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n"
            f" ON n.oid = c.relnamespace WHERE c.oid = to_regclass({literal(self._table)})"
        )
        execute(self._session, "COMMIT")
        if not found:
            raise SinkError(
                f"the sink's database has no table {self._table}",
                hint="create it with the columns that the enrichment returns",
            )
        return found

    def _require_columns(self, name: str) -> None:
        found = self._scalar(
            "SELECT coalesce(json_agg(attname), '[]') FROM pg_attribute WHERE attrelid ="
            f" {literal(name)}::regclass AND attnum > 0 AND NOT attisdropped"
            " AND attgenerated = ''"
        )
        missing = [one for one in self._names if one not in json.loads(found)]
        if missing:
            raise SinkError(
                f"{name} has no column {', '.join(missing)}, which the enrichment returns",
                hint="add it to the table, or give it the name of a column in the enrichment",
            )

    def _require_key(self, name: str, key: tuple[str, ...]) -> None:
        wanted = ", ".join(literal(one) for one in key)
        found = self._scalar(
            "SELECT count(*) FROM pg_index i WHERE indrelid ="
            f" {literal(name)}::regclass AND indisunique AND indisvalid AND indpred IS NULL"
            " AND indimmediate AND indexprs IS NULL"
            " AND (SELECT array_agg(attname::text ORDER BY attname) FROM pg_attribute"
            " WHERE attrelid = indrelid AND attnum = ANY(indkey[0:indnkeyatts - 1]))"
            f" = (SELECT array_agg(k ORDER BY k) FROM unnest(ARRAY[{wanted}]) k)"
        )
        if found == "0":
            names = column_list(key)
            raise SinkError(
                f"{name} has no unique index on ({names}), the key of its documents",
                hint=f"ALTER TABLE {name} ADD PRIMARY KEY ({names})",
            )

    def _scalar(self, query: str) -> str:
        result = execute(self._session, query)[-1]
        return (result.get_value(0, 0) or b"").decode() if result.ntuples else ""

    def _take_few(self, version: Version) -> None:
        """In two messages: of a few documents, waiting for answers is most of the time."""
        versions = self._insert_versions(version, "")
        self._refuse_collected(version, f"{versions};{self._drop_older(version)};")
        self._run(f"{self._delete_documents()};{self._insert_documents('')}")

    def _refuse_collected(self, version: Version, first: str = "") -> None:
        """Raise if the stage has documents that are older than what was collected: the versions of
        deleted ones that would have dropped them are gone. `first` is run before that is asked."""
        epoch, number = version
        found = self._scalar(
            f"{first} SELECT count(*) FROM {SCHEMA}.collected c"
            f" WHERE c.sink = {self._sink} AND c.origin = {self._origin}"
            f" AND ({epoch}, {number}) < (c.epoch, c.number)"
            " AND EXISTS (SELECT FROM stage s WHERE CASE c.partitions WHEN 0"
            " THEN s._shard = c.partition"
            " ELSE (s._shard % c.partitions + c.partitions) % c.partitions = c.partition END)"
        )
        if found != "0":
            raise SinkError(
                f"a delivery into {self._name} is older than what was collected there",
                hint="its rows are read again",
                sqlstate="40001",
            )

    def _take_versions(self, version: Version, count: int) -> bool:
        """Give the documents of the stage this version, and take those out of it that have a newer
        one; whether most of them were known before. A version that was written or found newer is
        locked until the end, so nobody else writes its document."""
        is_known = self._are_known()
        if is_known:
            fresh = self._run(
                _NESTED + f"UPDATE {SCHEMA}.version v SET shard = s._shard, epoch = {version[0]},"
                f" number = {version[1]}, deleted = s._deleted, origin = {self._origin}"
                f" FROM stage s WHERE {self._same_id}"
                f" AND (v.epoch, v.number) <= {version}"
            )
            if fresh < count:
                fresh += self._run(
                    self._insert_versions(
                        version,
                        f"WHERE NOT EXISTS (SELECT FROM {SCHEMA}.version v WHERE {self._same_id})",
                    )
                )
        else:
            fresh = self._run(self._insert_versions(version, ""))
        if fresh < count:
            if is_known:  # a version that was just forgotten counts as new
                self._run(self._insert_versions(version, ""))
            self._run(self._drop_older(version))
        return is_known

    def _drop_older(self, version: Version) -> str:
        """Out of the stage goes what the table has a newer version of."""
        return (
            f"DELETE FROM stage s USING {SCHEMA}.version v WHERE {self._same_id}"
            f" AND (v.epoch, v.number) > {version}"
        )

    def _are_known(self) -> bool:
        """Whether a sample of the stage has versions: then updating is half the work of inserting
        and meeting a conflict."""
        found = self._scalar(
            f"SELECT count(*) FROM (SELECT _id FROM stage LIMIT {_FEW}) s"
            f" WHERE EXISTS (SELECT FROM {SCHEMA}.version v WHERE {self._same_id})"
        )
        return 2 * int(found) > _FEW

    @property
    def _same_id(self) -> str:
        return f"v.sink = {self._sink} AND v.id = s._id"

    def _insert_versions(self, version: Version, where: str) -> str:
        epoch, number = version
        return f"""
INSERT INTO {SCHEMA}.version AS v (sink, id, shard, epoch, number, deleted, origin)
SELECT {self._sink}, _id, _shard, {epoch}, {number}, _deleted, {self._origin}
  FROM stage s {where} ORDER BY _id
ON CONFLICT (sink, id) DO UPDATE SET shard = excluded.shard, epoch = excluded.epoch,
    number = excluded.number, deleted = excluded.deleted, origin = excluded.origin
    WHERE (v.epoch, v.number) <= (excluded.epoch, excluded.number)
"""

    def _take_documents(self, live: int, deleted: int, *, is_known: bool) -> None:
        """What the stage still has goes into the table."""
        others = self._others
        if deleted:
            self._run(self._delete_documents())
        updated = 0
        if is_known and others:
            changes = ", ".join(f"{one} = s.{one}" for one in others)
            updated = self._run(
                f"{_NESTED}UPDATE {self._name} t SET {changes} FROM stage s"
                f" WHERE NOT s._deleted AND {self._same_key}"
            )
        if updated < live:
            missing = f" AND NOT EXISTS (SELECT FROM {self._name} t WHERE {self._same_key})"
            self._run(self._insert_documents(missing if updated else ""))

    @property
    def _others(self) -> list[str]:
        """Columns that are not of the key."""
        return [ident(one) for one in self._names if one not in self._key]

    @property
    def _same_key(self) -> str:
        return " AND ".join(f"t.{ident(one)} = s.{ident(one)}" for one in self._key)

    def _delete_documents(self) -> str:
        return (
            f"{_NESTED}DELETE FROM {self._name} t USING stage s"
            f" WHERE s._deleted AND {self._same_key}"
        )

    def _insert_documents(self, condition: str) -> str:
        names, keys = column_list(self._names), column_list(self._key)
        changes = ", ".join(f"{one} = excluded.{one}" for one in self._others)
        return (
            f"INSERT INTO {self._name} ({names})"
            f" SELECT {names} FROM stage s WHERE NOT _deleted{condition}"
            f" ORDER BY {keys} ON CONFLICT ({keys})"
            f" DO {f'UPDATE SET {changes}' if changes else 'NOTHING'}"
        )

    def _run(self, statement: str) -> int:
        """The number of rows that it wrote."""
        return command_rows(execute(self._session, statement, "writing documents")[-1])


def _csv(rows: pa.RecordBatch) -> memoryview:
    sink = pa.BufferOutputStream()
    options = csv.WriteOptions(include_header=False, quoting_style="needed")
    csv.write_csv(rows, sink, options)
    return memoryview(sink.getvalue())
