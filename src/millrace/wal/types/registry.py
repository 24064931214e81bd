"""From a type's descriptor to what prints its stored values.

Invariant: a value is printed as the server prints it, or refused with the name of its type. Types
of pg_catalog and of a few extensions are known by name; whatever is made of them, arrays, domains,
enums, ranges and composite types, is known by its descriptor.

The texts of values have one character for each byte here, whatever the encoding of the database.
Names and labels in descriptors are proper text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Protocol

from millrace.errors import FormatError
from millrace.wal.output.identifier import quote_identifier
from millrace.wal.row.descriptor import COMPOSITE, DOMAIN, ENUM, MULTIRANGE, RANGE, TypeDescriptor
from millrace.wal.types import container, extension, jsonb, jsonpath, moment, number, scalar, search
from millrace.wal.types.acl import acl_renderer
from millrace.wal.types.geometry import geometry_renderers
from millrace.wal.types.settings import OutputSettings

Render = Callable[[bytes], str]

# What damaged bytes can lead to in a renderer.
_BAD_BYTES: Final = (
    struct.error, IndexError, KeyError, ValueError, OverflowError, MemoryError, RecursionError,
)  # fmt: skip
_CATALOG: Final = "pg_catalog"
# Types that hold the OID of an object, and print its name; without a name, the OID.
REGISTERED: Final = (
    "regclass", "regcollation", "regconfig", "regdictionary", "regnamespace", "regoper",
    "regoperator", "regproc", "regprocedure", "regrole", "regtype",
)  # fmt: skip
_NO_OBJECT: Final = {"regoper": "0", "regoperator": "0"}


class ObjectNames(Protocol):
    """Names of objects, as they were at the same point of the WAL."""

    def find(self, kind: str, oid: int) -> str | None:
        """What a type such as regclass prints for an OID, or None if there is no such object; of
        regrole, the name without quotes."""
        ...


class Renderers:
    """What prints stored values under given settings."""

    def __init__(
        self,
        settings: OutputSettings,
        names: ObjectNames | None = None,
        *,
        unknown_as_raw: bool = False,
    ) -> None:
        """With `unknown_as_raw` values of types that are not known are printed as their bytes in
        hexadecimal, instead of an error."""
        self.settings = settings
        self._names = names
        self._unknown_as_raw = unknown_as_raw
        self._known = _built_in(settings)
        self._found: dict[TypeDescriptor, Render] = {}

    def render(self, type_: TypeDescriptor, data: bytes) -> bytes:
        """The text of a value, in the encoding of the database."""
        try:
            return self.find(type_)(data).encode(scalar.TEXT_ENCODING)
        except _BAD_BYTES as error:
            # What a codec or a mapping says would quote the value.
            is_own = type(error) is ValueError
            raise FormatError(
                f"expected a stored value of type {type_.name} in {len(data)} bytes"
                + (f": {error}" if is_own else ""),
                type=type_.name,
            ) from None

    def find(self, type_: TypeDescriptor) -> Render:
        """What prints values of this type, without a look at bad bytes."""
        found = self._found.get(type_)
        if found is None:
            found = self._found[type_] = self._make(type_)
        return found

    def _make(self, type_: TypeDescriptor) -> Render:
        if type_.kind == DOMAIN and type_.base is not None:
            return self.find(type_.base)
        if type_.kind == ENUM:
            return self._enum_renderer(type_)
        if type_.kind == COMPOSITE:
            renderers = tuple(
                None if column.type is None else self.find(column.type) for column in type_.columns
            )
            return container.composite_renderer(type_.columns, renderers)
        if type_.kind == RANGE and type_.subtype is not None:
            return container.range_renderer(type_.subtype, self.find(type_.subtype))
        if type_.kind == MULTIRANGE and type_.range is not None and type_.range.subtype is not None:
            subtype = type_.range.subtype
            return container.multirange_renderer(subtype, self.find(subtype))
        element = type_.array_element
        if element is not None:
            return container.array_renderer(element, self.find(element), element.delimiter)
        return self._base(type_)

    def _base(self, type_: TypeDescriptor) -> Render:
        known = self._known if type_.namespace == _CATALOG else _EXTENSIONS
        if type_.name in known:
            return known[type_.name]
        if type_.namespace == _CATALOG and type_.name in REGISTERED:
            return self._registered(type_.name)
        if type_.namespace == _CATALOG and type_.name == "aclitem":
            return acl_renderer(lambda oid: self._name("regrole", oid))
        if self._unknown_as_raw:
            return lambda data: "\\x" + data.hex()
        return _unknown_renderer(type_)

    def _registered(self, kind: str) -> Render:
        def render(data: bytes) -> str:
            (oid,) = struct.unpack("<I", data)
            if not oid:
                return _NO_OBJECT.get(kind, "-")
            name = self._name(kind, oid)
            if name is None:
                return str(oid)
            is_bare = kind == "regrole"
            return quote_identifier(name, self.settings.server_version) if is_bare else name

        return render

    def _name(self, kind: str, oid: int) -> str | None:
        if self._names is None:
            raise FormatError(f"the names of objects are not known that a {kind} refers to")
        name = self._names.find(kind, oid)
        return None if name is None else self._bytewise(name)

    def _enum_renderer(self, type_: TypeDescriptor) -> Render:
        labels = {oid: self._bytewise(label) for oid, label in type_.labels}

        def render(data: bytes) -> str:
            (oid,) = struct.unpack("<I", data)
            if oid not in labels:
                raise ValueError(f"label {oid}")
            return labels[oid]

        return render

    def _bytewise(self, text: str) -> str:
        return text.encode(self.settings.encoding, "surrogateescape").decode(scalar.TEXT_ENCODING)


def needs_names(type_: TypeDescriptor) -> bool:
    """Whether the text of a value depends on the names that objects have at its place."""
    if type_.namespace == _CATALOG and (type_.name in REGISTERED or type_.name == "aclitem"):
        return True
    inner = [type_.element, type_.base, type_.subtype, type_.range]
    inner += [column.type for column in type_.columns]
    return any(needs_names(one) for one in inner if one is not None)


def _unknown_renderer(type_: TypeDescriptor) -> Render:
    def refuse(data: bytes) -> str:
        raise FormatError(
            f"values of type {type_.namespace}.{type_.name} can't be printed",
            hint="--unknown-type raw prints their bytes instead",
            type=type_.name,
        )

    return refuse


def _built_in(settings: OutputSettings) -> dict[str, Render]:
    return {
        **_FIXED,
        **geometry_renderers(settings),
        "char": scalar.char_renderer(settings),
        "bytea": scalar.bytea_renderer(settings),
        "float4": number.float4_renderer(settings),
        "float8": number.float8_renderer(settings),
        "money": number.money_renderer(settings),
        "date": moment.date_renderer(settings),
        "timestamp": moment.timestamp_renderer(settings, with_zone=False),
        "timestamptz": moment.timestamp_renderer(settings, with_zone=True),
        "interval": moment.interval_renderer(settings),
    }


# Those that no setting changes.
_FIXED: Final[dict[str, Render]] = {
    **dict.fromkeys(
        ("text", "varchar", "bpchar", "json", "refcursor", "pg_node_tree", "unknown"),
        scalar.render_text,
    ),
    "bool": scalar.render_bool,
    "name": scalar.render_name,
    "int2": number.integer_renderer("<h"),
    "int4": number.integer_renderer("<i"),
    "int8": number.integer_renderer("<q"),
    **dict.fromkeys(("oid", "xid", "cid"), number.integer_renderer("<I")),
    "xid8": number.integer_renderer("<Q"),
    "numeric": number.render_numeric,
    "time": moment.render_time,
    "timetz": moment.render_timetz,
    **dict.fromkeys(("bit", "varbit"), scalar.render_bit),
    **dict.fromkeys(("macaddr", "macaddr8"), scalar.render_macaddr),
    "inet": scalar.render_inet,
    "cidr": scalar.render_cidr,
    "uuid": scalar.render_uuid,
    "xml": scalar.render_xml,
    "jsonb": jsonb.render_jsonb,
    "jsonpath": jsonpath.render_jsonpath,
    "tsvector": search.render_tsvector,
    "tsquery": search.render_tsquery,
    "pg_lsn": scalar.render_lsn,
    "tid": scalar.render_tid,
    **dict.fromkeys(("txid_snapshot", "pg_snapshot"), scalar.render_snapshot),
    "int2vector": container.vector_renderer("h"),
    "oidvector": container.vector_renderer("I"),
}
# In whatever schema the extension is.
_EXTENSIONS: Final[dict[str, Render]] = {
    "hstore": extension.render_hstore,
    "ltree": extension.render_ltree,
    "citext": scalar.render_text,
}
