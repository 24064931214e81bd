"""Names of objects as types like regclass print them, at a position of the WAL.

Invariant: a name is that of the position it is asked for, quoted and qualified as the server does
with the default search path.

Facts: regproc.c, regclassout() and others; ruleutils.c, quote_identifier().
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.wal.catalog.catalog_layout import (
    PG_AUTHID,
    PG_CLASS,
    PG_COLLATION,
    PG_NAMESPACE,
    PG_OPERATOR,
    PG_PROC,
    PG_TS_CONFIG,
    PG_TS_DICT,
)
from millrace.wal.catalog.catalog_row import Row, decode_vector
from millrace.wal.catalog.historic_catalog import HistoricCatalog, Snapshot
from millrace.wal.catalog.table_lookup import Look
from millrace.wal.output.identifier import quote_identifier
from millrace.wal.output.type_name import format_type

_PG_CATALOG = 11
# Catalog, name and namespace of what a type refers to by a single name.
_KINDS = {
    "regclass": (PG_CLASS, "relname", "relnamespace"),
    "regcollation": (PG_COLLATION, "collname", "collnamespace"),
    "regconfig": (PG_TS_CONFIG, "cfgname", "cfgnamespace"),
    "regdictionary": (PG_TS_DICT, "dictname", "dictnamespace"),
    "regproc": (PG_PROC, "proname", "pronamespace"),
    "regoper": (PG_OPERATOR, "oprname", "oprnamespace"),
}


class HistoricNames:
    """Looks names up in the historic catalog, where the changes are that are being printed."""

    def __init__(
        self, catalog: HistoricCatalog, encoding: str, search_path: Sequence[str] = ("public",)
    ) -> None:
        self._catalog = catalog
        self._encoding = encoding
        self._search_path = tuple(search_path)
        self._lsn = self._end_lsn = 0

    def move_to(self, lsn: int, end_lsn: int) -> None:
        """The change that names are asked for, and the end of its transaction, which may have
        made the object itself."""
        self._lsn, self._end_lsn = lsn, end_lsn

    def find(self, kind: str, oid: int) -> str | None:
        return self._find(kind, oid, self._lsn) or self._find(kind, oid, self._end_lsn)

    def _find(self, kind: str, oid: int, lsn: int) -> str | None:
        look = Look(self._catalog, Snapshot(lsn), None, self._encoding, self._search_path)
        if kind == "regtype":
            found = look.type(oid)
            return format_type(found, self._catalog.version) if found.namespace else None
        if kind in ("regnamespace", "regrole"):
            return self._global(look, kind, oid)
        if kind in ("regprocedure", "regoperator"):
            return self._signature(look, kind, oid)
        catalog, name, namespace = _KINDS[kind]
        rows = look.find(catalog, 0, oid)
        return self._qualified(look, rows[0], name, namespace, catalog) if rows else None

    def _global(self, look: Look, kind: str, oid: int) -> str | None:
        catalog, column = (
            (PG_NAMESPACE, "nspname") if kind == "regnamespace" else (PG_AUTHID, "rolname")
        )
        rows = look.find(catalog, 0, oid)
        if not rows:
            return None
        name = look.text(rows[0][column])
        return name if kind == "regrole" else self._quote(name)

    def _signature(self, look: Look, kind: str, oid: int) -> str | None:
        is_function = kind == "regprocedure"
        rows = look.find(PG_PROC if is_function else PG_OPERATOR, 0, oid)
        if not rows:
            return None
        row = rows[0]
        if is_function:
            name = self._qualified(look, row, "proname", "pronamespace", PG_PROC, any_first=False)
            types = [self._type(look, each) for each in decode_vector(row["proargtypes"])]
        else:
            name = self._qualified(
                look, row, "oprname", "oprnamespace", PG_OPERATOR, any_first=False
            )
            types = [self._type(look, row[side]) for side in ("oprleft", "oprright")]
        return f"{name}({','.join(types)})"

    def _type(self, look: Look, oid: int) -> str:
        return format_type(look.type(oid), self._catalog.version) if oid else "NONE"

    def _qualified(
        self,
        look: Look,
        row: Row,
        name: str,
        namespace: str,
        catalog: int,
        *,
        any_first: bool = True,
    ) -> str:
        """The bare name if that finds this object, else with its schema."""
        text = look.text(row[name])
        shown = text if catalog == PG_OPERATOR else self._quote(text)
        schema = look.namespace(row[namespace])
        is_visible = row[namespace] == _PG_CATALOG or schema in self._search_path
        if is_visible and any_first and catalog in (PG_PROC, PG_OPERATOR):
            others = look.find(catalog, 1, row[name].ljust(64, b"\0"))
            is_visible = len(others) == 1
        return shown if is_visible else f"{self._quote(schema)}.{shown}"

    def _quote(self, name: str) -> str:
        return quote_identifier(name, self._catalog.version)
