"""The sink `tantivy`: documents in a full-text index, a directory of files.

Invariant: the index holds the newest version of each document that it was given, in one entry; that
of a deleted document has its version and no text. One process writes at a time, for one commit;
the others wait for their turn. What is older than a finished collection of garbage is refused: the
entries of deleted documents that would reject it are gone; a file beside the index has the limit.

Text of the columns is searchable word by word, numbers and truth values are searchable as such.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from millrace import failpoint
from millrace.errors import ConfigError, SinkError
from millrace.sink.document import (
    Document,
    DocumentBatch,
    DocumentOrigin,
    Version,
    iter_documents,
)
from millrace.sink.failure import FailureGuard
from millrace.sink.protocol import Capabilities, Difference, ShardChoice

# Names of columns do not begin like this one in the index.
_ID, _SHARD, _EPOCH, _NUMBER, _DELETED = "_id", "_shard", "_epoch", "_number", "_deleted"
_ORIGIN: Final = "_origin"
_NUMBERS: Final = (_SHARD, _EPOCH, _NUMBER, _DELETED)
_OWN: Final = (_ID, _ORIGIN, *_NUMBERS)
# Up to where garbage was collected, by origin and choice of shards.
_COLLECTED: Final = "collected.json"
_HEAP_BYTES: Final = 64 << 20
_MANY: Final = 10_000_000
_LARGEST: Final = (1 << 63) - 1
# How long another process may keep the index, and how often that is looked at.
_LOCK_SECONDS: Final = 60.0
_LOCK_PAUSE_SECONDS: Final = 0.02


def open_sink(address: str) -> TantivySink:
    """`tantivy:DIR`."""
    if not address:
        raise ConfigError("the sink tantivy needs a directory", hint="write tantivy:DIR")
    return TantivySink(Path(address))


class TantivySink:
    """Writes to one index."""

    capabilities = Capabilities(compares_versions=True, lists_ids_by_shard=True)
    position = 0

    def __init__(self, folder: Path) -> None:
        try:
            import tantivy
        except ImportError as error:
            raise ConfigError(
                "the sink tantivy needs the package tantivy", hint="pip install 'millrace[tube]'"
            ) from error
        self._tantivy = tantivy
        self._folder = folder
        self._guard = FailureGuard(str(folder))
        self._batches: list[DocumentBatch] = []
        self._index: Any = None
        self._origin = ""
        with self._guard.step("opening"):
            folder.mkdir(parents=True, exist_ok=True)

    def begin_documents(self, origin: DocumentOrigin, body: pa.Schema) -> None:
        self._origin = f"{origin.tube} {origin.table}"
        with self._guard.step("opening"):
            schema = self._schema(body)
            if not self._tantivy.Index.exists(str(self._folder)):
                self._create(schema)
            self._index = self._tantivy.Index.open(str(self._folder))
            if self._index.schema != schema:
                raise SinkError(
                    f"the index in {self._folder} has other columns than the enrichment returns",
                    hint="write to a new directory and backfill, or make the enrichment return"
                    " the same columns",
                )

    def write_documents(self, batch: DocumentBatch) -> None:
        self._batches.append(batch)

    def commit(self, position: int) -> None:
        if not self._batches:
            return
        with self._guard.step("writing"), self._writing() as writer:
            for batch in self._batches:
                self._add(writer, batch)
            failpoint.hit("sink.before_commit")
        self._batches = []

    def close(self) -> None:
        self._batches, self._index = [], None

    def list_ids(self, choice: ShardChoice, older_than: Version, limit: int) -> dict[str, int]:
        query = self._boolean(self._term(_DELETED, 0), self._older(choice, older_than))
        found = self._search(query, self._most(choice, limit))
        ids = ((str(one[_ID][0]), int(one[_SHARD][0])) for one in found)
        return dict(islice(((id_, shard) for id_, shard in ids if choice.has(shard)), limit))

    def forget_deleted(self, choice: ShardChoice, older_than: Version) -> None:
        query = self._boolean(self._term(_DELETED, 1), self._older(choice, older_than))
        # Looked up under the writer's lock: another one may bring a document back meanwhile.
        with self._guard.step("writing"), self._writing() as writer:
            self._note_collected(choice, older_than)
            for one in self._search(query, self._most(choice, _MANY)):
                if choice.has(int(one[_SHARD][0])):
                    writer.delete_documents_by_term(_ID, str(one[_ID][0]))

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """A writer, which commits at the end."""
        writer = self._open_writer()
        try:
            yield writer
            writer.commit()
        except ValueError as error:
            raise SinkError(f"writing {self._folder} failed: {error}") from error
        finally:
            # It gives the index back when nobody refers to it.
            writer.wait_merging_threads()

    def iter_held(self, limit: int) -> Iterator[list[str]]:
        """As the index is now: what is committed meanwhile moves no page."""
        self._index.reload()
        searcher, offset = self._index.searcher(), 0
        query = self._term(_DELETED, 0)
        while hits := searcher.search(query, limit=limit, count=False, offset=offset).hits:
            yield [str(searcher.doc(address)[_ID][0]) for _, address in hits]
            offset += limit

    def find_unequal(self, batch: DocumentBatch) -> dict[str, Difference]:
        ids = self._tantivy.Query.term_set_query(self._index.schema, _ID, batch.ids.to_pylist())
        query = self._boolean(self._term(_DELETED, 0), ids)
        held = {str(one[_ID][0]): one.to_dict() for one in self._search(query, len(batch))}
        found: dict[str, Difference] = {}
        for one in iter_documents(batch):
            if one.body is None:
                if one.id in held:
                    found[one.id] = Difference.SURPLUS
            elif one.id not in held:
                found[one.id] = Difference.MISSING
            elif not _is_equal(held[one.id], _values(one, batch.body.schema)):
                found[one.id] = Difference.DIFFERENT
        return found

    def newest_version(self) -> Version | None:
        self._index.reload()
        searcher = self._index.searcher()
        everything = self._tantivy.Query.all_query()
        epoch = self._largest(searcher, everything, _EPOCH)
        if epoch is None:
            return None
        number = self._largest(searcher, self._term(_EPOCH, epoch), _NUMBER)
        return epoch, number or 0

    def _largest(self, searcher: Any, query: Any, name: str) -> int | None:
        hits = searcher.search(query, limit=1, count=False, order_by_field=name).hits
        return int(searcher.doc(hits[0][1])[name][0]) if hits else None

    def _collected(self) -> dict[str, list[tuple[ShardChoice, Version]]]:
        """Of all origins."""
        path = self._folder / _COLLECTED
        found = json.loads(path.read_text()) if path.exists() else {}
        return {
            origin: [(ShardChoice(*choice), (epoch, number)) for choice, epoch, number in places]
            for origin, places in found.items()
        }

    def _note_collected(self, choice: ShardChoice, version: Version) -> None:
        found = self._collected()
        places = dict(found.get(self._origin, ()))
        places[choice] = max(version, places.get(choice, version))
        found[self._origin] = list(places.items())
        text = {
            origin: [(astuple(one), *up_to) for one, up_to in noted]
            for origin, noted in found.items()
        }
        draft = self._folder / f"{_COLLECTED}.new"
        draft.write_text(json.dumps(text))
        draft.replace(self._folder / _COLLECTED)

    def _most(self, choice: ShardChoice, limit: int) -> int:
        """How many have to be looked at: which of all shards are chosen is not in the index."""
        return limit if choice.shard is not None else _MANY

    def _schema(self, body: pa.Schema) -> Any:
        builder = self._tantivy.SchemaBuilder()
        for name in (_ID, _ORIGIN):
            builder.add_text_field(name, stored=True, tokenizer_name="raw")
        for name in _NUMBERS:
            builder.add_integer_field(name, stored=True, indexed=True, fast=True)
        for field in body:
            if field.name in _OWN:
                raise SinkError(
                    f"column {field.name} has a name that the index uses itself",
                    hint="give it another name in the enrichment",
                )
            if pa.types.is_integer(field.type):
                builder.add_integer_field(field.name, stored=True, indexed=True)
            elif pa.types.is_floating(field.type):
                builder.add_float_field(field.name, stored=True, indexed=True)
            elif pa.types.is_boolean(field.type):
                builder.add_boolean_field(field.name, stored=True, indexed=True)
            else:
                builder.add_text_field(field.name, stored=True)
        return builder.build()

    def _create(self, schema: Any) -> None:
        """Two processes may come at once: the second finds what the first has made."""
        try:
            self._tantivy.Index(schema, path=str(self._folder))
        except ValueError:
            if not self._tantivy.Index.exists(str(self._folder)):
                raise

    def _open_writer(self) -> Any:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return self._index.writer(heap_size=_HEAP_BYTES, num_threads=1)
            except ValueError as error:
                if "LockBusy" not in str(error):
                    raise SinkError(f"writing {self._folder} failed: {error}") from error
                if time.monotonic() > deadline:
                    raise SinkError(
                        f"another process has kept the index in {self._folder} for"
                        f" {_LOCK_SECONDS:.0f} s",
                        hint="stop it, or write to another directory",
                        sqlstate="55P03",
                    ) from error
            time.sleep(_LOCK_PAUSE_SECONDS)

    def _add(self, writer: Any, batch: DocumentBatch) -> None:
        """Under the writer's lock nobody else changes the versions that are looked up here."""
        for choice, version in self._collected().get(self._origin, ()):
            if batch.version < version and any(map(choice.has, batch.shards.to_pylist())):
                raise SinkError(
                    f"a delivery into {self._folder} is older than what was collected there",
                    hint="its rows are read again",
                    sqlstate="40001",
                )
        known = self._versions(batch.ids.to_pylist())
        for one in iter_documents(batch):
            if known.get(one.id, (-1, -1)) > one.version:
                continue
            writer.delete_documents_by_term(_ID, one.id)
            writer.add_document(self._document(one, batch.body.schema))

    def _versions(self, ids: list[str]) -> dict[str, Version]:
        query = self._tantivy.Query.term_set_query(self._index.schema, _ID, ids)
        return {
            str(found[_ID][0]): (found[_EPOCH][0], found[_NUMBER][0])
            for found in self._search(query, len(ids))
        }

    def _document(self, one: Document, schema: pa.Schema) -> Any:
        epoch, number = one.version
        found = self._tantivy.Document()
        found.add_text(_ID, one.id)
        found.add_text(_ORIGIN, self._origin)
        values = (one.shard, epoch, number, int(one.body is None))
        for name, value in zip(_NUMBERS, values, strict=True):
            found.add_integer(name, value)
        for name, value in _values(one, schema).items():
            if pa.types.is_integer(kind := schema.field(name).type):
                found.add_integer(name, value)
            elif pa.types.is_floating(kind):
                found.add_float(name, value)
            elif pa.types.is_boolean(kind):
                found.add_boolean(name, value)
            else:
                found.add_text(name, value)
        return found

    def _search(self, query: Any, limit: int) -> list[Any]:
        if not limit:
            return []
        self._index.reload()
        searcher = self._index.searcher()
        hits = searcher.search(query, limit=limit, count=False).hits
        return [searcher.doc(address) for _, address in hits]

    def _older(self, choice: ShardChoice, version: Version) -> Any:
        epoch, number = version
        same = self._boolean(self._term(_EPOCH, epoch), self._range(_NUMBER, number))
        should = self._tantivy.Occur.Should
        either = self._tantivy.Query.boolean_query(
            [(should, self._range(_EPOCH, epoch)), (should, same)]
        )
        mine = self._boolean(self._term(_ORIGIN, self._origin), either)
        if choice.shard is None:
            return mine
        return self._boolean(self._term(_SHARD, choice.shard), mine)

    def _term(self, name: str, value: int | str) -> Any:
        return self._tantivy.Query.term_query(self._index.schema, name, value)

    def _range(self, name: str, below: int) -> Any:
        kind = self._tantivy.FieldType.Integer
        return self._tantivy.Query.range_query(
            self._index.schema, name, kind, -_LARGEST, below, include_upper=False
        )

    def _boolean(self, *queries: Any) -> Any:
        return self._tantivy.Query.boolean_query(
            [(self._tantivy.Occur.Must, query) for query in queries]
        )


def _values(one: Document, schema: pa.Schema) -> dict[str, Any]:
    """What the index stores of a document; a value that is null has no entry."""
    values: dict[str, Any] = {}
    for field in schema:
        value = (one.body or {}).get(field.name)
        if value is None:
            continue
        is_own = (
            isinstance(value, str)
            or pa.types.is_integer(field.type)
            or pa.types.is_floating(field.type)
            or pa.types.is_boolean(field.type)
        )
        values[field.name] = value if is_own else json.dumps(value, default=str)
    return values


def _is_equal(held: dict[str, list[Any]], wanted: dict[str, Any]) -> bool:
    stored = {name: values[0] for name, values in held.items() if name not in _OWN}
    # Two NaN are the same value here.
    return stored.keys() == wanted.keys() and all(
        stored[name] == value or (stored[name] != stored[name] and value != value)
        for name, value in wanted.items()
    )
