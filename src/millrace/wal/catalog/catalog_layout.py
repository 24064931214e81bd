"""Which catalogs a decoder keeps, and how pg_attribute itself is laid out in each version.

Invariant: pg_attribute's own columns are the only ones written down here. The columns of all
other catalogs are read from its rows, so that a new column in a new version needs no change.

Facts: catalog/pg_attribute.h of 15 to 18; the OIDs are fixed in the headers of each catalog.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millrace.errors import UnknownVersion
from millrace.wal.row.descriptor import ColumnDescriptor

PG_CLASS: Final = 1259
PG_ATTRIBUTE: Final = 1249
PG_TYPE: Final = 1247
PG_PROC: Final = 1255
PG_NAMESPACE: Final = 2615
PG_ENUM: Final = 3501
PG_RANGE: Final = 3541
PG_INDEX: Final = 2610
PG_INHERITS: Final = 2611
PG_OPERATOR: Final = 2617
PG_TS_CONFIG: Final = 3602
PG_TS_DICT: Final = 3600
PG_COLLATION: Final = 3456
PG_PUBLICATION: Final = 6104
PG_PUBLICATION_REL: Final = 6106
PG_PUBLICATION_NAMESPACE: Final = 6237
PG_DATABASE: Final = 1262
PG_AUTHID: Final = 1260
PG_REPLICATION_ORIGIN: Final = 6000

SHARED: Final = frozenset({PG_DATABASE, PG_AUTHID, PG_REPLICATION_ORIGIN})

# What is looked up, and by which columns: a position and a size at the head of the row, where
# all columns are fixed and never NULL.
KEYS: Final[dict[int, tuple[tuple[int, int], ...]]] = {
    PG_CLASS: ((0, 4), (88, 4)),  # oid, relfilenode
    PG_ATTRIBUTE: ((0, 4),),  # attrelid
    PG_TYPE: ((0, 4), (4, 64)),  # oid, typname
    PG_PROC: ((0, 4), (4, 64)),  # oid, proname
    PG_NAMESPACE: ((0, 4),),
    PG_ENUM: ((0, 4), (4, 4)),  # oid, enumtypid
    PG_RANGE: ((0, 4), (8, 4)),  # rngtypid, rngmultitypid
    PG_INDEX: ((0, 4), (4, 4)),  # indexrelid, indrelid
    PG_INHERITS: ((0, 4),),  # inhrelid
    PG_OPERATOR: ((0, 4), (4, 64)),  # oid, oprname
    PG_TS_CONFIG: ((0, 4),),
    PG_TS_DICT: ((0, 4),),
    PG_COLLATION: ((0, 4),),
    PG_PUBLICATION: ((0, 4),),
    PG_PUBLICATION_REL: ((8, 4),),  # prrelid
    PG_PUBLICATION_NAMESPACE: ((8, 4),),  # pnnspid
    PG_DATABASE: ((0, 4),),
    PG_AUTHID: ((0, 4),),
    PG_REPLICATION_ORIGIN: ((0, 4),),
}

# Relations with an OID below are the server's own (FirstUnpinnedObjectId).
FIRST_UNPINNED_OID: Final = 12000
# The tablespaces pg_default and pg_global.
DEFAULT_TABLESPACE: Final = 1663
GLOBAL_TABLESPACE: Final = 1664


@dataclass(frozen=True, slots=True)
class CatalogColumns:
    """The columns of a catalog, and how each value is to be understood."""

    columns: tuple[ColumnDescriptor, ...]
    types: tuple[int, ...]


# Type OID, length, alignment.
_KINDS: Final = {
    "oid": (26, 4, "i"),
    "int2": (21, 2, "s"),
    "int4": (23, 4, "i"),
    "name": (19, 64, "c"),
    "bool": (16, 1, "c"),
    "char": (18, 1, "c"),
    "array": (1009, -1, "i"),
    # Of anything, so aligned for everything; of aclitems since 16.
    "array8": (2277, -1, "d"),
}

_TAIL = "attacl:array8 attoptions:array attfdwoptions:array attmissingval:array8"
_TAIL_15 = _TAIL.replace("attacl:array8", "attacl:array")
_FLAGS = (
    "attbyval:bool attalign:char attstorage:char attcompression:char attnotnull:bool "
    "atthasdef:bool atthasmissing:bool attidentity:char attgenerated:char attisdropped:bool "
    "attislocal:bool"
)
_PG_ATTRIBUTE: Final = {
    15: "attrelid:oid attname:name atttypid:oid attstattarget:int4 attlen:int2 attnum:int2 "
    f"attndims:int4 attcacheoff:int4 atttypmod:int4 {_FLAGS} attinhcount:int4 attcollation:oid "
    + _TAIL_15,
    16: "attrelid:oid attname:name atttypid:oid attlen:int2 attnum:int2 attcacheoff:int4 "
    f"atttypmod:int4 attndims:int2 {_FLAGS} attinhcount:int2 attstattarget:int2 "
    f"attcollation:oid {_TAIL}",
    17: "attrelid:oid attname:name atttypid:oid attlen:int2 attnum:int2 attcacheoff:int4 "
    f"atttypmod:int4 attndims:int2 {_FLAGS} attinhcount:int2 attcollation:oid "
    f"attstattarget:int2 {_TAIL}",
    18: "attrelid:oid attname:name atttypid:oid attlen:int2 attnum:int2 atttypmod:int4 "
    f"attndims:int2 {_FLAGS} attinhcount:int2 attcollation:oid attstattarget:int2 {_TAIL}",
}


def attribute_columns(version: int) -> CatalogColumns:
    """The columns of pg_attribute in a major version."""
    if version not in _PG_ATTRIBUTE:
        raise UnknownVersion(
            f"expected a catalog of PostgreSQL 15 to 18, found {version}",
            hint="decode it with a version of millrace that knows this server",
        )
    columns, types = [], []
    for number, entry in enumerate(_PG_ATTRIBUTE[version].split(), 1):
        name, kind = entry.split(":")
        type_oid, length, align = _KINDS[kind]
        columns.append(ColumnDescriptor(number, name, None, length, length > 0, align))
        types.append(type_oid)
    return CatalogColumns(tuple(columns), tuple(types))
