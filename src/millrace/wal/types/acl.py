"""Stored access privileges as the server prints them.

Invariant: letters come in the server's order, `*` behind those that may be granted on.

    aclitem = grantee:4 grantor:4 privileges: 16 bits and 16 for the grant option before version
              16, twice 32 since

Facts: acl.h, ACL_ALL_RIGHTS_STR; acl.c, aclitemout(), putid().
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Final

_LETTERS: Final = "arwdDxtXUCTcsAm"
_IS_SAFE: Final = re.compile(r"[A-Za-z0-9_]*")
_OLD_BYTES: Final = 12


def acl_renderer(role_name: Callable[[int], str | None]) -> Callable[[bytes], str]:
    """`role_name` gives the name of a role by its OID."""

    def role(oid: int) -> str:
        name = role_name(oid)
        return str(oid) if name is None else _quoted(name)

    def render(data: bytes) -> str:
        grantee, grantor = struct.unpack_from("<II", data)
        layout = "<HH" if len(data) == _OLD_BYTES else "<II"
        privileges, options = struct.unpack(layout, data[8:])
        letters = "".join(
            letter + ("*" if options >> bit & 1 else "")
            for bit, letter in enumerate(_LETTERS)
            if privileges >> bit & 1
        )
        return f"{role(grantee) if grantee else ''}={letters}/{role(grantor)}"

    return render


def _quoted(name: str) -> str:
    if _IS_SAFE.fullmatch(name):
        return name
    return '"' + name.replace('"', '""') + '"'
