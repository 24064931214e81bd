"""Enrichment: from keys to documents, read under one snapshot.

Invariant: every key that was asked for gets exactly one document: its row, or a deletion if there
is none. Rows of other keys, and a key twice, are an error. The number of the version is drawn
before the snapshot is taken, so that a row that is read has at least the age that its version says.

Rows travel as COPY prints them, and are parsed by Arrow: no Python object for each value.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from millrace.errors import ConfigError, FormatError, MillraceError
from millrace.postgres.quote import literal
from millrace.postgres.sql_text import find_parameters
from millrace.postgres.wire.connect import server_error
from millrace.postgres.wire.libpq import copy_out
from millrace.retry import is_transient_code
from millrace.sink.document import JSON_KEY, DocumentBatch, Version, id_of, key_of
from millrace.tube.delivery.tube import Connection, TubeTable

# pg_type.oid
_INTEGERS: Final = (20, 21, 23, 26)
_FLOATS: Final = (700, 701)
_BOOLEAN: Final = 16
# Printed by PostgreSQL as JSON values; a numeric may be NaN, which is none.
_JSON: Final = (114, 3802)
# As format_type prints char(n).
_BLANK_PADDED: Final = "bpchar"

log = logging.getLogger(__name__)


class Enrichment(Protocol):
    """Where documents come from."""

    @property
    def schema(self) -> pa.Schema:
        """Their columns."""

    @property
    def key(self) -> tuple[str, ...]:
        """Which of these are the key."""

    def read(self, keys: Sequence[str]) -> pa.Table:
        """Rows of these keys, no more than one for each."""


@dataclass(frozen=True)
class _Column:
    name: str
    type_oid: int

    def field(self) -> pa.Field:
        kind = pa.string()
        if self.type_oid in _INTEGERS:
            kind = pa.int64()
        elif self.type_oid in _FLOATS:
            kind = pa.float64()
        elif self.type_oid == _BOOLEAN:
            kind = pa.bool_()
        metadata = {JSON_KEY: b""} if self.type_oid in _JSON else None
        return pa.field(self.name, kind, metadata=metadata)


class SqlKeys:
    """A SELECT with an array of keys as $1; with a key of several columns, an array for each."""

    def __init__(self, sql: str, table: TubeTable, what: str) -> None:
        self._table = table
        self._pieces = find_parameters(sql.strip().rstrip(";"))
        used = {number for _, number in self._pieces if number is not None}
        wanted = set(range(1, len(table.key) + 1))
        if used != wanted:
            raise ConfigError(
                f"the {what} of {table.label} uses the parameters"
                f" {_list(used) or 'none'}, expected {_list(wanted)}",
                hint="write the keys as $1: SELECT ... WHERE id = ANY($1)",
            )

    def statement(self, keys: Sequence[str]) -> str:
        """With these keys in their places: COPY takes no parameters."""
        arrays = [
            f"{literal(_array(column))}::{kind}[]"
            for column, kind in zip(_columns(keys, self._table), self._table.key_types, strict=True)
        ]
        return "".join(
            text if number is None else arrays[number - 1] for text, number in self._pieces
        )


class SqlEnrichment:
    """A SELECT; its columns are those of the documents."""

    def __init__(self, connection: Connection, sql: str, table: TubeTable) -> None:
        self._connection = connection
        self._table = table
        self._keys = SqlKeys(sql, table, "enrichment")
        columns = self._describe()
        self._names = [column.name for column in columns]
        self.key = _choose_key(self._names, table)
        self.schema = pa.schema([column.field() for column in columns])
        # Keys are compared as PostgreSQL prints them.
        self._types = {
            field.name: pa.string() if field.name in self.key else field.type
            for field in self.schema
        }

    def read(self, keys: Sequence[str]) -> pa.Table:
        statement = f"COPY ({self._keys.statement(keys)}) TO STDOUT (FORMAT csv)"
        data = copy_out(self._connection.pgconn, statement, f"enriching {self._table.label}")
        if not data:
            return pa.table({name: pa.array([], kind) for name, kind in self._types.items()})
        return csv.read_csv(
            io.BytesIO(data),
            csv.ReadOptions(column_names=self._names, block_size=len(data) + 1, use_threads=False),
            csv.ParseOptions(newlines_in_values=True),
            csv.ConvertOptions(
                column_types=self._types,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                true_values=["t"],
                false_values=["f"],
                check_utf8=True,
            ),
        )

    def _describe(self) -> list[_Column]:
        """The columns, without running it."""
        try:
            result = self._connection.execute(
                f"SELECT * FROM ({self._keys.statement(())}) AS enrichment LIMIT 0".encode()
            )
        except psycopg.Error as error:
            if is_transient_code(error.sqlstate):
                raise server_error(error, f"enriching {self._table.label}") from error
            raise ConfigError(
                f"the enrichment of {self._table.label} does not compile:"
                f" {error.diag.message_primary}",
                hint="it is one SELECT, with the keys as $1",
            ) from error
        found = [_Column(one.name, one.type_code) for one in result.description or ()]
        names = [one.name for one in found]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(
                f"the enrichment of {self._table.label} returns two columns called {_list(twice)}",
                hint="give each a name of its own",
            )
        return found


class CallableEnrichment:
    """A function over Arrow batches: keys in, rows with their keys out."""

    def __init__(
        self, function: Callable[[pa.RecordBatch], pa.Table | pa.RecordBatch], table: TubeTable
    ) -> None:
        self._function = function
        self._table = table
        empty = self._call(())
        self.schema = empty.schema
        self.key = _choose_key(list(empty.column_names), table)

    def read(self, keys: Sequence[str]) -> pa.Table:
        found = self._call(keys)
        if found.schema != self.schema:
            raise FormatError(
                f"the enrichment of {self._table.label} returned other columns than at first"
            )
        return found

    def _call(self, keys: Sequence[str]) -> pa.Table:
        columns = _columns(keys, self._table)
        asked = pa.RecordBatch.from_pydict(
            {
                name: pa.array(column, pa.string())
                for name, column in zip(self._table.key, columns, strict=True)
            }
        )
        try:
            found = self._function(asked)
            return found if isinstance(found, pa.Table) else pa.Table.from_batches([found])
        except MillraceError:
            raise
        except Exception as error:
            # Its words may quote a row.
            log.warning("the enrichment of %s failed", self._table.label, exc_info=True)
            raise FormatError(
                f"the enrichment of {self._table.label} raised {type(error).__name__}",
                hint="the log has the traceback",
            ) from error


def enrich(
    source: Enrichment, table: TubeTable, version: Version, shards: dict[str, int]
) -> DocumentBatch:
    """The documents of keys, given with their shards."""
    asked = pa.array(shards, pa.string())
    found = source.read(list(shards))
    ids = _ids(found, source.key, table.key_types)
    # Where each row's key is among those that were asked for.
    places = pc.index_in(ids, value_set=asked)
    if places.null_count:
        raise FormatError(
            f"the enrichment of {table.label} returned a key that was not asked for",
            hint="it must return rows of the keys in $1 only, with the key's columns",
        )
    if pc.count_distinct(places).as_py() < len(places):
        raise FormatError(
            f"the enrichment of {table.label} returned a key twice",
            hint="it must return one row for each key: aggregate what is joined",
        )
    missing = _others(places, len(asked))
    gone = asked.take(missing)
    body = pa.concat_tables([_typed(found, source), _deleted(gone.to_pylist(), source)])
    body = body.combine_chunks()
    every = pa.concat_arrays([places, missing])
    return DocumentBatch(
        version,
        asked.take(every),
        pa.array(shards.values(), pa.int32()).take(every),
        pc.greater_equal(pa.array(range(len(every))), len(places)),
        (body.to_batches() or [pa.RecordBatch.from_pylist([], schema=body.schema)])[0],
    )


def _ids(found: pa.Table, key: tuple[str, ...], types: tuple[str, ...]) -> pa.StringArray:
    texts = [pc.cast(found[name], pa.string()).combine_chunks() for name in key]
    # What was touched is a key cast to text, which removes blanks.
    columns = [
        pc.utf8_rtrim(text, " ") if kind == _BLANK_PADDED else text
        for text, kind in zip(texts, types, strict=True)
    ]
    if len(columns) == 1:
        return columns[0]
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    return pa.array([id_of(values) for values in rows], pa.string())


def _others(places: pa.Int32Array, count: int) -> pa.Int32Array:
    """The numbers below `count` that are not among these."""
    every = pa.array(range(count), pa.int32())
    if len(places) == count:
        return every.slice(0, 0)
    return every.filter(pc.invert(pc.is_in(every, value_set=places)))


def _typed(found: pa.Table, source: Enrichment) -> pa.Table:
    """With the columns' own types: keys were read as text."""
    return found.cast(source.schema)


def _deleted(ids: list[str], source: Enrichment) -> pa.Table:
    keys = list(zip(*(key_of(one, len(source.key)) for one in ids), strict=True))
    arrays = []
    for field in source.schema:
        if field.name in source.key and ids:
            texts = pa.array(keys[source.key.index(field.name)], pa.string())
            arrays.append(pc.cast(texts, field.type))
        else:
            arrays.append(pa.nulls(len(ids), field.type))
    return pa.Table.from_arrays(arrays, schema=source.schema)


def _choose_key(names: list[str], table: TubeTable) -> tuple[str, ...]:
    """The columns of the table's key, by name or else by position."""
    if set(table.key) <= set(names):
        return table.key
    if len(names) < len(table.key):
        raise ConfigError(
            f"the enrichment of {table.label} does not return its key, {_list(table.key)}",
            hint="select the key's columns, under their names or first",
        )
    return tuple(names[: len(table.key)])


def _columns(keys: Sequence[str], table: TubeTable) -> list[Sequence[str]]:
    """Of each column of the key, its values."""
    if len(table.key) == 1:
        return [keys]
    values = list(zip(*(key_of(key, len(table.key)) for key in keys), strict=True))
    return list(values) if values else [() for _ in table.key]


def _array(values: Sequence[str]) -> str:
    """An array as PostgreSQL reads it. No value has a NUL, so that one may stand between them."""
    if not values:
        return "{}"
    quoted = "\0".join(values).replace("\\", "\\\\").replace('"', '\\"')
    return '{"' + quoted.replace("\0", '","') + '"}'


def _list(values: Any) -> str:
    return ", ".join(f"${one}" if isinstance(one, int) else one for one in sorted(values))
