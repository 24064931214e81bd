"""Digests in the place of values: computed by the source for a copy, here for changes.

Invariant: the same value and key give the same digest, on every source, whichever way the value
came; NULL stays NULL. The key is in no statement and in no work directory's tables: a session gets
it when it connects, as two settings.

    HMAC-SHA256(key, value) = sha256(outer || sha256(inner || value))

where `inner` and `outer` are the key with each byte changed by a constant. The value is the text in
UTF-8, or the bytes of a bytea. The digest of a text is its 64 hexadecimal digits, that of a bytea
its 32 bytes: so the column keeps its type.

Facts: RFC 2104; PostgreSQL documentation, "Binary String Functions" (sha256, since version 11).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from millrace.errors import ConfigError
from millrace.postgres.quote import ident

_BLOCK_BYTES: Final = 64
_INNER, _OUTER = "millrace.hash_inner", "millrace.hash_outer"
BYTEA_OID: Final = 17
# Of the text that a digest is.
DIGITS: Final = 64


def digest_settings(key: bytes) -> dict[str, str]:
    """What a session must know to compute digests."""
    block = (key if len(key) <= _BLOCK_BYTES else hashlib.sha256(key).digest()).ljust(
        _BLOCK_BYTES, b"\0"
    )
    return {
        _INNER: bytes(byte ^ 0x36 for byte in block).hex(),
        _OUTER: bytes(byte ^ 0x5C for byte in block).hex(),
    }


def digest_sql(column: str, type_name: str) -> str:
    """The digest of a column, in a session with these settings."""
    is_bytea = type_name == "bytea"
    value = ident(column) if is_bytea else f"convert_to({ident(column)}::text, 'UTF8')"
    digest = f"sha256({_pad(_OUTER)} || sha256({_pad(_INNER)} || {value}))"
    return digest if is_bytea else f"encode({digest}, 'hex')"


def _pad(name: str) -> str:
    return f"decode(current_setting('{name}'), 'hex')"


class Digester:
    """Computes the same without a server."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        if _INNER not in settings:
            raise ConfigError(
                "columns are to arrive as digests, and there is no key for them",
                hint="only `millrace consolidate` has one: use its commands",
            )
        self._inner = hashlib.sha256(bytes.fromhex(settings[_INNER]))
        self._outer = hashlib.sha256(bytes.fromhex(settings[_OUTER]))

    def digest(self, value: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(value)
        outer.update(inner.digest())
        return outer.digest()
