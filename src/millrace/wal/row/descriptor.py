"""What a stored row needs to be read and printed: its columns and their types, as plain values.

Invariant: a descriptor is complete in itself. It holds every type, label and column that the row's
values may refer to, as they were at one point of the WAL, so that it can be sent to any process and
asked there. Two descriptors that are equal print the same bytes in the same way.

Facts: the catalogs pg_class, pg_attribute, pg_type, pg_enum, pg_range and pg_index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# pg_type.typtype
BASE: Final = "b"
COMPOSITE: Final = "c"
DOMAIN: Final = "d"
ENUM: Final = "e"
PSEUDO: Final = "p"
RANGE: Final = "r"
MULTIRANGE: Final = "m"

# pg_attribute.attlen of types without a fixed length
VARLENA: Final = -1
CSTRING: Final = -2

# pg_attribute.attalign, pg_type.typalign
ALIGNMENT_BYTES: Final = {"c": 1, "s": 2, "i": 4, "d": 8}


@dataclass(frozen=True)
class TypeDescriptor:
    """A row of pg_type, and what is behind its references."""

    oid: int
    name: str
    # The name of its schema.
    namespace: str
    # typlen, typbyval, typalign
    length: int
    is_by_value: bool
    alignment: str
    # typtype
    kind: str = BASE
    # typdelim
    delimiter: str = ","
    # Whether typsubscript is array_subscript_handler. Others have elements, too, such as point.
    is_array: bool = False
    # Of an array, of a domain (typbasetype), of a range (rngsubtype), of a multirange (its range).
    element: TypeDescriptor | None = None
    base: TypeDescriptor | None = None
    subtype: TypeDescriptor | None = None
    range: TypeDescriptor | None = None
    # Of a composite type, in the order of attnum, dropped ones included.
    columns: tuple[ColumnDescriptor, ...] = ()
    # Of an enum: (pg_enum.oid, label).
    labels: tuple[tuple[int, str], ...] = ()
    # Whether search_path finds it by its bare name; all of pg_catalog is found.
    is_visible: bool = True

    def __hash__(self) -> int:
        # All that it refers to would be a long way for a look into a dictionary.
        return hash((self.oid, self.name))

    @property
    def array_element(self) -> TypeDescriptor | None:
        """Of an array that is printed as one: int2vector and oidvector are not."""
        is_vector = self.namespace == "pg_catalog" and self.name.endswith("vector")
        return self.element if self.is_array and not is_vector else None


@dataclass(frozen=True)
class ColumnDescriptor:
    """A row of pg_attribute; `missing` is what rows have that were stored before the column."""

    number: int
    name: str
    # None for a dropped column.
    type: TypeDescriptor | None
    # attlen, attbyval, attalign: of a dropped column they are all that is left of the type.
    length: int
    is_by_value: bool
    alignment: str
    # atttypmod
    modifier: int = -1
    # attgenerated: '', 's' (stored) or 'v' (virtual, since version 18)
    generated: str = ""
    # As `deform` returns a value; None is NULL.
    missing: bytes | None = None
    # Whether it is part of the replica identity.
    is_key: bool = False

    @property
    def is_dropped(self) -> bool:
        return self.type is None

    @classmethod
    def of_type(
        cls, number: int, name: str, type_: TypeDescriptor, modifier: int = -1
    ) -> ColumnDescriptor:
        """A column as a new one would be."""
        return cls(number, name, type_, type_.length, type_.is_by_value, type_.alignment, modifier)


@dataclass(frozen=True)
class RowDescriptor:
    """A table and its columns in the order of attnum, dropped ones included."""

    oid: int
    namespace: str
    name: str
    columns: tuple[ColumnDescriptor, ...]
    # relreplident: d, i, f or n
    replica_identity: str = "d"
    kind: str = field(default="r")

    def __hash__(self) -> int:
        return hash((self.oid, self.name, len(self.columns)))

    @property
    def live_columns(self) -> tuple[ColumnDescriptor, ...]:
        return tuple(column for column in self.columns if column.type is not None)
