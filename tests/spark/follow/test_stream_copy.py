"""A stream and its copy: made apart, as it is documented, and no other copy is followed."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.sql import execute, rows
from tests.fixtures.stream.followed import SCHEMA, Followed, writing
from tests.fixtures.stream.rerouted import rerouted
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.clone import claim
from millrace.clone.progress import Progress, Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.clone.step import Step
from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
from millrace.follow.bound_copy import read_stream
from millrace.follow.slot import cleanup
from millrace.follow.stream import follow
from millrace.postgres.wire.connect import connect
from millrace.route import Route
from millrace.spark.session import Engine
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.stream_binding import bind_copy

LOOSE = "CREATE TABLE loose (n int); INSERT INTO loose SELECT generate_series(1, 100);"


def run_cli(*arguments: str, failpoints: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MILLRACE, *arguments],
        env=os.environ | {"MILLRACE_FAILPOINTS": failpoints},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


class Apart:
    """A snapshot held with a slot by a process of its own."""

    def __init__(self, source: str, target: str, directory: Path, engine: Engine) -> None:
        execute(source, SCHEMA, LOOSE)
        self.slot = "apart_" + source.partition("?")[0].rpartition("/")[2]
        self.followed = Followed(source, target, directory, self.slot, engine)
        self.directory = directory
        self.settings = CloneSettings(Route(Dsn.parse(source), Dsn.parse(target), directory))
        self.servers = ("--source", source, "--target", target, "--dir", str(directory))
        self.holder = subprocess.Popen(
            [*MILLRACE, "snapshot", "--follow", "--slot-name", self.slot,
             "--source", source, "--dir", str(directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            wait_for(lambda: self.holder.poll() is not None or read_stream(directory))
            assert self.holder.poll() is None
        except BaseException:
            self.holder.kill()
            self.holder.communicate()
            raise

    def end_snapshot(self) -> str:
        """What the process has to say."""
        self.holder.send_signal(signal.SIGTERM)
        _, said = self.holder.communicate(timeout=DEADLINE_SECONDS)
        assert self.holder.returncode == 0
        return said

    def close(self) -> None:
        if self.holder.poll() is None:
            self.end_snapshot()
        with (
            connect(self.settings.source, "test") as here,
            connect(self.settings.target, "test") as there,
        ):
            cleanup(here, there, self.slot, self.settings.source.identity())


@pytest.fixture
def apart(source_db: str, target_db: str, tmp_path: Path, engine: Engine) -> Iterator[Apart]:
    opened = Apart(source_db, target_db, tmp_path / "work", engine)
    yield opened
    opened.close()


def test_the_documented_way_with_a_clone_killed_twice_ends_equal(
    apart: Apart, tmp_path: Path
) -> None:
    with pytest.raises(WorkDirError, match="nothing is copied yet"):
        apart.followed.follow()
    with writing(apart.followed.source, seed=12, truncates=False) as written:
        for options, failpoint in (((), "pre-data.done"), (("--resume",), "index.begin")):
            marker = tmp_path / "marker"
            marker.touch()
            killed = run_cli(
                "clone", *apart.servers, *options, failpoints=f"{failpoint}=kill@{marker}"
            )
            assert killed.returncode == -signal.SIGKILL, killed.stderr
        before = written()
        wait_for(lambda: written() > before + 50)
        done = run_cli("clone", *apart.servers, "--resume", "--quiet")
        assert done.returncode == 0, done.stderr
        assert "continue with `millrace follow`" in apart.end_snapshot()
        wait_for(lambda: written() > before + 100)
    with sqlite3.connect(apart.directory / "schema" / "source.db") as database:
        database.row_factory = sqlite3.Row
        setup = dict(database.execute("SELECT * FROM setup").fetchone())
    database.close()
    assert (setup["slot_name"], setup["plugin"]) == (apart.slot, "pgoutput")
    assert setup["source_pg_uri"] == apart.settings.source.identity()
    assert setup["target_pg_uri"].startswith("postgresql://")
    assert apart.followed.follow().reached_endpos
    apart.followed.assert_equal()


def test_another_slot_or_plugin_than_the_one_held_is_refused_with_both_names(
    apart: Apart,
) -> None:
    for options, words in (
        (("--slot-name", "other"), ("--slot-name", apart.slot, "other")),
        (("--plugin", "test_decoding"), ("--plugin", "pgoutput", "test_decoding")),
    ):
        for command in (("clone",), ("clone", "--follow"), ("stream", "setup")):
            refused = run_cli(*command, *apart.servers, *options, "--json")
            assert refused.returncode == 4, refused.stderr
            told = json.loads(refused.stdout)
            for word in words:
                assert word in told["message"]
    with sqlite3.connect(apart.directory / "stream.db") as database:
        row = database.execute("SELECT slot_name, plugin, encoding, run_id FROM stream").fetchone()
    database.close()
    assert row == (apart.slot, "pgoutput", "", "")
    assert "nothing was copied" in apart.end_snapshot()


def test_a_directory_of_a_stream_takes_no_other_copy(
    apart: Apart, engine: Engine, reporter: Reporter, tmp_path: Path
) -> None:
    """As a new copy, as a restart, as single steps, from another directory; before and after the
    first change was applied."""
    settings, source, target = apart.settings, apart.followed.source, apart.followed.target
    clone(settings, engine, reporter)
    apart.end_snapshot()
    execute(source, "INSERT INTO loose SELECT generate_series(101, 200)")
    for changes in (
        {"drop_if_exists": True},
        {"restart": True},
        {"drop_if_exists": True, "snapshot": "00000003-00000048-1"},
        {"drop_if_exists": True, "not_consistent": True},
    ):
        with pytest.raises(WorkDirError, match=f"belongs to the stream of slot {apart.slot}"):
            clone(replace(settings, **changes), engine, reporter)  # type: ignore[arg-type]
    elsewhere = rerouted(settings, directory=tmp_path / "elsewhere", drop_if_exists=True)
    with pytest.raises(WorkDirError, match=f"followed by the stream of slot {apart.slot}"):
        clone(elsewhere, engine, reporter)
    again = replace(settings, steps=frozenset({Step.TABLE_DATA}), not_consistent=True)
    with pytest.raises(WorkDirError, match="belongs to the stream"):
        clone(again, engine, reporter)
    anew = replace(settings, steps=frozenset({Step.PRE_DATA}), drop_if_exists=True)
    with pytest.raises(WorkDirError, match="belongs to the stream"):
        clone(anew, engine, reporter)
    apart.followed.follow()
    apart.followed.assert_equal()
    with pytest.raises(WorkDirError, match="has begun to apply"):
        clone(replace(again, not_consistent=False), engine, reporter)
    assert rows(target, "SELECT count(*) FROM loose") == [(200,)]


def test_a_stream_is_not_applied_to_another_copy_or_another_target(
    apart: Apart, engine: Engine, reporter: Reporter
) -> None:
    clone(apart.settings, engine, reporter)
    apart.end_snapshot()
    stream = read_stream(apart.directory)
    assert stream is not None
    # As if a copy had come in between, by an older release.
    bind_copy(apart.directory, "another", "UTF8")
    with pytest.raises(WorkDirError, match="is not the one that the stream"):
        apart.followed.follow()
    bind_copy(apart.directory, stream.run_id, "UTF8")
    other = apart.settings.target.with_(dbname="postgres")
    with pytest.raises(WorkDirError, match=r"went to .* --target is"):
        follow(rerouted(apart.followed.settings(), target=other), engine, apart.followed.reporter)
    execute(apart.followed.target, "UPDATE millrace.stream_copy SET run_id = 'another'")
    with pytest.raises(WorkDirError, match="holds another copy"):
        apart.followed.follow()
    execute(
        apart.followed.target,
        f"UPDATE millrace.stream_copy SET run_id = '{stream.run_id}'",
    )
    apart.followed.follow()
    # A target that was put back to an older state has lost its position.
    with connect(apart.settings.target, "test") as connection:
        connection.execute(
            "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin"
            " WHERE starts_with(roname, %s)",
            (apart.slot,),
        )
    with Sentinel(apart.directory) as sentinel:
        sentinel.write_applied(stream.start_lsn + 1)
    with pytest.raises(WorkDirError, match="has no position of the stream"):
        apart.followed.follow()


class Waiting:
    """A reporter that holds its run where it begins to copy."""

    def __init__(self) -> None:
        self.is_there, self.goes_on = Event(), Event()

    def update(self, progress: Progress) -> None:
        if progress.step == "restore the schema":
            self.is_there.set()
            assert self.goes_on.wait(DEADLINE_SECONDS)


def test_a_clone_that_is_running_is_not_ended_by_another(
    source_db: str,
    target_db: str,
    engine: Engine,
    reporter: Reporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claim, "GRACE_SECONDS", 0.3)
    execute(source_db, LOOSE)
    first = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "first"))
    second = rerouted(first, directory=tmp_path / "second", drop_if_exists=True)
    waiting = Waiting()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(clone, first, engine, waiting)
        try:
            assert waiting.is_there.wait(DEADLINE_SECONDS)
            with pytest.raises(WorkDirError, match="another millrace is copying") as refused:
                clone(second, engine, reporter)
        finally:
            waiting.goes_on.set()
        assert running.result(DEADLINE_SECONDS).summary is not None
    for word in (f"process {os.getpid()}", socket.gethostname(), str(tmp_path / "first")):
        assert word in refused.value.message
    assert refused.value.exit_code == 4
    # One that is done is in nobody's way, as soon as the server has seen that.
    monkeypatch.setattr(claim, "GRACE_SECONDS", DEADLINE_SECONDS)
    clone(second, engine, reporter)
    assert rows(target_db, "SELECT count(*) FROM loose") == [(100,)]
