"""The change batch: row events of the source as an Arrow table, wherever they were decoded.

Invariant: batches of one source, in their order, hold whole transactions in commit order; within a
transaction `position` counts its changes from 0. A value is the text PostgreSQL prints, NULL is an
entry of the map without a value, and a column that was not sent has no entry.

Which columns are there depends on the operation:

    insert    new
    update    new, and old if the key changed or the replica identity is FULL; out-of-line values
              that the update left alone are in neither, but named in unchanged
    delete    old
    truncate  neither; a row for each table, with one lsn for the tables of one statement
    message   neither, but prefix and content; it is of no table, so what describes one is NULL

Partitions go by the name of the topmost table they belong to, but in a truncate by their own: what
else the table holds stays.

`old` has the columns of the replica identity, which are named in `key`: those of the primary key or
of another index, or all with REPLICA IDENTITY FULL.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from millrace.errors import FormatError, UnknownVersion

# Of the layout below. It is in the metadata of every batch's schema, so that whoever stores batches
# stores it with them; another one is refused.
VERSION: Final = 1
VERSION_KEY: Final = b"millrace.change_batch"

INSERT: Final = "insert"
UPDATE: Final = "update"
DELETE: Final = "delete"
TRUNCATE: Final = "truncate"
# What was given to pg_logical_emit_message.
MESSAGE: Final = "message"
OPERATIONS: Final = (INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE)

# By pg_class.relreplident.
REPLICA_IDENTITIES: Final = {"d": "default", "i": "index", "f": "full", "n": "nothing"}

# What is in `options` of a truncate.
CASCADE: Final = "cascade"
RESTART_IDENTITY: Final = "restart_identity"

_NAMES: Final = pa.list_(pa.field("element", pa.string()))
ROW: Final = pa.map_(pa.string(), pa.string())

SCHEMA: Final = pa.schema(
    [
        # Where the commit record begins, where it ends, and where the change itself is.
        ("commit_lsn", pa.int64()),
        ("end_lsn", pa.int64()),
        ("lsn", pa.int64()),
        ("position", pa.int64()),
        ("xid", pa.int64()),
        ("committed_at", pa.timestamp("us", "UTC")),
        ("schema", pa.string()),
        ("table", pa.string()),
        # pg_class.oid on the source: it stays the same when the table is renamed.
        ("relation_oid", pa.int64()),
        ("operation", pa.string()),
        # default, index, full or nothing: what the source sends of the old row.
        ("replica_identity", pa.string()),
        ("key", _NAMES),
        ("old", ROW),
        ("new", ROW),
        ("unchanged", _NAMES),
        ("options", _NAMES),
        ("prefix", pa.string()),
        ("content", pa.binary()),
    ],
    metadata={VERSION_KEY: str(VERSION).encode()},
)


def check_schema(schema: pa.Schema) -> None:
    """Refuse what is not a change batch, or one of a layout that this program does not know."""
    found = (schema.metadata or {}).get(VERSION_KEY)
    if found is None:
        raise FormatError(
            "expected a change batch: the schema's metadata has no millrace.change_batch"
        )
    if found != SCHEMA.metadata[VERSION_KEY]:
        raise UnknownVersion(
            f"expected version {VERSION} of change batches, found {found.decode(errors='replace')}",
            hint="use the version of millrace that wrote them",
        )
    if not schema.equals(SCHEMA):
        names = sorted(set(schema.names) ^ set(SCHEMA.names))
        raise FormatError(
            f"expected the columns of change batches, version {VERSION}: "
            + (f"different are {', '.join(names)}" if names else "their types or order differ")
        )
