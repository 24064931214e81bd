"""Documents of a downstream system, in columns: what became of rows that were touched.

Invariant: a batch was read under one snapshot, so it has one version, and no id twice. A deleted
document has its key and nothing else. A value of a column that is marked as JSON is the text of a
JSON value; other columns have Arrow's types, and whatever has no such type is the text PostgreSQL
prints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from millrace.errors import FormatError

# (epoch, number): a later read of the same row has a larger one.
Version = tuple[int, int]

# In the metadata of a field whose values are JSON.
JSON_KEY: Final = b"millrace.json"


@dataclass(frozen=True)
class DocumentOrigin:
    """Where documents come from; ids are unique within it."""

    tube: str
    # As schema.name.
    table: str
    # The columns that make up the key, by their names in the documents.
    key: tuple[str, ...]


@dataclass(frozen=True)
class DocumentBatch:
    """Documents of one origin, row by row in the same order."""

    version: Version
    ids: pa.StringArray
    shards: pa.Int32Array
    is_deleted: pa.BooleanArray
    body: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, offset: int, length: int) -> DocumentBatch:
        return DocumentBatch(
            self.version,
            self.ids.slice(offset, length),
            self.shards.slice(offset, length),
            self.is_deleted.slice(offset, length),
            self.body.slice(offset, length),
        )


@dataclass(frozen=True)
class Document:
    """One of them, for sinks that take them one by one."""

    id: str
    shard: int
    version: Version
    # None: it was deleted.
    body: dict[str, Any] | None


def id_of(values: tuple[str, ...]) -> str:
    """The id of a document whose key has these values, as PostgreSQL prints them."""
    return values[0] if len(values) == 1 else json.dumps(values, ensure_ascii=False)


def key_of(id_: str, columns: int) -> tuple[str, ...]:
    """The values that `id_of` was given."""
    if columns == 1:
        return (id_,)
    try:
        values = json.loads(id_)
    except ValueError:
        values = None
    if not isinstance(values, list) or [type(one) for one in values] != [str] * columns:
        raise FormatError(
            f"a key that was touched is no JSON array of {columns} texts",
            hint='touch keys of several columns as ["a", "b"]',
        )
    return tuple(values)


def is_json(field: pa.Field) -> bool:
    return JSON_KEY in (field.metadata or {})


def iter_documents(batch: DocumentBatch) -> Iterator[Document]:
    """The documents; JSON is still text."""
    rows = zip(
        batch.ids.to_pylist(),
        batch.shards.to_pylist(),
        batch.is_deleted.to_pylist(),
        batch.body.to_pylist(),
        strict=True,
    )
    for id_, shard, is_deleted, body in rows:
        yield Document(id_, shard, batch.version, None if is_deleted else body)


def render_lines(batch: DocumentBatch) -> Iterator[str]:
    """A JSON object for each document, in one line."""
    for one in iter_documents(batch):
        head = json.dumps(
            {
                "id": one.id,
                "shard": one.shard,
                "version": list(one.version),
                "deleted": one.body is None,
            },
            ensure_ascii=False,
        )
        if one.body is None:
            yield head
        else:
            yield f'{head[:-1]}, "body": {render_json(one.body, batch.body.schema)}}}'


def render_json(body: dict[str, Any], schema: pa.Schema) -> str:
    """A document's body as a JSON object; what is JSON already goes as it is."""
    members = []
    for field in schema:
        value = body[field.name]
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)  # JSON has no such number
        is_raw = value is not None and is_json(field)
        raw = value if is_raw else json.dumps(value, ensure_ascii=False, default=str)
        members.append(f"{json.dumps(field.name, ensure_ascii=False)}: {raw}")
    return "{" + ", ".join(members) + "}"
