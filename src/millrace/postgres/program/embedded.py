"""Throw-away clusters for the demo and the tests.

Invariant: no server and no file of a cluster outlives the process that opened
it, however that process ends. One watchdog per cluster reads from a pipe whose
only write end is ours; at its end it stops the server and removes the folder.
`close` takes the same way, so the way is walked every day.

These servers forgive anything but bugs: no fsync, and trust for everyone who
reaches the socket (mode 0700) or, with `tcp`, the loopback address.

Facts: postgres and initdb refuse to run as root (main.c, check_root()), so root
hands them to an unprivileged account. pg_ctl puts the server in a session of
its own (pg_ctl.c, start_postmaster()), so Ctrl-C does not reach it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg.sql import SQL, Identifier

from millrace.errors import PreflightError, ServerError
from millrace.postgres.program.binaries import Installation, server_installations

DEFAULT_SETTINGS: Mapping[str, str] = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "wal_level": "logical",
    "max_connections": "100",
    "shared_buffers": "128MB",
}

# Where servers have their folders, if not among other temporary files.
FOLDER_VARIABLE = "MILLRACE_EMBEDDED_DIR"
_SOCKET_PORT = 5432  # every cluster has a socket folder of its own
# sun_path holds 104 bytes on macOS; "/mr-XXXXXXXX/.s.PGSQL.65535.lock" takes 32 of them.
_MAX_ROOT_BYTES = 60
# A server that fails says so at once; one on a busy machine takes its time.
_PROGRAM_SECONDS = 300
_START_SECONDS = "240"
_CLOSE_SECONDS = 180
_PORT_ATTEMPTS = 5
_LOG_TAIL_LINES = 15
_SETTINGS_FILE = "millrace.conf"
_HBA = """\
local  all          all                trust
local  replication  all                trust
host   all          all  127.0.0.1/32  trust
host   replication  all  127.0.0.1/32  trust
"""
# $1 is pg_ctl, $2 where to make the folder. The watchdog makes it, so there is no moment at
# which we could die and leave one. A server that was just starting when we died has no pid
# file yet and is met by the next attempt, or finds its folder gone.
_WATCHDOG = """\
trap '' HUP INT PIPE TERM
folder=$(mktemp -d "$2/mr-XXXXXXXX") || exit 1
echo "$folder"
exec >/dev/null 2>&1
cat
for attempt in 1 2 3 4 5 6 7 8 9 10; do
    "$1" stop -s -D "$folder/data" -m immediate
    rm -rf "$folder"
    [ -e "$folder" ] || exit 0
    sleep 1
done
"""


class Cluster:
    """One server with its folder; made by `open_cluster`."""

    def __init__(
        self,
        installation: Installation,
        *,
        settings: Mapping[str, str] | None = None,
        tcp: bool = False,
    ) -> None:
        self.version = installation.version
        self.installation = installation
        self.tcp = tcp
        self.settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self.port = _SOCKET_PORT
        self._account = _server_account()
        self._watchdog, self._lifeline, self.socket_dir = self._start_watchdog()
        self.data_dir = self.socket_dir / "data"
        self.log_file = self.socket_dir / "server.log"
        self._owner_pid = os.getpid()
        _open_clusters.add(self)

    def uri(
        self,
        database: str = "postgres",
        *,
        user: str = "postgres",
        password: str | None = None,
        tcp: bool = False,
    ) -> str:
        if tcp:
            secret = f":{quote(password, safe='')}" if password is not None else ""
            login = quote(user, safe="") + secret
            return f"postgresql://{login}@127.0.0.1:{self.port}/{quote(database, safe='')}"
        query = {"host": str(self.socket_dir), "port": str(self.port), "user": user}
        if password is not None:
            query["password"] = password
        # libpq reads + in a URI as +, so blanks must be %20.
        options = urlencode(query, safe="/", quote_via=quote)
        return f"postgresql:///{quote(database, safe='')}?{options}"

    def execute(self, sql: str, database: str = "postgres") -> None:
        with psycopg.connect(self.uri(database), autocommit=True) as connection:
            connection.execute(sql.encode())

    def create_database(self, name: str, *, encoding: str | None = None, locale: str = "C") -> str:
        """Create an empty database and return its URI."""
        statement = SQL(
            "CREATE DATABASE {} TEMPLATE template0 ENCODING {} LC_COLLATE {} LC_CTYPE {}"
        ).format(Identifier(name), encoding or "UTF8", locale, locale)
        self.execute(statement.as_string())
        return self.uri(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, and the sessions in it."""
        statement = SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name))
        self.execute(statement.as_string())

    def start(self) -> None:
        self._pg_ctl("start", "-l", self.log_file)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; one that is not running is left alone."""
        if self.running():
            self._pg_ctl("stop", "-m", mode)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def running(self) -> bool:
        return self._call("pg_ctl", "status", "-D", self.data_dir).returncode == 0

    def close(self) -> None:
        """Stop the server at once and remove its files; a second call does nothing."""
        if self._lifeline < 0 or os.getpid() != self._owner_pid:
            return
        self._cut_lifeline()
        try:
            self._watchdog.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"the server in {self.socket_dir} does not stop") from error
        if self.socket_dir.exists():  # somebody killed the watchdog
            self._call("pg_ctl", "stop", "-s", "-D", self.data_dir, "-m", "immediate")
            shutil.rmtree(self.socket_dir, ignore_errors=True)

    def _create(self, hba: str | None) -> None:
        self._run(
            "initdb", "--no-sync", "-D", self.data_dir, "-U", "postgres",
            "-E", "UTF8", "--locale=C", "-A", "trust",
        )  # fmt: skip
        self._write("pg_hba.conf", (hba or "") + "\n" + _HBA)

    def _create_standby(self, primary: Cluster, hba: str | None) -> None:
        self._run(
            "pg_basebackup", "--no-sync", "-D", self.data_dir, "-R", "-X", "stream", "-c", "fast",
            "-h", primary.socket_dir, "-p", str(primary.port), "-U", "postgres",
        )  # fmt: skip
        if hba is not None:
            self._write("pg_hba.conf", hba + "\n" + _HBA)

    def _start_first(self) -> None:
        """Start, taking another port when somebody was faster."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self.port = _free_port() if self.tcp else _SOCKET_PORT
            self._write_settings()
            try:
                self.start()
                return
            except ServerError as error:
                taken = "could not bind" in error.hint or "in use" in error.hint
                if not (self.tcp and taken) or attempt == _PORT_ATTEMPTS:
                    raise

    def _write_settings(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1" if self.tcp else "",
            "port": str(self.port),
            "unix_socket_directories": str(self.socket_dir),
            **self.settings,
        }
        quoted = {name: value.replace("'", "''") for name, value in settings.items()}
        lines = (f"{name} = '{value}'\n" for name, value in quoted.items())
        self._write(_SETTINGS_FILE, "".join(lines))
        # A standby has the line already, from its primary.
        main = (self.data_dir / "postgresql.conf").read_text()
        include = f"include '{_SETTINGS_FILE}'\n"
        if not main.endswith(include):
            self._write("postgresql.conf", main + include)

    def _write(self, name: str, text: str) -> None:
        path = self.data_dir / name
        path.write_text(text)
        if self._account:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _start_watchdog(self) -> tuple[subprocess.Popen[str], int, Path]:
        """The watchdog, the end of the pipe that keeps it quiet, and the folder it made."""
        pg_ctl = self.installation.program("pg_ctl")
        # Both ends are close-on-exec (PEP 446): no child program can hold ours open.
        read_end, write_end = os.pipe()
        watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "millrace-watchdog", pg_ctl, _temp_root(self._account)],
            stdin=read_end,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            start_new_session=True,
            **_as_account(self._account),
        )
        os.close(read_end)
        with watchdog.stdout or contextlib.nullcontext() as stdout:
            folder = stdout.readline().rstrip("\n") if stdout else ""
        if not folder:
            os.close(write_end)
            watchdog.wait()
            raise ServerError("no folder for a server can be made", hint="Set TMPDIR.")
        return watchdog, write_end, Path(folder)

    def _cut_lifeline(self) -> None:
        _open_clusters.discard(self)
        os.close(self._lifeline)
        self._lifeline = -1

    def _pg_ctl(self, what: str, *options: str | Path) -> None:
        waiting = ("-s", "-w", "-t", _START_SECONDS)
        self._run("pg_ctl", what, *waiting, "-D", self.data_dir, *options)

    def _run(self, program: str, *arguments: str | Path) -> None:
        """Run a program of this installation to its end, or raise with the end of the log."""
        result = self._call(program, *arguments)
        if result.returncode:
            raise ServerError(
                f"{program} of PostgreSQL {self.version} failed: {result.stderr.strip()}",
                hint=self._log_tail(),
                program=program,
            )

    def _call(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.installation.program(program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROGRAM_SECONDS,
            cwd=self.socket_dir,
            **_as_account(self._account),
        )

    def _log_tail(self) -> str:
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-_LOG_TAIL_LINES:])


@contextlib.contextmanager
def open_cluster(
    version: int,
    *,
    settings: Mapping[str, str] | None = None,
    tcp: bool = False,
    installation: Installation | None = None,
    base_backup_of: Cluster | None = None,
    hba: str | None = None,
) -> Iterator[Cluster]:
    """A running server, gone at the end of the block.

    `hba` holds lines for pg_hba.conf that go before our own and so win.
    `base_backup_of` makes a streaming standby of that cluster, with its settings.
    """
    if base_backup_of:
        installation = base_backup_of.installation
        # A standby must not have fewer connections or workers than its primary.
        settings = {**base_backup_of.settings, **(settings or {})}
    chosen = _runnable(installation or _find_server(version))
    with contextlib.closing(Cluster(chosen, settings=settings, tcp=tcp)) as cluster:
        if base_backup_of:
            cluster._create_standby(base_backup_of, hba)
        else:
            cluster._create(hba)
        cluster._start_first()
        yield cluster


def _find_server(version: int) -> Installation:
    for installation in server_installations():
        if installation.version == version:
            return installation
    raise PreflightError(
        f"no PostgreSQL {version} server programs on this machine",
        hint="Install millrace[demo], which brings servers 16 and 18.",
        server_version=version,
    )


def _server_account() -> pwd.struct_passwd | None:
    """Who runs the servers; None for ourselves."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise PreflightError(
        "PostgreSQL does not run as root, and there is no account postgres or nobody",
        hint="Run as another user.",
    )


def _as_account(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Arguments for subprocess: the account, and no PG* variable that could point elsewhere."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    arguments: dict[str, Any] = {"env": {**env, "LC_ALL": "C"}}
    if account:
        arguments |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    return arguments


def _temp_root(account: pwd.struct_passwd | None) -> str:
    """The folder for temporary files, or /tmp if that is too long or closed to the account."""
    root = os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir()
    fits = len(os.fsencode(root)) <= _MAX_ROOT_BYTES
    return root if fits and _may_run(["/bin/ls", "-d", root + "/."], account) else "/tmp"


def _runnable(installation: Installation) -> Installation:
    """The installation, or a copy of it that the account may read."""
    if _may_run([installation.program("initdb"), "--version"], _server_account()):
        return installation
    return _copy_installation(installation)


def _may_run(command: list[str], account: pwd.struct_passwd | None) -> bool:
    if account is None:
        return True
    try:
        result = subprocess.run(command, capture_output=True, cwd="/", **_as_account(account))
    except PermissionError:
        return False
    return result.returncode == 0


def _copy_installation(installation: Installation) -> Installation:
    """A readable copy in /tmp, made once and kept for the next run.

    The copy has the shape of the original because a wheel's programs find their
    libraries by relative path (`$ORIGIN/../../../<package>.libs`).
    """
    prefix = installation.bindir.resolve().parent
    stamp = (prefix / "bin" / "postgres").stat().st_mtime_ns
    key = hashlib.sha256(f"{prefix} {stamp}".encode()).hexdigest()[:12]
    home = Path("/tmp") / f"mr-pg{installation.version}-{key}"
    if not home.exists():
        draft = Path(tempfile.mkdtemp(prefix="mr-pg-", dir="/tmp"))
        libraries = prefix.parent.with_name(prefix.parent.name + ".libs")
        _copy_tree(prefix, draft / prefix.parent.name / prefix.name)
        if libraries.is_dir():
            _copy_tree(libraries, draft / libraries.name)
        draft.chmod(0o755)
        try:
            draft.rename(home)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    if home.lstat().st_uid != os.geteuid() or home.is_symlink():
        raise ServerError(f"{home} belongs to another user", hint="Remove it.")
    bindir = home / prefix.parent.name / prefix.name / "bin"
    return Installation(installation.version, bindir, installation.origin)


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
    for path in [target.parent, target, *target.rglob("*")]:
        if not path.is_symlink():
            readable = 0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644
            path.chmod(readable)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


_open_clusters: weakref.WeakSet[Cluster] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child has our write ends too and must not keep a server alive with them."""
    for cluster in list(_open_clusters):
        cluster._cut_lifeline()


os.register_at_fork(after_in_child=_forget_in_child)
