"""The JSON of wal2json (format version 2), parsed.

    {"action":"B","xid":726,"timestamp":"...","lsn":"0/193E560","nextlsn":"0/193E590"}
    {"action":"U","schema":"public","table":"t","columns":[{"name":"id","type":"integer","value":1}],
     "identity":[{"name":"id","type":"integer","value":1}]}
    {"action":"C",...}

Numbers are kept as they are written. A bytea comes without its `\\x`. An out-of-line value that an
update left alone is left out of `columns`. TRUNCATE comes table by table, without its flags.
Before version 2.6 NaN and infinity come as null; only with `numeric-data-types-as-string` are they
told apart.

Facts: wal2json.c, pg_decode_write_tuple() and pg_decode_write_value().
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from millrace.errors import ConfigError
from millrace.lsn import parse_lsn
from millrace.postgres.pgoutput.messages import Unchanged
from millrace.postgres.pgoutput.plugin_change import (
    BeginText,
    ChangeText,
    CommitText,
    MessageText,
    Row,
    RowText,
    TruncateText,
    bad_text,
)
from millrace.postgres.pgoutput.test_decoding import parse_timestamp

PLUGIN = "wal2json"
OPTIONS = {
    "format-version": "2",
    "include-xids": "1",
    "include-timestamp": "1",
    "include-lsn": "1",
    "include-transaction": "1",
}
# Since 2.6.
NUMBERS_AS_STRINGS = "numeric-data-types-as-string"
# Of the names in this option, these are escaped.
LEFT_OUT = "filter-tables"
_SPECIAL = re.compile(r"[ ',.*\\]")


def render_tables(names: Iterable[tuple[str, str]]) -> str:
    """Tables whose rows are not to be sent, as the plugin reads them."""
    return ",".join(
        ".".join(_SPECIAL.sub(lambda match: f"\\{match[0]}", part) for part in name)
        for name in sorted(names)
    )


def parse_message(text: str) -> ChangeText:
    """One message."""
    try:
        found = json.loads(text, parse_float=str, parse_int=str, parse_constant=str)
    except ValueError as error:
        raise bad_text(PLUGIN, "JSON", getattr(error, "pos", 0), text) from None
    try:
        return _change(found, text)
    except (KeyError, TypeError, ValueError, ConfigError):
        raise bad_text(PLUGIN, "the fields of a change", 0, text) from None


def _change(found: dict[str, Any], text: str) -> ChangeText:
    action = found["action"]
    if action in ("B", "C"):
        committed_at = parse_timestamp(found["timestamp"], text)
        commit_lsn = parse_lsn(found["lsn"])
        if action == "B":
            return BeginText(int(found["xid"]), commit_lsn, committed_at)
        end_lsn = parse_lsn(found["nextlsn"])
        return CommitText(int(found["xid"]), committed_at, commit_lsn, end_lsn)
    if action == "M":
        return MessageText()
    schema, table = found["schema"], found["table"]
    if action == "T":
        return TruncateText(((schema, table),), False, False)
    if action not in ("I", "U", "D"):
        raise bad_text(PLUGIN, "a known action", 0, text)
    new = _row(found["columns"]) if action != "D" else None
    old = _row(found["identity"]) if action != "I" and "identity" in found else None
    return RowText(action, schema, table, new, old, may_omit=action == "U")


def _row(columns: list[dict[str, Any]]) -> Row:
    return {column["name"]: _value(column["value"], column["type"]) for column in columns}


def _value(value: Any, type_name: str) -> str | Unchanged | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "t" if value else "f"
    if not isinstance(value, str):
        raise TypeError(type_name)
    if type_name == "bytea":
        return "\\x" + value
    return value
