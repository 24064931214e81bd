"""Everything that can break in mid-copy: the result is equal, or there is a clear error and
nothing is left running.

A table of the source has a check that waits at one row for a lock of the target's database. A test
that holds this lock has a COPY that is in the middle for as long as the test wants.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import psycopg
import pytest
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import wait_for

from millrace.clone.compare_run import CompareSettings, compare_data
from millrace.clone.progress import Reporter
from millrace.clone.run import CloneResult, clone
from millrace.clone.settings import CloneSettings
from millrace.clone.split import SplitSettings
from millrace.config.dsn import Dsn
from millrace.errors import MillraceError, ServerError, SnapshotLost
from millrace.postgres.embedded import Cluster, open_cluster
from millrace.snapshot.export import open_snapshot
from millrace.spark.session import Engine

DEADLINE_SECONDS = 60
GATE = 4711

# Rows of 6 kB, in a page each: more than all buffers between two servers hold, and above the
# size up to which tables share a task.
GATED = f"""
CREATE FUNCTION gate(id int) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
    IF id = 10 THEN PERFORM pg_advisory_xact_lock_shared({GATE}); END IF;
    RETURN true;
END $$;
CREATE TABLE gated (id int PRIMARY KEY, filler text, CHECK (public.gate(id)));
ALTER TABLE gated ALTER filler SET STORAGE PLAIN;
INSERT INTO gated SELECT i, repeat('x', 6000) FROM generate_series(1, 2500) AS i;
CREATE TABLE small (id int PRIMARY KEY, name text UNIQUE);
INSERT INTO small SELECT i, 'name ' || i FROM generate_series(1, 100) AS i;
"""

T = TypeVar("T")


# What holds a clone in the middle, and what looks at it there.


@contextlib.contextmanager
def gate_closed(target: str) -> Iterator[psycopg.Connection[Any]]:
    """COPY into `gated` stops at its tenth row until the yielded connection is closed."""
    with contextlib.closing(psycopg.connect(target, autocommit=True)) as connection:
        connection.execute(f"SELECT pg_advisory_lock({GATE})".encode())
        # A test that is stuck must not stay so.
        connection.execute(f"SET idle_session_timeout = '{DEADLINE_SECONDS}s'".encode())
        yield connection


def waiting_at_gate(target: str) -> set[int]:
    """Backends of the target that are in mid-COPY."""
    found = rows(
        target,
        f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = {GATE} AND NOT granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
    )
    return {pid for (pid,) in found}


def sessions(*uris: str, like: str = "millrace%") -> list[str]:
    query = (
        f"SELECT application_name FROM pg_stat_activity WHERE application_name LIKE '{like}'"
        " AND datname = current_database()"
    )
    return [name for uri in uris for (name,) in rows(uri, query)]


def terminate(uri: str, like: str) -> None:
    """End the one session with such a name."""
    ended = rows(
        uri,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE application_name LIKE '{like}' AND datname = current_database()",
    )
    assert ended == [(True,)]


def backend_of_gated(source: str) -> str:
    """A query for the backend that copies this table, on either server."""
    [(oid,)] = rows(source, "SELECT 'gated'::regclass::oid::int8")
    return (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        f" AND application_name LIKE 'millrace copy % {oid}.%'"
    )


def assert_equal_data(
    source: str, target: str, engine: Engine, snapshot: str | None = None
) -> None:
    settings = CompareSettings(Dsn.parse(source), Dsn.parse(target), snapshot=snapshot)
    assert [one.label for one in compare_data(settings, engine) if not one.is_equal] == []


@pytest.fixture
def in_background(
    engine: Engine, reporter: Reporter, tmp_path: Path
) -> Iterator[Callable[..., Future[CloneResult]]]:
    """Starts a clone and gives its future."""
    with ThreadPoolExecutor(1) as thread:

        def start(source: str, target: str, **options: Any) -> Future[CloneResult]:
            settings = CloneSettings(
                Dsn.parse(source), Dsn.parse(target), tmp_path / "work", **options
            )
            return thread.submit(clone, settings, engine, reporter)

        yield start


# Broken on the way, and whole in the end


def tcp(cluster: Cluster, uri: str) -> str:
    return cluster.uri(Dsn.parse(uri).parameters["dbname"], tcp=True)


def client_of(uri: str, pid: int) -> psutil.Process:
    """The process at the other end of a backend's TCP connection."""
    [(port,)] = rows(uri, f"SELECT client_port FROM pg_stat_activity WHERE pid = {pid}")
    [client] = {
        connection.pid
        for connection in psutil.net_connections("tcp4")
        if connection.laddr.port == port and connection.pid
    }
    return psutil.Process(client)


@pytest.mark.parametrize("split", [0, 4_000_000], ids=["whole", "split"])
def test_killed_worker_is_replaced_and_each_row_comes_once(
    source_cluster: Cluster,
    target_cluster: Cluster,
    source_db: str,
    target_db: str,
    engine: Engine,
    in_background: Callable[..., Future[CloneResult]],
    split: int,
) -> None:
    execute(source_db, GATED)
    source, target = tcp(source_cluster, source_db), tcp(target_cluster, target_db)
    with gate_closed(target_db):
        running = in_background(source, target, split=SplitSettings(split))
        [first] = wait_for(lambda: waiting_at_gate(target_db))
        worker = client_of(target_db, first)
        assert "pyspark" in " ".join(worker.cmdline())
        assert worker.pid != os.getpid()
        worker.kill()
        # Another worker has come as far, and the session of the killed one is gone.
        wait_for(lambda: waiting_at_gate(target_db) not in (set(), {first}))
        wait_for(lambda: first not in waiting_at_gate(target_db))
    running.result(DEADLINE_SECONDS)
    assert rows(target_db, "SELECT count(*), count(DISTINCT id) FROM gated") == [(2500, 2500)]
    assert_equal_data(source_db, target_db, engine)


@pytest.mark.parametrize("side", ["source", "target"])
def test_lost_connection_is_made_again_under_the_same_snapshot(
    source_db: str,
    target_db: str,
    engine: Engine,
    in_background: Callable[..., Future[CloneResult]],
    side: str,
) -> None:
    execute(source_db, GATED)
    with open_snapshot(Dsn.parse(source_db)) as held:
        with gate_closed(target_db):
            running = in_background(source_db, target_db, snapshot=held.id)
            wait_for(lambda: waiting_at_gate(target_db))
            # A second attempt that looks at the table as it is now brings other rows.
            execute(
                source_db,
                "DELETE FROM gated WHERE id % 2 = 0",
                "UPDATE gated SET filler = 'changed' WHERE id % 3 = 0",
                "INSERT INTO gated VALUES (-1, 'new')",
            )
            uri = source_db if side == "source" else target_db
            [(pid,)] = rows(uri, backend_of_gated(source_db))
            execute(uri, f"SELECT pg_terminate_backend({pid})")
            wait_for(lambda: not rows(uri, f"SELECT FROM pg_stat_activity WHERE pid = {pid}"))
        running.result(DEADLINE_SECONDS)
        assert_equal_data(source_db, target_db, engine, held.id)
    assert rows(target_db, "SELECT count(*), max(length(filler)) FROM gated") == [(2500, 6000)]


# Errors


REFUSED = """
CREATE FUNCTION accepts(id int) RETURNS bool LANGUAGE sql AS
    $$ SELECT id <> 77 OR current_setting('server_version_num')::int < 170000 $$;
CREATE TABLE refused (id int PRIMARY KEY, secret text, CHECK (public.accepts(id)));
INSERT INTO refused SELECT i, 'secret ' || i FROM generate_series(1, 5000) AS i;
"""


def test_refused_row_stops_its_table_only_and_the_run_is_not_done(
    source_db: str,
    target_db: str,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
) -> None:
    execute(source_db, REFUSED, GATED)
    settings = CloneSettings(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work")
    with pytest.raises(ServerError, match=r"^public\.refused: ") as raised:
        clone(settings, engine, reporter)
    assert raised.value.exit_code == 5
    assert raised.value.facts["sqlstate"] == "23514"
    assert "check" in raised.value.hint
    assert "secret 77" not in str(raised.value)

    assert rows(target_db, "SELECT count(*) FROM refused") == [(0,)]
    assert rows(target_db, "SELECT count(*) FROM gated") == [(2500,)]
    names = "SELECT conname FROM pg_constraint WHERE contype IN ('p', 'u') AND conrelid > 16384"
    assert {("gated_pkey",), ("small_pkey",), ("small_name_key",)} <= set(rows(target_db, names))
    wait_for(lambda: not sessions(source_db, target_db))
    assert not (tmp_path / "work" / "summary.json").exists()
    with pytest.raises(MillraceError):
        clone(settings, engine, reporter)


def test_fail_fast_does_not_wait_for_other_tables(
    source_db: str, target_db: str, in_background: Callable[..., Future[CloneResult]]
) -> None:
    execute(source_db, REFUSED, GATED)
    # The gate is never opened: a run that waits for `gated` does not end.
    with gate_closed(target_db):
        running = in_background(source_db, target_db, fail_fast=True)
        with pytest.raises(ServerError, match=r"^public\.refused: "):
            running.result(DEADLINE_SECONDS)
        wait_for(lambda: not sessions(source_db, target_db))
        assert rows(target_db, "SELECT count(*) FROM gated") == [(0,)]


@contextlib.contextmanager
def interrupted_at_gate(target: str) -> Iterator[None]:
    """Ctrl-C as soon as something of the target waits for the gate."""

    def interrupt() -> None:
        wait_for(lambda: waiting_at_gate(target) or ended.is_set())
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(interrupt)
        try:
            yield
        finally:
            ended.set()
            watching.result()


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE INDEX gated_gate ON gated (public.gate(id))",
        "CREATE MATERIALIZED VIEW gated_view AS SELECT public.gate(10)",
    ],
    ids=["an index is built", "a view is filled"],
)
def test_interrupt_after_the_copy_leaves_no_session(
    source_db: str,
    target_db: str,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
    statement: str,
) -> None:
    ungated = GATED.replace(", CHECK (public.gate(id))", "")
    execute(source_db, ungated, "ALTER FUNCTION gate IMMUTABLE", statement)
    settings = CloneSettings(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work")
    with gate_closed(target_db):
        with pytest.raises(KeyboardInterrupt), interrupted_at_gate(target_db):
            clone(settings, engine, reporter)
        wait_for(lambda: not sessions(source_db, target_db))


@pytest.fixture
def tiny_disk(target_cluster: Cluster) -> Iterator[str]:
    """A database of the target on a disk with some free megabytes."""
    folder = target_cluster.socket_dir / "tiny"
    owner = target_cluster.socket_dir.stat()
    folder.mkdir()
    options = f"size=20m,uid={owner.st_uid},gid={owner.st_gid},mode=700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("no right to mount a small disk")
    try:
        execute(
            target_cluster.uri(),
            f"CREATE TABLESPACE tiny LOCATION '{folder}'",
            "CREATE DATABASE tiny TEMPLATE template0 TABLESPACE tiny STRATEGY file_copy",
        )
        yield target_cluster.uri("tiny")
    finally:
        target_cluster.drop_database("tiny")
        execute(target_cluster.uri(), "DROP TABLESPACE IF EXISTS tiny")
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


def test_full_disk_of_the_target_is_told_at_once_and_not_tried_again(
    source_db: str,
    tiny_disk: str,
    target_cluster: Cluster,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
) -> None:
    execute(source_db, GATED)
    settings = CloneSettings(Dsn.parse(source_db), Dsn.parse(tiny_disk), tmp_path / "work")
    before = target_cluster.log_file.stat().st_size
    with pytest.raises(ServerError) as raised:
        clone(settings, engine, reporter)
    assert raised.value.exit_code == 5
    assert raised.value.facts["sqlstate"] == "53100"
    assert "disk space" in raised.value.hint
    wait_for(lambda: not sessions(source_db, tiny_disk))
    assert rows(tiny_disk, "SELECT count(*) FROM gated") == [(0,)]
    with target_cluster.log_file.open(errors="replace") as log:
        log.seek(before)
        assert log.read().count("No space left on device") == 1


# The whole process


@dataclass
class Program:
    """A running `millrace clone`, what it started, and what it printed."""

    process: subprocess.Popen[bytes]
    directory: Path
    out: Path
    err: Path

    def family(self) -> list[psutil.Process]:
        """The processes below it, of which one is a JVM and one a Python worker."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        names = [process.name() for process in found]
        assert "java" in names
        assert [name for name in names if name.startswith("python")]
        return found

    def printed(self) -> str:
        return self.out.read_text() + self.err.read_text()


def is_gone(process: psutil.Process) -> bool:
    """Ended; nobody may be there to collect an orphan."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts the command line program; what is left of it in the end is killed."""
    started: list[Program] = []

    def start(source: str, target: str, *options: str, **variables: str) -> Program:
        directory, out, err = (tmp_path / name for name in ("work", "out", "err"))
        jobs = ("--table-jobs=2", "--large-objects-jobs=1")
        command = [sys.executable, "-m", "millrace", "clone", "--dir", directory, *jobs, *options]
        servers = {"MILLRACE_SOURCE": source, "MILLRACE_TARGET": target}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **servers, **variables},
                start_new_session=True,
            )
        started.append(Program(process, directory, out, err))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            for process in psutil.Process(one.process.pid).children(recursive=True):
                process.kill()
            one.process.kill()
            one.process.wait()


# How the run is ended, the exit code, and words on stderr.
ENDINGS: dict[str, tuple[Callable[[Program, str], None], int, str]] = {
    # A terminal's Ctrl-C goes to all processes of the foreground.
    "SIGINT": (lambda one, _: os.killpg(one.process.pid, signal.SIGINT), 130, "stopped"),
    "SIGTERM": (lambda one, _: one.process.terminate(), 143, "stopped"),
    "SIGKILL": (lambda one, _: one.process.kill(), -signal.SIGKILL, ""),
    "snapshot lost": (
        lambda _, source: terminate(source, "millrace snapshot"),
        SnapshotLost.exit_code,
        "hint: ",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_ended_in_mid_copy_nothing_is_left_running(
    source_db: str, target_db: str, program: Callable[..., Program], ending: str
) -> None:
    end, exit_code, words = ENDINGS[ending]
    execute(source_db, GATED)
    with gate_closed(target_db):
        one = program(source_db, target_db)
        wait_for(lambda: waiting_at_gate(target_db) or one.process.poll())
        family = one.family()
        end(one, source_db)
        assert one.process.wait(DEADLINE_SECONDS) == exit_code
        wait_for(lambda: all(map(is_gone, family)))
        wait_for(lambda: not sessions(source_db, target_db))
    printed = one.printed()
    assert words in printed
    assert "Traceback" not in printed
    if ending == "snapshot lost":
        assert "snapshot" in printed
    assert not (one.directory / "summary.json").exists()
    assert rows(target_db, "SELECT count(*) FROM gated") == [(0,)]


def test_workers_killed_before_and_after_their_commit_change_nothing(
    source_db: str, target_db: str, program: Callable[..., Program], engine: Engine, tmp_path: Path
) -> None:
    execute(source_db, GATED)
    markers = {point: tmp_path / point for point in ("copy.before-commit", "copy.after-commit")}
    for marker in markers.values():
        marker.touch()
    failpoints = ",".join(f"{point}=kill@{marker}" for point, marker in markers.items())
    one = program(
        source_db,
        target_db,
        "--split-tables-larger-than=4MB",
        "--json",
        MILLRACE_FAILPOINTS=failpoints,
    )
    assert one.process.wait(DEADLINE_SECONDS) == 0, one.printed()
    assert [marker for marker in markers.values() if marker.exists()] == []
    tables = {table["name"]: table for table in json.loads(one.out.read_text())["tables"]}
    assert tables["gated"]["parts"] > 1
    assert tables["gated"]["rows"] == 2500
    assert rows(target_db, "SELECT count(*), count(DISTINCT id) FROM gated") == [(2500, 2500)]
    assert_equal_data(source_db, target_db, engine)


# Passwords


@pytest.fixture(scope="module")
def asking_cluster() -> Iterator[tuple[Cluster, str]]:
    """A server that asks a superuser for a password, and the password."""
    password = secrets.token_hex(16)
    hba = "host all keeper 127.0.0.1/32 scram-sha-256\n"
    with open_cluster(16, tcp=True, hba=hba) as cluster:
        execute(cluster.uri(), f"CREATE ROLE keeper SUPERUSER LOGIN PASSWORD '{password}'")
        execute(cluster.create_database("kept"), GATED, "SELECT lo_from_bytea(3001, 'large')")
        yield cluster, password


class CommandLines:
    """Reads the command lines of all processes, again and again, until the block ends."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.found: set[bytes] = set()
        self.seen: set[bytes] = set()

    def __enter__(self) -> CommandLines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._closing.wait(0.03):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    line = path.read_bytes()
                    self.seen.add(line.partition(b"\0")[0].rpartition(b"/")[2])
                    if self._secret in line:
                        self.found.add(line)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no /proc")
def test_password_is_in_no_file_no_log_no_command_line_and_not_in_sparks_pages(
    asking_cluster: tuple[Cluster, str], program: Callable[..., Program], tmp_path: Path
) -> None:
    cluster, password = asking_cluster
    target_db = cluster.create_database("kept_too")
    source, target = (
        cluster.uri(name, user="keeper", password=password, tcp=True)
        for name in ("kept", "kept_too")
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with CommandLines(password) as lines:
        with gate_closed(target_db):
            one = program(
                source,
                target,
                "--verbose",
                "--conf=spark.ui.enabled=true",
                f"--conf=spark.ui.port={port}",
            )
            wait_for(lambda: waiting_at_gate(target_db) or one.process.poll() is not None)
            assert one.process.poll() is None, one.printed()
            pages = [fetched(port, page) for page in ("environment/", "jobs/", "stages/")]
            [application] = json.loads(fetched(port, "api/v1/applications"))
            for page in ("environment", "jobs", "stages", "allexecutors"):
                pages.append(fetched(port, f"api/v1/applications/{application['id']}/{page}"))
        assert one.process.wait(DEADLINE_SECONDS) == 0, one.printed()
    assert "spark.master" in pages[0]
    assert "public.gated" in pages[1] + pages[2]
    assert [page for page in pages if password in page] == []
    assert b"java" in lines.seen
    assert lines.found == set()
    assert password not in one.printed()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert one.directory / "schema" / "source.db" in files
    assert [path for path in files if password.encode() in path.read_bytes()] == []
    cluster.drop_database("kept_too")


def test_wrong_password_is_an_error_that_does_not_repeat_it(
    asking_cluster: tuple[Cluster, str], program: Callable[..., Program]
) -> None:
    cluster, _ = asking_cluster
    uri = cluster.uri("kept", user="keeper", password="not the right one", tcp=True)
    one = program(uri, cluster.uri(), "--verbose", "--json")
    assert one.process.wait(DEADLINE_SECONDS) == 5
    assert "password authentication failed" in one.err.read_text()
    assert ".pgpass" in one.err.read_text()
    assert json.loads(one.out.read_text())["exit_code"] == 5
    assert "not the right one" not in one.printed()
    assert "not%20the" not in one.printed()
    assert "Traceback" not in one.printed()


def test_password_is_in_no_file_that_tasks_are_handed_through(
    asking_cluster: tuple[Cluster, str],
    target_db: str,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, password = asking_cluster
    engine.wait()
    from pyspark.core import broadcast, context

    kept: list[Path] = []

    def keeping(module: Any) -> None:
        original = module.NamedTemporaryFile

        def named(*arguments: Any, **options: Any) -> Any:
            file = original(*arguments, **options)
            kept.append(tmp_path / f"kept{len(kept)}")
            os.link(file.name, kept[-1])
            return file

        monkeypatch.setattr(module, "NamedTemporaryFile", named)

    # PySpark hands over data in files that it removes at once; a second name keeps them for us.
    for module in (context, broadcast):
        keeping(module)
    source = cluster.uri("kept", user="keeper", password=password, tcp=True)
    settings = CloneSettings(Dsn.parse(source), Dsn.parse(target_db), tmp_path / "work")
    clone(settings, engine, reporter)
    assert [path for path in kept if password.encode() in path.read_bytes()] == []


def fetched(port: int, page: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=30) as answer:
        text: str = answer.read().decode()
        return text
