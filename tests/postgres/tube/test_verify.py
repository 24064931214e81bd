"""Both sides of a tube are compared, and what differs is touched."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fixtures.engines.direct_engine import DirectEngine, ThreadEngine
from tests.fixtures.tube.tube_source import TubeSource, fill
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.errors import ConfigError
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.run import check_delivery, run_delivery
from millrace.tube.verify import task
from millrace.tube.verify.run import VerifyReport, verify

ATTACH = "SELECT tube_ensure_exists('t', 2)", "SELECT tube_table_attach('t', 'article', 1)"


@pytest.fixture
def source(source_db: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TubeSource]:
    monkeypatch.setattr(task, "PAUSE_SECONDS", 0.0)
    found = TubeSource(source_db)
    with closing(found.connection):
        yield found


def unseen(source: TubeSource, *statements: str) -> None:
    """As if no trigger had fired."""
    source.run(*statements, "DELETE FROM t")


def look(delivery: Delivery, **more: Any) -> VerifyReport:
    return verify(delivery, ThreadEngine(), **more)


def replace_sleep(monkeypatch: pytest.MonkeyPatch, what: Callable[[float], object]) -> None:
    """Of verify alone: other threads sleep, too."""
    monkeypatch.setattr(task, "time", SimpleNamespace(**{**vars(time), "sleep": what}))


def counts(report: VerifyReport) -> tuple[int, int, int, int]:
    (found,) = report.sinks
    return found.missing, found.surplus, found.different, found.waiting


@pytest.mark.parametrize("kind", ["postgresql", "tantivy"])
def test_what_triggers_did_not_see_is_found_and_mended(
    source: TubeSource, kind: str, tmp_path: Path
) -> None:
    """Silenced triggers stand for every write that leaves no pod."""
    sink = source.sink() if kind == "postgresql" else f"tantivy:{tmp_path / 'index'}"
    source.run(*ATTACH)
    fill(source, 500)
    source.deliver(sink=sink)
    delivery = source.delivery(sink=sink)
    report = look(delivery)
    assert report.is_equal
    assert (report.sinks[0].documents, report.sinks[0].keys) == (500, 500)
    source.run(
        "ALTER TABLE article DISABLE TRIGGER USER",
        "INSERT INTO article VALUES (1001, 'new', 1, 1), (1002, 'hidden', 1, 1)",
        "UPDATE article SET stars = NULL WHERE id IN (7, 8)",
        "UPDATE article SET title = 'hidden' WHERE id = 9",
        "DELETE FROM article WHERE id BETWEEN 20 AND 22",
    )
    report = look(delivery, is_dry_run=True)
    assert counts(report) == (1, 4, 2, 0)
    assert sorted(report.sinks[0].samples["different"]) == ["public.article 7", "public.article 8"]
    assert "disabled" in report.problems[0].what
    assert source.pods() == 0
    source.run("SELECT tube_table_attach('t', 'article', 1)")
    report = look(delivery)
    assert counts(report) == (1, 4, 2, 0)
    assert report.sinks[0].touched == 7
    assert not report.problems
    # Touched, and not yet delivered.
    assert counts(look(delivery)) == (0, 0, 0, 7)
    source.deliver(sink=sink)
    assert look(delivery).is_equal
    if kind == "postgresql":
        source.assert_equal()


def test_what_somebody_did_downstream_is_mended(source: TubeSource) -> None:
    source.run(*ATTACH)
    fill(source, 100)
    source.deliver()
    source.run(
        "DELETE FROM docs WHERE id <= 3",
        "UPDATE docs SET title = 'mine' WHERE id = 50",
        "INSERT INTO docs VALUES (-5, 'mine', 1), (5000, 'mine', 1)",
    )
    assert counts(look(source.delivery())) == (3, 2, 1, 0)
    source.deliver()
    source.assert_equal()
    assert look(source.delivery()).is_equal


def test_pages_are_small_and_keys_have_several_columns_of_any_type(
    source: TubeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.run(
        'CREATE TABLE part (name text COLLATE "C", at timestamptz, v json, PRIMARY KEY (name, at))',
        "CREATE TABLE parts (at timestamptz, name text, v json, PRIMARY KEY (name, at))",
        "SELECT tube_ensure_exists('t', 1, 'name <> ''left out''')",
        "SELECT tube_table_attach('t', 'part', -1)",
        "INSERT INTO part SELECT n, timestamptz '2024-03-01 00:00:01.5+02' + i * interval '1 day',"
        " '{\"a\":  1}' FROM unnest(ARRAY['', 'it''s \\ \"odd\"', 'é', 'left out']) n,"
        " generate_series(1, 5) i",
    )
    enrich = (
        "SELECT p.name, p.at, v FROM part p JOIN unnest($1, $2) AS k (name, at) USING (name, at)"
    )
    delivery = source.delivery(enrich, source.sink().replace("docs", "parts"))
    source.deliver(enrich=enrich, sink=source.sink().replace("docs", "parts"))
    made = task.VerifyTask
    monkeypatch.setattr(
        "millrace.tube.verify.run.VerifyTask",
        lambda *args, **more: made(*args, **more, page_ids=4),
    )
    report = look(delivery)
    assert report.is_equal
    assert (report.sinks[0].documents, report.sinks[0].keys) == (15, 15)
    unseen(
        source,
        "DELETE FROM part WHERE name = '' AND at < '2024-03-04'",
        "UPDATE part SET v = '1' WHERE name = 'é'",
        "DELETE FROM parts WHERE name LIKE '%odd%'",
    )
    report = look(delivery)
    assert counts(report) == (5, 3, 5, 0)
    source.deliver(enrich=enrich, sink=source.sink().replace("docs", "parts"))
    assert look(delivery).is_equal


def test_what_is_in_the_tube_is_no_difference(source: TubeSource) -> None:
    """Pods with keys, and control pods after which everything is looked at again."""
    source.run(*ATTACH)
    fill(source, 50)
    delivery = source.delivery()
    assert counts(look(delivery)) == (0, 0, 0, 50)
    source.deliver()
    source.run("TRUNCATE article")
    assert counts(look(delivery)) == (0, 0, 0, 50)
    source.deliver()
    assert look(delivery).is_equal
    unseen(source, "INSERT INTO article SELECT i, 'b', 1, 1 FROM generate_series(1, 20) i")
    source.run("SELECT tube_backfill_schedule('t', 'id', 0, 9)")
    assert counts(look(delivery)) == (0, 0, 0, 20)
    source.deliver()
    assert look(delivery).is_equal


def test_a_row_that_is_delivered_between_two_looks_is_no_difference(
    source: TubeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.run(*ATTACH)
    fill(source, 10)
    source.deliver()
    source.run("UPDATE article SET stars = 99 WHERE id = 4")

    def deliver(seconds: float) -> None:
        pytest.fail("the pod was there")

    replace_sleep(monkeypatch, deliver)
    assert counts(look(source.delivery())) == (0, 0, 0, 1)
    source.run("DELETE FROM t")
    replace_sleep(
        monkeypatch, lambda seconds: source.run("UPDATE docs SET stars = 99 WHERE id = 4")
    )
    assert counts(look(source.delivery())) == (0, 0, 0, 0)


def test_attachments_that_are_not_whole_are_reported(source: TubeSource) -> None:
    source.run(
        "CREATE TABLE place (id int, k int, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
        "CREATE TABLE place_1 PARTITION OF place FOR VALUES IN (1)",
        "SELECT tube_ensure_exists('t')",
        "SELECT tube_table_attach('t', 'place', 1, key => '{id}')",
        "CREATE TABLE dropped (id int PRIMARY KEY)",
        "SELECT tube_table_attach('t', 'dropped', 1)",
        "CREATE TABLE place_2 PARTITION OF place FOR VALUES IN (2)",
        "ALTER TABLE place_1 DISABLE TRIGGER ALL",
        "DROP TABLE dropped",
        "CREATE TABLE places (id int PRIMARY KEY)",
    )
    enrich = "SELECT DISTINCT id FROM place WHERE id = ANY($1)"
    delivery = source.delivery(enrich, source.sink().replace("docs", "places"))
    said = {one.table: one.what for one in look(delivery, is_dry_run=True).problems}
    assert "TRUNCATE of it by name" in said["public.place_2"]
    assert "are disabled" in said["public.place_1"]
    assert [what for name, what in said.items() if name.startswith("oid")] == [
        "the table was dropped"
    ]
    # What no trigger has seen is found.
    source.run(
        "INSERT INTO place VALUES (1, 2), (2, 2)",
        "CREATE TABLE place_3 PARTITION OF place FOR VALUES IN (3)",
        "INSERT INTO place VALUES (3, 3)",
    )
    source.deliver(enrich=enrich, sink=source.sink().replace("docs", "places"))
    source.run("ALTER TABLE place_3 DISABLE TRIGGER ALL", "TRUNCATE place_3")
    assert source.pods() == 0
    assert counts(look(delivery)) == (0, 1, 0, 0)
    said = {one.table: one.what for one in look(delivery).problems}
    # A delivery has given it its triggers.
    assert "are disabled" in said["public.place_3"]
    assert "public.place_2" not in said
    source.run("ALTER TABLE place RENAME id TO number", "DROP TRIGGER _tube_1_truncate ON place")
    report = look(delivery)
    said_of_root = [one.what for one in report.problems if one.table == "public.place"]
    assert "a column id, which is gone" in said_of_root[0]
    assert "no trigger for TRUNCATE" in said_of_root[1]
    assert report.sinks == ()


def test_parents_are_mended_by_touching_their_children(source: TubeSource) -> None:
    source.run(
        "CREATE TABLE note (id bigint PRIMARY KEY, article bigint)",
        "SELECT tube_ensure_exists('t')",
        "SELECT tube_table_attach('t', 'note', 1)",
    )
    fill(source, 30)
    source.run("INSERT INTO note SELECT i, i % 20 + 1 FROM generate_series(1, 200) i")
    fan_out = "SELECT id, article FROM note WHERE id = ANY($1)"
    delivery = source.delivery()
    delivery = replace(delivery, tables={"": replace(delivery.tables[""], fan_out=fan_out)})
    run_delivery(check_delivery(delivery, 1), 1, DirectEngine(), stop=threading.Event())
    assert look(delivery).is_equal
    source.run("UPDATE article SET stars = 55 WHERE id <= 25", "DELETE FROM docs WHERE id > 18")
    report = look(delivery)
    assert counts(report) == (2, 0, 18, 0)
    assert report.sinks[0].touched == 200
    run_delivery(check_delivery(delivery, 1), 1, DirectEngine(), stop=threading.Event())
    assert look(delivery).is_equal


def test_a_sink_that_can_not_list_is_refused_with_what_replaces_it(
    source: TubeSource, tmp_path: Path
) -> None:
    source.run(*ATTACH)
    with pytest.raises(ConfigError, match="the sink jsonl can't list what it holds") as caught:
        look(source.delivery(sink=f"jsonl:{tmp_path / 'lines'}"))
    assert "backfill t public.article" in caught.value.hint


def test_a_sink_that_is_ahead_of_a_restored_source_is_told_and_the_epoch_rises(
    source: TubeSource,
) -> None:
    """A disk put back to an earlier state is on the same timeline: only the sink can tell."""
    source.run(*ATTACH)
    fill(source, 10)
    source.run("SELECT setval('tube.tube_seq', 1000)")
    source.deliver()
    source.run("SELECT setval('tube.tube_seq', 1)", "UPDATE article SET stars = 77")
    source.deliver()
    assert source.rows("SELECT count(*) FROM docs WHERE stars = 77") == [(0,)]
    report = look(source.delivery(), is_dry_run=True)
    assert report.sinks[0].is_ahead
    assert not report.is_equal
    look(source.delivery())
    source.deliver()
    source.assert_equal()


def test_the_command_prints_what_differs_and_ends_with_its_code(
    source: TubeSource, in_this_process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("millrace.cli.tube.verify.Engine", ThreadEngine)
    source.run(*ATTACH)
    fill(source, 10)
    source.deliver()
    asked = [
        "tube", "verify", "--source", source.uri, "--tube", "t", "--sink", source.sink(),
        "--enrich", source.delivery().tables[""].enrich, "--dir", str(tmp_path / "run"),
    ]  # fmt: skip
    assert json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["equal"]
    source.run("DELETE FROM docs WHERE id < 4")
    found = CliRunner().invoke(app, [*asked, "--dry-run", "--samples", "1"])
    assert getattr(found.exception, "exit_code", None) == 9
    assert "7 documents against 10 keys, 3 missing" in found.stdout
    assert found.stdout.count("missing: public.article 1") == 1
    assert source.pods() == 0
    file = tmp_path / "tube.toml"
    enrich = source.delivery().tables[""].enrich
    file.write_text(
        f'source = "{source.uri}"\n[tubes.gone]\n[tubes.t]\nsink = "{source.sink()}"\n'
        f'tables."public.article" = {{ shard = 1, enrich = "{enrich}" }}\n'
    )
    by_file = ["tube", "verify", "--config", str(file), "--dir", str(tmp_path / "run"), "--json"]
    found = CliRunner().invoke(app, [*by_file, "--dry-run"])
    assert json.loads(found.stdout)["t"]["sinks"][0]["missing"] == 3
    assert "there is no tube gone" in str(found.exception)
    file.write_text(file.read_text().replace("[tubes.gone]\n", ""))
    assert getattr(CliRunner().invoke(app, by_file).exception, "exit_code", None) == 9
    source.deliver()
    assert CliRunner().invoke(app, by_file).exit_code == 0
    found = CliRunner().invoke(app, [*by_file, "--sink", "x"])
    assert "--sink can't be used" in str(found.exception)
