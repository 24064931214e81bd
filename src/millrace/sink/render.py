"""Changes as SQL statements or JSON objects, a line for each.

Invariant: the SQL, run on a database that is where the changes begin, leads to where they end: each
statement changes exactly the row that the source changed. What can't be said so is an error.

Values are literals without a type, so that the column decides. A row without a key is known by what
all its columns look like, and one of several equal rows is taken.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

import pyarrow as pa

from millrace.change import CASCADE, DELETE, INSERT, MESSAGE, RESTART_IDENTITY, TRUNCATE, UPDATE
from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.postgres.quote import columns, ident, literal, qualified
from millrace.sink.print_format import OutputFormat

Row = Mapping[str, str | None]

# Under these a server prints and reads values as the changes have them, and does nothing beside
# them: what triggers did on the source is among the changes.
SESSION: Final = (
    "SET client_encoding = 'UTF8'; SET session_replication_role = replica;"
    " SET datestyle = 'ISO, YMD'; SET intervalstyle = 'postgres'; SET timezone = 'UTC';"
    " SET extra_float_digits = 3; SET bytea_output = 'hex'; SET search_path = pg_catalog;"
)


@dataclass(frozen=True)
class Change:
    """One row of a change batch."""

    commit_lsn: int
    end_lsn: int
    lsn: int
    position: int
    xid: int
    committed_at: datetime
    schema: str
    table: str
    operation: str
    is_full: bool
    key: tuple[str, ...]
    old: Row | None
    new: Row | None
    unchanged: tuple[str, ...]
    options: tuple[str, ...]
    prefix: str | None
    content: bytes | None

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def name(self) -> str:
        return qualified(self.schema, self.table)


class Renderer(Protocol):
    """Makes lines of change batches in commit order."""

    def render(self, batch: pa.RecordBatch) -> Iterator[str]:
        """The lines of a batch; a transaction may go on in the next one."""

    def end(self) -> Iterator[str]:
        """The lines that are still due after the last change of a transaction."""


def open_renderer(form: OutputFormat) -> Renderer:
    return SqlRenderer() if form is OutputFormat.SQL else JsonRenderer()


class SqlRenderer:
    """A statement for each change, between BEGIN and COMMIT."""

    def __init__(self) -> None:
        self._is_first = True
        self._open: Change | None = None

    def render(self, batch: pa.RecordBatch) -> Iterator[str]:
        for group in _groups(batch):
            change = group[0]
            if self._is_first:
                yield SESSION
                self._is_first = False
            if self._open is None or self._open.end_lsn != change.end_lsn:
                yield from self.end()
                at = change.committed_at.isoformat(sep=" ")
                yield f"BEGIN; -- xid {change.xid}, commit {render_lsn(change.commit_lsn)}, {at}"
            self._open = change
            yield _sql(group)

    def end(self) -> Iterator[str]:
        if self._open is not None:
            yield f"COMMIT; -- xid {self._open.xid}, end {render_lsn(self._open.end_lsn)}"
        self._open = None


class JsonRenderer:
    """An object for each change, and for the begin and the commit of each transaction."""

    def __init__(self) -> None:
        self._open: Change | None = None

    def render(self, batch: pa.RecordBatch) -> Iterator[str]:
        for group in _groups(batch):
            change = group[0]
            if self._open is None or self._open.end_lsn != change.end_lsn:
                yield from self.end()
                yield _json_mark("begin", change)
            self._open = change
            yield json.dumps(_json(group), ensure_ascii=False)

    def end(self) -> Iterator[str]:
        if self._open is not None:
            yield _json_mark("commit", self._open)
        self._open = None


def _groups(batch: pa.RecordBatch) -> Iterator[list[Change]]:
    """One change at a time, the tables of a TRUNCATE together."""
    held: list[Change] = []
    for row in batch.to_pylist():
        change = _change(row)
        is_same = change.operation == TRUNCATE and held and held[0].lsn == change.lsn
        if held and not is_same:
            yield held
            held = []
        held.append(change)
        if change.operation != TRUNCATE:
            yield held
            held = []
    if held:
        yield held


def _change(row: dict[str, Any]) -> Change:
    return Change(
        row["commit_lsn"],
        row["end_lsn"],
        row["lsn"],
        row["position"],
        row["xid"],
        row["committed_at"],
        row["schema"],
        row["table"],
        row["operation"],
        row["replica_identity"] == "full",
        tuple(row["key"] or ()),
        None if row["old"] is None else dict(row["old"]),
        None if row["new"] is None else dict(row["new"]),
        tuple(row["unchanged"]),
        tuple(row["options"] or ()),
        row["prefix"],
        row["content"],
    )


def _sql(group: list[Change]) -> str:
    change = group[0]
    if change.operation == TRUNCATE:
        return _truncate(group)
    if change.operation == MESSAGE:
        return _message(change)
    if change.operation == INSERT:
        return _insert(change)
    if change.operation == UPDATE:
        return _update(change)
    assert change.operation == DELETE
    return f"DELETE FROM {change.name} WHERE {_condition(change)};"


def _insert(change: Change) -> str:
    row = change.new or {}
    if not row:
        return f"INSERT INTO {change.name} DEFAULT VALUES;"
    values = ", ".join(_value(value) for value in row.values())
    # Without it, values of GENERATED ALWAYS AS IDENTITY columns are refused.
    return (
        f"INSERT INTO {change.name} ({columns(list(row))}) OVERRIDING SYSTEM VALUE"
        f" VALUES ({values});"
    )


def _update(change: Change) -> str:
    before, after = change.old or {}, change.new or {}
    # A key that stays need not be set, nor a value that is known to be the same.
    is_key = set(change.key)
    changed = {
        name: value
        for name, value in after.items()
        if (before[name] != value if name in before else name not in is_key)
    }
    if not changed:
        return f"SELECT FROM {change.name} WHERE {_condition(change)};"
    listed = ", ".join(f"{ident(name)} = {_value(value)}" for name, value in changed.items())
    return f"UPDATE {change.name} SET {listed} WHERE {_condition(change)};"


def _condition(change: Change) -> str:
    """What only the row meets that is to be changed."""
    row = change.old if change.old is not None else change.new or {}
    missing = [name for name in change.key if name not in row]
    if not change.key or missing:
        raise FormatError(
            f"{change.label}: the source does not tell which row was changed",
            hint="give the table a primary key, or REPLICA IDENTITY FULL",
            lsn=render_lsn(change.lsn),
        )
    if not change.is_full:
        return " AND ".join(f"{ident(name)} = {_value(row[name])}" for name in change.key)
    # Not every type has an equality, and equal numbers can look different: format() prints any.
    looks = " AND ".join(
        f"{ident(name)} IS NULL"
        if row[name] is None
        else f"format('%s', {ident(name)}) = {_value(row[name])}"
        for name in change.key
    )
    return f"(tableoid, ctid) = (SELECT tableoid, ctid FROM {change.name} WHERE {looks} LIMIT 1)"


def _message(change: Change) -> str:
    """A comment: whoever runs the statements passes on changes, not what was said beside them."""
    prefix = json.dumps(change.prefix, ensure_ascii=True)
    return f"-- message, prefix {prefix}, {len(change.content or b'')} bytes"


def _truncate(group: list[Change]) -> str:
    options = group[0].options
    names = ", ".join(change.name for change in group)
    restart = " RESTART IDENTITY" if RESTART_IDENTITY in options else ""
    return f"TRUNCATE {names}{restart}{' CASCADE' if CASCADE in options else ''};"


def _value(value: str | None) -> str:
    return "NULL" if value is None else literal(value).lstrip()


def _json_mark(action: str, change: Change) -> str:
    return json.dumps(
        {
            "action": action,
            "xid": change.xid,
            "commit_lsn": render_lsn(change.commit_lsn),
            "end_lsn": render_lsn(change.end_lsn),
            "committed_at": change.committed_at.isoformat(sep=" "),
        }
    )


def _json(group: list[Change]) -> dict[str, Any]:
    change = group[0]
    common = {
        "action": change.operation,
        "lsn": render_lsn(change.lsn),
        "position": change.position,
    }
    if change.operation == TRUNCATE:
        tables = [{"schema": one.schema, "table": one.table} for one in group]
        return common | {"tables": tables, "options": list(change.options)}
    if change.operation == MESSAGE:
        content = base64.b64encode(change.content or b"").decode()
        return common | {"prefix": change.prefix, "content_base64": content}
    found: dict[str, Any] = common | {
        "schema": change.schema,
        "table": change.table,
        "key": list(change.key),
    }
    if change.old is not None:
        found["old"] = change.old
    if change.new is not None:
        found["new"] = change.new
    if change.unchanged:
        found["unchanged"] = list(change.unchanged)
    return found
