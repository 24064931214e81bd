"""Which built-in types can be turned from binary into text, by their OID.

Invariant: a type is listed only if its binary form holds everything its text form needs. Names of
objects (regclass and the like) and money (which prints as the server's locale says) are not.

Facts: src/include/catalog/pg_type.dat; below 10000 OIDs mean the same on every server.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from millrace.errors import FormatError
from millrace.postgres.binary_text import geometry, moment, number, scalar, search
from millrace.postgres.binary_text.container import (
    Render,
    array_renderer,
    multirange_renderer,
    range_renderer,
    vector_renderer,
)

# What damaged bytes can lead to in a renderer.
_BAD_BYTES = (struct.error, IndexError, ValueError, OverflowError, MemoryError)


@dataclass(frozen=True)
class BinaryType:
    """A type whose binary values can be printed."""

    oid: int
    name: str
    renderer: Render

    def render(self, data: bytes, encoding: str = "utf-8") -> str:
        """The text of a value; `encoding` is Python's name of the client encoding."""
        try:
            return self.renderer(data, encoding)
        except _BAD_BYTES as error:
            # What a codec says would quote the value.
            why = "" if isinstance(error, UnicodeError) else f": {error}"
            raise FormatError(
                f"expected a binary value of type {self.name} in {len(data)} bytes{why}"
            ) from None


def find_type(oid: int) -> BinaryType | None:
    """The type with this OID, or None if its binary form can't be printed."""
    return _TYPES.get(oid)


# OID, array's OID, name, renderer
_SCALARS: Final[tuple[tuple[int, int, str, Render], ...]] = (
    (16, 1000, "bool", scalar.render_bool),
    (17, 1001, "bytea", scalar.render_bytea),
    (18, 1002, '"char"', scalar.render_char),
    (19, 1003, "name", scalar.render_text),
    (20, 1016, "int8", number.render_int8),
    (21, 1005, "int2", number.render_int2),
    (22, 1006, "int2vector", vector_renderer(number.render_int2)),
    (23, 1007, "int4", number.render_int4),
    (25, 1009, "text", scalar.render_text),
    (26, 1028, "oid", number.render_uint4),
    (27, 1010, "tid", scalar.render_tid),
    (28, 1011, "xid", number.render_uint4),
    (29, 1012, "cid", number.render_uint4),
    (30, 1013, "oidvector", vector_renderer(number.render_uint4)),
    (114, 199, "json", scalar.render_text),
    (142, 143, "xml", scalar.render_xml),
    (600, 1017, "point", geometry.render_point),
    (601, 1018, "lseg", geometry.render_lseg),
    (602, 1019, "path", geometry.render_path),
    (603, 1020, "box", geometry.render_box),
    (604, 1027, "polygon", geometry.render_polygon),
    (628, 629, "line", geometry.render_line),
    (650, 651, "cidr", scalar.render_inet),
    (700, 1021, "float4", number.render_float4),
    (701, 1022, "float8", number.render_float8),
    (718, 719, "circle", geometry.render_circle),
    (774, 775, "macaddr8", scalar.render_macaddr),
    (829, 1040, "macaddr", scalar.render_macaddr),
    (869, 1041, "inet", scalar.render_inet),
    (1042, 1014, "bpchar", scalar.render_text),
    (1043, 1015, "varchar", scalar.render_text),
    (1082, 1182, "date", moment.render_date),
    (1083, 1183, "time", moment.render_time),
    (1114, 1115, "timestamp", moment.render_timestamp),
    (1184, 1185, "timestamptz", moment.render_timestamptz),
    (1186, 1187, "interval", moment.render_interval),
    (1266, 1270, "timetz", moment.render_timetz),
    (1560, 1561, "bit", scalar.render_bit),
    (1562, 1563, "varbit", scalar.render_bit),
    (1700, 1231, "numeric", number.render_numeric),
    (1790, 2201, "refcursor", scalar.render_text),
    (2950, 2951, "uuid", scalar.render_uuid),
    (2970, 2949, "txid_snapshot", scalar.render_snapshot),
    (3220, 3221, "pg_lsn", scalar.render_lsn),
    (3614, 3643, "tsvector", search.render_tsvector),
    (3615, 3645, "tsquery", search.render_tsquery),
    (3802, 3807, "jsonb", scalar.render_versioned),
    (4072, 4073, "jsonpath", scalar.render_versioned),
    (5038, 5039, "pg_snapshot", scalar.render_snapshot),
    (5069, 271, "xid8", number.render_uint8),
)
# (OID, array's OID, name) of the range, of the multirange, and the renderer of bounds
_RANGES: Final[tuple[tuple[tuple[int, int, str], tuple[int, int, str], Render], ...]] = (
    ((3904, 3905, "int4range"), (4451, 6150, "int4multirange"), number.render_int4),
    ((3906, 3907, "numrange"), (4532, 6151, "nummultirange"), number.render_numeric),
    ((3908, 3909, "tsrange"), (4533, 6152, "tsmultirange"), moment.render_timestamp),
    ((3910, 3911, "tstzrange"), (4534, 6153, "tstzmultirange"), moment.render_timestamptz),
    ((3912, 3913, "daterange"), (4535, 6155, "datemultirange"), moment.render_date),
    ((3926, 3927, "int8range"), (4536, 6157, "int8multirange"), number.render_int8),
)
_BOX: Final = 603


def _all_types() -> dict[int, BinaryType]:
    singles = list(_SCALARS)
    for (oid, array, name), (multi_oid, multi_array, multi_name), bound in _RANGES:
        one = range_renderer(bound)
        singles.append((oid, array, name, one))
        singles.append((multi_oid, multi_array, multi_name, multirange_renderer(one)))
    types = {}
    for oid, array, name, render in singles:
        types[oid] = BinaryType(oid, name, render)
        # The text of a box has commas.
        arrays = array_renderer(render, oid, ";" if oid == _BOX else ",")
        types[array] = BinaryType(array, f"{name}[]", arrays)
    return types


_TYPES = _all_types()
