"""pg_dump, pg_restore and pg_dumpall, run for their DDL.

Invariant: a program's failure is our failure, with its first error line, and what
pg_dump warns of is a warning of ours; no password of a connection is ever an argument
or in a file. Passwords that the schema itself holds, those of user mappings and
subscriptions, are in files that their owner alone can read.

An entry of an archive is known by its catalog and object OID, never by its name.

Facts: pg_restore --list prints `dumpId; catalogOid objectOid DESCRIPTION schema tag owner`.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace import failpoint
from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.log import redact
from millrace.postgres.catalog.schemas import OWN_SCHEMA
from millrace.postgres.program.binaries import Installation
from millrace.postgres.program.process import run_program
from millrace.postgres.wire.connect import APPLICATION, connect, translated
from millrace.postgres.wire.lock_wait import LOCK_NOT_AVAILABLE, explain_lock_wait
from millrace.retry import ATTEMPTS
from millrace.room import CATALOG_BYTES, NO_ROOM, RESUME, disk_error, no_room

log = logging.getLogger(__name__)

# Descriptions of more than one word that matter to us; all others are the first word.
_DESCRIPTIONS = (
    "FK CONSTRAINT",
    "CHECK CONSTRAINT",
    "INDEX ATTACH",
    "TABLE ATTACH",
    "TABLE DATA",
    "MATERIALIZED VIEW DATA",
    "MATERIALIZED VIEW",
    "EVENT TRIGGER",
    "PUBLICATION TABLES IN SCHEMA",
    "PUBLICATION TABLE",
    "DEFAULT ACL",
    "ROW SECURITY",
    "SECURITY LABEL",
    "USER MAPPING",
    "STATISTICS DATA",
    "SEQUENCE SET",
    "SEQUENCE OWNED BY",
)
_WITHOUT_OID = ("INDEX ATTACH", "TABLE ATTACH", "TABLE DATA")
PRIVATE = 0o600
_TIMEOUTS = (
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "transaction_timeout",
)
# How long pg_dump waits for the lock of a table; those of the snapshot's holder are not in its way.
LOCK_TIMEOUT = "30s"
_TIMED_OUT = "canceling statement due to statement timeout"
_ENTRY = re.compile(r"(\d+); (\d+) (\d+) (.*)")


@dataclass(frozen=True)
class Entry:
    """A line of an archive's table of contents."""

    line: str
    catalog_oid: int
    object_oid: int
    description: str
    # Schema, tag and owner, as printed.
    rest: str


def parse_toc(text: str) -> list[Entry]:
    """The entries of `pg_restore --list`, in restore order."""
    entries = []
    for line in text.split("\n"):
        match = _ENTRY.fullmatch(line)
        if not match:
            continue
        words = match[4]
        description = next((d for d in _DESCRIPTIONS if words.startswith(d + " ")), None)
        # A schema may be named ATTACH or DATA; but what is attached has no OID of its own.
        if description in _WITHOUT_OID and int(match[2]):
            description = None
        if description is None:
            description = words.split(" ", 1)[0]
        rest = words[len(description) + 1 :]
        entries.append(Entry(line, int(match[2]), int(match[3]), description, rest))
    return entries


@dataclass(frozen=True)
class Archive:
    """A dumped schema on disk, and the programs that read it."""

    path: Path
    tools: Installation

    def entries(self, section: str) -> list[Entry]:
        """The table of contents of `pre-data` or `post-data`."""
        command = [
            str(self.tools.bindir / "pg_restore"),
            "--list",
            f"--section={section}",
            str(self.path),
        ]
        return parse_toc(_run(command, "reading the dumped schema").stdout)

    def script(self, entries: Iterable[Entry], name: str, options: Sequence[str] = ()) -> bytes:
        """The SQL of some entries; also kept in a file beside the archive, for people."""
        listing = self.path.with_name(f"{name}.list")
        lines = "".join(f"{entry.line}\n" for entry in entries)
        try:
            listing.touch(PRIVATE)
            listing.write_text(lines, encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise disk_error(listing, error, needed_bytes=CATALOG_BYTES, then=RESUME) from error
        script = self.path.with_name(f"{name}.sql")
        command = [
            str(self.tools.bindir / "pg_restore"),
            f"--use-list={listing}",
            f"--file={script}",
            *options,
            str(self.path),
        ]
        _run(command, "turning the dumped schema into SQL", file=script)
        return script.read_bytes()


def dump_schema(
    tools: Installation, source: Dsn, snapshot: str | None, path: Path, *, role: str = "schema"
) -> Archive:
    """Dump everything but data, under the snapshot; the file is there when it is whole."""
    for leftover in path.parent.glob(f"{path.stem}.*.partial"):
        leftover.unlink(missing_ok=True)
    # A name of its own: the pg_dump of a killed process may still be writing.
    draft = path.with_suffix(f".{secrets.token_hex(4)}.partial")
    command = [
        str(tools.bindir / "pg_dump"),
        "--format=custom",
        "--section=pre-data",
        "--section=post-data",
        "--no-blobs",
        # Somebody else's of that name was refused, or is left out.
        f"--exclude-schema={OWN_SCHEMA}",
        f"--lock-wait-timeout={LOCK_TIMEOUT}",
        f"--file={draft}",
        f"--dbname={source.public_conninfo()}",
    ]
    if snapshot is not None:
        command.append(f"--snapshot={snapshot}")
    _warn(_run_under_locks(command, source, role, draft))
    failpoint.hit("schema.drafted")
    draft.replace(path)
    return Archive(path, tools)


def dump_statistics(
    tools: Installation, source: Dsn, snapshot: str | None, path: Path, *, role: str = "schema"
) -> None:
    """The planner's statistics as statements (pg_dump 18); the file is there when it is whole."""
    draft = path.with_suffix(f".{secrets.token_hex(4)}.partial")
    command = [
        str(tools.bindir / "pg_dump"),
        "--statistics-only",
        f"--exclude-schema={OWN_SCHEMA}",
        f"--lock-wait-timeout={LOCK_TIMEOUT}",
        f"--file={draft}",
        f"--dbname={source.public_conninfo()}",
    ]
    if snapshot is not None:
        command.append(f"--snapshot={snapshot}")
    try:
        _run(command, "dumping the statistics of the source", source, role, file=draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _run_under_locks(
    command: list[str], source: Dsn, role: str, draft: Path
) -> subprocess.CompletedProcess[str]:
    """Wait for other sessions as long as it takes, but only so often for one that waits for us."""
    attempts = 1
    while True:
        try:
            return _run(command, "dumping the schema of the source", source, role, file=draft)
        except ServerError as error:
            if error.facts.get("sqlstate") != LOCK_NOT_AVAILABLE:
                raise
            if explain_lock_wait(error, source):
                attempts += 1
                if attempts > ATTEMPTS:
                    raise
            log.warning("%s (%s); trying again", error, error.hint)


def dump_roles(tools: Installation, source: Dsn, *, passwords: bool) -> str:
    """CREATE ROLE, ALTER ROLE and GRANT statements; kept in memory, they hold password hashes."""
    command = [
        str(tools.bindir / "pg_dumpall"),
        "--roles-only",
        f"--dbname={_without_timeouts(source).public_conninfo()}",
    ]
    if not passwords:
        command.append("--no-role-passwords")
    process = _run(command, "reading the roles of the source", source)
    _warn(process)
    return process.stdout


def _without_timeouts(dsn: Dsn) -> Dsn:
    """For pg_dumpall: pg_dump turns them off on its own. Only those that are set: there are poolers
    that know no options."""
    with connect(dsn, "schema") as connection, translated("reading the source's timeouts"):
        # The session's own are off already.
        names = connection.execute(
            "SELECT name FROM pg_settings WHERE name = ANY(%s) AND reset_val <> '0' ORDER BY 1",
            (list(_TIMEOUTS),),
        ).fetchall()
    if not names:
        return dsn
    given = dsn.parameters.get("options", os.environ.get("PGOPTIONS", ""))
    return dsn.with_(options=" ".join([given, *(f"-c {name}=0" for (name,) in names)]).strip())


def _run(
    command: list[str],
    what: str,
    dsn: Dsn | None = None,
    role: str = "schema",
    *,
    file: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program that writes `file`, or to its standard output; LC_MESSAGES is C."""
    log.debug("running %s", redact(" ".join(command)))
    environment = os.environ | {"LC_MESSAGES": "C", "PGAPPNAME": f"{APPLICATION} {role}"}
    if dsn is not None:
        environment |= dsn.program_environment()
    process = run_program(command, environment, umask=0o077)
    if process.returncode and file is not None and NO_ROOM in process.stderr:
        reason = _first_error(process.stderr)
        raise no_room(file, reason, needed_bytes=CATALOG_BYTES, then=RESUME)
    if process.returncode and "LOCK TABLE" in process.stderr and _TIMED_OUT in process.stderr:
        raise ServerError(
            f"{what}: no lock on a table within {LOCK_TIMEOUT}",
            hint="another session holds an ACCESS EXCLUSIVE lock: wait for it, or end it",
            sqlstate=LOCK_NOT_AVAILABLE,
        )
    if process.returncode:
        raise ServerError(
            f"{what}: {_first_error(process.stderr)}",
            hint=f"the whole output of {Path(command[0]).name} is in the debug log (--verbose)",
            exit_status=process.returncode,
        )
    return process


def _warn(process: subprocess.CompletedProcess[str]) -> None:
    """Pass on what a program wrote although it succeeded: something was left out."""
    for line in dict.fromkeys(process.stderr.splitlines()):
        if line.strip():
            log.warning("%s", redact(line))


def _first_error(stderr: str) -> str:
    """The first line that says ERROR or FATAL with what follows it, or the first line at all."""
    log.debug("the program wrote: %s", stderr)
    lines = stderr.strip().splitlines() or ["it failed without a message"]
    for at, line in enumerate(lines):
        if re.search(r"\b(ERROR|FATAL|error|fatal):", line):
            details = [
                rest.strip()
                for rest in lines[at + 1 : at + 3]
                if rest.startswith(("DETAIL:", "HINT:"))
            ]
            return redact(" ".join([line, *details]))
    return redact(lines[0])
