"""Types as the server calls them.

Invariant: the names of format_type_be(): without modifiers, SQL's own names where SQL has one, a
schema only if search_path does not find the type.

Facts: format_type.c, format_type_extended().
"""

from __future__ import annotations

from typing import Final

from millrace.wal.output.identifier import quote_identifier, quote_qualified
from millrace.wal.row.descriptor import TypeDescriptor

_CATALOG: Final = "pg_catalog"
_SQL_NAMES: Final = {
    "bit": "bit",
    "bool": "boolean",
    "bpchar": "character",
    "float4": "real",
    "float8": "double precision",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "interval": "interval",
    "numeric": "numeric",
    "time": "time without time zone",
    "timetz": "time with time zone",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
    "varbit": "bit varying",
    "varchar": "character varying",
    # A keyword since version 17, and all the same not quoted.
    "json": "json",
}


def format_type(type_: TypeDescriptor, server_version: int) -> str:
    """The type's name, as in `column[type]`."""
    if type_.array_element is not None:
        return format_type(type_.array_element, server_version) + "[]"
    if type_.namespace == _CATALOG and type_.name in _SQL_NAMES:
        return _SQL_NAMES[type_.name]
    if type_.is_visible:
        return quote_identifier(type_.name, server_version)
    return quote_qualified(type_.namespace, type_.name, server_version)
