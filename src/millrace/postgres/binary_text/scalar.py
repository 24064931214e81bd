"""Text, bytes, addresses and other single values as PostgreSQL prints them.

Invariant: the text of a value depends on its bytes and on the client encoding, nothing else.

Facts: the types' own *send() and *out() functions under src/backend/utils/adt; for IPv6,
inet_net_ntop.c.
"""

from __future__ import annotations

import struct
import uuid
from itertools import groupby
from typing import Final

_IPV4, _IPV6 = 2, 3
_MAX_BITS = {_IPV4: 32, _IPV6: 128}
_JSON_VERSION: Final = 1


def render_bool(data: bytes, encoding: str) -> str:
    (value,) = struct.unpack(">B", data)
    return "t" if value else "f"


def render_text(data: bytes, encoding: str) -> str:
    return data.decode(encoding)


def render_char(data: bytes, encoding: str) -> str:
    """The type "char": one byte, which need not be a character."""
    (value,) = struct.unpack(">B", data)
    if value >= 128:
        return f"\\{value:03o}"
    return chr(value) if value else ""


def render_bytea(data: bytes, encoding: str) -> str:
    return "\\x" + data.hex()


def render_uuid(data: bytes, encoding: str) -> str:
    return str(uuid.UUID(bytes=data))


def render_versioned(data: bytes, encoding: str) -> str:
    """jsonb and jsonpath: text behind the number of its format."""
    if data[0] != _JSON_VERSION:
        raise ValueError(f"version {data[0]}")
    return data[1:].decode(encoding)


def render_xml(data: bytes, encoding: str) -> str:
    # In another encoding the server puts a declaration in front that the text form has not.
    if encoding != "utf-8":
        raise ValueError("XML in another encoding than UTF8")
    return data.decode(encoding)


def render_bit(data: bytes, encoding: str) -> str:
    (count,) = struct.unpack_from(">i", data)
    if count < 0 or len(data) != 4 + (count + 7) // 8:
        raise ValueError(f"{count} bits in {len(data)} bytes")
    return "".join([f"{byte:08b}" for byte in data[4:]])[:count]


def render_macaddr(data: bytes, encoding: str) -> str:
    if len(data) not in (6, 8):
        raise ValueError("neither 6 nor 8 bytes")
    return data.hex(":")


def render_inet(data: bytes, encoding: str) -> str:
    family, bits, is_cidr, size = struct.unpack_from(">BB?B", data)
    address = data[4:]
    if family not in _MAX_BITS or len(address) != size or 8 * size != _MAX_BITS[family]:
        raise ValueError(f"an address of {len(address)} bytes")
    text = render_address(address)
    return f"{text}/{bits}" if is_cidr or bits != _MAX_BITS[family] else text


def render_lsn(data: bytes, encoding: str) -> str:
    high, low = struct.unpack(">II", data)
    return f"{high:X}/{low:X}"


def render_tid(data: bytes, encoding: str) -> str:
    block, item = struct.unpack(">IH", data)
    return f"({block},{item})"


def render_snapshot(data: bytes, encoding: str) -> str:
    (count,) = struct.unpack_from(">i", data)
    xmin, xmax, *running = struct.unpack(f">{2 + count}Q", data[4:])
    return f"{xmin}:{xmax}:{','.join(map(str, running))}"


def render_address(address: bytes) -> str:
    """4 bytes of IPv4 or 16 of IPv6, without the length of a network."""
    return ".".join(map(str, address)) if len(address) == 4 else _render_ipv6(address)


def _render_ipv6(address: bytes) -> str:
    words = struct.unpack(">8H", address)
    first, count = _longest_zeros(words)
    # Addresses that hold one of IPv4 are printed with it.
    is_ipv4 = first == 0 and (count == 6 or (count == 5 and words[5] == 0xFFFF))
    shown = [f"{word:x}" for word in words]
    if is_ipv4:
        shown[6:] = [".".join(map(str, address[12:]))]
    if count < 2:
        return ":".join(shown)
    return ":".join(shown[:first]) + "::" + ":".join(shown[first + count :])


def _longest_zeros(words: tuple[int, ...]) -> tuple[int, int]:
    """(where, how many); the first of equally long ones."""
    best = (0, 0)
    at = 0
    for is_zero, group in groupby(words, lambda word: word == 0):
        count = len(list(group))
        if is_zero and count > best[1]:
            best = (at, count)
        at += count
    return best
