"""Stored values of extensions' types as the server prints them: hstore and ltree.

Invariant: known by the names of their types, because an extension's OIDs differ from database to
database; a layout that is not theirs is refused.

    hstore = count and 0x80000000:4 (end:30 is_null:1 is_first:1):4 for each key and value, data
    ltree  = levels:2 unused:2 (length:2 label, padded to 8 bytes)*

Facts: contrib/hstore/hstore.h, hstore_io.c, hstore_out(); contrib/ltree/ltree.h, ltree_io.c.
"""

from __future__ import annotations

import struct
from typing import Final

from millrace.wal.types.scalar import TEXT_ENCODING

_NEW_VERSION: Final = 0x80000000
_COUNT: Final = 0x0FFFFFFF
_END: Final = 0x3FFFFFFF
_IS_NULL: Final = 0x40000000


def render_hstore(data: bytes) -> str:
    if not data:
        return ""
    (header,) = struct.unpack_from("<I", data)
    if not header & _NEW_VERSION:
        raise ValueError("the format of hstore before version 9.0")
    count = header & _COUNT
    entries = struct.unpack_from(f"<{2 * count}I", data, 4)
    base = 4 + 8 * count
    ends = [entry & _END for entry in entries]
    if ends and base + ends[-1] > len(data):
        raise ValueError(f"{count} pairs")
    texts = [
        _quoted(data[base + first : base + end])
        for first, end in zip([0, *ends], ends, strict=False)
    ]
    pairs = zip(texts[::2], texts[1::2], entries[1::2], strict=True)
    return ", ".join(
        f"{key}=>{'NULL' if entry & _IS_NULL else value}" for key, value, entry in pairs
    )


def _quoted(data: bytes) -> str:
    text = data.decode(TEXT_ENCODING)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def render_ltree(data: bytes) -> str:
    (levels,) = struct.unpack_from("<H", data)
    at = 4
    labels = []
    for _ in range(levels):
        (length,) = struct.unpack_from("<H", data, at)
        label = data[at + 2 : at + 2 + length]
        if len(label) != length:
            raise ValueError("a label behind the end")
        labels.append(label.decode(TEXT_ENCODING))
        at += 2 + length
        at += -(2 + length) % 8
    return ".".join(labels)
