"""Digests in the place of values: RFC 2104, and the same whichever way a value came."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError, FormatError
from millrace.postgres.digest import BYTEA_OID, Digester, digest_settings
from millrace.postgres.pgoutput.messages import (
    UNCHANGED,
    RelationColumn,
    RelationVersion,
    decode_relation,
    encode_delete,
    encode_frame,
    encode_insert,
    encode_relation,
    encode_update,
    scan,
)
from millrace.receive.mask import Mask, Masker

KEY = b"0123456789abcdef"
RELATION = RelationVersion(
    7,
    "s",
    "t",
    "f",
    (
        RelationColumn("a", 25, -1, True),
        RelationColumn("b", 25, -1, True),
        RelationColumn("c", BYTEA_OID, -1, True),
    ),
)
NAME = ("s", "t")


def digest(value: bytes) -> bytes:
    return hmac.digest(KEY, value, hashlib.sha256)


def masked(mask: Mask, *messages: bytes, encoding: str = "UTF8") -> list[bytes]:
    data = b"".join(encode_frame(one, 1) for one in messages)
    frames, found = Masker(mask, encoding, digest_settings(KEY)).translate(
        memoryview(data), scan(np.frombuffer(data, np.uint8), len(data))
    )
    return [
        bytes(frames[int(at) : int(at + size)])
        for at, size in zip(found.offset, found.length, strict=True)
    ]


@given(st.binary(max_size=200), st.binary(max_size=300))
def test_a_digest_is_hmac_sha256(key: bytes, value: bytes) -> None:
    assert Digester(digest_settings(key)).digest(value) == hmac.digest(key, value, hashlib.sha256)


def test_without_a_key_nothing_is_received() -> None:
    with pytest.raises(ConfigError, match="no key"):
        Masker(Mask(hashed={NAME: frozenset({"a"})}), "UTF8", {})


def test_masked_columns_are_hashed_or_gone_in_every_tuple() -> None:
    mask = Mask({NAME: frozenset({"b"})}, {NAME: frozenset({"a", "c"})})
    old, new = [b"x", b"y", b"\\x00"], [None, b"z", UNCHANGED]
    relation, insert, update, delete = masked(
        mask,
        encode_relation(RELATION),
        encode_insert(7, old),
        encode_update(7, new, old, old_is_key=False),
        encode_delete(7, old, old_is_key=False),
    )
    assert [one.name for one in decode_relation(relation).columns] == ["a", "c"]
    hashed = [digest(b"x").hex().encode(), b"\\x" + digest(b"\0").hex().encode()]
    assert insert == encode_insert(7, hashed)
    assert update == encode_update(7, [None, UNCHANGED], hashed, old_is_key=False)
    assert delete == encode_delete(7, hashed, old_is_key=False)


def test_a_text_is_hashed_in_utf_8_whatever_it_came_in() -> None:
    mask = Mask(hashed={NAME: frozenset({"a"})})
    _, row = masked(
        mask,
        encode_relation(RELATION),
        encode_insert(7, ["ü".encode("latin-1"), None, None]),
        encoding="LATIN1",
    )
    assert row == encode_insert(7, [digest("ü".encode()).hex().encode(), None, None])


def test_other_tables_pass_as_they_came() -> None:
    other = RelationVersion(8, "s", "u", "d", RELATION.columns)
    messages = [encode_relation(other), encode_insert(8, [b"x", b"y", b"z"])]
    assert masked(Mask({NAME: frozenset({"b"})}), *messages) == messages


def test_a_damaged_row_is_refused() -> None:
    mask = Mask({NAME: frozenset({"b"})})
    with pytest.raises(FormatError):
        masked(mask, encode_relation(RELATION), encode_insert(7, [b"x", b"y", b"z"])[:-1])
    with pytest.raises(FormatError):
        masked(mask, encode_relation(RELATION), encode_insert(7, [b"x"]))
