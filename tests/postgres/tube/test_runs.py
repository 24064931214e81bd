"""Several tubes at once: each fails alone, and what comes and goes is picked up."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixtures.engines.thread_engine import ThreadEngine
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.tube.tubes import TubeDatabase
from tests.fixtures.wait import wait_for
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, EngineLost, PreflightError, TubeLost
from millrace.postgres.wire.connect import connect
from millrace.tube import config_watch
from millrace.tube.apply import apply_changes, plan_changes
from millrace.tube.config import read_tube_file
from millrace.tube.config_watch import ConfigWatch
from millrace.tube.delivery import resting, watch, worker
from millrace.tube.delivery import run as run_module
from millrace.tube.delivery import runs as runs_module
from millrace.tube.delivery.plan import Delivery, DeliveryLimits, TableDelivery
from millrace.tube.delivery.run import require_slots, run_delivery
from millrace.tube.delivery.runs import TubeRun, check_runs, run_deliveries

LIMITS = DeliveryLimits(settle_seconds=0.0, tries=2)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens every few seconds happens at once."""
    monkeypatch.setattr(runs_module, "AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(runs_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(run_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(resting, "MOST_REST_SECONDS", 0.5)


@pytest.fixture
def tubes(tubes_16: TubeDatabase) -> TubeDatabase:
    for name in "abc":
        make_tables(tubes_16, name)
    return tubes_16


def make_tables(tubes: TubeDatabase, name: str) -> None:
    tubes.run(
        f"CREATE TABLE {name} (id bigint PRIMARY KEY, v text)",
        f"CREATE TABLE docs_{name} (id bigint PRIMARY KEY, v text)",
    )


def make_tube(tubes: TubeDatabase, name: str, *tables: str) -> None:
    tubes.run(f"SELECT tube_ensure_exists('tube_{name}')")
    for table in tables or (name,):
        tubes.run(f"SELECT tube_table_attach('tube_{name}', '{table}', 1)")


def outlet(tubes: TubeDatabase, name: str) -> TableDelivery:
    enrich = f"SELECT id, v FROM {name} WHERE id = ANY($1)"
    return TableDelivery(enrich, f"{tubes.uri}&table=docs_{name}")


def one_run(tubes: TubeDatabase, name: str, *tables: str, until_empty: bool = False) -> TubeRun:
    plan = {f"public.{table}": outlet(tubes, table) for table in tables or (name,)}
    dsn = Dsn.parse(tubes.uri)
    delivery = Delivery(dsn, "tube", f"tube_{name}", plan, until_empty=until_empty, limits=LIMITS)
    return TubeRun(delivery, 1)


def fill(tubes: TubeDatabase, name: str, count: int = 10) -> None:
    first = tubes.rows(f"SELECT coalesce(max(id), 0) FROM {name}")[0]
    tubes.run(
        f"INSERT INTO {name} SELECT i, 'v' || i"
        f" FROM generate_series({first + 1}, {first + count}) i"
    )


def wait_for_docs(tubes: TubeDatabase, name: str) -> None:
    """Until they are equal to the table."""
    rows = f"SELECT count(*) FROM (TABLE {name} EXCEPT TABLE docs_{name}) x"
    wait_for(lambda: tubes.rows(rows) == [0], f"docs_{name}")


def pods(tubes: TubeDatabase, name: str) -> int:
    return int(tubes.rows(f"SELECT count(*) FROM tube.tube_{name}")[0])


@contextmanager
def running(
    *runs: TubeRun, changed: Callable[[], Sequence[TubeRun] | None] = lambda: None
) -> Iterator[ThreadEngine]:
    engine, stop = ThreadEngine(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(run_deliveries, runs, engine, stop=stop, changed=changed)
        try:
            yield engine
        finally:
            stop.set()
    future.result()


def test_neither_a_sink_that_fails_nor_one_that_is_slow_stops_the_others(
    tubes: TubeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        make_tube(tubes, name)
        fill(tubes, name)
    with (
        running(*(one_run(tubes, name) for name in "abc")),
        closing(tubes.connect(autocommit=False)) as blocker,
    ):
        for name in "abc":
            wait_for_docs(tubes, name)
            wait_for(lambda name=name: pods(tubes, name) == 0)  # type: ignore[misc]
        tubes.run("DROP TABLE docs_b")
        blocker.execute("LOCK TABLE docs_c IN ACCESS EXCLUSIVE MODE")
        for name in "cba":
            fill(tubes, name)
        wait_for_docs(tubes, "a")
        wait_for(lambda: "tube_b: public.b: " in caplog.text)
        fill(tubes, "c")
        fill(tubes, "a")
        wait_for_docs(tubes, "a")
        # What is not delivered waits in the tube, not in the worker.
        assert (pods(tubes, "b"), pods(tubes, "c")) == (1, 2)
        blocker.rollback()
        tubes.run("CREATE TABLE docs_b (id bigint PRIMARY KEY, v text)")
        tubes.run("SELECT tube_touch('tube_b', 'b', array_agg(id::text)) FROM b")
        for name in "abc":
            wait_for_docs(tubes, name)
    assert tubes.rows("SELECT count(*) FROM tube._tube_dead") == [0]


def test_a_tube_that_comes_goes_and_comes_again_is_picked_up_and_the_others_go_on(
    tubes: TubeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    make_tube(tubes, "a")
    runs = [one_run(tubes, name) for name in "ab"]
    check_runs(runs)  # a tube that is not there yet is no problem
    with running(*runs):
        fill(tubes, "a")
        wait_for_docs(tubes, "a")
        wait_for(lambda: "there is no tube tube_b" in caplog.text)
        make_tube(tubes, "b")
        fill(tubes, "b")
        wait_for_docs(tubes, "b")
        tubes.run("SELECT tube_ensure_absent('tube_b')")
        wait_for(lambda: "tube tube_b was dropped, with what was in it" in caplog.text)
        fill(tubes, "a")
        wait_for_docs(tubes, "a")
        make_tube(tubes, "b")
        fill(tubes, "b")
        wait_for_docs(tubes, "b")
    assert caplog.text.count("tube tube_b was dropped") == 1
    with pytest.raises(ConfigError, match="there is no tube tube_c"):
        check_runs([one_run(tubes, "c", until_empty=True)])


def test_a_tube_that_is_dropped_ends_its_own_delivery_with_a_clear_error(
    tubes: TubeDatabase,
) -> None:
    make_tube(tubes, "a")
    fill(tubes, "a")
    delivery = one_run(tubes, "a").delivery
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(run_delivery, delivery, 1, ThreadEngine(), stop=threading.Event())
        wait_for_docs(tubes, "a")
        tubes.run("SELECT tube_ensure_absent('tube_a')")
        with pytest.raises(TubeLost, match="tube tube_a was dropped") as caught:
            future.result()
    assert "millrace tube create tube_a" in caught.value.hint


def test_a_table_that_is_attached_while_the_tube_is_served_loses_no_touch(
    tubes: TubeDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Nobody looks at the tube's tables but for what its pods say.
    monkeypatch.setattr(worker, "LOOK_SECONDS", 3600.0)
    make_tube(tubes, "a")
    with running(one_run(tubes, "a", "a", "b")):
        fill(tubes, "a")
        wait_for_docs(tubes, "a")
        wait_for(lambda: "public.b not attached to it" in caplog.text)
        make_tube(tubes, "a", "a", "b", "c")
        fill(tubes, "c")
        fill(tubes, "b")
        wait_for_docs(tubes, "b")
        wait_for(lambda: "nothing says how public.c is delivered" in caplog.text)
        # Nothing says where they go, so they stay.
        wait_for(lambda: pods(tubes, "a") == 1, "only those of c are left")
        tubes.run("SELECT tube_table_ensure_detached('tube_a', 'c')")
        fill(tubes, "b")
        wait_for_docs(tubes, "b")


def test_pods_of_a_table_whose_sink_is_gone_do_not_hide_those_of_another(
    tubes: TubeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "FEW_PODS", 1)
    monkeypatch.setattr(resting, "FIRST_REST_SECONDS", 3600.0)
    monkeypatch.setattr(resting, "MOST_REST_SECONDS", 3600.0)
    make_tube(tubes, "a", "a", "b")
    run = one_run(tubes, "a", "a", "b")
    run.delivery = replace(run.delivery, limits=replace(LIMITS, batch_ids=1))
    tubes.run("DROP TABLE docs_b")
    for _ in range(30):
        fill(tubes, "b", 1)
    fill(tubes, "a", 1)
    with running(run):
        wait_for_docs(tubes, "a")
    assert pods(tubes, "a") == 30


def test_what_fails_ends_a_run_until_empty_after_the_others_are_delivered(
    tubes: TubeDatabase,
) -> None:
    make_tube(tubes, "a")
    make_tube(tubes, "b", "b", "c")
    for name in "abc":
        fill(tubes, name)
    runs = [one_run(tubes, "a", until_empty=True), one_run(tubes, "b", "b", "c", until_empty=True)]
    tubes.run("DROP TABLE docs_b")
    with pytest.raises(Exception, match="docs_b") as caught:
        run_deliveries(runs, ThreadEngine(), stop=threading.Event())
    assert getattr(caught.value, "exit_code", None) == 8
    wait_for_docs(tubes, "a")
    wait_for_docs(tubes, "c")
    assert (pods(tubes, "a"), pods(tubes, "b")) == (0, 1)


def test_partitions_that_come_later_get_triggers_for_statements(tubes: TubeDatabase) -> None:
    tubes.run(
        "CREATE TABLE parted (id bigint, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE docs_parted (id bigint PRIMARY KEY, v text)",
    )
    make_tube(tubes, "a", "parted")
    uncovered = "SELECT uncovered_partitions FROM tube_tables('tube_a')"
    with running(one_run(tubes, "a", "parted")):
        tubes.run("CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (100) TO (200)")
        assert tubes.rows(uncovered) in ([1], [0])
        wait_for(lambda: tubes.rows(uncovered) == [0])
        tubes.run("INSERT INTO parted_2 SELECT i, 'x' FROM generate_series(100, 150) i")
        wait_for_docs(tubes, "parted")


def test_an_engine_that_is_gone_or_too_small_is_an_error(tubes: TubeDatabase) -> None:
    for name in "ab":
        make_tube(tubes, name)
        fill(tubes, name)
    with (  # noqa: PT012
        pytest.raises(EngineLost, match="JVM ended"),
        running(one_run(tubes, "a"), one_run(tubes, "b")) as engine,
    ):
        wait_for_docs(tubes, "a")
        engine.lose()
    with pytest.raises(PreflightError, match="1 tasks at once, and 2 workers") as caught:
        require_slots(ThreadEngine(slots=1), 2)
    assert "--master local[2]" in caught.value.hint


def test_problems_of_several_tubes_are_one_error(tubes: TubeDatabase) -> None:
    for name in "abc":
        make_tube(tubes, name)
    runs = [one_run(tubes, name) for name in "abc"]
    tubes.run("ALTER TABLE a RENAME v TO w", "SELECT tube_table_attach('tube_b', 'c', 1)")
    with pytest.raises(ConfigError, match="tubes can't be delivered") as caught:
        check_runs(runs)
    assert "tube tube_a: the enrichment of public.a does not compile" in caught.value.message
    assert "tube tube_b: nothing says how public.c is delivered" in caught.value.message


def write_file(tubes: TubeDatabase, file: Path, names: str) -> None:
    """A file with these tubes; the database is made so."""
    lines = [f'source = "{tubes.uri}"', "[limits]", "tries = 2"]
    for name in names:
        lines += [
            f"[tubes.tube_{name}]",
            "partitions = 2",
            f'[tubes.tube_{name}.tables."public.{name}"]',
            'routing = "id % 2"',
            f'enrich = "SELECT id, v FROM {name} WHERE id = ANY($1)"',
            f'sink = "{tubes.uri}&table=docs_{name}"',
        ]
    file.write_text("\n".join(lines))
    with connect(Dsn.parse(tubes.uri), "test") as session:
        apply_changes(session, plan_changes(session, read_tube_file(file)), lambda step: None)


def test_a_file_that_is_changed_while_its_tubes_are_delivered_is_read_again(
    tubes: TubeDatabase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(config_watch, "WATCH_SECONDS", 0.05)
    file = tmp_path / "tube.toml"
    write_file(tubes, file, "a")
    planned = read_tube_file(file)
    config = ConfigWatch(planned, Dsn.parse(tubes.uri), "", until_empty=False)
    asked: list[int] = []

    def require(runs: Sequence[TubeRun]) -> None:
        asked.append(sum(run.workers for run in runs))
        require_slots(ThreadEngine(slots=2), asked[-1])

    with running(*config.runs(), changed=lambda: config.changed(require)):
        fill(tubes, "a")
        wait_for_docs(tubes, "a")
        write_file(tubes, file, "ab")
        fill(tubes, "b")
        wait_for_docs(tubes, "b")
        file.write_text("[tubes")
        wait_for(lambda: "is not valid TOML" in caplog.text)
        write_file(tubes, file, "abc")
        wait_for(lambda: "3 workers need a slot each; what was planned before" in caplog.text)
        fill(tubes, "a")
        wait_for_docs(tubes, "a")
        write_file(tubes, file, "b")
        wait_for(lambda: "tube tube_a is not delivered any more" in caplog.text)
        fill(tubes, "a")
        fill(tubes, "b")
        wait_for_docs(tubes, "b")
        assert pods(tubes, "a") == 2
    assert asked == [2, 3, 1]


def test_the_tubes_of_a_file_are_delivered_by_one_program(
    tubes: TubeDatabase, tmp_path: Path, in_this_process: None
) -> None:
    file = tmp_path / "tube.toml"
    write_file(tubes, file, "ab")
    for name in "ab":
        fill(tubes, name)
    run = ["tube", "run", "--config", str(file), "--dir", str(tmp_path / "dir")]
    with subprocess.Popen([*MILLRACE, *run], stderr=subprocess.PIPE, text=True) as process:
        try:
            for name in "ab":
                wait_for_docs(tubes, name)
                fill(tubes, name)
                wait_for_docs(tubes, name)
        finally:
            process.terminate()
            said = process.communicate()[1]
    assert process.returncode == 128 + 15, said
    tubes.run("DELETE FROM a WHERE id = 3")
    command = [*MILLRACE, *run, "--until-empty", "--json"]
    counts = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert (counts["tube_a"]["deleted"], counts["tube_b"]["ids"]) == (1, 0)
    refused = CliRunner().invoke(app, [*run, "--tube", "tube_a", "--workers", "2"]).exception
    assert str(refused) == "--tube, --workers can't be used with --config"
    refused = CliRunner().invoke(app, ["tube", "run", "--tube", "tube_a"]).exception
    assert str(refused) == "--enrich, --sink are missing"
