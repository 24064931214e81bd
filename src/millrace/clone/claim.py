"""Which living process copies into which schemas of a target.

Invariant: at most one process at a time copies into a schema, whatever its work directory; one
that died holds nothing. The server decides: the claim is a lock that ends with its session.

The locks belong to a transaction, so that a pooler in transaction mode keeps them with its server
connection, and gives them back. It reads nothing and so holds nothing back. Of a run with a great
many schemas only some are locked, to leave room in the server's lock table; the records decide
about all of them (`millrace.postgres.run_record`), but only when the run begins to write.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import APPLICATION, connect, translated

Connection = psycopg.Connection[tuple[Any, ...]]

# Older releases lock this alone, for the whole database; we share it.
_DATABASE = "millrace copies into this database"
# How many schemas are locked one by one.
MOST_LOCKS = 100
# Not one of the names by which a run's sessions are ended.
_ROLE = "claim:"
# A server may take a moment to see that a killed process has gone.
GRACE_SECONDS = 3.0
POLL_SECONDS = 0.1
_HOLDER = """
SELECT a.pid, a.application_name, coalesce(a.query, '')
  FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND l.pid <> pg_backend_pid()
   AND (l.classid::int8 << 32) | l.objid::int8 = hashtextextended(%s, 0)
"""


@contextmanager
def claim_target(
    target: Dsn, run_id: str, directory: Path, schemas: Collection[str]
) -> Iterator[None]:
    """Be the one that copies into these schemas of `target`, or say who is."""
    with connect(target, f"{_ROLE}{run_id}") as connection:
        with translated("claiming the target"):
            _claim(connection, run_id, _own_facts(directory), schemas)
        try:
            yield
        finally:
            connection.close()  # without a word to a server that may be gone


def _claim(connection: Connection, run_id: str, facts: str, schemas: Collection[str]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while taken := _try_lock(connection, facts, schemas):
        holder = connection.execute(_HOLDER, (taken,)).fetchone()
        if holder is not None and holder[1] == f"{APPLICATION} {_ROLE}{run_id}":
            # The work directory is ours, so this is a process of ours that died.
            connection.execute("SELECT pg_terminate_backend(%s)", (holder[0],))
        elif holder is not None and time.monotonic() > deadline:
            raise _claimed(*holder)
        time.sleep(POLL_SECONDS)


def _try_lock(connection: Connection, facts: str, schemas: Collection[str]) -> str:
    """In a transaction that stays open, if the locks are ours: then "", else the first that is
    somebody else's."""
    connection.execute("BEGIN")
    wanted = [(_DATABASE, "_shared")]
    wanted += [(_schema_lock(name), "") for name in sorted(schemas)[:MOST_LOCKS]]
    for name, mode in wanted:
        # The words come first: the server shows others only the beginning of a statement.
        row = connection.execute(
            f"/* {facts} */ SELECT pg_try_advisory_xact_lock{mode}(hashtextextended("
            f"{literal(name)}, 0))".encode()
        )
        if row.fetchone() != (True,):
            connection.execute("ROLLBACK")
            return name
    return ""


def _schema_lock(schema: str) -> str:
    return f"millrace copies into schema {schema}"


def _own_facts(directory: Path) -> str:
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "directory": str(directory)}
    return f"millrace {json.dumps(facts)}".replace("*/", "* /").replace("/*", "/ *")


def _claimed(backend: int, application: str, statement: str) -> WorkDirError:
    """What is known of the other one; a role without the right to see it knows less."""
    run_id = application.rpartition(":")[2]
    found = re.match(r"/\* millrace (\{.*?\}) \*/", statement)
    facts = json.loads(found[1]) if found else {}
    who = (
        f"process {facts['pid']} on {facts['host']}, in {facts['directory']}"
        if facts
        else f"run {run_id}, server process {backend}"
    )
    return WorkDirError(
        f"another millrace is copying into the target: {who}",
        hint="wait for it, or stop it; or choose other schema names (--rename-schema), or another "
        "--target",
        run_id=run_id,
        **facts,
    )
