"""The text of test_decoding, parsed.

    BEGIN 726
    table public.t: INSERT: id[integer]:1 v[text]:'it''s' n[numeric]:null
    table public.t: UPDATE: old-key: id[integer]:1 new-tuple: id[integer]:2 v[text]:'x'
    table public.t: DELETE: id[integer]:1
    table public.a, public.b: TRUNCATE: restart_seqs cascade
    COMMIT 726 (at 2026-11-15 23:37:49.383061+00)

Names are quoted identifiers. Numbers are bare, booleans are words, bit strings have a B before
the quotes, everything else is quoted with quotes doubled. Old rows leave out what is NULL.

Facts: contrib/test_decoding/test_decoding.c, print_literal() and tuple_to_stringinfo().
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from millrace.postgres.pgoutput.messages import MICROSECONDS_1970_TO_2000, UNCHANGED, Unchanged
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

PLUGIN = "test_decoding"
OPTIONS = {"include-xids": "1", "include-timestamp": "1", "skip-empty-xacts": "1"}

_BEGIN = re.compile(r"BEGIN (\d+)")
_COMMIT = re.compile(r"COMMIT (\d+) \(at (.+)\)")
_IDENTIFIER = r'(?:"(?:[^"]|"")+"|[^\s".,:\[]+)'
_NAME = re.compile(rf"({_IDENTIFIER})\.({_IDENTIFIER})(, |: )")
_ACTION = re.compile(r"(INSERT|UPDATE|DELETE|TRUNCATE): ?")
_COLUMN = re.compile(rf'({_IDENTIFIER})\[((?:"(?:[^"]|"")*"|\](?!:)|[^"\]])*)\]:')
_BARE = re.compile(r"[^\s']+")
_KINDS = {"INSERT": "I", "UPDATE": "U", "DELETE": "D"}
_OLD = "old-key: "
_NEW = "new-tuple: "
_NO_ROW = "(no-tuple-data)"


def parse_message(text: str) -> ChangeText:
    """One message."""
    if match := _BEGIN.fullmatch(text):
        return BeginText(int(match[1]))
    if match := _COMMIT.fullmatch(text):
        return CommitText(int(match[1]), parse_timestamp(match[2], text))
    if text.startswith("message: "):
        return MessageText()
    if not text.startswith("table "):
        raise bad_text(PLUGIN, "BEGIN, COMMIT or table", 0, text)
    tables, at = _parse_tables(text, len("table "))
    action = _ACTION.match(text, at)
    if not action:
        raise bad_text(PLUGIN, "an action", at, text)
    at = action.end()
    if action[1] == "TRUNCATE":
        flags = text[at:].split()
        return TruncateText(tuple(tables), "cascade" in flags, "restart_seqs" in flags)
    ((schema, table),) = tables
    kind = _KINDS[action[1]]
    if text[at:] == _NO_ROW:
        return RowText(kind, schema, table, None, None, False)
    old: Row | None = None
    if text.startswith(_OLD, at):
        old, at = _parse_row(text, at + len(_OLD))
        if not text.startswith(_NEW, at):
            raise bad_text(PLUGIN, "new-tuple", at, text)
        at += len(_NEW)
    row, at = _parse_row(text, at)
    if at != len(text):
        raise bad_text(PLUGIN, "the end of a row", at, text)
    if kind == "D":
        return RowText(kind, schema, table, None, row, False)
    return RowText(kind, schema, table, row, old, False)


def parse_timestamp(value: str, text: str) -> int:
    """Microseconds since 2000 of an ISO timestamp in UTC."""
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        raise bad_text("the plugin", "a timestamp", 0, text) from None
    since = at.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    microseconds = (since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds
    return microseconds - MICROSECONDS_1970_TO_2000


def _parse_tables(text: str, at: int) -> tuple[list[tuple[str, str]], int]:
    tables = []
    while True:
        match = _NAME.match(text, at)
        if not match:
            raise bad_text(PLUGIN, "the name of a table", at, text)
        tables.append((_unquoted(match[1]), _unquoted(match[2])))
        at = match.end()
        if match[3] == ": ":
            return tables, at


def _parse_row(text: str, at: int) -> tuple[Row, int]:
    """Columns up to the end, or to the next part."""
    row: Row = {}
    while at < len(text) and not text.startswith(_NEW, at):
        match = _COLUMN.match(text, at)
        if not match:
            raise bad_text(PLUGIN, "a column", at, text)
        row[_unquoted(match[1])], at = _parse_value(text, match.end(), match[2])
        if at < len(text):
            if text[at] != " ":
                raise bad_text(PLUGIN, "a blank after a value", at, text)
            at += 1
    return row, at


def _parse_value(text: str, at: int, type_name: str) -> tuple[str | Unchanged | None, int]:
    if text.startswith("'", at):
        return _parse_quoted(text, at)
    if text.startswith("B'", at):
        return _parse_quoted(text, at + 1)
    match = _BARE.match(text, at)
    if not match:
        raise bad_text(PLUGIN, "a value", at, text)
    word = match[0]
    if word == "null":
        return None, match.end()
    if word == "unchanged-toast-datum":
        return UNCHANGED, match.end()
    if type_name == "boolean":
        return word[:1], match.end()  # PostgreSQL prints t and f
    return word, match.end()


def _parse_quoted(text: str, at: int) -> tuple[str, int]:
    start = at + 1
    end = start
    while True:
        end = text.find("'", end)
        if end < 0:
            raise bad_text(PLUGIN, "the quote that ends a value", len(text), text)
        if not text.startswith("'", end + 1):
            return text[start:end].replace("''", "'"), end + 1
        end += 2


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name
