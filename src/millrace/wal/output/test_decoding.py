"""Changes as the output plugin test_decoding writes them.

Invariant: the same bytes as the server's plugin with its default options, in the encoding of the
database.

    BEGIN 726
    table public.t: INSERT: id[integer]:1 v[text]:'it''s' n[numeric]:null
    COMMIT 726

Numbers are bare, booleans are words, bit strings have a B before the quotes, everything else is
quoted with quotes doubled. That goes by the column's own type: a domain of integers is quoted.

Facts: contrib/test_decoding/test_decoding.c, print_literal(), tuple_to_stringinfo().
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millrace.errors import FormatError
from millrace.postgres.pgoutput.messages import Unchanged
from millrace.wal.output.identifier import quote_identifier, quote_qualified
from millrace.wal.output.row_change import DELETE, INSERT, UPDATE, RowChange
from millrace.wal.output.type_name import format_type
from millrace.wal.row.descriptor import ColumnDescriptor, RowDescriptor, TypeDescriptor
from millrace.wal.row.row_columns import column_error
from millrace.wal.row.toast import RowValue
from millrace.wal.types.registry import Renderers

BARE, QUOTED, BITS, WORD = range(4)
_MODES: Final = {
    **dict.fromkeys(("int2", "int4", "int8", "oid", "float4", "float8", "numeric"), BARE),
    **dict.fromkeys(("bit", "varbit"), BITS),
    "bool": WORD,
}
_KINDS: Final = {INSERT: b" INSERT:", UPDATE: b" UPDATE:", DELETE: b" DELETE:"}
_NO_ROW: Final = b" (no-tuple-data)"
UNCHANGED_TEXT: Final = b"unchanged-toast-datum"


def literal_mode(type_: TypeDescriptor) -> int:
    """How values of a column of this type stand in the text."""
    return _MODES.get(type_.name, QUOTED) if type_.namespace == "pg_catalog" else QUOTED


class TestDecoding:
    """Prints changes under the settings of the given renderers."""

    __test__ = False  # for pytest, which looks for names like this one

    def __init__(self, renderers: Renderers) -> None:
        self._renderers = renderers
        self._version = renderers.settings.server_version
        self._encoding = renderers.settings.encoding
        # What stands before the value, for each column of a relation.
        self._labels: dict[RowDescriptor, tuple[bytes, ...]] = {}

    def begin(self, xid: int) -> bytes:
        return b"BEGIN %d" % xid

    def commit(self, xid: int) -> bytes:
        return b"COMMIT %d" % xid

    def prepare(self, gid: str, xid: int) -> bytes:
        return self._two_phase(b"PREPARE TRANSACTION", gid, xid)

    def commit_prepared(self, gid: str, xid: int) -> bytes:
        return self._two_phase(b"COMMIT PREPARED", gid, xid)

    def rollback_prepared(self, gid: str, xid: int) -> bytes:
        return self._two_phase(b"ROLLBACK PREPARED", gid, xid)

    def message(self, prefix: bytes, content: bytes, *, is_transactional: bool) -> bytes:
        head = b"message: transactional: %d prefix: %s, sz: %d content:"
        return head % (is_transactional, prefix, len(content)) + content

    def truncate(
        self, relations: Sequence[RowDescriptor], *, cascade: bool, restart_identity: bool
    ) -> bytes:
        tables = b", ".join(self._table(relation) for relation in relations)
        flags = b" restart_seqs" * restart_identity + b" cascade" * cascade
        return b"table " + tables + b": TRUNCATE:" + (flags or b" (no-flags)")

    def change(self, change: RowChange) -> bytes:
        """The text of an insert, an update or a delete."""
        relation = change.relation
        text = self.head(relation, change.kind)
        if change.kind == DELETE:
            return text + self._row(relation, change.old, is_old=True)
        if change.kind == UPDATE and change.old is not None:
            text += b" old-key:" + self._row(relation, change.old, is_old=True) + b" new-tuple:"
        return text + self._row(relation, change.new, is_old=False)

    def head(self, relation: RowDescriptor, kind: str) -> bytes:
        """What stands before the first column."""
        return b"table " + self._table(relation) + b":" + _KINDS[kind]

    def labels(self, relation: RowDescriptor) -> tuple[bytes, ...]:
        """What stands before the value of each column; nothing for one that is dropped."""
        found = self._labels.get(relation)
        if found is None:
            found = self._labels[relation] = tuple(map(self._label, relation.columns))
        return found

    def _row(
        self, relation: RowDescriptor, values: Sequence[RowValue] | None, *, is_old: bool
    ) -> bytes:
        if values is None:
            return _NO_ROW
        parts = []
        for column, label, value in zip(
            relation.columns, self.labels(relation), values, strict=True
        ):
            if column.type is None or (value is None and is_old):
                continue
            parts += [label, self._literal(relation, column, column.type, value)]
        return b"".join(parts)

    def _literal(
        self,
        relation: RowDescriptor,
        column: ColumnDescriptor,
        type_: TypeDescriptor,
        value: RowValue,
    ) -> bytes:
        if value is None:
            return b"null"
        if isinstance(value, Unchanged):
            return UNCHANGED_TEXT
        return quote_literal(render_column(self._renderers, relation, column, value), type_)

    def _label(self, column: ColumnDescriptor) -> bytes:
        if column.type is None:
            return b""
        name = quote_identifier(column.name, self._version)
        return self._encoded(f" {name}[{format_type(column.type, self._version)}]:")

    def _table(self, relation: RowDescriptor) -> bytes:
        return self._encoded(quote_qualified(relation.namespace, relation.name, self._version))

    def _two_phase(self, words: bytes, gid: str, xid: int) -> bytes:
        quoted = "'" + gid.replace("'", "''") + "'"
        if "\\" in gid:
            quoted = "E" + quoted.replace("\\", "\\\\")
        return words + self._encoded(f" {quoted}, txid {xid}")

    def _encoded(self, text: str) -> bytes:
        return text.encode(self._encoding, "surrogateescape")


def render_column(
    renderers: Renderers, relation: RowDescriptor, column: ColumnDescriptor, value: bytes
) -> bytes:
    """The text of a column's value; an error says which column it is."""
    if column.type is None:
        return b""
    try:
        return renderers.render(column.type, value)
    except FormatError as error:
        raise column_error(relation, column, error) from None


def quote_literal(text: bytes, type_: TypeDescriptor) -> bytes:
    mode = literal_mode(type_)
    if mode == BARE:
        return text
    if mode == BITS:
        return b"B'" + text + b"'"
    if mode == WORD:
        return b"true" if text == b"t" else b"false"
    return b"'" + text.replace(b"'", b"''") + b"'"
