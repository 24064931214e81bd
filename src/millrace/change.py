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

Partitions go by the name of the topmost table they belong to, but in a truncate by their own: what
else the table holds stays.

`old` has the columns of the replica identity, which are named in `key`: those of the primary key or
of another index, or all with REPLICA IDENTITY FULL.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

INSERT: Final = "insert"
UPDATE: Final = "update"
DELETE: Final = "delete"
TRUNCATE: Final = "truncate"
OPERATIONS: Final = (INSERT, UPDATE, DELETE, TRUNCATE)

# By pg_class.relreplident.
REPLICA_IDENTITIES: Final = {"d": "default", "i": "index", "f": "full", "n": "nothing"}

# What stands in `options` of a truncate.
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
        # default, index, full or nothing: what the source tells of the old row.
        ("replica_identity", pa.string()),
        ("key", _NAMES),
        ("old", ROW),
        ("new", ROW),
        ("unchanged", _NAMES),
        ("options", _NAMES),
    ]
)
