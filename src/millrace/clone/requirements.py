"""The versions that extensions are to have on the target: pgcopydb's JSON file.

    [{"name": "postgis", "version": "3.4.2"}, ...]

Invariant: an extension that is named here is created in that version, or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from millrace.config.file import read_given
from millrace.errors import ConfigError, InvariantError
from millrace.postgres.quote import ident, literal


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
    for name in extensions:
        if name not in versions:
            continue
        # pg_dump quotes a name where it must.
        either = b"|".join(re.escape(form.encode()) for form in (name, ident(name)))
        create = rb"^CREATE EXTENSION IF NOT EXISTS (?:%s) WITH SCHEMA [^\n]*(?=;$)" % either
        # The first is the one: extensions come before everything that could quote such a line.
        found = re.search(create, script, re.MULTILINE)
        if not found:
            raise InvariantError(f"the dump does not create extension {name}")
        version = f" VERSION {literal(versions[name])}".encode()
        script = script[: found.end()] + version + script[found.end() :]
    return script
