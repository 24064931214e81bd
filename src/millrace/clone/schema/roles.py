"""Roles of the source's whole server, made on the target where they are missing.

Invariant: a role that exists on the target is left as it is. Password hashes pass
through memory only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import psycopg

from millrace.clone.settings import CloneSettings
from millrace.postgres.program.binaries import Installation
from millrace.postgres.program.dump import dump_roles
from millrace.postgres.program.script import run_script
from millrace.postgres.sql_text import AstNode, Statement, cut_statements
from millrace.postgres.wire.connect import translated

log = logging.getLogger(__name__)


def copy_roles(
    tools: Installation, settings: CloneSettings, target: psycopg.Connection[tuple[Any, ...]]
) -> None:
    """pg_dumpall --roles-only, less what exists."""
    with translated("reading the target's roles"):
        existing = {row[0] for row in target.execute("SELECT rolname FROM pg_roles")}
    script = dump_roles(tools, settings.source, passwords=settings.role_passwords)
    run_script(
        settings.target,
        missing_roles(script.encode(errors="surrogateescape"), existing),
        "copying roles",
        role="roles",
    )


def missing_roles(script: bytes, existing: Collection[str]) -> bytes:
    """The script less the statements that make, alter, describe or enrol roles in `existing`.

    Memberships are granted by whoever runs it: the one who granted them on the source may lack
    the ADMIN option on the target, which 16 and later insist on.
    """
    kept = []
    for statement in cut_statements(script):
        name = _role_of(statement.tree)
        if name is None or name not in existing:
            kept.append(_without_grantor(statement))
        elif statement.tree.HasField("create_role_stmt"):
            log.info("role %s exists on the target and is left as it is", name)
    return b"".join(kept)


def _role_of(tree: AstNode) -> str | None:
    """The role that a statement is about."""
    match tree.WhichOneof("node"):
        case "create_role_stmt":
            return str(tree.create_role_stmt.role)
        case "alter_role_stmt":
            return str(tree.alter_role_stmt.role.rolename)
        case "alter_role_set_stmt":
            return str(tree.alter_role_set_stmt.role.rolename)
        case "comment_stmt":
            return str(tree.comment_stmt.object.string.sval)
        case "grant_role_stmt":
            return str(tree.grant_role_stmt.grantee_roles[0].role_spec.rolename)
    return None


def _without_grantor(statement: Statement) -> bytes:
    grant = statement.tree.grant_role_stmt
    if not grant.HasField("grantor"):
        return statement.text
    before = statement.text[: grant.grantor.location - statement.offset]
    kept = before.rstrip().removesuffix(b"GRANTED BY").rstrip()
    return kept + statement.text[statement.length :]
