"""Keeping writers off the source while a stream is cut over.

Invariant: a source that is paused is given back as it was if the cut-over fails, also by the next
command if this one is killed: what it was is on disk before it is changed. After a cut-over that
succeeded it stays paused, because applications that write to it would be writing to the past.

Facts: ALTER DATABASE; "Predefined privileges", CONNECT; pgbouncer(5), "Admin console".
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, MillraceError, PreflightError, ServerError
from millrace.postgres.quote import ident, literal
from millrace.postgres.wire.connect import connect, translated
from millrace.workdir.store import write_json

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

FILE: Final = "pause.json"
# How long sessions that were told to end may take to roll back.
END_SECONDS = 60.0
POLL_SECONDS = 0.05
_SETTING: Final = "default_transaction_read_only"

_OTHERS = """
  FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND coalesce(backend_type, 'client backend') IN ('client backend', 'parallel worker')
   AND coalesce(application_name, '') !~ '^millrace '
"""
_FORMER_SETTING = f"""
SELECT split_part(one, '=', 2) FROM pg_db_role_setting s, unnest(s.setconfig) AS one
 WHERE s.setrole = 0 AND s.setdatabase = (SELECT oid FROM pg_database
                                           WHERE datname = current_database())
   AND starts_with(one, '{_SETTING}=')
"""
# Of everybody but the owner, who keeps it whatever is revoked.
_CONNECT = """
SELECT CASE a.grantee WHEN 0 THEN '' ELSE a.grantee::regrole::text END, a.is_grantable
  FROM pg_database d, aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a
 WHERE d.datname = current_database() AND a.privilege_type = 'CONNECT' AND a.grantee <> d.datdba
"""
_IS_SAFE = """
SELECT r.rolsuper OR pg_has_role(r.oid, d.datdba, 'USAGE')
  FROM pg_roles r, pg_database d WHERE r.rolname = current_user AND d.datname = current_database()
"""


class PauseKind(StrEnum):
    """How writers are kept off."""

    NONE = "none"
    READ_ONLY = "read-only"
    REVOKE_CONNECT = "revoke-connect"
    PGBOUNCER = "pgbouncer"


@dataclass(frozen=True)
class PauseSettings:
    """As the user gave them. Commands are the shell's."""

    kind: PauseKind = PauseKind.NONE
    command: str = ""
    resume_command: str = ""
    # The admin console, for `pgbouncer`, and the database's name there.
    pgbouncer: str = ""
    pgbouncer_database: str = ""

    @property
    def is_asked(self) -> bool:
        return self.kind is not PauseKind.NONE or bool(self.command)


@dataclass(frozen=True)
class Former:
    """What a pause has changed, as it was before."""

    kind: str
    setting: str | None = None
    grants: list[list[Any]] = field(default_factory=list)


class Pause:
    """Whether the cut-over it was made for has succeeded."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.is_kept = False

    def keep(self) -> None:
        """The target is the primary now: the source is not given back."""
        self.is_kept = True


@contextmanager
def paused(settings: PauseSettings, source: Dsn, directory: Path) -> Iterator[Pause]:
    """Writers are off from here on; if the block does not `keep` it, they are let in again."""
    _check(settings)
    if not settings.is_asked:
        yield Pause(time.monotonic())
        return
    former = _read_former(directory) or _look(settings, source)
    write_json(directory / FILE, asdict(former))
    pause = Pause(time.monotonic())
    try:
        _pause(settings, source)
        yield pause
    finally:
        if pause.is_kept or _is_given_back(settings, source, former):
            (directory / FILE).unlink(missing_ok=True)


def _check(settings: PauseSettings) -> None:
    if settings.kind is PauseKind.PGBOUNCER and not settings.pgbouncer:
        raise ConfigError(
            "--pause pgbouncer needs the address of its admin console",
            hint="--pgbouncer postgresql://admin@127.0.0.1:6432/pgbouncer",
        )
    if settings.resume_command and not settings.command:
        raise ConfigError("--resume-command is of no use without --pause-command")


def _read_former(directory: Path) -> Former | None:
    """What a cut-over that was killed in its pause has found."""
    try:
        return Former(**json.loads((directory / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _look(settings: PauseSettings, source: Dsn) -> Former:
    with connect(source, "pause") as connection, translated("looking at the source"):
        if settings.kind is PauseKind.REVOKE_CONNECT:
            if connection.execute(_IS_SAFE).fetchone() != (True,):
                raise PreflightError(
                    f"{connection.info.user} could not connect to the source any more itself",
                    hint="--pause revoke-connect takes the owner of the database, or a superuser",
                )
            grants = [list(row) for row in connection.execute(_CONNECT)]
            return Former(settings.kind, grants=grants)
        row = connection.execute(_FORMER_SETTING).fetchone()
        return Former(settings.kind, setting=row[0] if row else None)


def _pause(settings: PauseSettings, source: Dsn) -> None:
    if settings.command:
        _run(settings.command, "--pause-command")
    if settings.kind is PauseKind.PGBOUNCER:
        _tell_pgbouncer(settings, source, "PAUSE")
    if settings.kind not in (PauseKind.READ_ONLY, PauseKind.REVOKE_CONNECT):
        return
    with connect(source, "pause") as connection, translated("pausing the source"):
        database = ident(connection.info.dbname)
        if settings.kind is PauseKind.READ_ONLY:
            connection.execute(f"ALTER DATABASE {database} SET {_SETTING} = on")
            log.info("new sessions of the source are read-only")
        else:
            for role, _ in connection.execute(_CONNECT).fetchall():
                whom = role or "PUBLIC"
                connection.execute(f"REVOKE CONNECT ON DATABASE {database} FROM {whom} CASCADE")
            log.info("nobody but superusers and its owner may connect to the source")
        _end_sessions(connection)


def _end_sessions(connection: Connection) -> None:
    """Of everybody but us; a transaction that is prepared would outlive them."""
    prepared = connection.execute(
        "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    ).fetchall()
    if prepared:
        raise ServerError(
            f"{len(prepared)} prepared transactions of the source may commit at any time",
            hint=f"COMMIT PREPARED or ROLLBACK PREPARED {literal(str(prepared[0][0]))} first",
        )
    until = time.monotonic() + END_SECONDS
    while left := connection.execute(f"SELECT pid, pg_terminate_backend(pid) {_OTHERS}").fetchall():
        if time.monotonic() > until:
            raise ServerError(
                f"sessions of the source do not end: {', '.join(str(pid) for pid, _ in left[:5])}",
                hint="end them, and run the same command again",
            )
        time.sleep(POLL_SECONDS)


def _is_given_back(settings: PauseSettings, source: Dsn, former: Former) -> bool:
    """Whether that succeeded; what made the cut-over fail is reported in any case."""
    try:
        _give_back(settings, source, former)
    except MillraceError as error:
        log.error("the source is still paused: %s (%s)", error, error.hint)
        return False
    return True


def _give_back(settings: PauseSettings, source: Dsn, former: Former) -> None:
    log.warning("the source is given back as it was")
    if settings.resume_command:
        _run(settings.resume_command, "--resume-command")
    if settings.kind is PauseKind.PGBOUNCER:
        _tell_pgbouncer(settings, source, "RESUME")
    if former.kind not in (PauseKind.READ_ONLY, PauseKind.REVOKE_CONNECT):
        return
    with connect(source, "pause") as connection, translated("giving the source back"):
        database = ident(connection.info.dbname)
        if former.kind == PauseKind.READ_ONLY:
            change = (
                f"RESET {_SETTING}"
                if former.setting is None
                else f"SET {_SETTING} = {literal(former.setting)}"
            )
            connection.execute(f"ALTER DATABASE {database} {change}")
        for role, is_grantable in former.grants:
            option = " WITH GRANT OPTION" if is_grantable else ""
            connection.execute(
                f"GRANT CONNECT ON DATABASE {database} TO {role or 'PUBLIC'}{option}"
            )


def _tell_pgbouncer(settings: PauseSettings, source: Dsn, word: str) -> None:
    """Its console takes simple statements, outside of transactions."""
    named = conninfo_to_dict(source.conninfo()).get("dbname", "")
    database = settings.pgbouncer_database or str(named)
    try:
        with psycopg.connect(settings.pgbouncer, autocommit=True) as console:
            console.execute(f"{word} {ident(database)}")
    except psycopg.Error as error:
        raise ServerError(
            f"pgbouncer did not {word} {database}: {str(error).strip()}",
            hint="check --pgbouncer and --pgbouncer-database, and that the role is in admin_users",
        ) from error
    log.info("pgbouncer: %s %s", word, database)


def _run(command: str, option: str) -> None:
    log.info("%s: %s", option, command)
    ended = subprocess.run(command, shell=True, env=os.environ, check=False)
    if ended.returncode != 0:
        raise ServerError(f"{option} ended with {ended.returncode}", hint="look at what it printed")
