"""The nouns of a database: tables and what belongs to them.

Invariant: these are plain values; they hold no connection, survive pickle, and
two reads of the same catalog give equal values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.name import QualifiedName


@dataclass(frozen=True)
class Column:
    """A column that COPY carries (generated columns are computed by the target)."""

    name: str
    type_name: str
    # Why the type can't travel in binary, or "" if it can.
    text_reason: str = ""
    # What the source computes in its place; "" for the column as it is.
    expression: str = ""


@dataclass(frozen=True)
class SplitKey:
    """An integer column with a unique index over all rows: what a table can be cut by."""

    column: str
    nullable: bool


@dataclass(frozen=True)
class Table:
    """A table with rows of its own: plain, leaf partition, inheritance parent or child."""

    oid: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    # Main fork only, what ctid ranges cut.
    heap_bytes: int
    # With TOAST: what is copied, and what counts against the split threshold.
    total_bytes: int
    estimated_rows: int
    split_key: SplitKey | None = None
    access_method: str = "heap"
    is_unlogged: bool = False
    # Which rows of an extension's configuration table are the user's; None for ordinary tables.
    extension_condition: str | None = None
    # (oid, schema, name) of the partitioned table its rows must go through, because the target
    # may put them into other partitions: hash values of enums, for one, differ between servers.
    load_via: tuple[int, str, str] | None = None
    # Which rows are copied, a predicate over the source's row; None for all.
    where: str | None = None
    # What it is called on the target; None for the same name.
    renamed: QualifiedName | None = None

    @property
    def label(self) -> str:
        """The name as people write it."""
        return f"{self.schema}.{self.name}"

    @property
    def target(self) -> QualifiedName:
        """Its name on the target."""
        return self.renamed or QualifiedName(self.schema, self.name)

    @property
    def text_reason(self) -> str:
        """Why this table is copied in text format, or "" for binary."""
        if not self.columns:
            return "no columns"
        for column in self.columns:
            if column.text_reason:
                return f"column {column.name}: {column.text_reason}"
        return ""


@dataclass(frozen=True)
class Index:
    """An index of a table with rows, and the constraint that rests on it, if any."""

    oid: int
    table_oid: int
    schema: str
    name: str
    definition: str
    is_unique: bool
    # Statements to run once the index is built: clustering, replica identity, statistics, options,
    # extensions it depends on.
    after: tuple[str, ...] = ()
    tablespace: str | None = None
    constraint_oid: int | None = None
    constraint_name: str | None = None
    # p primary key, u unique, x exclusion
    constraint_type: str | None = None
    constraint_definition: str | None = None
    deferrable: bool = False
    deferred: bool = False
    # Exclusion and period constraints can't be made from an index: they are built whole.
    built_whole: bool = False
    bytes: int = 0
    # The name of its table.
    table: str = ""


@dataclass(frozen=True)
class ForeignKey:
    """A foreign key; both tables are locked while it is added."""

    oid: int
    name: str
    schema: str
    table: str
    table_oid: int
    referenced_oid: int
    definition: str
    is_partitioned: bool
    # The schema that the referenced table is looked up in, if the definition names none.
    search_path: str | None = None


@dataclass(frozen=True)
class Sequence:
    """A sequence and its current value."""

    oid: int
    schema: str
    name: str
    last_value: int = 0
    is_called: bool = False


@dataclass(frozen=True)
class Extension:
    """An extension installed in the source."""

    oid: int
    name: str
    version: str
    schema: str


@dataclass(frozen=True)
class Part:
    """A range of a table that one task copies; the whole table if it is not split."""

    table_oid: int
    number: int
    total: int
    # SQL over the source's row; "" for the whole table.
    condition: str
    # For people: what the range is, e.g. `id >= 10 and id < 20`.
    bounds: str
    estimated_rows: int
    estimated_bytes: int


@dataclass(frozen=True)
class LargeObjectRange:
    """Large objects that one task copies: first and last OID, both included."""

    number: int
    first_oid: int
    last_oid: int
    count: int


@dataclass(frozen=True)
class SourceCatalog:
    """Everything the plan is made from, read under one snapshot."""

    tables: tuple[Table, ...] = ()
    indexes: tuple[Index, ...] = ()
    foreign_keys: tuple[ForeignKey, ...] = ()
    sequences: tuple[Sequence, ...] = ()
    extensions: tuple[Extension, ...] = ()
    partitioned_tables: tuple[tuple[int, str, str], ...] = ()
    materialized_views: tuple[tuple[int, str, str], ...] = ()
    # OIDs of the indexes of these.
    view_indexes: frozenset[int] = frozenset()
    # Publications that streams made, and the tables in them: they stay where they are. Catalog,
    # OID and the publication's name of each.
    own_publications: frozenset[tuple[int, int, str]] = frozenset()
    # Likewise the event triggers by which a stream captures DDL.
    own_event_triggers: frozenset[tuple[int, int, str]] = frozenset()
    schemas: dict[int, str] = field(default_factory=dict)
    # Their owners, but for a public schema that is still the server's own.
    schema_owners: dict[int, str] = field(default_factory=dict)
    # Each partition and the root of its tree.
    families: dict[int, int] = field(default_factory=dict)
    large_object_ranges: tuple[LargeObjectRange, ...] = ()
    large_object_bytes: int = 0
    # Tables truncated or rewritten after the snapshot was taken, before they were locked.
    rewritten: tuple[str, ...] = ()
