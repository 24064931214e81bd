"""Compiling the kernels before they are needed.

Invariant: it changes nothing but the cache of machine code beside this package, which every
later process on this machine finds.
"""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from millrace.apply.fold import fold
from millrace.postgres.pgoutput.messages import (
    Begin,
    Commit,
    RelationColumn,
    RelationVersion,
    encode_begin,
    encode_commit,
    encode_delete,
    encode_frame,
    encode_insert,
    encode_relation,
    encode_update,
    scan,
    whole_frames,
)
from millrace.postgres.pgoutput.tuples import locate
from millrace.postgres.wire.copy_format import encode_binary, encode_text
from millrace.postgres.wire.slot_batch import make_frames


def warm_up(argument: int = 0, attempt: int = 0) -> int:
    """Run every kernel once; a task body, so that the workers' machines compile as well."""
    row, other = [b"1", b"x" * 40], [b"2", None]
    messages = [
        encode_insert(1, row),
        encode_update(1, other, row),
        encode_delete(1, other),
    ]
    buffer = np.frombuffer(b"".join(encode_frame(one, 1) for one in messages), np.uint8)
    found = scan(buffer, len(buffer))
    whole_frames(buffer, len(buffer))
    make_frames(np.empty(0, np.uint8))
    rows = locate(buffer, found.kind, found.offset, found.length, found.lsn, 2)
    key, both = np.array([0], np.int64), np.array([0, 1], np.int64)
    fold(rows, key, is_multiset=False)
    # Without its insert, the row was there before.
    fold(rows.between(1, len(rows)), both, is_multiset=True).known_by(key, both)
    for encode in (encode_binary, encode_text):
        encode(buffer, rows.new, numbered=True)
    return argument


def warm_up_reading() -> None:
    """The same for those who read changes: a small spool is written and read."""
    from millrace.spool.change_batch import iter_changes
    from millrace.spool.reader import SpoolReader
    from millrace.spool.writer import SpoolWriter

    # A date, a timestamptz, a numeric and a bytea, each as the server sends it.
    types = {1082: bytes(4), 1184: bytes(8), 1700: struct.pack(">5h", 1, 0, 0, 0, 1), 17: b"x"}
    columns = tuple(RelationColumn(f"c{oid}", oid, -1, is_key=False) for oid in types)
    row = b"".join(struct.pack(">cI", b"b", len(value)) + value for value in types.values())
    messages = [
        encode_begin(Begin(1, 0, 1)),
        encode_relation(RelationVersion(1, "public", "t", "f", columns)),
        struct.pack(">cIcH", b"I", 1, b"N", len(types)) + row,
        encode_commit(Commit(1, 2, 0)),
    ]
    frames = b"".join(encode_frame(one, 2) for one in messages)
    with TemporaryDirectory() as folder:
        with SpoolWriter(Path(folder)) as spool:
            spool.append(memoryview(frames), scan(np.frombuffer(frames, np.uint8), len(frames)))
            spool.sync()
        reader = SpoolReader(Path(folder))
        found = reader.plan(0, 1, None)
        assert found is not None
        for _ in iter_changes(reader, found, "utf-8"):
            continue


if __name__ == "__main__":
    warm_up()
    warm_up_reading()
