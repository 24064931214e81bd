"""Compiling the kernels before they are needed.

Invariant: it changes nothing but the cache of machine code beside this package, which every
later process on this machine finds.
"""

from __future__ import annotations

import numpy as np

from millrace.postgres.copy_format import encode_binary, encode_text
from millrace.postgres.pgoutput import (
    encode_delete,
    encode_frame,
    encode_insert,
    encode_update,
    scan,
    whole_frames,
)
from millrace.postgres.pgoutput_tuple import locate
from millrace.stream.fold import fold


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
    rows = locate(buffer, found.kind, found.offset, found.length, found.lsn, 2)
    fold(rows, np.array([0], np.int64), is_multiset=False)
    for encode in (encode_binary, encode_text):
        encode(buffer, rows.new, numbered=True)
    return argument


if __name__ == "__main__":
    warm_up()
