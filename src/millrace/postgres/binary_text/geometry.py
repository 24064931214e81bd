"""Geometric types as PostgreSQL prints them.

Invariant: every coordinate is printed as a float8 is.

Facts: geo_ops.c, the functions *_send() and *_out().
"""

from __future__ import annotations

import struct
from typing import Final

from millrace.postgres.binary_text.number import render_double

_POINT_BYTES: Final = 16


def render_point(data: bytes, encoding: str) -> str:
    (point,) = _points(data, 1)
    return point


def render_line(data: bytes, encoding: str) -> str:
    return "{" + ",".join(map(render_double, struct.unpack(">3d", data))) + "}"


def render_lseg(data: bytes, encoding: str) -> str:
    return "[" + ",".join(_points(data, 2)) + "]"


def render_box(data: bytes, encoding: str) -> str:
    return ",".join(_points(data, 2))


def render_path(data: bytes, encoding: str) -> str:
    is_closed, count = struct.unpack_from(">?i", data)
    points = ",".join(_points(data[5:], count))
    return f"({points})" if is_closed else f"[{points}]"


def render_polygon(data: bytes, encoding: str) -> str:
    (count,) = struct.unpack_from(">i", data)
    return "(" + ",".join(_points(data[4:], count)) + ")"


def render_circle(data: bytes, encoding: str) -> str:
    (center,) = _points(data[:_POINT_BYTES], 1)
    (radius,) = struct.unpack(">d", data[_POINT_BYTES:])
    return f"<{center},{render_double(radius)}>"


def _points(data: bytes, count: int) -> list[str]:
    if len(data) != _POINT_BYTES * count:
        raise ValueError(f"{count} points in {len(data)} bytes")
    pairs = struct.iter_unpack(">2d", data)
    return [f"({render_double(x)},{render_double(y)})" for x, y in pairs]
