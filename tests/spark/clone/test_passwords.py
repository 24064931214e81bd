"""Passwords go to the server, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.gate import GATED, gate_closed, waiting_at_gate
from tests.fixtures.port import free_port
from tests.fixtures.processes.clone_program import CloneProgram
from tests.fixtures.sql import execute
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.clone.progress import Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.route import Route
from millrace.spark.session import Engine


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
    asking_cluster: tuple[Cluster, str], program: Callable[..., CloneProgram], tmp_path: Path
) -> None:
    cluster, password = asking_cluster
    target_db = cluster.create_database("kept_too")
    source, target = (
        cluster.uri(name, user="keeper", password=password, tcp=True)
        for name in ("kept", "kept_too")
    )
    port = free_port()
    with CommandLines(password) as lines:
        with gate_closed(target_db):
            one = program(
                source,
                target,
                "--verbose",
                "--conf=spark.ui.enabled=true",
                f"--conf=spark.ui.port={port}",
                has_spark=True,
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
    asking_cluster: tuple[Cluster, str], program: Callable[..., CloneProgram]
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
    settings = CloneSettings(Route(Dsn.parse(source), Dsn.parse(target_db), tmp_path / "work"))
    clone(settings, engine, reporter)
    assert [path for path in kept if password.encode() in path.read_bytes()] == []


def fetched(port: int, page: str) -> str:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/{page}", timeout=DEADLINE_SECONDS
    ) as answer:
        text: str = answer.read().decode()
        return text
