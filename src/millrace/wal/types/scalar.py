"""Stored text, bytes, addresses and other single values as the server prints them.

Invariant: texts are as stored, one character for each byte: no encoding is known here. All
encodings a server can have keep ASCII for itself, so what is quoted and escaped is the same.

Facts: the types' own *out() functions under src/backend/utils/adt; inet.h; xml.c,
xml_out_internal(), print_xml_decl().
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Callable
from typing import Final

from millrace.postgres.binary_text.scalar import render_address
from millrace.wal.types.settings import OutputSettings

Render = Callable[[bytes], str]

TEXT_ENCODING: Final = "latin-1"

_IPV4: Final = 2
_ADDRESS_BYTES: Final = {2: 4, 3: 16}
_OCTAL_CHAR_FROM: Final = 16
_XML_DECLARATION: Final = re.compile(
    r"<\?xml[ \t\r\n]+version[ \t\r\n]*=[ \t\r\n]*(?:'([^']*)'|\"([^\"]*)\")"
    r"(?:[ \t\r\n]+encoding[ \t\r\n]*=[ \t\r\n]*(?:'[^']*'|\"[^\"]*\"))?"
    r"(?:[ \t\r\n]+standalone[ \t\r\n]*=[ \t\r\n]*(?:'(yes|no)'|\"(yes|no)\"))?"
    r"[ \t\r\n]*\?>"
)


def render_bool(data: bytes) -> str:
    (value,) = struct.unpack("<B", data)
    return "t" if value else "f"


def render_text(data: bytes) -> str:
    return data.decode(TEXT_ENCODING)


def render_name(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(TEXT_ENCODING)


def char_renderer(settings: OutputSettings) -> Render:
    """The type "char": one byte, which need not be a character."""
    is_octal = settings.server_version >= _OCTAL_CHAR_FROM

    def render(data: bytes) -> str:
        (value,) = struct.unpack("<B", data)
        if value >= 128 and is_octal:
            return f"\\{value:03o}"
        return chr(value) if value else ""

    return render


def bytea_renderer(settings: OutputSettings) -> Render:
    return _escape if settings.bytea_output == "escape" else lambda data: "\\x" + data.hex()


def _escape(data: bytes) -> str:
    return "".join([_ESCAPES[byte] for byte in data])


def _escaped(byte: int) -> str:
    if byte == 0x5C:
        return "\\\\"
    return chr(byte) if 0x20 <= byte <= 0x7E else f"\\{byte:03o}"


_ESCAPES: Final = tuple(map(_escaped, range(256)))


def render_uuid(data: bytes) -> str:
    return str(uuid.UUID(bytes=data))


def render_bit(data: bytes) -> str:
    (count,) = struct.unpack_from("<i", data)
    if count < 0 or len(data) != 4 + (count + 7) // 8:
        raise ValueError(f"{count} bits in {len(data)} bytes")
    return "".join([f"{byte:08b}" for byte in data[4:]])[:count]


def render_macaddr(data: bytes) -> str:
    return data.hex(":")


def render_inet(data: bytes) -> str:
    return _network(data, is_cidr=False)


def render_cidr(data: bytes) -> str:
    return _network(data, is_cidr=True)


def _network(data: bytes, *, is_cidr: bool) -> str:
    family, bits = data[0], data[1]
    size = _ADDRESS_BYTES[family]
    if len(data) < 2 + size:
        raise ValueError(f"an address of {len(data)} bytes")
    text = render_address(data[2 : 2 + size])
    return f"{text}/{bits}" if is_cidr or bits != 8 * size else text


def render_lsn(data: bytes) -> str:
    (position,) = struct.unpack("<Q", data)
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def render_tid(data: bytes) -> str:
    high, low, item = struct.unpack("<HHH", data)
    return f"({high << 16 | low},{item})"


def render_snapshot(data: bytes) -> str:
    (count,) = struct.unpack_from("<I", data)
    xmin, xmax, *running = struct.unpack(f"<{2 + count}Q", data[4:])
    return f"{xmin}:{xmax}:{','.join(map(str, running))}"


def render_xml(data: bytes) -> str:
    """The encoding it was given in is no longer true, so the declaration is printed without."""
    text = data.decode(TEXT_ENCODING)
    match = _XML_DECLARATION.match(text)
    if match is None:
        return text.removeprefix("\n") if not text.startswith("<?xml") else text
    version, standalone = match[1] or match[2], match[3] or match[4]
    rest = text[match.end() :]
    if version == "1.0" and standalone is None:
        return rest.removeprefix("\n")
    suffix = f' standalone="{standalone}"' if standalone else ""
    return f'<?xml version="{version}"{suffix}?>{rest}'
