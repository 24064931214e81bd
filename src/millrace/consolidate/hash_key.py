"""The key of the digests that columns arrive as.

Invariant: all sources of a work directory have one key, made before the first digest and kept from
then on, so that digests of the same value are the same everywhere. It is in a file of its own that
nobody else may read. What is copied is pinned to a name of the key that does not give it away.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Final

from millrace.config.dsn import Dsn
from millrace.consolidate.config import Consolidation, SourceConfig
from millrace.errors import ConfigError
from millrace.filter.rules import FilterRules
from millrace.postgres.digest import digest_settings
from millrace.room import writing
from millrace.workdir.place import make_private

FILE: Final = "hash.key"
_BYTES: Final = 32
# Shorter ones can be tried out.
_LEAST_BYTES: Final = 16
_NAME_DIGITS: Final = 16


def find_key(
    consolidation: Consolidation, source: SourceConfig, directory: Path, *, makes: bool = True
) -> bytes:
    """The key; empty if no column of the source is hashed. If the work directory has none, it is
    made, unless nothing may be changed."""
    if not source.filters.of("hash-column"):
        return b""
    path = consolidation.hash_key or directory / FILE
    if consolidation.hash_key is None and not path.exists():
        if not makes:
            return b""
        _make(path)
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"the hash key can't be read: {error}", hint="hash_key = ... names its file"
        ) from error
    if len(key) < _LEAST_BYTES:
        raise ConfigError(
            f"the hash key in {path} has {len(key)} bytes, and at least {_LEAST_BYTES} are needed",
            hint=f"make one: openssl rand -hex {_BYTES} > {path}",
        )
    return key


def with_key(dsn: Dsn, key: bytes) -> Dsn:
    """The same database, with sessions that can compute digests."""
    return replace(dsn, settings=dsn.settings | digest_settings(key)) if key else dsn


def rules_with_key(rules: FilterRules, key: bytes) -> FilterRules:
    """The rules, those about digests with a name of the key."""
    name = hashlib.sha256(b"millrace hash key " + key).hexdigest()[:_NAME_DIGITS]
    return replace(
        rules,
        rules=tuple(
            replace(rule, predicate=name) if rule.section == "hash-column" else rule
            for rule in rules.rules
        ),
    )


def _make(path: Path) -> None:
    """Whole or not at all: another process may make it at the same time, and one of them wins."""
    make_private(path.parent)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with writing(path, needed_bytes=_BYTES):
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(scratch, path)
        except FileExistsError:
            return
        finally:
            scratch.unlink()
