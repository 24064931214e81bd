"""From a file number in a record to the table it belonged to, and how its rows were made up.

Invariant: an answer holds for a stretch of WAL positions, and is given again only within it; what
a later commit changes ends the stretch. Answers to a transaction that changes catalogs itself are
never kept for others.

Facts: relfilenumbermap.c; relcache.c, RelationGetIndexList(), RelationIsLogicallyLogged();
reorderbuffer.c, ReorderBufferProcessTXN(), for what is skipped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from millrace.wal.catalog.catalog_file import Locator
from millrace.wal.catalog.catalog_layout import (
    FIRST_UNPINNED_OID,
    PG_ATTRIBUTE,
    PG_CLASS,
    PG_ENUM,
    PG_INDEX,
    PG_NAMESPACE,
    PG_RANGE,
    PG_TYPE,
)
from millrace.wal.catalog.catalog_row import Row, decode_vector
from millrace.wal.catalog.historic_catalog import HistoricCatalog, Lookups, Snapshot
from millrace.wal.row.descriptor import (
    COMPOSITE,
    DOMAIN,
    ENUM,
    MULTIRANGE,
    RANGE,
    ColumnDescriptor,
    RowDescriptor,
    TypeDescriptor,
)
from millrace.wal.row.heap_tuple import read_value

_PG_CATALOG = 11
_PG_TOAST = 99
_ARRAY_SUBSCRIPT_HANDLER = 6179
# An array of one element without NULLs: its header behind the varlena header.
_ARRAY_HEADER_BYTES = 20
_VARLENA_HEADER_BYTES = 4


class Role(Enum):
    """What becomes of a change to a relation."""

    TABLE = "table"  # it is emitted
    TOAST = "toast"  # it is a piece of a row to come
    SKIPPED = "skipped"  # catalogs, sequences, heaps that are being rewritten
    UNKNOWN = "unknown"  # nothing visible has that file


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation at some position of the WAL."""

    role: Role
    oid: int = 0
    row: RowDescriptor | None = None


@dataclass(slots=True)
class _Answer:
    begin: int
    end: int
    relation: Relation


_SKIPPED = Relation(Role.SKIPPED)
_UNKNOWN = Relation(Role.UNKNOWN)


class TableLookup:
    """Relations by file, or by OID, under a snapshot."""

    def __init__(
        self,
        catalog: HistoricCatalog,
        *,
        encoding: str = "utf-8",
        search_path: Sequence[str] = ("public",),
    ) -> None:
        self._catalog = catalog
        self._encoding = encoding
        self._search_path = tuple(search_path)
        self._answers: dict[tuple[object, ...], list[_Answer]] = {}
        # Which answers end when a key's rows change.
        self._watchers: dict[tuple[int, int, bytes], list[_Answer]] = {}
        self.mapped_files: set[int] = set()
        catalog.on_change = self._on_change

    def by_file(self, locator: Locator, snapshot: Snapshot) -> Relation:
        """The relation that had the file."""
        return self._answer(("file", *locator), snapshot)

    def by_oid(self, oid: int, snapshot: Snapshot) -> Relation:
        return self._answer(("oid", oid), snapshot)

    def epoch(self, lsn: int) -> int:
        """Equal positions and commands under equal epochs see the same catalogs."""
        epochs = self._catalog.epochs
        at = bisect_left(epochs, lsn)
        return epochs[at - 1] if at else 0

    def stretch(self, locator: Locator, lsn: int) -> tuple[int, int]:
        """For which positions the last answer for the file holds."""
        for answer in reversed(self._answers.get(("file", *locator), [])):
            if answer.begin <= lsn < answer.end:
                return answer.begin, answer.end
        return lsn, lsn + 1

    def forget(self, horizon: int) -> None:
        """Nobody asks for positions before the horizon any more."""
        for question, answers in list(self._answers.items()):
            kept = [a for a in answers if a.end > horizon]
            if kept:
                self._answers[question] = kept
            else:
                del self._answers[question]
        for key, watchers in list(self._watchers.items()):
            alive = [a for a in watchers if a.end > horizon]
            if alive:
                self._watchers[key] = alive
            else:
                del self._watchers[key]

    def _answer(self, question: tuple[object, ...], snapshot: Snapshot) -> Relation:
        if snapshot.own or snapshot.hidden:
            return self._resolve(question, snapshot, None)
        answers = self._answers.setdefault(question, [])
        for answer in reversed(answers):
            if answer.begin <= snapshot.lsn < answer.end:
                return answer.relation
        lookups = Lookups(snapshot.lsn)
        relation = self._resolve(question, snapshot, lookups)
        answer = _Answer(lookups.begin, lookups.end, relation)
        answers.append(answer)
        for key in lookups.keys:
            self._watchers.setdefault(key, []).append(answer)
        return relation

    def _on_change(self, catalog: int, number: int, key: bytes, lsn: int) -> None:
        for answer in self._watchers.pop((catalog, number, key), ()):
            answer.end = min(answer.end, lsn + 1)

    def _resolve(
        self, question: tuple[object, ...], snapshot: Snapshot, lookups: Lookups | None
    ) -> Relation:
        look = Look(self._catalog, snapshot, lookups, self._encoding, self._search_path)
        if question[0] == "oid":
            return look.by_oid(int(str(question[1])))
        spc, db, number = (int(str(part)) for part in question[1:])
        if number in self.mapped_files or (spc, db, number) in self._catalog.files:
            return _SKIPPED
        return look.by_file(spc, number)


@dataclass(frozen=True, slots=True)
class Look:
    """Lookups under one snapshot."""

    catalog: HistoricCatalog
    snapshot: Snapshot
    lookups: Lookups | None
    encoding: str
    search_path: tuple[str, ...]

    def by_file(self, tablespace: int, number: int) -> Relation:
        shown = 0 if tablespace == self.catalog.tablespace else tablespace
        for row in self.find(PG_CLASS, 1, number):
            if row["reltablespace"] == shown and row["relpersistence"] != "t":
                return self._relation(row)
        return _UNKNOWN

    def by_oid(self, oid: int) -> Relation:
        rows = self.find(PG_CLASS, 0, oid)
        return self._relation(rows[0]) if rows else _UNKNOWN

    def _relation(self, row: Row) -> Relation:
        oid = row["oid"]
        if oid < FIRST_UNPINNED_OID or row["relrewrite"] or row["relpersistence"] != "p":
            return _SKIPPED
        if row["relkind"] in ("S", "f"):
            return _SKIPPED
        if row["relnamespace"] == _PG_TOAST:
            return Relation(Role.TOAST, oid)
        return Relation(Role.TABLE, oid, self._describe(row))

    def _describe(self, row: Row) -> RowDescriptor:
        identity = row["relreplident"]
        keys = self._key_columns(row["oid"], identity)
        return RowDescriptor(
            row["oid"],
            self.namespace(row["relnamespace"]),
            self.text(row["relname"]),
            self._columns(row["oid"], None if identity == "f" else keys),
            identity,
            row["relkind"],
        )

    def _columns(self, oid: int, keys: frozenset[int] | None) -> tuple[ColumnDescriptor, ...]:
        rows = [r for r in self.find(PG_ATTRIBUTE, 0, oid) if r["attnum"] > 0]
        rows.sort(key=lambda r: int(r["attnum"]))
        return tuple(self._column(r, keys is None or r["attnum"] in keys) for r in rows)

    def _column(self, row: Row, is_key: bool) -> ColumnDescriptor:
        dropped = row["attisdropped"]
        return ColumnDescriptor(
            row["attnum"],
            self.text(row["attname"]),
            None if dropped else self.type(row["atttypid"]),
            row["attlen"],
            row["attbyval"],
            row["attalign"],
            row["atttypmod"],
            row["attgenerated"].strip("\0"),
            None if dropped else _missing(row),
            is_key and not dropped,
        )

    def _key_columns(self, oid: int, identity: str) -> frozenset[int]:
        """The columns of the replica identity's index."""
        wanted = {"d": "indisprimary", "i": "indisreplident"}.get(identity)
        if wanted is None:
            return frozenset()
        for row in self.find(PG_INDEX, 1, oid):
            usable = row["indisvalid"] and row["indislive"] and row["indimmediate"]
            if usable and row[wanted]:
                return frozenset(decode_vector(row["indkey"])[: row["indnkeyatts"]])
        return frozenset()

    def type(self, oid: int) -> TypeDescriptor:
        """A type and all that its values are made of."""
        rows = self.find(PG_TYPE, 0, oid)
        if not rows:
            return TypeDescriptor(oid, str(oid), "", -1, False, "i")
        row = rows[0]
        kind = row["typtype"]
        is_array = row["typsubscript"] == _ARRAY_SUBSCRIPT_HANDLER
        namespace = self.namespace(row["typnamespace"])
        return TypeDescriptor(
            oid,
            self.text(row["typname"]),
            namespace,
            row["typlen"],
            row["typbyval"],
            row["typalign"],
            kind,
            row["typdelim"],
            is_array,
            element=self.type(row["typelem"]) if row["typelem"] and kind != COMPOSITE else None,
            base=self.type(row["typbasetype"]) if kind == DOMAIN else None,
            subtype=self._range_part(0, oid, "rngsubtype") if kind == RANGE else None,
            range=self._range_part(1, oid, "rngtypid") if kind == MULTIRANGE else None,
            columns=self._columns(row["typrelid"], frozenset()) if kind == COMPOSITE else (),
            labels=self._labels(oid) if kind == ENUM else (),
            is_visible=self._is_visible(row, namespace),
        )

    def _range_part(self, number: int, oid: int, column: str) -> TypeDescriptor | None:
        rows = self.find(PG_RANGE, number, oid)
        return self.type(rows[0][column]) if rows else None

    def _labels(self, oid: int) -> tuple[tuple[int, str], ...]:
        rows = sorted(self.find(PG_ENUM, 1, oid), key=lambda r: float(r["enumsortorder"]))
        return tuple((r["oid"], self.text(r["enumlabel"])) for r in rows)

    def _is_visible(self, row: Row, namespace: str) -> bool:
        """Whether the search path leads to this type, and to no other one of its name first."""
        if row["typnamespace"] == _PG_CATALOG:
            return True
        if namespace not in self.search_path:
            return False
        before = self.search_path[: self.search_path.index(namespace)]
        same_name = self.find(PG_TYPE, 1, row["typname"].ljust(64, b"\0"))
        others = {r["typnamespace"] for r in same_name}
        if _PG_CATALOG in others:
            return False
        return not any(self.namespace(other) in before for other in others)

    def namespace(self, oid: int) -> str:
        rows = self.find(PG_NAMESPACE, 0, oid)
        return self.text(rows[0]["nspname"]) if rows else ""

    def find(self, catalog: int, number: int, key: int | bytes) -> list[Row]:
        return self.catalog.find(catalog, number, key, self.snapshot, self.lookups)

    def text(self, name: bytes) -> str:
        return name.decode(self.encoding)


def _missing(row: Row) -> bytes | None:
    """The value of rows that are older than the column: an array with that one element."""
    stored = row["attmissingval"]
    if not row["atthasmissing"] or not isinstance(stored, bytes):
        return None
    _, value = read_value(
        stored, _ARRAY_HEADER_BYTES, _VARLENA_HEADER_BYTES, row["attlen"], row["attalign"]
    )
    return value if isinstance(value, bytes) else None
