"""Everything that can break in mid-copy: the result is equal, or there is a clear error and
nothing is left running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fixtures.gate import (
    GATED,
    assert_equal_data,
    gate_closed,
    sessions,
    waiting_at_gate,
)
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.clone.progress import Reporter
from millrace.clone.run import CloneResult, clone
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import MillraceError, ServerError
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route
from millrace.snapshot.export import open_snapshot
from millrace.spark.session import Engine
from millrace.split.plan import SplitSettings


def backend_of_gated(source: str) -> str:
    """A query for the backend that copies this table, on either server."""
    [(oid,)] = rows(source, "SELECT 'gated'::regclass::oid::int8")
    return (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        f" AND application_name LIKE 'millrace copy % {oid}.%'"
    )


@pytest.fixture
def in_background(
    engine: Engine, reporter: Reporter, tmp_path: Path
) -> Iterator[Callable[..., Future[CloneResult]]]:
    """Starts a clone and gives its future."""
    with ThreadPoolExecutor(1) as thread:

        def start(source: str, target: str, **options: Any) -> Future[CloneResult]:
            settings = CloneSettings(
                Route(Dsn.parse(source), Dsn.parse(target), tmp_path / "work"), **options
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
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))
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
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"))
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
    settings = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(tiny_disk), tmp_path / "work"))
    before = target_cluster.log_file.stat().st_size
    with pytest.raises(ServerError) as raised:
        clone(settings, engine, reporter)
    assert raised.value.exit_code == 5
    assert raised.value.facts["sqlstate"] == "53100"
    assert "make room on the target" in raised.value.hint
    wait_for(lambda: not sessions(source_db, tiny_disk))
    assert rows(tiny_disk, "SELECT count(*) FROM gated") == [(0,)]
    with target_cluster.log_file.open(errors="replace") as log:
        log.seek(before)
        assert log.read().count("No space left on device") == 1
