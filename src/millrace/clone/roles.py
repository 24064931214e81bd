"""Roles of the source's whole server, made on the target where they are missing.

Invariant: a role that exists on the target is left as it is. Password hashes pass
through memory only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import Any

import psycopg

from millrace.clone.settings import CloneSettings
from millrace.postgres.binaries import Installation
from millrace.postgres.connect import translated
from millrace.postgres.dump import dump_roles
from millrace.postgres.script import run_script

log = logging.getLogger(__name__)

_NAME = r'("(?:[^"]|"")*"|[^\s;"]+)'
_ABOUT_ROLE = re.compile(rf"(CREATE ROLE|ALTER ROLE|COMMENT ON ROLE|GRANT {_NAME} TO) {_NAME}")
_GRANTED_BY = re.compile(rf"(GRANT {_NAME} TO {_NAME}(?: WITH [A-Z, ]+)?) GRANTED BY {_NAME};")
# A comment, a psql command, an empty line, or a statement: whatever is quoted in that may hold
# semicolons and line breaks.
_STATEMENT = re.compile(
    r"""--[^\n]*\n|\\[^\n]*\n|\n|(?:[^;'"]|'(?:[^']|'')*'|"(?:[^"]|"")*")*;\n?"""
)


def copy_roles(
    tools: Installation, settings: CloneSettings, target: psycopg.Connection[tuple[Any, ...]]
) -> None:
    """pg_dumpall --roles-only, less what exists."""
    with translated("reading the target's roles"):
        existing = {row[0] for row in target.execute("SELECT rolname FROM pg_roles")}
    script = dump_roles(tools, settings.source, passwords=settings.role_passwords)
    script = without_grantors(without_existing(script, existing))
    run_script(
        settings.target,
        script.encode(errors="surrogateescape"),
        "copying roles",
        role="roles",
    )


def without_existing(script: str, existing: Collection[str]) -> str:
    """The script less the statements that make, alter, describe or enrol roles in `existing`."""
    kept = []
    for statement in _STATEMENT.findall(script):
        match = _ABOUT_ROLE.match(statement)
        name = _unquoted(match[3]) if match else None
        if name is None or name not in existing:
            kept.append(statement)
        elif match and match[1] == "CREATE ROLE":
            log.info("role %s exists on the target and is left as it is", name)
    return "".join(kept)


def without_grantors(script: str) -> str:
    """The script with memberships granted by whoever runs it: the one who granted them on the
    source may lack the ADMIN option on the target, which 16 and later insist on."""
    return "".join(
        _GRANTED_BY.sub(r"\1;", one, count=1) if _GRANTED_BY.match(one) else one
        for one in _STATEMENT.findall(script)
    )


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name
