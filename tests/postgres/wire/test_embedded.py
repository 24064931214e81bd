"""Throw-away clusters: they start, they serve, and nothing is left of them."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest
from tests.fixtures.wait import wait_for

from millrace.errors import PreflightError, ServerError
from millrace.postgres.program import embedded
from millrace.postgres.program.binaries import server_installations
from millrace.postgres.program.embedded import Cluster, open_cluster


def _ask(uri: str, query: str) -> object:
    with psycopg.connect(uri) as connection:
        row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None


def _processes_of(folder: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(folder in argument for argument in process.info["cmdline"] or ())
    ]


def test_source_and_target_have_their_versions(
    source_cluster: Cluster, target_cluster: Cluster
) -> None:
    for cluster, version in ((source_cluster, 16), (target_cluster, 18)):
        assert cluster.version == version
        assert _ask(cluster.uri(), "SHOW server_version_num").startswith(str(version))  # type: ignore[attr-defined]


def test_system_server_starts(system_cluster: Cluster) -> None:
    assert _ask(system_cluster.uri(), "SELECT 1") == 1


def test_socket_and_tcp_reach_the_same_server(source_cluster: Cluster) -> None:
    query = "SELECT pg_postmaster_start_time()"
    assert _ask(source_cluster.uri(), query) == _ask(source_cluster.uri(tcp=True), query)


def test_socket_path_is_short(source_cluster: Cluster) -> None:
    assert len(os.fsencode(source_cluster.socket_dir / f".s.PGSQL.{source_cluster.port}")) < 100


def test_each_test_has_an_empty_utf8_database(source_db: str, target_db: str) -> None:
    for uri in (source_db, target_db):
        assert _ask(uri, "SHOW server_encoding") == "UTF8"
        assert (
            _ask(uri, "SELECT datcollate FROM pg_database WHERE datname = current_database()")
            == "C"
        )
        assert _ask(uri, "SELECT count(*) FROM pg_stat_user_tables") == 0


def test_names_with_odd_characters_survive_the_uri(source_cluster: Cluster) -> None:
    name = "Odd name/?&%+ü\"'"
    uri = source_cluster.create_database(name)
    try:
        assert _ask(uri, "SELECT current_database()") == name
        assert _ask(source_cluster.uri(name, tcp=True), "SELECT current_database()") == name
    finally:
        source_cluster.drop_database(name)


def test_database_with_open_sessions_is_dropped(source_cluster: Cluster) -> None:
    uri = source_cluster.create_database("busy")
    with psycopg.connect(uri) as connection:
        connection.execute("SELECT 1")
        source_cluster.drop_database("busy")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


def test_another_encoding_can_be_asked_for(source_cluster: Cluster) -> None:
    uri = source_cluster.create_database("latin", encoding="LATIN1")
    try:
        assert _ask(uri, "SHOW server_encoding") == "LATIN1"
    finally:
        source_cluster.drop_database("latin")


def test_settings_password_restart_and_standby() -> None:
    """One cluster for four questions: each start costs seconds."""
    hba = "host all ann 127.0.0.1/32 scram-sha-256"
    settings = {"max_connections": "120", "cluster_name": "it's ours"}
    with open_cluster(16, settings=settings, tcp=True, hba=hba) as primary:
        assert _ask(primary.uri(), "SHOW max_connections") == "120"
        assert _ask(primary.uri(), "SHOW cluster_name") == "it's ours"
        assert _ask(primary.uri(), "SHOW wal_level") == "logical"

        primary.execute("CREATE ROLE ann LOGIN PASSWORD 'a b/c@d'")
        uri = primary.uri(user="ann", password="a b/c@d", tcp=True)
        assert _ask(uri, "SELECT current_user") == "ann"
        with pytest.raises(psycopg.OperationalError):
            _ask(primary.uri(user="ann", password="wrong", tcp=True), "SELECT 1")

        with open_cluster(16, base_backup_of=primary) as standby:
            assert _ask(standby.uri(), "SELECT pg_is_in_recovery()") is True
            primary.execute("CREATE TABLE t AS SELECT 42 AS answer")
            wait_for(lambda: _ask(standby.uri(), "SELECT to_regclass('t') IS NOT NULL") is True)
            assert _ask(standby.uri(), "SELECT answer FROM t") == 42

        primary.stop()
        assert not primary.running()
        primary.stop()
        primary.restart("immediate")
        assert _ask(primary.uri(tcp=True), "SELECT answer FROM t") == 42


def test_nothing_is_left_after_close() -> None:
    with open_cluster(18) as cluster:
        folder = cluster.socket_dir
        assert _processes_of(str(folder))
    assert not folder.exists()
    # A server process removes its file a moment before it is gone.
    wait_for(lambda: not _processes_of(str(folder)))
    cluster.close()


@pytest.mark.parametrize("group", [False, True], ids=["SIGKILL", "SIGINT then SIGKILL"])
def test_nothing_is_left_of_a_killed_process(group: bool) -> None:
    script = (
        "import signal, sys\n"
        "from millrace.postgres.program.embedded import open_cluster\n"
        "with open_cluster(16) as cluster:\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    print(cluster.socket_dir, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout
        folder = child.stdout.readline().strip()
        assert _processes_of(folder)
        if group:
            os.killpg(child.pid, signal.SIGINT)
            assert Path(folder).exists()
        child.kill()
    wait_for(lambda: not Path(folder).exists() and not _processes_of(folder))


def test_forked_child_neither_keeps_nor_stops_the_server() -> None:
    with open_cluster(16) as cluster:
        ours, childs = os.pipe()
        pid = os.fork()
        if pid == 0:
            cluster.close()
            os.read(ours, 1)
            os._exit(0)
        assert _ask(cluster.uri(), "SELECT 1") == 1
        folder = cluster.socket_dir
        cluster.close()
        assert not folder.exists()
        os.write(childs, b"x")
        os.waitpid(pid, 0)
        os.close(ours)
        os.close(childs)


def test_server_that_does_not_start_shows_its_log() -> None:
    with (
        pytest.raises(ServerError) as caught,
        open_cluster(16, settings={"shared_buffers": "many"}),
    ):
        pass
    assert "shared_buffers" in caught.value.hint


def test_missing_version_is_refused_with_a_hint() -> None:
    with pytest.raises(PreflightError, match="PostgreSQL 9 server") as caught, open_cluster(9):
        pass
    assert "millrace[demo]" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="for root only")
def test_root_hands_the_server_to_an_unprivileged_account(source_cluster: Cluster) -> None:
    pid = int((source_cluster.data_dir / "postmaster.pid").read_text().split()[0])
    assert psutil.Process(pid).uids().effective not in (0, None)
    assert psutil.Process(pid).gids().effective != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="for root only")
def test_programs_closed_to_the_account_are_copied_once(tmp_path: Path) -> None:
    wheel = next(i for i in server_installations() if i.origin == "wheel")
    prefix = wheel.bindir.parent
    libraries = prefix.parent.with_name(prefix.parent.name + ".libs")
    home = tmp_path / "home"
    closed = home / prefix.parent.name / prefix.name
    shutil.copytree(prefix, closed, symlinks=True)
    shutil.copytree(libraries, home / libraries.name, symlinks=True)
    home.chmod(0o700)
    installation = dataclasses.replace(wheel, bindir=closed / "bin")
    copy = embedded._runnable(installation)
    try:
        assert home not in copy.bindir.parents
        assert embedded._runnable(installation) == copy
        with open_cluster(wheel.version, installation=installation) as cluster:
            assert cluster.installation == copy
            assert _ask(cluster.uri(), "SELECT 1") == 1
    finally:
        shutil.rmtree(copy.bindir.parents[2])
