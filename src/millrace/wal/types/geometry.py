"""Stored geometric values as the server prints them.

Invariant: every coordinate is printed as a float8 is under the same settings.

    path    = points:4 is_closed:4 unused:4 (x:8 y:8)*
    polygon = points:4 bounding box:32 (x:8 y:8)*

Facts: geo_decls.h; geo_ops.c, path_encode().
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from millrace.wal.types.number import float_renderer
from millrace.wal.types.settings import OutputSettings

Render = Callable[[bytes], str]

_BOX_BYTES: Final = 32


def geometry_renderers(settings: OutputSettings) -> dict[str, Render]:
    """By the name of the type."""
    number = float_renderer(settings)

    def points(data: bytes) -> str:
        pairs = struct.iter_unpack("<2d", data)
        return ",".join([f"({number(x)},{number(y)})" for x, y in pairs])

    def line(data: bytes) -> str:
        return "{" + ",".join(map(number, struct.unpack("<3d", data))) + "}"

    def path(data: bytes) -> str:
        count, is_closed = struct.unpack_from("<ii", data)
        inner = points(_counted(data[12:], count))
        return f"({inner})" if is_closed else f"[{inner}]"

    def polygon(data: bytes) -> str:
        (count,) = struct.unpack_from("<i", data)
        return f"({points(_counted(data[4 + _BOX_BYTES :], count))})"

    def circle(data: bytes) -> str:
        x, y, radius = struct.unpack("<3d", data)
        return f"<({number(x)},{number(y)}),{number(radius)}>"

    return {
        "point": points,
        "line": line,
        "lseg": lambda data: f"[{points(data)}]",
        "box": points,
        "path": path,
        "polygon": polygon,
        "circle": circle,
    }


def _counted(data: bytes, count: int) -> bytes:
    if len(data) != 16 * count:
        raise ValueError(f"{count} points in {len(data)} bytes")
    return data
