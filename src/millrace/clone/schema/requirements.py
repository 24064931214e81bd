"""The versions that extensions are to have on the target: pgcopydb's JSON file.

    [{"name": "postgis", "version": "3.4.2"}, ...]

Invariant: an extension that is named here is created in that version, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from millrace.config.file import read_given
from millrace.errors import ConfigError, InvariantError
from millrace.postgres.quote import literal
from millrace.postgres.sql_text import cut_statements


def read_requirements(path: Path) -> dict[str, str]:
    """Versions by the extension's name."""
    return parse_requirements(read_given(path, "requirements"), name=str(path))


def parse_requirements(text: str, *, name: str) -> dict[str, str]:
    """Versions of a file's text; `name` is for messages."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(name, f"line {error.lineno} is not JSON: {error.msg}") from error
    if not isinstance(found, list):
        raise _wrong(name, "there is no list in it")
    versions: dict[str, str] = {}
    for number, one in enumerate(found, 1):
        match one:
            case {"name": str(extension), "version": str(version), **more} if not more:
                if versions.setdefault(extension, version) != version:
                    raise _wrong(name, f"two versions of {extension}")
            case _:
                raise _wrong(name, f"number {number} has not just a name and a version")
    return versions


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{name}: {what}",
        hint="`millrace list extensions --requirements` prints such a file for the source",
        file=name,
    )


def pin_versions(script: bytes, extensions: Iterable[str], versions: Mapping[str, str]) -> bytes:
    """A script of pg_restore that creates these extensions, in the versions wanted."""
    wanted = {name: versions[name] for name in extensions if name in versions}
    if not wanted:
        return script
    pieces = []
    for statement in cut_statements(script):
        name = statement.tree.create_extension_stmt.extname
        version = wanted.pop(name, None)
        addition = b"" if version is None else f" VERSION {literal(version)}".encode()
        text, length = statement.text, statement.length
        pieces.append(text[:length] + addition + text[length:])
    if wanted:
        raise InvariantError(f"the dump does not create extension {next(iter(wanted))}")
    return b"".join(pieces)
