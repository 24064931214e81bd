"""Changes as pgoutput's messages.

Invariant: row messages are the bytes the server's pgoutput sends to a subscriber of all columns
that asks for text. Relation messages say the same as the server's, but when they are sent is our
own affair: before the first row of each version of a table.

Generated columns are left out, as publications do unless they are told otherwise, but for those
that are part of the key. A delete without an old row, of a table without replica identity, is no
message at all.

Facts: proto.c, logicalrep_write_insert() and others; pgoutput.c, pgoutput_change().
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.postgres.pgoutput.messages import (
    RelationColumn,
    RelationVersion,
    Unchanged,
    Value,
    encode_delete,
    encode_insert,
    encode_relation,
    encode_update,
)
from millrace.wal.output.row_change import DELETE, INSERT, RowChange
from millrace.wal.output.test_decoding import render_column
from millrace.wal.row.descriptor import ColumnDescriptor, RowDescriptor
from millrace.wal.row.toast import RowValue
from millrace.wal.types.registry import Renderers


def is_sent(column: ColumnDescriptor) -> bool:
    """Whether rows have the column."""
    return column.type is not None and (not column.generated or column.is_key)


def relation_version(relation: RowDescriptor) -> RelationVersion:
    """What a Relation message says of the table."""
    columns = tuple(
        RelationColumn(column.name, column.type.oid, column.modifier, column.is_key)
        for column in relation.columns
        if is_sent(column) and column.type is not None
    )
    return RelationVersion(
        relation.oid, relation.namespace, relation.name, relation.replica_identity, columns
    )


class PgOutput:
    """Encodes changes under the settings of the given renderers."""

    def __init__(self, renderers: Renderers) -> None:
        self._renderers = renderers

    def relation(self, relation: RowDescriptor) -> bytes:
        return encode_relation(relation_version(relation), self._renderers.settings.encoding)

    def change(self, change: RowChange) -> bytes | None:
        """The message of an insert, an update or a delete; None if there is none to be sent."""
        relation = change.relation
        old = None if change.old is None else self._values(relation, change.old)
        is_key = relation.replica_identity != "f"
        if change.kind == DELETE:
            if old is None:
                return None
            return encode_delete(relation.oid, old, old_is_key=is_key)
        new = self._values(relation, change.new or ())
        if change.kind == INSERT:
            return encode_insert(relation.oid, new)
        return encode_update(relation.oid, new, old, old_is_key=is_key)

    def _values(self, relation: RowDescriptor, values: Sequence[RowValue]) -> list[Value]:
        return [
            self._value(relation, column, value)
            for column, value in zip(relation.columns, values, strict=True)
            if is_sent(column)
        ]

    def _value(self, relation: RowDescriptor, column: ColumnDescriptor, value: RowValue) -> Value:
        if value is None or isinstance(value, Unchanged):
            return value
        return render_column(self._renderers, relation, column, value)
