"""Identifiers, quoted as the server quotes them.

Invariant: quotes are set where quote_identifier() of that version sets them and nowhere else: a
name of lower-case letters, digits and underscores is bare, unless it is a keyword that can't be
used everywhere.

Facts: ruleutils.c, quote_identifier(); src/include/parser/kwlist.h (checked with
pg_get_keywords()).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_IS_BARE: Final = re.compile(r"[a-z_][a-z0-9_]*")

# All but the unreserved ones, as of version 15.
_KEYWORDS: Final = """
    all analyse analyze and any array as asc asymmetric authorization between bigint binary
    bit boolean both case cast char character check coalesce collate collation column
    concurrently constraint create cross current_catalog current_date current_role
    current_schema current_time current_timestamp current_user dec decimal default
    deferrable desc distinct do else end except exists extract false fetch float for foreign
    freeze from full grant greatest group grouping having ilike in initially inner inout int
    integer intersect interval into is isnull join lateral leading least left like limit
    localtime localtimestamp national natural nchar none normalize not notnull null nullif
    numeric offset on only or order out outer overlaps overlay placing position precision
    primary real references returning right row select session_user setof similar smallint
    some substring symmetric table tablesample then time timestamp to trailing treat trim
    true union unique user using values varchar variadic verbose when where window with
    xmlattributes xmlconcat xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi
    xmlroot xmlserialize xmltable
"""
# Added by later versions.
_SINCE: Final = {
    16: frozenset(("json_array", "json_arrayagg", "json_object", "json_objectagg", "system_user")),
    17: frozenset(
        (
            "json",
            "json_exists",
            "json_query",
            "json_scalar",
            "json_serialize",
            "json_table",
            "json_value",
            "merge_action",
        )
    ),
}


def quote_identifier(name: str, server_version: int) -> str:
    """The name, with quotes if it needs them."""
    if _IS_BARE.fullmatch(name) and name not in _keywords(server_version):
        return name
    return '"' + name.replace('"', '""') + '"'


def quote_qualified(namespace: str, name: str, server_version: int) -> str:
    return f"{quote_identifier(namespace, server_version)}.{quote_identifier(name, server_version)}"


@lru_cache(10)
def _keywords(server_version: int) -> frozenset[str]:
    added = [words for version, words in _SINCE.items() if version <= server_version]
    return frozenset(_KEYWORDS.split()).union(*added)
